"""What is trained: model, data, loss, optimizer and algorithm. How it is laid over ranks is a layout's business."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from meshmark.errors import AlgorithmError, InputError, UnknownNameError
from meshmark.spec.algorithm import SYNCHRONOUS, Algorithm, algorithm_presets
from meshmark.spec.mixture_spec import MIXTURE_MINI, MixtureSpec
from meshmark.spec.model_config import Dataset, ImageModelConfig, ModelConfig
from meshmark.spec.model_spec import MODELS, ModelSpec
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.own_model import OwnModelConfig as OwnModelConfig  # a model family that records may hold
from meshmark.spec.vision_spec import VISION_MODELS

A = TypeVar("A", bound=Algorithm)
MOST_ROWS = 2**24
"""Of one global batch: more than anybody trains on, and few enough for its divisors to be searched in seconds."""


class Loss(StrEnum):
    """What is minimised: a sum over the targets of the global batch, divided by the sum of their weights."""

    CROSS_ENTROPY = "cross_entropy"
    """Every target counts or does not: PyTorch's cross-entropy leaves the masked ones out (`ignore_index`)."""
    OWN = "own"
    """The model's output is the sum already, as a user's own workload computes it."""
    WEIGHTED_CROSS_ENTROPY = "weighted_cross_entropy"
    """Each target's cross-entropy times its weight."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training problem, the same for every framework, layout and precision."""

    name: str
    model: ModelConfig
    dataset: Dataset = Dataset.TEXT
    loss: Loss = Loss.CROSS_ENTROPY
    optimizer: OptimizerSpec = OptimizerSpec()
    global_batch: int = 8
    """Rows (sequences or images) in one optimizer step, over all ranks."""
    masked: bool = True
    """Mask a random tail of every sequence, or some of the images, so that rows, micro-batches and ranks hold unequal
    numbers of targets; of masked text, all that is not to be found again."""
    frozen: tuple[str, ...] = ()
    """Starts of the names of parameters that are not trained, such as `embedding.`."""
    skipped_block: int | None = None
    """A block that every second step leaves out, so that its parameters are unused there."""
    corpus: str | None = None
    """Path of a file to train on, byte by byte, or of a folder of images in subfolders, one a class; None takes the
    text inside Python's standard library, or the digits."""
    seed: int = 0
    """Seeds the initial values and the batches."""
    algorithm: Algorithm = SYNCHRONOUS
    """How replicas train together."""

    def __post_init__(self) -> None:
        if not 1 <= self.global_batch <= MOST_ROWS:
            raise InputError(
                f"workload {self.name!r}: global_batch is {self.global_batch}, expected at least 1 and at most "
                f"{MOST_ROWS:,}"
            )
        if self.skipped_block is not None and not 0 <= self.skipped_block < self.model.num_layers:
            raise InputError(
                f"workload {self.name!r}: skipped_block is {self.skipped_block}, expected one of the model's "
                f"{self.model.num_layers} blocks, counted from 0"
            )
        if self.dataset not in self.model.datasets:
            raise InputError(
                f"workload {self.name!r}: model {self.model.name!r} (causal={self.model.causal}) trains on "
                f"{', '.join(sorted(self.model.datasets))}, but the data set is {self.dataset}: next tokens take a "
                "causal model, hidden ones an encoder, images a model of images"
            )
        if self.couples_rows and self.algorithm.replicas_differ:
            raise InputError(
                f"workload {self.name!r}: model {self.model.name!r} has batch norms, whose statistics are judged of "
                f"replicas that step together, but the algorithm is {self.algorithm.kind}; take a model without, or "
                "the synchronous algorithm"
            )
        if reason := self.algorithm.refusal(self.optimizer):
            raise AlgorithmError(f"workload {self.name!r}: algorithm {self.algorithm.id} {reason}")

    @property
    def id(self) -> str:
        """The name, which tells the algorithm where it is not the synchronous one."""
        end = f"-{self.algorithm.id}" if self.algorithm.id else ""
        return self.name if end in self.name else f"{self.name}{end}"

    def trains(self, name: str) -> bool:
        """Whether the parameter with this canonical name is trained."""
        return not name.startswith(self.frozen) if self.frozen else True

    def uses(self, name: str, step: int) -> bool:
        """Whether the parameter with this canonical name has a part in `step`."""
        skipped = self.skipped_at(step)
        return skipped is None or not name.startswith(f"blocks.{skipped}.")

    @property
    def leaves_unused(self) -> bool:
        """Whether a step has no gradient of some parameters that are trained."""
        return self.skipped_block is not None or self.model.leaves_unused

    def skipped_at(self, step: int) -> int | None:
        """The block that `step` leaves out."""
        return self.skipped_block if step % 2 else None

    def algorithm_as(self, cls: type[A]) -> A:
        """Return the algorithm, for code that knows one class of algorithms: it must have refused the others."""
        assert isinstance(self.algorithm, cls), f"workload {self.name!r} trains by {self.algorithm.id or 'none'}"
        return self.algorithm

    @property
    def transformer(self) -> ModelSpec:
        """The model, for those that know decoder-only transformers alone: they must have refused or left out others."""
        assert isinstance(self.model, ModelSpec), f"workload {self.name!r} trains {self.model.name!r}"
        return self.model

    @property
    def text_model(self) -> ModelSpec | MixtureSpec:
        """The model, for those that know transformers over tokens alone."""
        assert isinstance(self.model, ModelSpec | MixtureSpec), f"workload {self.name!r} trains {self.model.name!r}"
        return self.model

    @property
    def couples_rows(self) -> bool:
        """Whether the rows of a micro-batch enter one another's gradients, by a batch norm: the truth then depends on
        how a layout divides the batch, and replicas keep buffers of their own."""
        return self.model.couples_rows

    @property
    def routes(self) -> bool:
        """Whether its values decide which weights a token meets: where a decision is close, rounding makes it."""
        return self.model.routes

    @property
    def tokens_per_step(self) -> int:
        """Positions that the model computes in one step, masked ones too."""
        return self.global_batch * self.model.seq_len

    @property
    def unit(self) -> str:
        """What throughput counts."""
        return self.model.unit

    @property
    def units_per_step(self) -> int:
        """Masked ones too."""
        return self.tokens_per_step if self.unit == "tokens" else self.global_batch


