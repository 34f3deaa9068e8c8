"""The yardstick of equivalence: how far correct runs stand from the truth, and so how far is too far.

Every run is reduced to the same comparisons: the distance of each loss, norm, gradient and parameter at each step from
the truth, and for each gradient by how much its multiple of the truth misses one, which sees a scaling that is small
against the tensor's rounding in all other directions. The noise of a comparison is the largest value over the noise
runs, for a single number (which varies most, as nothing averages it) over all steps too. Each noise run is then held
out in turn and divided by the noise of the others: these ratios are what correct runs look like. Their tail beyond the
95th percentile is taken as exponential with the mean excess that they have there, which falls off more slowly than that
of any sum of many roundings; it is followed out to FALSE_ALARMS shared over all comparisons of a case. That gives the
factor: a case passes while no comparison exceeds factor x noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshmark.judge.deviation import Deviations, Quantity, QuantityKind
from meshmark.spec.precision import Precision

FALSE_ALARMS = 1e-4
"""Probability that a correct run fails: any of its comparisons, all steps together."""
TAIL = 0.05
"""Part of the held-out ratios that the tail is fitted to."""
SMALLEST_FACTORS = {"number": 5.0, "gradients": 2.5, "parameters": 2.5, "buffers": 2.5}
"""By kind: the tail of eight runs alone may come out too short. Over a thousand correct runs of many problems, and over
those of real adapters, which do not repeat `single`'s order of operations, the tails ask for 4.5, 2.2 and 1.8;
`make power` measures them again, and fails where they ask for more than stands here."""
ZERO = 1e-12
"""Relative to the norm of all gradients."""
UNMEASURED_FACTOR = 4.0
"""For records older than factors."""

Comparisons = Mapping[Quantity, list[float]]
"""One run, by quantity, then step; or the noise, which is the largest over runs. Quantities are those of `Deviations`
but for initial values, and the scales of gradients."""


def compare(deviations: Deviations) -> Comparisons:
    """What of a run is held against its noise. A gradient that is zero has no multiple, nor one that is no nearer to
    the truth than zero is."""
    zero = zeros(deviations)
    found = {q: [d.distance for d in steps] for q, steps in deviations.items() if q.kind is not QuantityKind.INITIAL}
    for quantity, steps in deviations.items():
        is_gradient = quantity.kind is QuantityKind.GRADIENTS
        if is_gradient and quantity not in zero and all(d.distance < d.scale for d in steps):
            found[replace(quantity, kind=QuantityKind.SCALE)] = [abs(d.factor - 1) for d in steps]
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
    happens to be exact says nothing of another."""
    ulp = 2.0 ** -(precision.wide.mantissa_bits + 1)
    found = compare(deviations)
    return {
        quantity: [
            max(value, ulp * (deviations[quantity][step].scale if quantity in deviations else 1.0))
            for step, value in enumerate(steps)
        ]
        for quantity, steps in found.items()
    }


def kind_of(quantity: Quantity) -> str:
    """What shares a factor: `number`s (loss, norm and multiples), `gradients`, `parameters` and `buffers`."""
    tensors = (QuantityKind.GRADIENTS, QuantityKind.PARAMETERS, QuantityKind.BUFFERS)
    return quantity.kind.value if quantity.kind in tensors else "number"


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """Noise and the factors on it."""

    noise: Comparisons
    factors: dict[str, float]
    """By kind of quantity."""

    def noise_of(self, quantity: Quantity, step: int) -> float:
        """A tensor's noise is that of its step; a number's that of all steps."""
        steps = self.noise[quantity]
        if not all(map(math.isfinite, steps)):
            return math.inf
        return max(steps) if kind_of(quantity) == "number" else steps[step]

    def factor_of(self, quantity: Quantity) -> float:
        return self.factors.get(kind_of(quantity), UNMEASURED_FACTOR)

    def tolerance(self, quantity: Quantity, step: int) -> float:
        return self.factor_of(quantity) * self.noise_of(quantity, step)

    def ratios(self, run: Comparisons) -> Iterator[tuple[float, Quantity, int]]:
        """Every comparison of a run as a multiple of its noise, with quantity and step. What `single` does not tell,
        such as a norm without clipping, cannot be held against anyone."""
        for quantity, steps in run.items():
            if quantity in self.noise:
                for step, value in enumerate(steps):
                    yield _ratio(value, self.noise_of(quantity, step)), quantity, step

    def excesses(self, run: Comparisons) -> Iterator[tuple[float, Quantity, int]]:
        """The same as multiples of the tolerance: above one fails."""
        for ratio, quantity, step in self.ratios(run):
            yield ratio / self.factor_of(quantity), quantity, step


def _ratio(value: float, noise: float) -> float:
    """What is exactly right passes whatever the noise; a noise that is no number excuses nothing."""
    if value == 0:
        return 0.0
    return value / noise if noise and math.isfinite(value) and math.isfinite(noise) else math.inf


def fit(runs: Sequence[Comparisons]) -> Yardstick:
    """The yardstick that noise runs make; they hold the same losses, norms, gradients and parameters."""
    quantities = [q for q in runs[0] if all(q in run for run in runs)]
    values = {q: np.array([run[q] for run in runs]) for q in quantities}
    noise = {q: [float(v) for v in array.max(axis=0)] for q, array in values.items()}
    num_comparisons = sum(len(steps) for steps in noise.values())
    held_out: dict[str, list[NDArray[np.float64]]] = {}
    for quantity, array in values.items():
        held_out.setdefault(kind_of(quantity), []).append(_held_out(array, pooled=kind_of(quantity) == "number"))
    factors = {
        kind: max(SMALLEST_FACTORS[kind], tail_factor(np.concatenate(r), FALSE_ALARMS / num_comparisons))
        for kind, r in held_out.items()
    }
    return Yardstick(noise=noise, factors=factors)


def _held_out(values: NDArray[np.float64], *, pooled: bool) -> NDArray[np.float64]:
    """Each run's values (runs x steps) over the largest of the other runs', flat; what is no number is left out."""
    others = np.stack([np.delete(values, run, axis=0).max(axis=0) for run in range(len(values))])
    if pooled:
        others = others.max(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios: NDArray[np.float64] = (values / others).ravel()
    return ratios[np.isfinite(ratios)]


def tail_factor(ratios: NDArray[np.float64], probability: float) -> float:
    """Where the exponential tail of `ratios` falls to `probability`; zero where there are none."""
    if not len(ratios):
        return 0.0
    threshold = float(np.quantile(ratios, 1 - TAIL))
    excess = ratios[ratios > threshold] - threshold
    mean = float(excess.mean()) if len(excess) else 0.0
    return threshold + mean * math.log(TAIL / probability)
