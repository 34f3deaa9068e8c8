"""The formulas of `quadratics` against what the transitions do: exponents, with intervals, and constants."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from meshmark.algorithms.decentralised import DPSGD, DSGD, Decentralised, ExactDiffusion, GradientTracking
from meshmark.algorithms.decentralised.graph import Graph, GraphKind
from meshmark.algorithms.local_sgd import LocalSGD
from meshmark.algorithms.pipedream import PipeDream2BW
from meshmark.spec.algorithm import Algorithm, algorithm_named
from studies.convergence import quadratics as q
from studies.convergence.claim import GROUPS, PER_GROUP, Claim
from studies.convergence.claims_compressed import COMPRESSED_CLAIMS
from studies.convergence.claims_logistic import LOGISTIC_CLAIMS
from studies.convergence.quadratics import Array, Quadratic


def _along(cls: type[Decentralised], graph: GraphKind = GraphKind.RING) -> Decentralised:
    return cls(graph=Graph(kind=graph))


def _alike(count: int, noise: float = 0.0) -> Quadratic:
    """Return `count` quadratics of curvature one."""
    return Quadratic(centres=q.drawn(count, GROUPS * PER_GROUP), curvatures=np.ones(count), noise=noise)


def _last(problem: Quadratic, spec: Algorithm, rate: float, steps: int) -> Array:
    *_, last = q.states(problem, spec, rate, steps)
    return last


def _apart(problem: Quadratic, spec: Algorithm, rate: float) -> Array:
    """By coordinate, how far replicas end from the optimum."""
    last = _last(problem, spec, rate, math.ceil(20 / rate))
    return np.asarray(np.sqrt(np.mean(np.square(last - problem.optimum), axis=0)))


def _bias(cls: type[Decentralised], share: Callable[[Array, float], Array], paper: str) -> list[Claim]:
    spec = _along(cls)

    def formula(rate: float, count: int) -> Array:
        return q.steady_error(lambda values: share(values, rate), _alike(count), spec)

    return [
        Claim(
            name=f"bias of {cls.kind} on a ring of 8",
            swept="step size",
            values=(0.02, 0.04, 0.08, 0.16),
            measured=lambda rate: _apart(_alike(8), spec, rate),
            formula=lambda rate: formula(rate, 8),
            paper=paper,
        ),
        Claim(
            name=f"bias of {cls.kind} on rings of 4 to 16, step 0.05",
            swept="spectral gap",
            values=tuple(float(1 - q.spectrum(spec, count)[0][1]) for count in (4, 6, 8, 12, 16)),
            measured=lambda gap: _apart(_alike(_ring_of(gap)), spec, 0.05),
            formula=lambda gap: formula(0.05, _ring_of(gap)),
            paper=paper,
        ),
    ]


def _ring_of(gap: float) -> int:
    """The number of replicas whose ring has this gap, 2 (1 - cos(2 pi / n)) / 3."""
    return round(2 * math.pi / math.acos(1 - 1.5 * gap))


def _speedup() -> Claim:
    rate, noise = 0.1, 1.0

    def measured(count: float) -> Array:
        problem, spec = _alike(round(count), noise), _along(DSGD, GraphKind.EXPONENTIAL)
        means = [here.mean(axis=0) for here in q.states(problem, spec, rate, 600)]
        return np.asarray(np.sqrt(np.mean(np.square(np.array(means[200:]) - problem.optimum), axis=0)))

    return Claim(
        name="noise of the mean under DSGD, exponential graph, step 0.1",
        swept="replicas",
        values=(2, 4, 8, 16),
        measured=measured,
        formula=lambda count: np.full(GROUPS * PER_GROUP, q.mean_deviation(noise, round(count), rate, 1.0)),
        paper="arXiv:1705.09056",
    )


def _drift() -> Claim:
    rate = 0.02
    problem = Quadratic(centres=q.drawn(4, GROUPS * PER_GROUP), curvatures=np.array([0.5, 0.8, 1.2, 1.5]))

    def measured(less: float) -> Array:
        period = round(less) + 1
        steps = period * math.ceil(25 / (rate * period)) + 1
        return np.asarray(np.abs(_last(problem, LocalSGD(period=period), rate, steps)[0] - problem.optimum))

    return Claim(
        name="bias of local SGD, curvatures 0.5 to 1.5, step 0.02",
        swept="local steps less one",
        values=(1, 2, 4, 8),
        measured=measured,
        formula=lambda less: np.abs(q.local_sgd_end(problem, rate, round(less) + 1) - problem.optimum),
        paper="arXiv:2003.10422",
    )


def _rates(cls: type[Decentralised], recurrence: Callable[[float, float], tuple[float, float]], paper: str) -> Claim:
    """Claim the number of steps in which the slowest difference between replicas shrinks by a factor of e."""
    spec, step = _along(cls), 0.05

    def measured(gap: float) -> Array:
        problem = _alike(_ring_of(gap))
        _, vectors = q.spectrum(spec, len(problem.centres))
        series = np.array([vectors[:, 1:].T @ here for here in q.states(problem, spec, step, 24)])
        roots = [[q.fitted_root(one) for one in along.T] for along in np.moveaxis(series, 1, 0)]
        return np.asarray(-1 / np.log(np.max(roots, axis=0)))

    def formula(gap: float) -> Array:
        values, _ = q.spectrum(spec, _ring_of(gap))
        slowest = max(q.root(recurrence(float(value), step)) for value in values[1:])
        return np.full(GROUPS * PER_GROUP, -1 / math.log(slowest))

    return Claim(
        name=f"steps of {cls.kind} on rings of 4 to 12 to be e times less apart, step {step}",
        swept="spectral gap",
        values=tuple(float(1 - q.spectrum(spec, count)[0][1]) for count in (4, 6, 8, 12)),
        measured=measured,
        formula=formula,
        paper=paper,
    )


def _staleness() -> Claim:
    """Claim the number of steps for a factor of e with gradients that are one step old; without, it is -1 / log(1 -
    r)."""
    spec = PipeDream2BW()

    def measured(step: float) -> Array:
        problem = _alike(1)
        series = np.array(list(q.stale_states(problem, spec, step, 24))) - problem.optimum
        return np.asarray([-1 / math.log(q.fitted_root(one)) for one in series.T])

    return Claim(
        name="steps of PipeDream-2BW to be e times nearer",
        swept="step size",
        values=(0.02, 0.05, 0.1, 0.2),
        measured=measured,
        formula=lambda step: np.full(GROUPS * PER_GROUP, -1 / math.log(q.root(q.two_buffered_recurrence(step)))),
        paper="arXiv:2006.09503",
    )


def left_of_bias(spec: Algorithm) -> float:
    """Return the distance to the optimum after 400 steps of size 0.05 of 8 replicas; zero for algorithms without
    bias."""
    return float(np.max(_apart(_alike(8), spec, 0.05)))


BIASED = [algorithm_named(name) for name in ("dsgd-ring", "dpsgd-ring", "compressed-top-k10", "error-feedback-top-k10")]
UNBIASED = [algorithm_named(name) for name in ("gradient-tracking-ring", "exact-diffusion-ring", "ef21-top-k10")]
CLAIMS = [
    *_bias(DSGD, q.dsgd_share, "arXiv:1702.05122"),
    *_bias(DPSGD, q.dpsgd_share, "arXiv:1705.09056"),
    _speedup(),
    _drift(),
    _rates(GradientTracking, q.tracking_recurrence, "arXiv:1607.03218"),
    _rates(ExactDiffusion, q.diffusion_recurrence, "arXiv:1702.05123"),
    _staleness(),
    *COMPRESSED_CLAIMS,
    *LOGISTIC_CLAIMS,
]
