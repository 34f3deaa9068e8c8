"""Compressed gradients: replicas send less than gradients, and all step on one direction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from meshmark.algorithms.compressed.compressor import CONTRACTIONS, SPARSE, Compressor, CompressorKind
from meshmark.algorithms.compressed.traffic import message_bytes, summed_bytes, trained_shapes
from meshmark.errors import InputError
from meshmark.spec.algorithm import Algorithm
from meshmark.spec.workload import Workload
from meshmark.theory.traffic import METERED_STEP, Flow, Purpose, parameter_sizes, reductions

if TYPE_CHECKING:
    from meshmark.algorithms.compressed.transition import CompressedTransition
    from meshmark.algorithms.contract import FaultHypothesis, ObservedRun, UpdateRule
    from meshmark.spec.case import Case

POWER_SGD_WARMUP = 2
"""Fewest synchronous steps before PowerSGD: PyTorch's hook keeps state by bucket, and DDP rebuilds its buckets after
the first step."""


@dataclass(frozen=True, kw_only=True)
class Compressing(Algorithm):
    """Base of algorithms that compress.

    Raises `InputError` for a compressor that the algorithm does not take.
    """

    replicas_differ: ClassVar[bool] = True
    steps_on_local_gradients: ClassVar[bool] = False
    takes: ClassVar[frozenset[CompressorKind]] = frozenset()
    """Kinds of compressors that the algorithm is defined with; empty where it has none."""
    vectors_between_steps: ClassVar[int] = 0
    """Vectors as long as the gradients that every replica keeps; Adam's moments are an optimizer's states."""
    compressor: Compressor | None = None

    def __post_init__(self) -> None:
        got = self.compressor
        if bool(self.takes) != (got is not None) or got and got.kind not in self.takes:
            takes = f"takes one of {', '.join(sorted(self.takes))}" if self.takes else "takes none"
            raise InputError(f"algorithm: compressor {got.id if got else 'none'} for {self.kind}, which {takes}")

    @classmethod
    def presets(cls) -> Iterator[Self]:
        return (cls(compressor=Compressor(kind=kind)) for kind in sorted(cls.takes))

    @property
    def id(self) -> str:
        return f"{self.kind}-{self.compressor.id}" if self.compressor else self.kind

    @property
    def compressor_kind(self) -> str | None:
        return str(self.compressor.kind) if self.compressor else None

    @property
    def replicas_agree(self) -> bool:
        return True

    def compresses(self, step: int) -> bool:
        """Return whether `step` sends less than whole gradients."""
        return True

    def sends_gradients(self, step: int) -> bool:
        """Return whether `step` sends whole gradients."""
        return not self.compresses(step)

    def vectors_kept(self, case: Case, rank: int) -> int:
        return self.vectors_between_steps

    def traffic_repeats(self, case: Case, rank: int, step: int) -> bool:
        return self.compresses(step) == self.compresses(METERED_STEP) and (
            self.sends_gradients(step) == self.sends_gradients(METERED_STEP)
        )

    def traffic(self, case: Case, rank: int) -> list[Flow]:
        """Return the traffic: compressed gradients, all together or in buckets; in the warm-up, whole gradients."""
        count, tensors = parameter_sizes(case, rank)
        flows = []
        if self.sends_gradients(METERED_STEP):
            num_bytes = count * case.precision.reduction.itemsize
            flows += reductions(case, rank, Purpose.GRADIENTS, num_bytes, (1, tensors))
        if self.compresses(METERED_STEP):
            for kind, num_bytes, calls in self.step_bytes(case, rank):
                flows += reductions(case, rank, Purpose.GRADIENTS, num_bytes, (calls, calls * tensors), kind=kind)
        return flows

    def step_bytes(self, case: Case, rank: int) -> list[tuple[str, int, int]]:
        """Return the collectives of a step that compresses: kind, bytes of the full tensors, and fewest calls."""
        shapes, itemsize = trained_shapes(case, rank), case.precision.accumulation.itemsize
        if self.compressor and (summed := summed_bytes(self.compressor, shapes, itemsize)):
            return [("all_reduce", sum(summed), len(summed))]
        return self.gathered_bytes(case.layout.dp, message_bytes(self.compressor, shapes, itemsize))

    def gathered_bytes(self, num_replicas: int, message: int) -> list[tuple[str, int, int]]:
        """Return the collectives that bring together the `message` bytes of each replica."""
        return [("all_gather", num_replicas * message, 1)]

    def transition_class(self) -> type[CompressedTransition]:
        raise NotImplementedError

    def transition(
        self, workload: Workload, rules: Sequence[UpdateRule], *, exact: bool = True, num_stages: int = 1
    ) -> CompressedTransition:
        return self.transition_class()(workload, rules, exact)

    def fault_hypotheses(self, workload: Workload, run: ObservedRun) -> Iterator[FaultHypothesis]:
        from meshmark.algorithms.compressed.faults import compression_faults

        return compression_faults(self, run)


@dataclass(frozen=True, kw_only=True)
class Compressed(Compressing):
    """All replicas step on the mean of compressed gradients; what compression loses is lost.

    Random-k and PowerSGD are not taken: without feedback they would never send some of the gradient.
    """

    kind: ClassVar[str] = "compressed"
    takes: ClassVar[frozenset[CompressorKind]] = frozenset(CompressorKind) - {
        CompressorKind.POWER_SGD,
        CompressorKind.RANDOM_K,
    }

    def transition_class(self) -> type[CompressedTransition]:
        from meshmark.algorithms.compressed.transition import FORMATS, CompressedTransition, InFormatTransition

        in_format = self.compressor and self.compressor.kind in FORMATS
        return InFormatTransition if in_format else CompressedTransition


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Compressing):
    """Compression with error feedback: the part lost is added to the next step's gradient (arXiv:1809.07599,
    1901.09847).

    Raises `InputError` for PowerSGD with a shorter warm-up than PyTorch's hook needs, and for other compressors with a
    warm-up.
    """

    kind: ClassVar[str] = "error-feedback"
    warms_up: ClassVar[bool] = True
    takes: ClassVar[frozenset[CompressorKind]] = SPARSE | {CompressorKind.SIGN, CompressorKind.POWER_SGD}
    vectors_between_steps: ClassVar[int] = 1
    warmup_steps: int = 0
    """Synchronous steps before the first compressed one; PowerSGD's (arXiv:1905.13727) alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.is_power_sgd and self.warmup_steps:
            raise InputError(
                f"algorithm: warmup_steps {self.warmup_steps} means nothing in {self.kind} training with "
                f"{self.compressor_kind}; leave it out, or compress by power-sgd"
            )
        if self.is_power_sgd and self.warmup_steps < POWER_SGD_WARMUP:
            raise InputError(
                f"algorithm: warmup_steps is {self.warmup_steps}, expected at least {POWER_SGD_WARMUP} with power-sgd: "
                "PyTorch's hook remembers by bucket, and buckets are built anew after the first step"
            )

    @classmethod
    def presets(cls) -> Iterator[Self]:
        for kind in sorted(cls.takes):
            warmup = POWER_SGD_WARMUP if kind is CompressorKind.POWER_SGD else 0
            yield cls(compressor=Compressor(kind=kind), warmup_steps=warmup)

    @property
    def is_power_sgd(self) -> bool:
        return self.compressor is not None and self.compressor.kind is CompressorKind.POWER_SGD

    @property
    def id(self) -> str:
        return super().id + (f"w{self.warmup_steps}" if self.warmup_steps else "")

    def compresses(self, step: int) -> bool:
        return step >= self.warmup_steps

    def transition_class(self) -> type[CompressedTransition]:
        from meshmark.algorithms.compressed.transition import ErrorFeedbackTransition, PowerSGDTransition

        return PowerSGDTransition if self.is_power_sgd else ErrorFeedbackTransition


