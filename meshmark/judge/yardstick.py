"""The yardstick of equivalence: how far correct runs stand from the truth, and so how far is too far.

Every run is reduced to the same comparisons: the distance of each loss, norm, gradient and parameter at each step from
the truth, and for each gradient by how much its multiple of the truth misses one, which sees a scaling that is small
against the tensor's rounding in all other directions. The noise of a comparison is its root mean square over the noise
runs, for a single number (of which one run says least, as nothing averages it) over all steps too. How far a quantity
scatters about its noise, `spread` finds for each by itself, and follows to where a correct run is with a probability of
FALSE_ALARMS, shared over all comparisons of a case. That gives its factor: a case passes while no comparison exceeds
factor x noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshmark.judge.deviation import Deviations, Quantity, QuantityKind
from meshmark.judge.replicas import by_replica
from meshmark.judge.spread import Spread
from meshmark.spec.precision import Precision

FALSE_ALARMS = 1e-4
"""Probability that a correct run fails, any of its comparisons, all steps together: what factors aim at. What has been
shown of it, `false_alarms` tells."""
SMALLEST_FACTORS = {"number": 8.0, "gradients": 2.4, "parameters": 4.0, "buffers": 4.0, "twin": 4.0}
"""By kind: a framework that computes in another order than `single` has another noise, not only another draw of it. Of
real adapters the furthest stood at 4.9, 2.1 and 2.9. `make power` tells it again."""
ZERO = 1e-12
"""Relative to the norm of all gradients."""
STEP_BY_ROUNDING = 4.0
"""Units in the last place of a parameter whose gradient is zero by mathematics: twice the usual rounding, squared."""
UNMEASURED_FACTOR = 4.0
"""For records older than factors."""

MULTIPLES = {QuantityKind.GRADIENTS: QuantityKind.SCALE, QuantityKind.TWIN: QuantityKind.TWIN_SCALE}
"""What is told besides of tensors that have a multiple."""
TWINS = (QuantityKind.TWIN, QuantityKind.TWIN_SCALE, QuantityKind.TWIN_LOSS)
"""What is compared with the twin."""

Comparisons = Mapping[Quantity, list[float]]
"""One run, by quantity, then step; or the noise, which is the root mean square over runs. Quantities are those of
`Deviations` but for initial values, and the scales of gradients."""


def compare(deviations: Deviations) -> Comparisons:
    """What of a run is held against its noise. A gradient that is zero has no multiple, nor one that is no nearer to
    the truth than zero is."""
    zero = zeros(deviations)
    apart = (QuantityKind.INITIAL, QuantityKind.REFERENCE)
    found = {q: [d.distance for d in steps] for q, steps in deviations.items() if q.kind not in apart}
    for quantity, steps in deviations.items():
        multiple = MULTIPLES.get(quantity.kind)
        if multiple and quantity not in zero and all(d.distance < d.scale for d in steps):
            found[replace(quantity, kind=multiple)] = [abs(d.factor - 1) for d in steps]
    return found


def zeros(deviations: Deviations) -> set[Quantity]:
    """The gradients that are zero by mathematics, as that of the keys' bias is: in float64 it is nothing but
    rounding beside the others."""
    gradients = {q: steps for q, steps in deviations.items() if q.kind is QuantityKind.GRADIENTS}
    norms = gradient_norms(deviations)
    return {q for q, steps in gradients.items() if all(d.scale < ZERO * n for d, n in zip(steps, norms, strict=True))}


def gradient_norms(deviations: Deviations) -> list[float]:
    """The exact global norm of the gradients, by step."""
    gradients = [steps for quantity, steps in deviations.items() if quantity.kind is QuantityKind.GRADIENTS]
    return [math.hypot(*(d.scale for d in step)) for step in zip(*gradients, strict=True)]


def noise_run(deviations: Deviations, precision: Precision) -> Comparisons:
    """The comparisons of a noise run; none is taken for smaller than half a unit in the last place, for a run that
    happens to be exact says nothing of another. Of a gradient that is zero by mathematics, which another order of
    operations may make exact or not, that is a unit of all gradients together; and of its parameter four of its own,
    for AdamW's step beneath its epsilon is off by the square of what the gradient's rounding happens to be."""
    ulp = 2.0 ** -(precision.wide.mantissa_bits + 1)
    zero, norms = zeros(deviations), gradient_norms(deviations)

    def least(quantity: Quantity, step: int) -> float:
        if quantity in zero:
            return ulp * norms[step]
        own = deviations[quantity][step].scale if quantity in deviations else 1.0
        by_rounding = (
            quantity.kind is QuantityKind.PARAMETERS and replace(quantity, kind=QuantityKind.GRADIENTS) in zero
        )
        return STEP_BY_ROUNDING * ulp * own if by_rounding else ulp * own

    return {
        quantity: [max(value, least(quantity, step)) for step, value in enumerate(steps)]
        for quantity, steps in compare(deviations).items()
    }


def kind_of(quantity: Quantity) -> str:
    """What shares a factor: `number`s (losses, norm and multiples), and each kind of tensors."""
    return quantity.kind.value if quantity.kind.value in SMALLEST_FACTORS else "number"


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """Noise and the factors on it."""

    noise: Comparisons
    factors: Mapping[str, float]
    """By kind of quantity, and by quantity, as written, where that asks for more."""

    def noise_of(self, quantity: Quantity, step: int) -> float:
        """That of its step, where it is a number at all of them."""
        steps = self.noise[quantity]
        return steps[step] if all(map(math.isfinite, steps)) else math.inf

    def factor_of(self, quantity: Quantity) -> float:
        of_kind = self.factors.get(kind_of(quantity), UNMEASURED_FACTOR)
        return max(of_kind, self.factors.get(str(quantity), of_kind))

    def of_replicas(self, num_replicas: int) -> list[Yardstick]:
        """Each replica's own, of the quantities that they are where there is but one."""
        of_kinds = {name: factor for name, factor in self.factors.items() if name in SMALLEST_FACTORS}
        own = {Quantity.parse(name): factor for name, factor in self.factors.items() if name not in of_kinds}
        return [
            Yardstick(noise=noise, factors=of_kinds | {str(quantity): factor for quantity, factor in factors.items()})
            for noise, factors in zip(by_replica(self.noise, num_replicas), by_replica(own, num_replicas), strict=True)
        ]

    def tolerance(self, quantity: Quantity, step: int) -> float:
        return self.factor_of(quantity) * self.noise_of(quantity, step)

    def ratios(self, run: Comparisons) -> Iterator[tuple[float, Quantity, int]]:
        """Every comparison of a run as a multiple of its noise, with quantity and step. What `single` does not tell,
        such as a norm without clipping, cannot be held against anyone."""
        for quantity, steps in run.items():
            if quantity in self.noise:
                for step, value in enumerate(steps):
                    yield _ratio(value, self.noise_of(quantity, step)), quantity, step

    def judge(self, deviations: Deviations) -> Iterator[tuple[float, Quantity, int]]:
        """The excesses of a run; a twin that is wrong itself accuses nobody."""
        run = compare(deviations)
        if not self.twin_excess(deviations) <= 1:
            run = {quantity: steps for quantity, steps in run.items() if quantity.kind not in TWINS}
        return self.excesses(run)

    def twin_excess(self, deviations: Deviations) -> float:
        """How far the twin is from the truth, as a multiple of what a run may be; zero where there is none."""
        own = {
            replace(quantity, kind=QuantityKind.GRADIENTS): steps
            for quantity, steps in deviations.items()
            if quantity.kind is QuantityKind.REFERENCE
        }
        return max((excess for excess, *_ in self.excesses(compare(own))), default=0.0)

    def excesses(self, run: Comparisons) -> Iterator[tuple[float, Quantity, int]]:
        """The same as multiples of the tolerance: above one fails."""
        factors = {quantity: self.factor_of(quantity) for quantity in run}
        for ratio, quantity, step in self.ratios(run):
            yield ratio / factors[quantity], quantity, step


