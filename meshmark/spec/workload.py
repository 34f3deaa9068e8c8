"""Workloads: model, data, loss, optimizer and algorithm. How they are distributed over ranks is up to the layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from meshmark.errors import AlgorithmError, InputError, UnknownNameError
from meshmark.models.config import Dataset, ImageModelConfig, ModelConfig, digit_models
from meshmark.models.mixture import MIXTURE_MINI, MixtureSpec
from meshmark.models.transformer import MODELS, ModelSpec
from meshmark.spec.algorithm import SYNCHRONOUS, Algorithm, algorithm_presets
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.own_model import OwnModelConfig as OwnModelConfig  # a model family that records may hold

A = TypeVar("A", bound=Algorithm)
MOST_ROWS = 2**24
"""Upper bound for the rows of a global batch. Nobody trains on more, and its divisors are searched in seconds."""


class Loss(StrEnum):
    """The loss to minimise: a sum over the targets of the global batch, divided by the sum of their weights."""

    CROSS_ENTROPY = "cross_entropy"
    """Targets count fully or not at all; PyTorch's cross-entropy ignores masked ones (`ignore_index`)."""
    OWN = "own"
    """The model's output is already the sum, as a user's own workload computes it."""
    WEIGHTED_CROSS_ENTROPY = "weighted_cross_entropy"
    """Each target's cross-entropy is multiplied by its weight."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training problem, the same for every framework, layout and precision."""

    name: str
    model: ModelConfig
    dataset: Dataset = Dataset.TEXT
    loss: Loss = Loss.CROSS_ENTROPY
    optimizer: OptimizerSpec = OptimizerSpec()
    global_batch: int = 8
    """Rows (sequences or images) per optimizer step, over all ranks."""
    masked: bool = True
    """If True, mask a random tail of every sequence, or some of the images.

    Rows, micro-batches and ranks then hold unequal numbers of targets. In masked text, everything that is not a
    prediction target is masked.
    """
    frozen: tuple[str, ...] = ()
    """Prefixes of the names of parameters that are not trained, such as `embedding.`."""
    unfreeze_step: int | None = None
    """Step from which the `frozen` parameters are trained too. None if they never are."""
    skipped_block: int | None = None
    """A block that every second step leaves out, so that its parameters are unused there."""
    corpus: str | None = None
    """Path of a file to train on byte by byte, or of a folder of images with one subfolder per class.

    None uses the text in Python's standard library, or the digits.
    """
    seed: int = 0
    """Seed of the initial values and of the batches."""
    algorithm: Algorithm = SYNCHRONOUS
    """How replicas train together."""

    def __post_init__(self) -> None:
        if not 1 <= self.global_batch <= MOST_ROWS:
            raise InputError(
                f"workload {self.name!r}: global_batch is {self.global_batch}, expected at least 1 and at most "
                f"{MOST_ROWS:,}"
            )
        if self.unfreeze_step is not None:
            if not self.frozen or self.unfreeze_step < 1:
                raise InputError(
                    f"workload {self.name!r}: unfreeze_step is {self.unfreeze_step} and frozen is {self.frozen}, "
                    "expected a step of at least 1 and prefixes of parameters that are frozen before it"
                )
            if self.optimizer.warmup_steps:
                raise InputError(
                    f"workload {self.name!r}: unfreeze_step with warmup_steps; PyTorch's schedulers leave the rate of "
                    "parameters that an optimizer is given later as it is, so leave one of the two out"
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
        """The name, followed by the algorithm's id unless it is synchronous."""
        end = f"-{self.algorithm.id}" if self.algorithm.id else ""
        return self.name if end in self.name else f"{self.name}{end}"

    def trains(self, name: str) -> bool:
        """Return whether the parameter with this canonical name is trained in any step."""
        return self.unfreeze_step is not None or self.trains_at_first(name)

    def trains_at_first(self, name: str) -> bool:
        """Return whether the parameter with this canonical name is trained from the first step on."""
        return not name.startswith(self.frozen)

    def uses(self, name: str, step: int) -> bool:
        """Return whether the parameter with this canonical name is used in `step`, and not frozen."""
        skipped = self.skipped_at(step)
        return not name.startswith(self.frozen_at(step)) and (
            skipped is None or not name.startswith(f"blocks.{skipped}.")
        )

    def frozen_at(self, step: int) -> tuple[str, ...]:
        """Return the prefixes of the parameters that are frozen in `step`."""
        return () if self.unfreeze_step is not None and step >= self.unfreeze_step else self.frozen

    @property
    def leaves_unused(self) -> bool:
        """True if some trained parameters have no gradient in some step."""
        return self.skipped_block is not None or self.model.leaves_unused

    def skipped_at(self, step: int) -> int | None:
        """Return the block that `step` leaves out, or None."""
        return self.skipped_block if step % 2 else None

    def algorithm_as(self, cls: type[A]) -> A:
        """Return the algorithm as `cls`, for code that supports one class. It must have rejected the others before."""
        assert isinstance(self.algorithm, cls), f"workload {self.name!r} trains by {self.algorithm.id or 'none'}"
        return self.algorithm

    @property
    def transformer(self) -> ModelSpec:
        """The model, for code that supports only decoder-only transformers. It must have rejected others before."""
        assert isinstance(self.model, ModelSpec), f"workload {self.name!r} trains {self.model.name!r}"
        return self.model

    @property
    def text_model(self) -> ModelSpec | MixtureSpec:
        """The model, for code that supports only transformers over tokens."""
        assert isinstance(self.model, ModelSpec | MixtureSpec), f"workload {self.name!r} trains {self.model.name!r}"
        return self.model

    @property
    def couples_rows(self) -> bool:
        """True if a batch norm makes rows of a micro-batch affect each other's gradients.

        The exact gradient then depends on how a layout divides the batch, and replicas keep different buffers.
        """
        return self.model.couples_rows

    @property
    def routes(self) -> bool:
        """True if values decide which weights a token uses. Rounding then decides close calls."""
        return self.model.routes

    @property
    def tokens_per_step(self) -> int:
        """Positions that the model computes in one step, including masked ones."""
        return self.global_batch * self.model.seq_len

    @property
    def unit(self) -> str:
        """Unit of throughput."""
        return self.model.unit

    @property
    def units_per_step(self) -> int:
        """Units per step, including masked ones."""
        return self.tokens_per_step if self.unit == "tokens" else self.global_batch


# The tiny workloads start with gradient norms of about 2 to 5. This clip norm is below them, so that clipping is
# active in all of the first steps and a wrong norm changes the parameters.
_TINY_OPTIMIZER = OptimizerSpec(clip_norm=0.5)
_MOMENTUM = OptimizerSpec(kind=OptimizerKind.SGD, learning_rate=0.1, momentum=0.9, weight_decay=0.01, clip_norm=0.5)
_PLAIN = OptimizerSpec(kind=OptimizerKind.SGD, learning_rate=0.1, weight_decay=0.0, clip_norm=None)
_ADAM = OptimizerSpec(clip_norm=None, eps=1e-4)
_ADAFACTOR = OptimizerSpec(kind=OptimizerKind.ADAFACTOR, learning_rate=1e-2, clip_norm=0.5)
_MUON = OptimizerSpec(kind=OptimizerKind.MUON, momentum=0.95, nesterov=True, clip_norm=0.5)

_LARS = OptimizerSpec(kind=OptimizerKind.LARS, learning_rate=10.0, momentum=0.9, weight_decay=0.01, clip_norm=0.5)
_LAMB = OptimizerSpec(kind=OptimizerKind.LAMB, learning_rate=1e-2, weight_decay=0.01, clip_norm=0.5)
_UNCLIPPED_LAMB = replace(_LAMB, clip_norm=None, eps=1e-4)


def digits(name: str, model: ImageModelConfig) -> Workload:
    """Return the workload that trains a model on the digit images."""
    return Workload(
        name=name,
        model=model,
        dataset=Dataset.DIGITS,
        loss=Loss.WEIGHTED_CROSS_ENTROPY,
        optimizer=OptimizerSpec(clip_norm=0.1),
        global_batch=32,
    )


DEFAULT_WORKLOAD = "gpt-tiny"

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        # Half as deep, wide and long as gpt-tiny. The time of a launch is then mostly process start.
        Workload(name="gpt-mini", model=MODELS["gpt-mini"], optimizer=_TINY_OPTIMIZER),
        # Its rate grows in every step that a run observes, so that a schedule that starts late or early shows.
        Workload(name="gpt-mini-warmup", model=MODELS["gpt-mini"], optimizer=replace(_TINY_OPTIMIZER, warmup_steps=8)),
        # The same model with other optimizers.
        Workload(name="gpt-mini-momentum", model=MODELS["gpt-mini"], optimizer=_MOMENTUM),
        # For algorithms that are defined on a gradient step, or keep its momentum themselves.
        Workload(name="gpt-mini-sgd", model=MODELS["gpt-mini"], optimizer=_PLAIN),
        Workload(name="gpt-mini-heavy-ball", model=MODELS["gpt-mini"], optimizer=replace(_PLAIN, momentum=0.9)),
        # For algorithms that keep Adam's moments themselves.
        Workload(name="gpt-mini-adam", model=MODELS["gpt-mini"], optimizer=_ADAM),
        Workload(name="gpt-mini-plain-adam", model=MODELS["gpt-mini"], optimizer=replace(_ADAM, weight_decay=0.0)),
        Workload(name="gpt-mini-unclipped-lamb", model=MODELS["gpt-mini"], optimizer=_UNCLIPPED_LAMB),
        Workload(name="gpt-mini-nesterov", model=MODELS["gpt-mini"], optimizer=replace(_MOMENTUM, nesterov=True)),
        Workload(name="gpt-mini-adafactor", model=MODELS["gpt-mini"], optimizer=_ADAFACTOR),
        Workload(name="gpt-mini-muon", model=MODELS["gpt-mini"], optimizer=_MUON),
        Workload(name="gpt-mini-lars", model=MODELS["gpt-mini"], optimizer=_LARS),
        Workload(name="gpt-mini-lamb", model=MODELS["gpt-mini"], optimizer=_LAMB),
        # The default. Its rows divide into three micro-batches on up to eight replicas.
        Workload(name="gpt-tiny", model=MODELS["gpt-tiny"], optimizer=_TINY_OPTIMIZER, global_batch=24),
        Workload(name="llama-mini", model=MODELS["llama-mini"], optimizer=_TINY_OPTIMIZER),
        Workload(name="llama-tiny", model=MODELS["llama-tiny"], optimizer=_TINY_OPTIMIZER, global_batch=24),
        Workload(name="bert-mini", model=MODELS["bert-mini"], dataset=Dataset.MASKED_TEXT, optimizer=_TINY_OPTIMIZER),
        Workload(name="gpt-moe-mini", model=MIXTURE_MINI, optimizer=_TINY_OPTIMIZER),
        *(digits(name, model) for name, model in digit_models().items()),
        Workload(name="gpt2-124m", model=MODELS["gpt2-124m"], masked=False),
        Workload(name="gpt-1.3b", model=MODELS["gpt-1.3b"], masked=False),
    )
}


def workload(name: str) -> Workload:
    """Return the preset called `name`, or a preset combined with an algorithm's id, such as `gpt-mini-local-sgd2`.

    Raises `UnknownNameError` when there is none.
    """
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
