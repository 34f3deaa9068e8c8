"""What is trained: model, data, loss, optimizer and algorithm. How it is laid over ranks is a layout's business."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from meshmark.errors import InputError, UnknownNameError
from meshmark.spec.algorithm import AlgorithmSpec, local_sgd
from meshmark.spec.model_spec import MODELS, ModelSpec
from meshmark.spec.optimizer import OptimizerSpec


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training problem, the same for every framework, layout and precision."""

    name: str
    model: ModelSpec
    optimizer: OptimizerSpec = OptimizerSpec()
    global_batch: int = 8
    """Sequences in one optimizer step, over all ranks."""
    masked: bool = True
    """Mask a random tail of every sequence, so that rows, micro-batches and ranks hold unequal numbers of tokens."""
    frozen: tuple[str, ...] = ()
    """Starts of the names of parameters that are not trained, such as `embedding.`."""
    skipped_block: int | None = None
    """A block that every second step leaves out, so that its parameters are unused there."""
    corpus: str | None = None
    """Path of a file to train on, byte by byte; None takes the text inside Python's standard library."""
    seed: int = 0
    """Seeds the initial values and the batches."""
    algorithm: AlgorithmSpec = AlgorithmSpec()
    """By which replicas train together."""

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise InputError(f"workload {self.name!r}: global_batch is {self.global_batch}, expected at least 1")
        if self.skipped_block is not None and not 0 <= self.skipped_block < self.model.num_layers:
            raise InputError(
                f"workload {self.name!r}: skipped_block is {self.skipped_block}, expected one of the model's "
                f"{self.model.num_layers} blocks, counted from 0"
            )

    @property
    def id(self) -> str:
        """The name, which tells the algorithm where it is not the synchronous one."""
        return self.name if self.algorithm.id in self.name else f"{self.name}-{self.algorithm.id}"

    def trains(self, name: str) -> bool:
        """Whether the parameter with this canonical name is trained."""
        return not name.startswith(self.frozen) if self.frozen else True

    def uses(self, name: str, step: int) -> bool:
        """Whether the parameter with this canonical name has a part in `step`."""
        skipped = self.skipped_at(step)
        return skipped is None or not name.startswith(f"blocks.{skipped}.")

    def skipped_at(self, step: int) -> int | None:
        """The block that `step` leaves out."""
        return self.skipped_block if step % 2 else None

    @property
    def tokens_per_step(self) -> int:
        """Positions that the model computes in one step, masked ones too; throughput counts these."""
        return self.global_batch * self.model.seq_len


# A clip norm below the gradient norms that the tiny workloads start with (about 2 to 5): clipping is active in
# every one of the first steps, so that a wrong norm changes the parameters.
_TINY_OPTIMIZER = OptimizerSpec(clip_norm=0.5)

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        # Half as deep, wide and long: a launch is then mostly the launch.
        Workload(name="gpt-mini", model=MODELS["gpt-mini"], optimizer=_TINY_OPTIMIZER),
        # Of the first five steps, three average and two do not; the metered one does.
        Workload(
            name="gpt-mini-local-sgd2",
            model=MODELS["gpt-mini"],
            optimizer=_TINY_OPTIMIZER,
            algorithm=local_sgd(2),
        ),
        Workload(name="gpt-tiny", model=MODELS["gpt-tiny"], optimizer=_TINY_OPTIMIZER),
        Workload(name="llama-tiny", model=MODELS["llama-tiny"], optimizer=_TINY_OPTIMIZER),
        Workload(name="gpt2-124m", model=MODELS["gpt2-124m"], masked=False),
        Workload(name="gpt-1.3b", model=MODELS["gpt-1.3b"], masked=False),
    )
}


def workload(name: str, **changes: object) -> Workload:
    """The preset called `name`, with fields changed. Raises `UnknownNameError` when there is none."""
    if name not in WORKLOADS:
        raise UnknownNameError("workload", name, WORKLOADS)
    return dataclasses.replace(WORKLOADS[name], **changes)  # type: ignore[arg-type]