def _ratio(value: float, noise: float) -> float:
    """What is exactly right passes whatever the noise; a noise that is no number excuses nothing."""
    if value == 0:
        return 0.0
    return value / noise if noise and math.isfinite(value) and math.isfinite(noise) else math.inf


def fit(runs: Sequence[Comparisons], variance_ratio: float = 1.0) -> Yardstick:
    """The yardstick that noise runs make; they hold the same losses, norms, gradients and parameters.
    `variance_ratio`: how much more than all of them together a correct run may vary."""
    found = spreads(runs)
    wider = math.sqrt(variance_ratio)
    factors = {kind: wider * factor for kind, factor in SMALLEST_FACTORS.items()}
    probability = _share_of_false_alarms(found, factors)
    for quantity, spread in found.items():
        if (factor := wider * spread.factor(probability)) > factors[kind_of(quantity)]:
            factors[str(quantity)] = factor
    return Yardstick(noise={q: s.level for q, s in found.items()}, factors=factors)


def _share_of_false_alarms(found: Mapping[Quantity, Spread], smallest: Mapping[str, float]) -> float:
    """The probability at which each comparison may fail, that all together fail with FALSE_ALARMS. What the smallest
    factor of its kind keeps from failing as often leaves its share to the others."""
    times = np.array([len(s.level) for s in found.values()])
    at_smallest = np.array([float(s.probability(np.array(smallest[kind_of(q)]))) for q, s in found.items()])
    low, high = math.log(FALSE_ALARMS / times.sum()), math.log(FALSE_ALARMS)
    for _ in range(40):
        middle = (low + high) / 2
        total = float(np.sum(times * np.minimum(at_smallest, math.exp(middle))))
        low, high = (middle, high) if total < FALSE_ALARMS else (low, middle)
    return math.exp(low)


def spreads(runs: Sequence[Comparisons]) -> dict[Quantity, Spread]:
    """Of every quantity that all runs have."""
    return {
        quantity: Spread.of(np.array([run[quantity] for run in runs]), of_number=kind_of(quantity) == "number")
        for quantity in runs[0]
        if all(quantity in run for run in runs)
    }