# A clip norm below the gradient norms that the tiny workloads start with (about 2 to 5): clipping is active in
# every one of the first steps, so that a wrong norm changes the parameters.
_TINY_OPTIMIZER = OptimizerSpec(clip_norm=0.5)
_MOMENTUM = OptimizerSpec(kind=OptimizerKind.SGD, learning_rate=0.1, momentum=0.9, weight_decay=0.01, clip_norm=0.5)
_PLAIN = OptimizerSpec(kind=OptimizerKind.SGD, learning_rate=0.1, weight_decay=0.0, clip_norm=None)
_ADAM = OptimizerSpec(clip_norm=None, eps=1e-4)
_ADAFACTOR = OptimizerSpec(kind=OptimizerKind.ADAFACTOR, learning_rate=1e-2, clip_norm=0.5)
_MUON = OptimizerSpec(kind=OptimizerKind.MUON, momentum=0.95, nesterov=True, clip_norm=0.5)

_LARS = OptimizerSpec(kind=OptimizerKind.LARS, learning_rate=10.0, momentum=0.9, weight_decay=0.01, clip_norm=0.5)
_LAMB = OptimizerSpec(kind=OptimizerKind.LAMB, learning_rate=1e-2, weight_decay=0.01, clip_norm=0.5)
_UNCLIPPED_LAMB = replace(_LAMB, clip_norm=None, eps=1e-4)


