"""The points where algorithms rest in logistic regression on real images, against those that their equations give."""

from __future__ import annotations

import math

import numpy as np

from meshmark.algorithms.decentralised import Decentralised
from meshmark.algorithms.local_sgd import LocalSGD
from meshmark.spec.algorithm import Algorithm, algorithm_named
from studies.convergence import logistic
from studies.convergence.claim import GROUPS, Claim
from studies.convergence.logistic import Logistic
from studies.convergence.quadratics import Array

COUNT = 8
SORTED = 0.5
"""Share of the images that are sorted by label, where it is not swept."""
RATE = 0.2
FORGOTTEN = 18
"""Times that the slowest direction shrinks by e, of which nothing but rounding is left of the start."""


def problems(share: float = SORTED) -> list[Logistic]:
    """One a group."""
    return [logistic.dealt(COUNT, share, seed) for seed in range(GROUPS)]


def rest(found: list[Logistic], spec: Algorithm, rate: float) -> Array:
    """By group, replica and feature, less the optimum; after an averaging where there is one."""
    steps = math.ceil(FORGOTTEN / (rate * logistic.MU) / spec.steps_per_meeting) * spec.steps_per_meeting + 1
    *_, last = logistic.states(found, spec, rate, steps)
    return last - np.stack([problem.optimum for problem in found])[:, None]


def _over_replicas(left: Array) -> Array:
    """By group, then feature."""
    return np.asarray(np.sqrt(np.mean(np.square(left), axis=1)).ravel())


def _dsgd(swept: str, values: tuple[float, ...]) -> Claim:
    spec = algorithm_named("dsgd-ring")
    assert isinstance(spec, Decentralised)
    matrix = np.array(spec.graph.matrix(COUNT, 0))

    def chosen(value: float) -> tuple[list[Logistic], float]:
        return (problems(), value) if swept == "step size" else (problems(value), RATE)

    def measured(value: float) -> Array:
        found, rate = chosen(value)
        return _over_replicas(rest(found, spec, rate))

    def formula(value: float) -> Array:
        found, rate = chosen(value)
        left = [logistic.dsgd_rest(problem, matrix, rate) - problem.optimum for problem in found]
        return _over_replicas(np.stack(left))

    return Claim(
        name=f"logistic regression: bias of dsgd on a ring of {COUNT}",
        swept=swept,
        values=values,
        measured=measured,
        formula=formula,
        paper="arXiv:1310.7063",
    )


def _local_sgd() -> Claim:
    def formula(less: float) -> Array:
        found = [logistic.local_sgd_rest(p, RATE, round(less) + 1) - p.optimum for p in problems()]
        return np.abs(np.stack(found)).ravel()

    def measured(less: float) -> Array:
        return np.abs(rest(problems(), LocalSGD(period=round(less) + 1), RATE)[:, 0]).ravel()

    return Claim(
        name=f"logistic regression: bias of local SGD, {COUNT} replicas, step {RATE}",
        swept="local steps less one",
        values=(1, 2, 4, 8),
        measured=measured,
        formula=formula,
        paper="arXiv:2003.10422",
    )


def left_of_logistic(spec: Algorithm) -> float:
    """How far the furthest replica rests from the optimum of one dealing."""
    return float(np.max(np.abs(rest(problems()[:1], spec, RATE))))


LOGISTIC_CLAIMS = [
    _dsgd("step size", (0.05, 0.1, 0.2, 0.4)),
    _dsgd("share of images dealt by label", (0.25, 0.5, 0.75, 1.0)),
    _local_sgd(),
]
CORRECTED = [algorithm_named(name) for name in ("gradient-tracking-ring", "exact-diffusion-ring")]
"""Whose replicas come to rest at the optimum."""
