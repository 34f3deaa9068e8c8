"""The tolerance model of equivalence: how far correct runs stand from the truth, and so how far is too far.

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
from dataclasses import dataclass, field, replace

import numpy as np

from meshmark.adapter.arithmetic import Casting
from meshmark.judge.deviation import Deviation, Deviations, Quantity, QuantityKind
from meshmark.judge.replicas import by_replica
from meshmark.judge.spread import Spread
from meshmark.spec.precision import Precision

FALSE_ALARMS = 1e-4
"""Probability that a correct run fails, any of its comparisons, all steps together: what factors aim at. What has been
shown of it, `false_alarms` tells."""
SMALLEST_FACTORS = {"number": 8.0, "gradients": 2.4, "parameters": 4.0, "buffers": 4.0, "twin": 4.0, "way": 4.0}
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


@dataclass(frozen=True, kw_only=True)
class Way:
    """What engines that compute in one way have in common."""

    dense: Mapping[str, float] = field(default_factory=dict)
    """Quantities, as written, that are far from the twin in every one of them, at every step; and at least how far."""
    fewest: int = 0
    """Gradients, at all steps together, that had not the twin's bits in the one of them that is the most like it."""
    most_flips: int = 0
    """The most gradients of one of them, at all steps together, that were further than the others had led to expect."""


@dataclass(frozen=True, kw_only=True)
class Ways:
    """In which an engine that casts as declared may still differ from the twin, the least first."""

    reordered: QuantityKind
    regrouped: QuantityKind | None = None
    sums: QuantityKind
    products: QuantityKind
    forward: QuantityKind

    @property
    def kinds(self) -> list[QuantityKind]:
        return [kind for kind in (self.reordered, self.regrouped, self.sums, self.products, self.forward) if kind]


WAYS = {
    Casting.AUTOCAST: Ways(
        reordered=QuantityKind.REORDERED,
        regrouped=QuantityKind.REGROUPED,
        sums=QuantityKind.SUMS,
        products=QuantityKind.PRODUCTS,
        forward=QuantityKind.FORWARD,
    ),
    Casting.WEIGHTS: Ways(
        reordered=QuantityKind.CAST_REORDERED,
        sums=QuantityKind.CAST_SUMS,
        products=QuantityKind.CAST_PRODUCTS,
        forward=QuantityKind.CAST_FORWARD,
    ),
}
_ALL_WAYS = frozenset(kind for ways in WAYS.values() for kind in ways.kinds)
WAY_NAMES = {
    "reordered": "rows in another order",
    "regrouped": "other micro-batches",
    "sums": "another order of products' inner sums",
    "products": "fused products",
    "forward": "another forward pass, as of attention by hand",
}
_FLIPS_LIKE = {
    QuantityKind.REORDERED: (QuantityKind.REGROUPED, 1.0),
    QuantityKind.SUMS: (QuantityKind.FORWARD, 0.25),
    QuantityKind.PRODUCTS: (QuantityKind.FORWARD, 0.25),
    QuantityKind.CAST_REORDERED: (QuantityKind.CAST_FORWARD, 0.25),
    QuantityKind.CAST_SUMS: (QuantityKind.CAST_FORWARD, 0.25),
    QuantityKind.CAST_PRODUCTS: (QuantityKind.CAST_FORWARD, 0.25),
}
"""Where a way rounds most numbers as the twin does, a few are flipped, each engine's in other tensors. A tensor with a
flip is no further off than one of which a way rounds all numbers anew: this part of what that makes. Of n numbers anew
one flip is sqrt(6 / n) of all, a few times that for the largest number: all of a bias, a quarter of what has passed
through layers."""
DENSE = 10.0
"""Tolerances of the twin's own bits: where every engine that was drawn of a way is further away, the way shows."""
SHOWN = 0.1
"""Of what a way always changes, the part that a run must show that claims it. An engine that fuses products in some of
its layers shows some of it; a defect in one tensor shows none of the others."""
LEAST = 0.5
"""Of the least that any engine drawn of a way had: what is smaller does not show the way."""
SHOWN_AT_SIZE = 0.5
"""Of what a run changes of that, the part that must be as large. Sums over ranks in 11 bits instead of 24 change every
gradient, and each by a tenth of what other products do."""
MORE_FLIPS = 4
"""Beyond twice the most that any engine drawn of a way had where the others had none. Flips are rare and independent,
so their number is Poisson's, and a next draw exceeds twice the most of a dozen, and four, in fewer than one of 10,000
runs whatever the rate."""
ONE_DIRECTION = 1e-3
"""Of the twin's distance from the truth, the part that is no multiple: a tensor of one element has less."""

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
    if quantity.kind in _ALL_WAYS:
        return "way"
    return quantity.kind.value if quantity.kind.value in SMALLEST_FACTORS else "number"


