"""How compression is got wrong: one thing changed in an algorithm that compresses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from meshmark.algorithms.compressed import Compressing
from meshmark.algorithms.compressed.compressor import Compressor, CompressorKind
from meshmark.algorithms.compressed.compressors import Array, Draw, scale_of, signs
from meshmark.algorithms.compressed.transition import (
    CompressedTransition,
    DoubleSqueezeTransition,
    EF21Transition,
    ErrorFeedbackTransition,
    InFormatTransition,
    MajorityVoteTransition,
    PowerSGDTransition,
)
from meshmark.algorithms.contract import FaultHypothesis, ObservedRun, Tensors, averaged

Faults = dict[str, type[CompressedTransition]]
"""Wrong transitions, by what they do."""


class Whole(CompressedTransition):
    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        return averaged(self.widened(gradients))


class Sum(CompressedTransition):
    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        found = super().directions(gradients)
        return [{name: len(found) * x for name, x in d.items()} for d in found]


class MeanOfMean(CompressedTransition):
    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        found = super().directions(gradients)
        return [{name: x / len(found) for name, x in d.items()} for d in found]


class First(CompressedTransition):
    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        return super().directions([gradients[0] for _ in gradients])


class Recalled(ErrorFeedbackTransition):
    """What is left enters the next gradient by another factor than 1."""

    times: ClassVar[float]
    replica: ClassVar[int | None] = None
    """The replica that does so, if it is one alone."""
    step: ClassVar[int | None] = None
    """The step in which it does so, if it is one alone."""

    def wanted(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        if self.left is not None and self.step in (None, self.steps):
            self.left = [
                {name: self.times * x for name, x in own.items()} if self.replica in (None, i) else own
                for i, own in enumerate(self.left)
            ]
        return super().wanted(gradients)


class Forgotten(Recalled):
    times = 0.0


class Twice(Recalled):
    times = 2.0


class Late(ErrorFeedbackTransition):
    """The rest that was not sent is added one step too late."""

    before: list[Tensors] | None = None

    def wanted(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        now, self.left, self.before = self.left, self.before, self.left
        found = super().wanted(gradients)
        self.left = now
        return found


class NotTakenOff(ErrorFeedbackTransition):
    """The part that was sent is not subtracted from the rest."""

    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        wanted = self.wanted(gradients)
        found = super().directions(gradients)
        self.left = wanted
        return found


class Signed(CompressedTransition):
    def once(self, x: Array, draw: Draw) -> Array:
        flat, left = x.ravel(), np.zeros_like(x.ravel())
        chosen = np.argsort(-flat, kind="stable")[: self.compressor.kept(len(flat))]
        left[chosen] = flat[chosen]
        return left.reshape(x.shape)


class Fewer(CompressedTransition):
    @property
    def compressor(self) -> Compressor:
        right = super().compressor
        return replace(right, percent=max(right.percent // 2, 1))


class ScaledByRow(CompressedTransition):
    def once(self, x: Array, draw: Draw) -> Array:
        rows = x.reshape(-1, x.shape[-1])
        return np.stack([scale_of(row) * signs(row) for row in rows]).reshape(x.shape)


class ScaledByNorm(CompressedTransition):
    def once(self, x: Array, draw: Draw) -> Array:
        norm: np.floating = x.dtype.type(np.linalg.norm(x) / np.sqrt(x.size))
        return norm * signs(x)


class Unscaled(CompressedTransition):
    def once(self, x: Array, draw: Draw) -> Array:
        return signs(x)


class DrawnAlike(CompressedTransition):
    def draw(self, replica: int, name: str) -> Draw:
        return super().draw(0, name)


class DrawnBefore(CompressedTransition):
    def draw(self, replica: int, name: str) -> Draw:
        return replace(super().draw(replica, name), step=max(self.steps - 1, 0))


class DrawnOnce(CompressedTransition):
    def draw(self, replica: int, name: str) -> Draw:
        return replace(super().draw(replica, name), step=0)


class _Halves(Draw):
    def uniform(self, size: int) -> Array:
        return np.full(size, 0.5, dtype=np.float32)


class Nearest(CompressedTransition):
    def draw(self, replica: int, name: str) -> Draw:
        right = super().draw(replica, name)
        return _Halves(seed=right.seed, step=right.step, replica=replica, name=name)


class KnownForgotten(EF21Transition):
    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        self.known = None
        return super().directions(gradients)


class ChangesAlone(EF21Transition):
    """Stepped on what changed."""

    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        before = self.known
        after = super().directions(gradients)
        if before is None:
            return after
        gone = averaged(self.widened(before))
        return [{n: x - h[n] for n, x in d.items()} for d, h in zip(after, gone, strict=True)]


class OfMean(EF21Transition):
    """The change since what is known of the mean."""

    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        if self.known:
            self.known = averaged(self.known)
        return super().directions(gradients)


class SignOfMean(MajorityVoteTransition):
    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        return [{name: signs(x) for name, x in d.items()} for d in averaged(self.widened(gradients))]


class MeanOfSigns(MajorityVoteTransition):
    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        return averaged(self.widened([{name: signs(x) for name, x in own.items()} for own in gradients]))


class TiesPlus(MajorityVoteTransition):
    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        return [{name: signs(x) for name, x in d.items()} for d in super().directions(gradients)]


class OtherFormat(InFormatTransition):
    @property
    def compressor(self) -> Compressor:
        kinds = {CompressorKind.FP16: CompressorKind.BF16, CompressorKind.BF16: CompressorKind.FP16}
        right = super().compressor
        return replace(right, kind=kinds[right.kind])


class Cold(PowerSGDTransition):
    """Every step begins with the first Q."""

    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        self.factors = {}
        left = self.left
        if left is None:
            self.left = [{name: np.zeros_like(x) for name, x in own.items()} for own in gradients]
        return super().directions(gradients)


class HigherRank(PowerSGDTransition):
    @property
    def compressor(self) -> Compressor:
        right = super().compressor
        return replace(right, rank=right.rank + 1)


class LongerWarmup(CompressedTransition):
    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        if not self.algorithm.compresses(self.steps - 1):
            return self.whole(averaged(self.widened(gradients)))
        return super().directions(gradients)


class OneRound(CompressedTransition):
    @property
    def compressor(self) -> Compressor:
        return replace(super().compressor, rounds=1)


class _ServerForgets(DoubleSqueezeTransition):
    def wanted_back(self, mean: Tensors) -> Tensors:
        return mean


class _ServerAddsTwice(DoubleSqueezeTransition):
    def wanted_back(self, mean: Tensors) -> Tensors:
        return super().wanted_back(super().wanted_back(mean))


class _ServerSendsAll(DoubleSqueezeTransition):
    def received_back(self, name: str, x: Array) -> Array:
        return x


OF_SERVERS: Faults = {
    "what the server has left is forgotten": _ServerForgets,
    "what the server has left is added twice": _ServerAddsTwice,
    "the server sends its mean as it is": _ServerSendsAll,
}
FEEDBACK: Faults = {
    "what is left is forgotten": Forgotten,
    "what is left is added twice": Twice,
    "what is left is added a step late": Late,
    "what was sent is not taken off what is left": NotTakenOff,
}
LONGER_WARMUP: Faults = {"the warm-up is a step longer": LongerWarmup}
_OF_ALL: Faults = {
    "nothing is compressed": Whole,
    "the sum over replicas, not their mean": Sum,
    "divided by the number of replicas twice": MeanOfMean,
    "the first replica's gradient alone": First,
}
_OF_KINDS: dict[str, Faults] = {
    "error-feedback": FEEDBACK,
    "double-squeeze": {**OF_SERVERS, **FEEDBACK},
    "ef21": {
        "what is known of a gradient is forgotten": KnownForgotten,
        "all step on what changed, not on what is known": ChangesAlone,
        "the change is taken since what is known of the mean, not of the replica": OfMean,
    },
    "majority-vote": {
        "the sign of the mean gradient, not of most": SignOfMean,
        "the mean of signs, not the sign of most": MeanOfSigns,
        "where as many say the one as the other, plus": TiesPlus,
    },
}
_OF_COMPRESSORS: dict[CompressorKind, Faults] = {
    CompressorKind.TOP_K: {"the largest of signed values, not of magnitudes": Signed, "half as many elements": Fewer},
    CompressorKind.RANDOM_K: {
        "the same elements in every step": DrawnOnce,
        "the elements of the step before": DrawnBefore,
        "half as many elements": Fewer,
    },
    CompressorKind.SIGN: {
        "the scale is of each row, not of the tensor": ScaledByRow,
        "the scale is the root of the mean square, not the mean magnitude": ScaledByNorm,
        "signs are not scaled": Unscaled,
    },
    CompressorKind.QSGD: {
        "all replicas round by the same draws": DrawnAlike,
        "rounded by the draws of the step before": DrawnBefore,
        "rounded by the same draws in every step": DrawnOnce,
        "rounded to the nearest level, not at random": Nearest,
    },
    CompressorKind.FP16: {"in bf16, not in fp16": OtherFormat},
    CompressorKind.BF16: {"in fp16, not in bf16": OtherFormat},
    CompressorKind.POWER_SGD: {
        "the factor of the step before is not kept": Cold,
        "of a rank higher by one": HigherRank,
        **LONGER_WARMUP,
    },
}


def compression_faults(
    algorithm: Compressing, run: ObservedRun, of_kind: Faults | None = None
) -> Iterator[FaultHypothesis]:
    """Yield what is got wrong of every compression, of this algorithm (`of_kind`), and of its compressor.

    What all replicas do in every step comes first, then what one of them does, or all of them once.
    """
    real: Any = algorithm.transition_class()
    compressor = algorithm.compressor
    of_compressor = _OF_COMPRESSORS[compressor.kind] if compressor else {}
    if compressor and compressor.rounds > 1:
        of_compressor = {"one round of compression": OneRound, **of_compressor}
    own = _OF_KINDS.get(algorithm.kind, {}) if of_kind is None else of_kind
    faults = {**_OF_ALL, **own, **of_compressor}
    for how, change in {**faults, **_of_one(faults, run)}.items():
        wrong = change if issubclass(change, real) else type(change.__name__, (change, real), {})
        yield FaultHypothesis(how, wrong)


def _of_one(faults: Faults, run: ObservedRun) -> Faults:
    """Return those of the faults that can be one replica's, or one step's, with their place."""
    found: Faults = {}
    step, replicas = run.failed_step, range(len(run.gradients))
    places: list[tuple[str, int | None, int | None]] = [(f"on replica {r}", r, None) for r in replicas]
    places += [(f"in step {step} alone", None, step)]
    places += [(f"on replica {r} in step {step} alone", r, step) for r in replicas]
    for how, change in faults.items():
        if issubclass(change, Recalled):
            for place, replica, once in places:
                found[f"{how} {place}"] = type(change.__name__, (change,), {"replica": replica, "step": once})
    return found
