"""The tolerance model of equivalence: how far correct runs are from the truth, and so how far is too far.

Every run is reduced to the same comparisons: the distance of each loss, norm, gradient and parameter at each step from
the truth. For each gradient there is also the error of its multiple of the truth, which detects a scaling that is small
compared with the tensor's rounding in all other directions. The noise of a comparison is its root mean square over the
noise runs. For a single number, over which nothing averages, it is also over all steps. `Spread` estimates how each
quantity scatters about its noise, and the distance that a correct run exceeds with probability FALSE_ALARMS, shared
over all comparisons of a case. That gives the quantity's factor: a case passes while no comparison exceeds factor x
noise.

The tail of a quantity's distribution follows from its noise runs. The square of a tensor's distance is a sum of squares
in many directions, some with larger shares than others. Its variance relative to its mean is 2 / d. Here d is its
*degrees of freedom*: the number of equal directions with that variance. A few large shares make a longer tail than d
equal ones, so the tail is that of d / 7 directions with the same variance (one direction if d is below seven). The mean
is estimated from a few runs, which turns chi-squared into an F distribution. A single number has only one direction,
however little a few draws differ; for it the distribution is Student's t. reports/power.md compares this with correct
runs.

How often correct runs fail is measured too. `make power-long` runs correct training, of `single` and of real adapters,
and writes the counts to `false_alarms.json` in this folder. A run with the same bits as another shows nothing and is
not counted. Runs of one problem share its tolerance models, so they are more alike than runs of several problems. They
are worth as many independent runs as their number divided by their design effect (Kish, Survey Sampling, 1965).
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshmark.adapter.contract import Casting
from meshmark.judge.deviation import Deviation, Deviations, Quantity, QuantityKind, TruthPrint, by_replica
from meshmark.serial import decode
from meshmark.spec.precision import Precision

# --- How often correct runs fail, as measured.

COUNTED = Path(__file__).with_name("false_alarms.json")
CONFIDENCE = 0.95
CLOSE = 0.02
"""Share of all runs."""


@dataclass(frozen=True, kw_only=True)
class AlarmCounts:
    """Counts of correct runs of one problem."""

    what: str
    """How the runs were made, their workload and precision."""
    problems: int
    """Number of problems with different seeds, numbers of micro-batches, or both."""
    tolerance_models: int
    """Number of tolerance models, each from separate noise runs."""
    runs: int
    """Number of runs, no two with the same bits."""
    alarms: int


@dataclass(frozen=True, kw_only=True)
class FalseAlarms:
    """All counts under one version of the tolerance model."""

    version: int
    """Version of the noise and its factors: `passes.noise.FORMAT`."""
    machines: list[str]
    torch: list[str]
    design_effect: float = 1.0
    counted: list[AlarmCounts] = field(default_factory=list)

    @property
    def runs(self) -> int:
        return sum(c.runs for c in self.counted)

    @property
    def alarms(self) -> int:
        return sum(c.alarms for c in self.counted)

    @property
    def independent(self) -> int:
        """Number of runs of distinct problems that would show as much."""
        return int(self.runs / self.design_effect)

    @property
    def bound(self) -> float:
        """Upper limit of the probability that a correct run fails, by Clopper and Pearson.

        It assumes the effective number of independent runs with the same share of alarms (Korn and Graubard, Survey
        Methodology 24, 1998).
        """
        return upper_limit(self.alarms / self.design_effect, self.runs / self.design_effect)

    def __str__(self) -> str:
        if not self.runs:
            return "not counted yet: run make power-long"
        what = f"{self.alarms} alarms" if self.alarms > 1 else "1 alarm" if self.alarms else "no alarm"
        worth = f"which show as much as {self.independent:,} independent ones"
        return f"{what} in {self.runs:,} correct runs, {worth}: below {self.bound:.2g} ({CONFIDENCE:.0%})"


def design_effect(groups: Sequence[Sequence[float]]) -> float:
    """Return how much more the share of runs close to an alarm varies between problems than for independent runs.

    It is at least one. `groups` is the largest excess of every run, by problem. Alarms themselves are too rare, so the
    furthest CLOSE of all runs are used.
    """
    sizes = np.array([len(group) for group in groups])
    if sizes.sum() < 1 / CLOSE or len(groups) < 2:
        return 1.0
    limit = np.quantile(np.concatenate([np.asarray(group) for group in groups]), 1 - CLOSE)
    close = np.array([np.sum(np.asarray(group) > limit) for group in groups])
    share = close.sum() / sizes.sum()
    if not 0 < share < 1:
        return 1.0
    scatter = np.sum((close - share * sizes) ** 2) * len(groups) / (len(groups) - 1)
    return max(float(scatter / (sizes.sum() * share * (1 - share))), 1.0)


def upper_limit(num_events: float, num_trials: float, confidence: float = CONFIDENCE) -> float:
    """Return the probability at which `num_events` or fewer in `num_trials` have a chance of 1 - `confidence`.

    Neither number needs to be an integer.
    """
    from scipy.special import betaincinv  # takes a quarter of a second, and few commands need it

    return float(betaincinv(num_events + 1, num_trials - num_events, confidence)) if num_events < num_trials else 1.0


def merged(parts: Sequence[AlarmCounts]) -> list[AlarmCounts]:
    """Add up counts with the same description."""
    found: dict[str, AlarmCounts] = {}
    for part in parts:
        so_far = found.get(part.what, AlarmCounts(what=part.what, problems=0, tolerance_models=0, runs=0, alarms=0))
        found[part.what] = AlarmCounts(
            what=part.what,
            problems=so_far.problems + part.problems,
            tolerance_models=so_far.tolerance_models + part.tolerance_models,
            runs=so_far.runs + part.runs,
            alarms=so_far.alarms + part.alarms,
        )
    return [found[what] for what in sorted(found)]


@functools.cache
def shown() -> FalseAlarms:
    """Return the counts under this version of the tolerance model."""
    counted: FalseAlarms = decode(FalseAlarms, json.loads(COUNTED.read_text()))
    return counted


# --- How one quantity scatters between correct runs, estimated from its noise runs, and the tail of that distribution.

TAIL_DIRECTIONS = 1 / 7
"""Share of the degrees of freedom that carries the tail."""
MOST_DEGREES = 64.0
"""Largest number of degrees of freedom that a few dozen draws can show.