@dataclass(frozen=True, kw_only=True)
class ToleranceModel:
    """Noise and the factors on it."""

    noise: Comparisons
    factors: Mapping[str, float]
    """By kind of quantity, and by quantity, as written, where that asks for more."""
    ways: Mapping[str, Way] = field(default_factory=dict)
    """In which a correct run may differ from the twin, the least first."""
    way: str = ""
    """That this tolerance model has been fitted to."""

    def noise_of(self, quantity: Quantity, step: int) -> float:
        """That of its step, where it is a number at all of them."""
        steps = self.noise[quantity]
        return steps[step] if all(map(math.isfinite, steps)) else math.inf

    def factor_of(self, quantity: Quantity) -> float:
        of_kind = self.factors.get(kind_of(quantity), UNMEASURED_FACTOR)
        return max(of_kind, self.factors.get(str(quantity), of_kind))

    def of_replicas(self, num_replicas: int) -> list[ToleranceModel]:
        """Each replica's own, of the quantities that they are where there is but one."""
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
        """Every comparison of a run as a multiple of its noise, with quantity and step. What `single` does not tell,
        such as a norm without clipping, cannot be held against anyone."""
        for quantity, steps in run.items():
            if quantity in self.noise:
                for step, value in enumerate(steps):
                    yield _ratio(value, self.noise_of(quantity, step)), quantity, step

    def judge(self, deviations: Deviations) -> Iterator[tuple[float, Quantity, int]]:
        """The excesses of a run, held against the way in which it computes; a twin that is wrong itself accuses
        nobody."""
        run = compare(deviations)
        if not self.twin_excess(deviations) <= 1:
            run = {quantity: steps for quantity, steps in run.items() if quantity.kind not in TWINS}
        return self.fitted_to(deviations).excesses(run)

    def declared(self, casting: Casting | None) -> ToleranceModel:
        """With the ways that are open to an engine that declares who casts, and no others."""
        kinds = WAYS[casting].kinds if casting else []
        return replace(self, ways={kind.value: self.ways[kind.value] for kind in kinds if kind.value in self.ways})

    def fitted_to(self, deviations: Deviations) -> ToleranceModel:
        """This; or, where a run has not the twin's bits, one way explains that and nothing else is wrong, with what
        engines of that way do in the place of the twin's noise.

        A run may compute in any correct arithmetic, but in one: a defect that is as small as another attention's
        rounding in one tensor is excused only if the run shows another attention's rounding everywhere. So the ways
        are asked one by one, each for all quantities and steps together.
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
        """Whether a gradient is a multiple of the twin's and nothing else: rounding never does that, but to a tensor of
        one element."""
        reference = deviations[replace(quantity, kind=QuantityKind.REFERENCE)][step]
        if _beside_multiple(reference) <= ONE_DIRECTION * reference.distance:
            return False
        return _beside_multiple(deviations[quantity][step]) <= self.tolerance(quantity, step)

    def _explains(self, way: QuantityKind, own: Comparisons, off: set[tuple[Quantity, int]]) -> bool:
        """Whether a run computes in `way`: `own` of its quantities are from the twin, and `off` beyond its noise."""
        if any(not own[q][i] <= self._tolerance_of(way, q, i, flipped=True) for q, i in off):
            return False
        flipped = [q for q, i in off if own[q][i] > self._tolerance_of(way, q, i)]
        if len(flipped) > 2 * self.ways[way.value].most_flips + MORE_FLIPS:
            return False
        if any(flipped.count(q) == len(own[q]) for q in flipped):  # by chance, the same one at every step
            return False
        if len(off) < SHOWN * self.ways[way.value].fewest or self._is_lone(way, own, off):
            return False
        # With the twin's loss at every step, the forward pass is the twin's. With another, what is computed otherwise
        # may be less than attention; without, the way is to show at its size.
        is_forward = way in (ways.forward for ways in WAYS.values())
        if is_forward and not any(q.kind is QuantityKind.TWIN_LOSS for q, _ in off):
            return False
        least = {q: self.ways[way.value].dense.get(str(replace(q, kind=way)), math.inf) for q in own}
        changed = [(q, i) for q, i in off if least[q] < math.inf]
        shown = sum(is_forward or own[q][i] >= LEAST * least[q] for q, i in changed)
        always = sum(len(steps) for q, steps in own.items() if least[q] < math.inf)
        return shown >= max(SHOWN * always, SHOWN_AT_SIZE * len(changed))

    def _tolerance_of(self, way: QuantityKind, quantity: Quantity, step: int, *, flipped: bool = False) -> float:
        """How far from the twin an engine may be that computes in `way`, where a rounding was `flipped` or not."""
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
        """Whether one gradient alone is off, at every step, though `way` does not always change it."""
        quantities = {q for q, _ in off}
        if len(quantities) > 1 or len(off) < max(len(steps) for steps in own.values()):
            return False
        return all(str(replace(q, kind=way)) not in self.ways[way.value].dense for q in quantities)

    def excused(self, quantity: Quantity, step: int) -> float:
        """How far from the twin a gradient may be at every step while all others have its bits: as far as a way takes
        it of which no more need show."""
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
        """Held against `way`, which explains `own`."""
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


def _beside_multiple(found: Deviation) -> float:
    """The part of a distance that is no multiple of what it is from."""
    along = (found.factor - 1) * found.scale
    return math.sqrt(max(found.distance**2 - along**2, 0.0))


def _ratio(value: float, noise: float) -> float:
    """What is exactly right passes whatever the noise; a noise that is no number excuses nothing."""
    if value == 0:
        return 0.0
    return value / noise if noise and math.isfinite(value) and math.isfinite(noise) else math.inf


def fit(runs: Sequence[Comparisons], variance_ratio: float = 1.0) -> ToleranceModel:
    """The tolerance model that noise runs make; they hold the same losses, norms, gradients and parameters.
    `variance_ratio`: how much more than all of them together a correct run may vary."""
    found = spreads(runs)
    wider = math.sqrt(variance_ratio)
    factors = {kind: (1 if kind == "way" else wider) * factor for kind, factor in SMALLEST_FACTORS.items()}
    # A run is held against the twin's bits or against one way, each as many comparisons: they do not add up.
    probability = _share_of_false_alarms({q: s for q, s in found.items() if q.kind not in _ALL_WAYS}, factors)
    for quantity, spread in found.items():
        if quantity.kind in _ALL_WAYS:
            continue
        if (factor := wider * spread.factor(probability)) > factors[kind_of(quantity)]:
            factors[str(quantity)] = factor
    noise = {quantity: spread.level for quantity, spread in found.items()}
    return _with_ways(ToleranceModel(noise=noise, factors=factors), runs)


def _with_ways(plain: ToleranceModel, runs: Sequence[Comparisons]) -> ToleranceModel:
    """With what `runs` tell of the ways in which correct engines differ from the twin.

    A way's noise is the most that any run had at any step, and not a root mean square: most of what is reordered stays
    the same to the last bit, and of the rest a variance says nothing. Where all numbers are rounded anew, a dozen runs
    of three steps and more come close to the most. Where a few are flipped, `most_flips` tells of how many tensors one
    run may have flipped where no other has, and `_FLIPS_LIKE` how far that goes. Factor 4 is for engines that are of a
    way, and none of those that were drawn.
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
    """What `runs` of one way have in common; `plain` has the noise of the twin."""
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
    """Of every quantity that all runs have; and of ways in the runs that cast so."""
    found = {}
    for quantity in dict.fromkeys(quantity for run in runs for quantity in run):
        own = [run[quantity] for run in runs if quantity in run]
        if len(own) == len(runs) or quantity.kind in _ALL_WAYS:
            found[quantity] = Spread.of(np.array(own), of_number=kind_of(quantity) == "number")
    return found