def _digits(name: str, model: ImageModelConfig) -> Workload:
    return Workload(
        name=name,
        model=model,
        dataset=Dataset.DIGITS,
        loss=Loss.WEIGHTED_CROSS_ENTROPY,
        optimizer=OptimizerSpec(clip_norm=0.1),
        global_batch=32,
    )


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        # Half as deep, wide and long: a launch is then mostly the launch.
        Workload(name="gpt-mini", model=MODELS["gpt-mini"], optimizer=_TINY_OPTIMIZER),
        # The same with each other kind of optimizer.
        Workload(name="gpt-mini-momentum", model=MODELS["gpt-mini"], optimizer=_MOMENTUM),
        # Of algorithms that are defined on a gradient step, or keep its momentum themselves.
        Workload(name="gpt-mini-sgd", model=MODELS["gpt-mini"], optimizer=_PLAIN),
        Workload(name="gpt-mini-heavy-ball", model=MODELS["gpt-mini"], optimizer=replace(_PLAIN, momentum=0.9)),
        # Of those that keep Adam's moments themselves.
        Workload(name="gpt-mini-adam", model=MODELS["gpt-mini"], optimizer=_ADAM),
        Workload(name="gpt-mini-plain-adam", model=MODELS["gpt-mini"], optimizer=replace(_ADAM, weight_decay=0.0)),
        Workload(name="gpt-mini-unclipped-lamb", model=MODELS["gpt-mini"], optimizer=_UNCLIPPED_LAMB),
        Workload(name="gpt-mini-nesterov", model=MODELS["gpt-mini"], optimizer=replace(_MOMENTUM, nesterov=True)),
        Workload(name="gpt-mini-adafactor", model=MODELS["gpt-mini"], optimizer=_ADAFACTOR),
        Workload(name="gpt-mini-muon", model=MODELS["gpt-mini"], optimizer=_MUON),
        Workload(name="gpt-mini-lars", model=MODELS["gpt-mini"], optimizer=_LARS),
        Workload(name="gpt-mini-lamb", model=MODELS["gpt-mini"], optimizer=_LAMB),
        Workload(name="gpt-tiny", model=MODELS["gpt-tiny"], optimizer=_TINY_OPTIMIZER),
        Workload(name="llama-tiny", model=MODELS["llama-tiny"], optimizer=_TINY_OPTIMIZER),
        Workload(name="bert-mini", model=MODELS["bert-mini"], dataset=Dataset.MASKED_TEXT, optimizer=_TINY_OPTIMIZER),
        Workload(name="gpt-moe-mini", model=MIXTURE_MINI, optimizer=_TINY_OPTIMIZER),
        _digits("vit-digits", VISION_MODELS["vit-mini"]),
        _digits("vit-digits-bn", VISION_MODELS["vit-mini-bn"]),
        _digits("resnet-digits", VISION_MODELS["resnet-mini"]),
        _digits("coatnet-digits", VISION_MODELS["coatnet-mini"]),
        _digits("coatnet-digits-bn", VISION_MODELS["coatnet-mini-bn"]),
        _digits("amoebanet-digits", VISION_MODELS["amoebanet-mini"]),
        Workload(name="gpt2-124m", model=MODELS["gpt2-124m"], masked=False),
        Workload(name="gpt-1.3b", model=MODELS["gpt-1.3b"], masked=False),
    )
}


def workload(name: str) -> Workload:
    """The preset called `name`, or that of its start by the algorithm that its end names: `gpt-mini-local-sgd2`. Raises
    `UnknownNameError` when there is none."""
    if name in WORKLOADS:
        return WORKLOADS[name]
    for end, algorithm in algorithm_presets().items():
        start = name.removesuffix(f"-{end}")
        if start != name and start in WORKLOADS:
            return replace(WORKLOADS[start], name=name, algorithm=algorithm)
    start = max((known for known in WORKLOADS if name.startswith(f"{known}-")), key=len, default="")
    if start:
        raise UnknownNameError(f"algorithm of workload {start!r}", name.removeprefix(f"{start}-"), algorithm_presets())
    raise UnknownNameError("workload", name, WORKLOADS)
