"""What is trained: model, data, loss and optimizer. How it is laid over ranks is a layout's business."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum

from meshmark.errors import InputError, UnknownNameError
from meshmark.model_spec import MODELS, ModelSpec


class OptimizerKind(StrEnum):
    ADAMW = "adamw"
    SGD = "sgd"


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """The optimizer, applied alike to every parameter."""

    kind: OptimizerKind = OptimizerKind.ADAMW
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Decoupled for AdamW, L2 for SGD."""
    clip_norm: float | None = 1.0
    """Largest global L2 norm of the gradients; None leaves them alone."""

    @property
    def states_per_parameter(self) -> int:
        """Tensors of a parameter's shape that the optimizer keeps."""
        return 2 if self.kind is OptimizerKind.ADAMW else 0


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
    corpus: str | None = None
    """Path of a file to train on, byte by byte; None takes the text inside Python's standard library."""
    seed: int = 0
    """Seeds the initial values and the batches."""

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise InputError(f"workload {self.name!r}: global_batch is {self.global_batch}, expected at least 1")

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