@dataclass(frozen=True, kw_only=True)
class EF21(Compressing):
    """EF21: compress the gradient's change since what was last sent of it (arXiv:2106.05203)."""

    kind: ClassVar[str] = "ef21"
    takes: ClassVar[frozenset[CompressorKind]] = CONTRACTIONS
    vectors_between_steps: ClassVar[int] = 2

    def transition_class(self) -> type[CompressedTransition]:
        from meshmark.algorithms.compressed.transition import EF21Transition

        return EF21Transition


@dataclass(frozen=True, kw_only=True)
class Served(Compressing):
    """Algorithms that compress both ways, to a server and back; replica 0 is the server."""

    vectors_between_steps: ClassVar[int] = 1

    def vectors_kept(self, case: Case, rank: int) -> int:
        """On the server what it has left too."""
        return self.vectors_between_steps + (case.layout.coordinates(rank).dp == 0)

    def gathered_bytes(self, num_replicas: int, message: int) -> list[tuple[str, int, int]]:
        return [("gather", num_replicas * message, 1), ("broadcast", message, 1)]

    def update_memory_is_planned(self, num_replicas: int) -> bool:
        return num_replicas <= 2  # of two, the backward pass holds more


@dataclass(frozen=True, kw_only=True)
class DoubleSqueeze(Served):
    """A server compresses the mean of compressed gradients too, and both feed back what is lost (arXiv:1905.05957).

    With several rounds of compression it is NEOLITHIC's (arXiv:2206.03665).
    """

    kind: ClassVar[str] = "double-squeeze"
    takes: ClassVar[frozenset[CompressorKind]] = CONTRACTIONS

    @classmethod
    def presets(cls) -> Iterator[Self]:
        yield from super().presets()
        yield cls(compressor=Compressor(kind=CompressorKind.SIGN, rounds=3))

    def transition_class(self) -> type[CompressedTransition]:
        from meshmark.algorithms.compressed.transition import DoubleSqueezeTransition

        return DoubleSqueezeTransition


@dataclass(frozen=True, kw_only=True)
class MajorityVote(Compressing):
    """All replicas step on the sign that most replicas' gradients have, element by element (arXiv:1810.05291)."""

    kind: ClassVar[str] = "majority-vote"

    @classmethod
    def presets(cls) -> Iterator[Self]:
        yield cls()

    def transition_class(self) -> type[CompressedTransition]:
        from meshmark.algorithms.compressed.transition import MajorityVoteTransition

        return MajorityVoteTransition


ALGORITHMS: tuple[type[Algorithm], ...] = (Compressed, ErrorFeedback, EF21, DoubleSqueeze, MajorityVote)