Roundings take few values. Identical draws may be followed by one where a single element was rounded the other way,
which changes the square by a tenth in a bias of 32 elements. Independent roundings of as many have 80 degrees of
freedom.
"""
ONE_SIDED = 1.645
"""Standard errors between an estimate and its one-sided 95 % limit."""
APART = 3.1
"""Standard errors beyond which one step scatters more than all together, not by chance: one in 1,000."""


def _at_least(degrees: float, num_values: int) -> float:
    """Return the lower 95 % limit of degrees of freedom estimated from the variance of `num_values` squared values.

    Without it, the quantities whose few draws happened to differ little would cause alarms.
    """
    return degrees / (1 + ONE_SIDED * _error_of_variance(degrees, num_values))


def _error_of_variance(degrees: float, num_values: int) -> float:
    """Return the relative standard error of the sample variance of `num_values` chi-squared values over d.

    Its relative variance is (2 + 12 / d) / n.
    """
    return math.sqrt((2 + 12 / degrees) / num_values)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Scatter of one quantity."""

    level: list[float]
    """Root mean square over the runs, by step."""
    degrees: float
    """Degrees of freedom of one squared value, at the step that scatters most if one does more than by chance.

    Below one if steps differ more than their draws.
    """
    known: float
    """Degrees of freedom of `level`."""

    @classmethod
    def of(cls, values: NDArray[np.float64], *, of_number: bool) -> Spread:
        """Return the spread of values (runs x steps).

        `of_number` is for a single number, whose level at every step is at least that of all steps together.
        """
        squares = np.square(values)
        own = squares.mean(axis=0)
        means = np.broadcast_to(np.maximum(squares.mean(), own) if of_number else own, squares.shape)
        num_draws = len(values)
        level = [float(x) for x in np.sqrt(means[0])]
        if not np.isfinite(means).all():
            return cls(level=level, degrees=1.0, known=float(num_draws))
        relative = np.divide(squares, means, out=np.ones_like(squares), where=means > 0)
        # The runs' own mean lies between them: they scatter less about it than about the true one.
        variances = np.mean((relative - 1) ** 2, axis=0) * num_draws / max(num_draws - 1, 1)
        variance, widest = float(variances.mean()), float(variances.max())
        most = 1.0 if of_number else MOST_DEGREES
        degrees = min(_at_least(2 / variance, squares.size), most) if variance else most
        # Steps are draws of one distribution only if they scatter alike. Adagrad's first step is the sign of a
        # gradient that is zero but for rounding. From where that leads, runs differ more at some steps than at others.
        if not of_number and widest > variance * (1 + APART * _error_of_variance(degrees, num_draws)):
            degrees = min(_at_least(2 / widest, num_draws), degrees)
        return cls(level=level, degrees=degrees, known=num_draws * degrees)

    @property
    def _directions(self) -> float:
        return max(1.0, TAIL_DIRECTIONS * self.degrees)

    @property
    def _share(self) -> float:
        """Share of a squared value that is in the tail's directions."""
        return math.sqrt(self._directions / self.degrees)

    def factor(self, probability: float) -> float:
        """Return the multiple of its level that a value exceeds with `probability`."""
        from scipy.special import betaincinv  # takes a quarter of a second, and few commands need it

        y = float(betaincinv(self.known / 2, self._directions / 2, probability))
        tail = self.known * (1 - y) / (self._directions * y) if y else math.inf
        return math.sqrt(1 - self._share + self._share * tail)

    def probability(self, multiples: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the probability that a correct run exceeds these multiples of the level, the inverse of `factor`."""
        from scipy.special import betainc

        tail = np.maximum((np.square(multiples) - 1 + self._share) / self._share, 0.0)
        found: NDArray[np.float64] = betainc(
            self.known / 2, self._directions / 2, self.known / (self.known + self._directions * tail)
        )
        return found


# --- The tolerance model of equivalence: how far correct runs are from the truth, and so how far is too far.

FALSE_ALARMS = 1e-4
"""Target probability that a correct run fails in any of its comparisons at any step. `false_alarms.json` has
measured values.
"""
SMALLEST_FACTORS = {"number": 8.0, "gradients": 2.4, "parameters": 4.0, "buffers": 4.0, "twin": 4.0, "way": 4.0}
"""Smallest factors by kind. A framework that computes in another order than `single` has another noise distribution.

The furthest real adapters were at 4.9, 2.1 and 2.9. `make power` measures it again.
"""
ZERO = 1e-12
"""Threshold for zero gradients, relative to the norm of all gradients."""
STEP_BY_ROUNDING = 4.0
"""Units in the last place of a parameter whose gradient is mathematically zero: twice the usual rounding, squared."""
UNMEASURED_FACTOR = 4.0
"""Factor for records from before factors existed."""

MULTIPLES = {QuantityKind.GRADIENTS: QuantityKind.SCALE, QuantityKind.TWIN: QuantityKind.TWIN_SCALE}
"""Kinds of tensors that have a scale, and the kind of the scale."""
TWINS = (QuantityKind.TWIN, QuantityKind.TWIN_SCALE, QuantityKind.TWIN_LOSS)
"""Kinds that are compared with the twin."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """Common properties of engines that compute in one way."""

    dense: Mapping[str, float] = field(default_factory=dict)
    """Quantities, as written, that are far from the twin in all such engines at every step, with their least
    distance.
    """
    fewest: int = 0
    """Least number of gradients, over all steps of one engine, that differ from the twin's bits."""
    most_flips: int = 0
    """Most gradients of one engine, over all steps, that were further from the twin than the other engines
    suggested.
    """


@dataclass(frozen=True, kw_only=True)
class Ways:
    """Ways in which an engine that casts as declared may still differ from the twin, the smallest difference first."""

    reordered: QuantityKind
    regrouped: QuantityKind | None = None
    sums: QuantityKind
    split: QuantityKind
    products: QuantityKind
    forward: QuantityKind

    @property
    def kinds(self) -> list[QuantityKind]:
        found = (self.reordered, self.regrouped, self.sums, self.split, self.products, self.forward)
        return [kind for kind in found if kind]


WAYS = {
    Casting.AUTOCAST: Ways(
        reordered=QuantityKind.REORDERED,
        regrouped=QuantityKind.REGROUPED,
        sums=QuantityKind.SUMS,
        split=QuantityKind.SPLIT,
        products=QuantityKind.PRODUCTS,
        forward=QuantityKind.FORWARD,
    ),
    Casting.WEIGHTS: Ways(
        reordered=QuantityKind.CAST_REORDERED,
        sums=QuantityKind.CAST_SUMS,
        split=QuantityKind.CAST_SPLIT,
        products=QuantityKind.CAST_PRODUCTS,
        forward=QuantityKind.CAST_FORWARD,
    ),
}
_ALL_WAYS = frozenset(kind for ways in WAYS.values() for kind in ways.kinds)
WAY_NAMES = {
    "reordered": "rows in another order",
    "regrouped": "other micro-batches",
    "sums": "another order of products' inner sums",
    "split": "products in parts",
    "products": "fused products",
    "forward": "another forward pass, as of attention by hand",
}
_FLIPS_LIKE = {
    QuantityKind.REORDERED: (QuantityKind.REGROUPED, 1.0),
    QuantityKind.SUMS: (QuantityKind.FORWARD, 0.25),
    QuantityKind.SPLIT: (QuantityKind.FORWARD, 0.25),
    QuantityKind.PRODUCTS: (QuantityKind.FORWARD, 0.25),
    QuantityKind.CAST_REORDERED: (QuantityKind.CAST_FORWARD, 0.25),
    QuantityKind.CAST_SUMS: (QuantityKind.CAST_FORWARD, 0.25),
    QuantityKind.CAST_SPLIT: (QuantityKind.CAST_FORWARD, 0.25),
    QuantityKind.CAST_PRODUCTS: (QuantityKind.CAST_FORWARD, 0.25),
}
"""Bounds for tensors with a flipped rounding, as (way, share of its effect).

If a way rounds most numbers as the twin does, a few are flipped, in other tensors for each engine. A tensor with a
flip is no further off than one whose numbers are all rounded anew: this share of that effect. With n numbers, one flip
is sqrt(6 / n) of all, and a few times that for the largest number: all of a bias, a quarter of what has passed through
layers.
"""
DENSE = 10.0
"""Distance, in tolerances of the twin's own bits, beyond which all drawn engines of a way must be for the way to
show.
"""
SHOWN = 0.1
"""Share of what a way always changes that a run must show to use the way.

An engine that fuses products in some of its layers shows some of it. A defect in one tensor shows none in the others.
"""
LEAST = 0.5
"""Share of the least distance of any drawn engine of a way. Smaller distances do not show the way."""
SHOWN_AT_SIZE = 0.5
"""Share of a run's changes that must be as large as those of the way.

Sums over ranks in 11 bits instead of 24 change every gradient, each by a tenth of what other products do.
"""
MORE_FLIPS = 4
"""Flips allowed beyond twice the most that any drawn engine of a way had where the others had none.

Flips are rare and independent, so their number is Poisson. Another draw exceeds twice the most of a dozen, plus four,
in fewer than one of 10,000 runs, whatever the rate.
"""
ONE_DIRECTION = 1e-3
"""Share of the twin's distance from the truth that is not a multiple. A tensor of one element has less."""

Comparisons = Mapping[Quantity, list[float]]
"""Comparisons of one run by quantity, then step; or the noise, their root mean square over runs.

Quantities are those of `Deviations` without initial values, and the scales of gradients.
"""


def compare(deviations: Deviations) -> Comparisons:
    """Return the comparisons of a run that are compared with its noise.

    A gradient that is zero, or no nearer to the truth than zero is, has no scale.
    """
    zero = zeros(deviations)
    apart = (QuantityKind.INITIAL, QuantityKind.REFERENCE)
    found = {q: [d.distance for d in steps] for q, steps in deviations.items() if q.kind not in apart}
    for quantity, steps in deviations.items():
        multiple = MULTIPLES.get(quantity.kind)
        if multiple and quantity not in zero and all(d.distance < d.scale for d in steps):
            found[replace(quantity, kind=multiple)] = [abs(d.factor - 1) for d in steps]
    return found


def zeros(deviations: Deviations) -> set[Quantity]:
    """Return the gradients that are mathematically zero, such as that of the keys' bias.

    In float64 they are only rounding compared with the others.
    """
    gradients = {q: steps for q, steps in deviations.items() if q.kind is QuantityKind.GRADIENTS}
    norms = gradient_norms(deviations)
    return {q for q, steps in gradients.items() if all(d.scale < ZERO * n for d, n in zip(steps, norms, strict=True))}


def gradient_norms(deviations: Deviations) -> list[float]:
    """Return the exact global norm of the gradients, by step."""
    gradients = [steps for quantity, steps in deviations.items() if quantity.kind is QuantityKind.GRADIENTS]
    return [math.hypot(*(d.scale for d in step)) for step in zip(*gradients, strict=True)]


def noise_run(deviations: Deviations, precision: Precision) -> Comparisons:
    """Return the comparisons of a noise run.

    None is smaller than half a unit in the last place, because a run that happens to be exact says nothing about
    others. For a gradient that is mathematically zero, which another order of operations may make exact or not, the
    unit is that of all gradients together. For its parameter it is four units, because AdamW's step below its epsilon
    is off by the square of the gradient's rounding.
    """
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
    """Return the kind under which a quantity shares a factor: `number` (losses, norm and scales), or a kind of
    tensors.
    """
    if quantity.kind in _ALL_WAYS:
        return "way"
    return quantity.kind.value if quantity.kind.value in SMALLEST_FACTORS else "number"


@dataclass(frozen=True, kw_only=True)
class ToleranceModel:
    """Noise, and the factors on it."""

    noise: Comparisons
    factors: Mapping[str, float]
    """Factors by kind of quantity, and by quantity, as written, if it needs more."""
    ways: Mapping[str, Way] = field(default_factory=dict)
    """Ways in which a correct run may differ from the twin, the smallest difference first."""
    way: str = ""
    """The way that this tolerance model was fitted to."""
    truth_print: TruthPrint | None = None
    """Fingerprint of the truth in a process that imported no framework."""

    def noise_of(self, quantity: Quantity, step: int) -> float:
        """Return the noise at a step, or infinity unless it is finite at all steps."""
        steps = self.noise[quantity]
        return steps[step] if all(map(math.isfinite, steps)) else math.inf

    def factor_of(self, quantity: Quantity) -> float:
        of_kind = self.factors.get(kind_of(quantity), UNMEASURED_FACTOR)
        return max(of_kind, self.factors.get(str(quantity), of_kind))

    def of_replicas(self, num_replicas: int) -> list[ToleranceModel]:
        """Split the model by replica. Its quantities then have no replica, as if there were only one."""
        of_kinds = {name: factor for name, factor in self.factors.items() if name in SMALLEST_FACTORS}
        own = {Quantity.parse(name): factor for name, factor in self.factors.items() if name not in of_kinds}
        return [
            ToleranceModel(
                noise=noise,
                factors=of_kinds | {str(quantity): factor for quantity, factor in factors.items()},
                ways=self.ways if num_replicas == 1 else {},
            )
            for noise, factors in zip(by_replica(self.noise, num_replicas), by_replica(own, num_replicas), strict=True)
        ]

    def tolerance(self, quantity: Quantity, step: int) -> float:
        return self.factor_of(quantity) * self.noise_of(quantity, step)

    def ratios(self, run: Comparisons) -> Iterator[tuple[float, Quantity, int]]:
        """Yield every comparison of a run as a multiple of its noise, with quantity and step.

        Quantities that `single` does not report, such as a norm without clipping, are left out.
        """
        for quantity, steps in run.items():
            if quantity in self.noise:
                for step, value in enumerate(steps):
                    yield _ratio(value, self.noise_of(quantity, step)), quantity, step

    def judge(self, deviations: Deviations) -> Iterator[tuple[float, Quantity, int]]:
        """Yield the excesses of a run, under the way in which it computes. A twin that is wrong itself is ignored."""
        run = compare(deviations)
        if not self.twin_excess(deviations) <= 1:
            run = {quantity: steps for quantity, steps in run.items() if quantity.kind not in TWINS}
        return self.fitted_to(deviations).excesses(run)

    def accepts(self, deviations: Deviations) -> bool:
        """Return whether a run starts as prescribed and exceeds no tolerance."""
        starts = all(
            steps[0].distance == 0 for quantity, steps in deviations.items() if quantity.kind is QuantityKind.INITIAL
        )
        return starts and all(excess <= 1 for excess, *_ in self.judge(deviations))

    def declared(self, casting: Casting | None) -> ToleranceModel:
        """Return the model with only the ways that are open to an engine that declares who casts."""
        kinds = WAYS[casting].kinds if casting else []
        return replace(self, ways={kind.value: self.ways[kind.value] for kind in kinds if kind.value in self.ways})

    def fitted_to(self, deviations: Deviations) -> ToleranceModel:
        """Return the model with the noise of the way that explains the run's differences from the twin.

        That needs a run without the twin's bits, one way that explains this, and nothing else wrong; otherwise it is
        this model. A run may compute in any correct arithmetic, but in one only. A defect as small as another
        attention's rounding in one tensor is excused only if the run shows another attention's rounding everywhere.
        The ways are therefore tried one by one, each for all quantities and steps together.
        """
        run = compare(deviations)
        own = {q: steps for q, steps in run.items() if q.kind in (QuantityKind.TWIN, QuantityKind.TWIN_LOSS)}
        own = {q: steps for q, steps in own.items() if q in self.noise}
        off = {(q, i) for q, steps in own.items() for i, x in enumerate(steps) if not x <= self.tolerance(q, i)}
        if not off or any(self._is_multiple(deviations, q, i) for q, i in off if q.kind is QuantityKind.TWIN):
            return self
        for name in self.ways:
            if self._explains(QuantityKind(name), own, off):
                found = self._with(QuantityKind(name), own)
                return found if all(excess <= 1 for excess, *_ in found.excesses(run)) else self
        return self

    def _is_multiple(self, deviations: Deviations, quantity: Quantity, step: int) -> bool:
        """Return whether a gradient is purely a multiple of the twin's. Rounding never causes that, except with one
        element.
        """
        reference = deviations[replace(quantity, kind=QuantityKind.REFERENCE)][step]
        if _residual_of_multiple(reference) <= ONE_DIRECTION * reference.distance:
            return False
        return _residual_of_multiple(deviations[quantity][step]) <= self.tolerance(quantity, step)

    def _explains(self, way: QuantityKind, own: Comparisons, off: set[tuple[Quantity, int]]) -> bool:
        """Return whether a run computes in `way`.

        `own` is its quantities' distances from the twin, and `off` those beyond the noise.
        """
        if any(not own[q][i] <= self._tolerance_of(way, q, i, flipped=True) for q, i in off):
            return False
        flipped = [q for q, i in off if own[q][i] > self._tolerance_of(way, q, i)]
        if len(flipped) > 2 * self.ways[way.value].most_flips + MORE_FLIPS:
            return False
        if any(flipped.count(q) == len(own[q]) for q in flipped):  # by chance, the same one at every step
            return False
        if len(off) < SHOWN * self.ways[way.value].fewest or self._is_lone(way, own, off):
            return False
        # If the twin's loss is met at every step, the forward pass is the twin's. Otherwise, less than attention may
        # be computed differently. Without a forward difference, the way must show at its full size.
        is_forward = way in (ways.forward for ways in WAYS.values())
        if is_forward and not any(q.kind is QuantityKind.TWIN_LOSS for q, _ in off):
            return False
        least = {q: self.ways[way.value].dense.get(str(replace(q, kind=way)), math.inf) for q in own}
        changed = [(q, i) for q, i in off if least[q] < math.inf]
        if not is_forward and not _reaches_the_input(
            {q.name for q, _ in changed}, {q.name for q in own if least[q] < math.inf}
        ):
            return False
        shown = sum(is_forward or own[q][i] >= LEAST * least[q] for q, i in changed)
        always = sum(len(steps) for q, steps in own.items() if least[q] < math.inf)
        return shown >= max(SHOWN * always, SHOWN_AT_SIZE * len(changed))

    def _tolerance_of(self, way: QuantityKind, quantity: Quantity, step: int, *, flipped: bool = False) -> float:
        """Return how far from the twin an engine may be that computes in `way`, with or without a `flipped`
        rounding.
        """
        own, other = self.tolerance(quantity, step), replace(quantity, kind=way)
        if other not in self.noise:
            return own
        found = max(own, self.tolerance(other, step))
        if not flipped or not quantity.name or way not in _FLIPS_LIKE:
            return found
        kind, part = _FLIPS_LIKE[way]
        like = replace(quantity, kind=kind)
        return max(found, part * self.noise_of(like, step)) if like in self.noise else found

    def _is_lone(self, way: QuantityKind, own: Comparisons, off: set[tuple[Quantity, int]]) -> bool:
        """Return whether a single gradient is off, at every step, though `way` does not always change it."""
        quantities = {q for q, _ in off}
        if len(quantities) > 1 or len(off) < max(len(steps) for steps in own.values()):
            return False
        return all(str(replace(q, kind=way)) not in self.ways[way.value].dense for q in quantities)

    def excused(self, quantity: Quantity, step: int) -> float:
        """Return how far from the twin a gradient may be at every step while all others have its bits.

        It is the largest tolerance under any way that may change this gradient alone.
        """
        forward = [ways.forward for ways in WAYS.values()]
        num_steps = len(self.noise[quantity])
        lone = [QuantityKind(name) for name, way in self.ways.items() if SHOWN * way.fewest <= num_steps]
        found = [
            self._tolerance_of(way, quantity, step)
            for way in lone
            if way not in forward and str(replace(quantity, kind=way)) in self.ways[way.value].dense
        ]
        return max([self.tolerance(quantity, step), *found])

    def _with(self, way: QuantityKind, own: Comparisons) -> ToleranceModel:
        """Return the model fitted to `way`, which explains `own`."""
        noise = {
            quantity: steps for quantity, steps in self.noise.items() if quantity.kind is not QuantityKind.TWIN_SCALE
        }
        for quantity, values in own.items():
            tolerances = [
                self._tolerance_of(way, quantity, i, flipped=value > self._tolerance_of(way, quantity, i))
                for i, value in enumerate(values)
            ]
            noise[quantity] = [tolerance / self.factor_of(quantity) for tolerance in tolerances]
        return replace(self, noise=noise, way=way.value, ways={})

    def twin_excess(self, deviations: Deviations) -> float:
        """Return how far the twin is from the truth, as a multiple of what is allowed for a run.

        Zero without a twin.
        """
        own = {
            replace(quantity, kind=QuantityKind.GRADIENTS): steps
            for quantity, steps in deviations.items()
            if quantity.kind is QuantityKind.REFERENCE
        }
        return max((excess for excess, *_ in self.excesses(compare(own))), default=0.0)

    def excesses(self, run: Comparisons) -> Iterator[tuple[float, Quantity, int]]:
        """Yield the comparisons as multiples of the tolerance. Above one fails."""
        factors = {quantity: self.factor_of(quantity) for quantity in run}
        for ratio, quantity, step in self.ratios(run):
            yield ratio / factors[quantity], quantity, step


def _residual_of_multiple(found: Deviation) -> float:
    """Return the part of a distance that is not a multiple of the quantity compared with."""
    along = (found.factor - 1) * found.scale
    return math.sqrt(max(found.distance**2 - along**2, 0.0))


def _ratio(value: float, noise: float) -> float:
    """Return the ratio. An exact value passes with any noise, and a noise that is not finite excuses nothing."""
    if value == 0:
        return 0.0
    return value / noise if noise and math.isfinite(value) and math.isfinite(noise) else math.inf


@dataclass(frozen=True, kw_only=True)
class NoiseFloor:
    """Measurements of a workload and precision without any framework."""

    runs: list[Comparisons]
    truth_print: TruthPrint | None = None
    """The fingerprint of the truth."""


def fit(runs: Sequence[Comparisons], variance_ratio: float = 1.0) -> ToleranceModel:
    """Return the tolerance model of noise runs, which have the same losses, norms, gradients and parameters.

    `variance_ratio` is how much more than all of them together a correct run may vary.
    """
    found = spreads(runs)
    wider = math.sqrt(variance_ratio)
    factors = {kind: (1 if kind == "way" else wider) * factor for kind, factor in SMALLEST_FACTORS.items()}
    # A run is compared with the twin's bits or with one way, each as many comparisons, so they do not add up.
    probability = _share_of_false_alarms({q: s for q, s in found.items() if q.kind not in _ALL_WAYS}, factors)
    for quantity, spread in found.items():
        if quantity.kind in _ALL_WAYS:
            continue
        if (factor := wider * spread.factor(probability)) > factors[kind_of(quantity)]:
            factors[str(quantity)] = factor
    noise = {quantity: spread.level for quantity, spread in found.items()}
    return _with_ways(ToleranceModel(noise=noise, factors=factors), runs)


def _reaches_the_input(changed: Set[str], dense: Set[str]) -> bool:
    """Return whether other arithmetic in the backward pass may have changed these gradients and no others.

    `dense` is the names of all gradients that it can change. A product that is computed differently passes another
    gradient on, so the gradients of all earlier blocks change. The embedding's changes too, unless the weights' own
    products, and only these, are computed differently in all blocks.
    """
    of_blocks = {name: int(match[1]) for name in dense if (match := _IN_BLOCK.match(name))}
    blocks = set(of_blocks.values())
    shown = {of_blocks[name] for name in changed if name in of_blocks}
    if not shown or len(blocks) < 2:
        return True
    if any(block not in shown for block in blocks if block <= max(shown)):
        return False
    before = {name for name in dense if name.startswith("embedding.")}
    return shown == blocks or not before or bool(before & changed)


_IN_BLOCK = re.compile(r"blocks\.(\d+)\.")
"""Names of parameters of the numbered blocks of a model."""


def _with_ways(plain: ToleranceModel, runs: Sequence[Comparisons]) -> ToleranceModel:
    """Return the model with the ways that `runs` show, in which correct engines differ from the twin.

    A way's noise is the maximum over runs and steps, not a root mean square: most reordered values are bitwise equal,
    and a variance says nothing about the rest. If all numbers are rounded anew, a dozen runs of three steps or more
    come close to the maximum. If a few are flipped, `most_flips` says in how many tensors one run may have flips where
    no other has, and `_FLIPS_LIKE` how large they are. Factor 4 is for engines of a way that were not drawn.
    """
    noise, ways = dict(plain.noise), dict[str, Way]()
    for kind in QuantityKind:
        of_kind = [run for run in runs if any(quantity.kind is kind for quantity in run)]
        if kind in _ALL_WAYS and of_kind:
            for quantity in [quantity for quantity in noise if quantity.kind is kind]:
                noise[quantity] = [max(x for run in of_kind for x in run[quantity])] * len(noise[quantity])
            ways[kind.value] = _way(kind, of_kind, plain)
    return replace(plain, noise=noise, ways=ways)


def _way(kind: QuantityKind, runs: Sequence[Comparisons], plain: ToleranceModel) -> Way:
    """Return the common properties of `runs` of one way. `plain` has the noise of the twin."""
    gradients = [q for q in runs[0] if q.kind is kind and q.name]
    values = np.array([[run[q] for q in gradients] for run in runs])  # runs x gradients x steps
    sharp = np.array(
        [
            [plain.tolerance(replace(q, kind=QuantityKind.TWIN), step) for step in range(values.shape[2])]
            for q in gradients
        ]
    )
    dense = [bool(np.all(of_one > DENSE * own)) for of_one, own in zip(values.swapaxes(0, 1), sharp, strict=True)]
    flips = []
    for i in range(len(runs)):
        others = np.delete(values, i, 0).max((0, 2), initial=0.0)[:, None]
        flips.append(int((values[i] > np.maximum(sharp, SMALLEST_FACTORS["way"] * others)).sum()))
    least = zip(map(str, gradients), values.min((0, 2)), dense, strict=True)
    return Way(
        dense={name: float(x) for name, x, is_dense in least if is_dense},
        fewest=min(int((own > sharp).sum()) for own in values),
        most_flips=max(flips),
    )


def _share_of_false_alarms(found: Mapping[Quantity, Spread], smallest: Mapping[str, float]) -> float:
    """Return the failure probability per comparison with which all together fail with FALSE_ALARMS.

    Comparisons that fail less often because of the smallest factor of their kind leave their share to the others.
    """
    times = np.array([len(s.level) for s in found.values()])
    at_smallest = np.array([float(s.probability(np.array(smallest[kind_of(q)]))) for q, s in found.items()])
    low, high = math.log(FALSE_ALARMS / times.sum()), math.log(FALSE_ALARMS)
    for _ in range(40):
        middle = (low + high) / 2
        total = float(np.sum(times * np.minimum(at_smallest, math.exp(middle))))
        low, high = (middle, high) if total < FALSE_ALARMS else (low, middle)
    return math.exp(low)


def spreads(runs: Sequence[Comparisons]) -> dict[Quantity, Spread]:
    """Return the spread of every quantity that all runs have, and for ways, that the runs with this casting have."""
    found = {}
    for quantity in dict.fromkeys(quantity for run in runs for quantity in run):
        own = [run[quantity] for run in runs if quantity in run]
        if len(own) == len(runs) or quantity.kind in _ALL_WAYS:
            found[quantity] = Spread.of(np.array(own), of_number=kind_of(quantity) == "number")
    return found
