"""Steps to a target loss, over seeds, beside synchronous training on the very same images.

Each replica draws ROWS of its own images in every step (`logistic` says which are its own). The target is a loss of
all images, at the mean of the replicas, that is nearer to the optimum than the start was by TARGET. An algorithm is
too slow where one can be sure that it takes more than AT_MOST times the steps of synchronous SGD, and suspiciously
fast where one can be sure that it takes fewer than AT_LEAST times as many: nothing that sends less knows more (in the
manner of MLPerf's reference convergence points, arXiv:1910.01500).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from meshmark.algorithms import logistic
from meshmark.algorithms.claim import CONFIDENCE, GROUPS
from meshmark.algorithms.logistic import Logistic
from meshmark.algorithms.quadratics import Array
from meshmark.spec.algorithm import ALGORITHMS, AlgorithmSpec, local_sgd

ROWS, RATE, TARGET, SORTED = 8, 0.1, 0.05, 0.5
MOST_STEPS = 400
AT_LEAST, AT_MOST = 0.9, 1.25
SYNCHRONOUS = local_sgd(1)
"""Averaged after every step."""


@dataclass(frozen=True, kw_only=True)
class Sampled(Logistic):
    """Whose gradients are of a few images each."""

    seed: int

    def drawn(self, step: int) -> Logistic:
        count, images = self.labels.shape
        chosen = np.random.default_rng([self.seed, step]).integers(images, size=(count, ROWS))
        rows = np.arange(count)[:, None]
        return Logistic(features=self.features[rows, chosen], labels=self.labels[rows, chosen])

    def loss(self, state: Array) -> float:
        """Of all images."""
        margins = self.labels * (self.features @ state)
        return float(np.logaddexp(0, -margins).mean() + logistic.MU / 2 * state @ state)


RACERS = [
    ALGORITHMS[name]
    for name in (
        "local-sgd2",
        "dsgd-ring",
        "dsgd-exponential",
        "dsgd-one-peer",
        "gradient-tracking-ring",
        "compressed-qsgd64",
        "error-feedback-top-k10",
        "error-feedback-sign",
        "double-squeeze-sign",
    )
]


@dataclass(frozen=True, kw_only=True)
class Race:
    spec: AlgorithmSpec
    count: int
    """Of replicas."""
    steps: Array
    """By seed."""
    synchronous: Array

    @property
    def ratios(self) -> Array:
        return np.asarray(np.log(self.steps / self.synchronous))

    @property
    def ratio(self) -> float:
        return math.exp(float(self.ratios.mean()))

    @property
    def bounds(self) -> tuple[float, float]:
        """Of the ratio, each by a one-sided test."""
        mean, deviation = float(self.ratios.mean()), float(self.ratios.std(ddof=1))
        half = float(stats.t.ppf(CONFIDENCE, len(self.ratios) - 1)) * deviation / math.sqrt(len(self.ratios))
        return math.exp(mean - half), math.exp(mean + half)

    @property
    def verdict(self) -> str:
        """What papers promise is as many steps as synchronous training."""
        least, most = self.bounds
        if not np.isfinite(self.ratio):
            return "never there"
        if least > AT_MOST:
            return "too slow"
        return "suspiciously fast" if most < AT_LEAST else "as promised"


def problems(count: int) -> list[Sampled]:
    dealt = [logistic.dealt(count, SORTED, seed) for seed in range(GROUPS)]
    return [Sampled(features=p.features, labels=p.labels, seed=seed) for seed, p in enumerate(dealt)]


def steps_to_target(found: list[Sampled], spec: AlgorithmSpec) -> Array:
    """By problem; not a number where `MOST_STEPS` do not do."""
    aims = []
    for problem in found:
        best, start = problem.loss(problem.optimum), problem.loss(np.zeros_like(problem.optimum))
        aims.append(best + TARGET * (start - best))
    taken = np.full(len(found), np.nan)
    for step, here in enumerate(logistic.states(found, spec, RATE, MOST_STEPS), start=1):
        for p, problem in enumerate(found):
            if np.isnan(taken[p]) and problem.loss(here[p].mean(axis=0)) <= aims[p]:
                taken[p] = step
        if not np.isnan(taken).any():
            break
    return taken


def race(count: int) -> list[Race]:
    found = problems(count)
    synchronous = steps_to_target(found, SYNCHRONOUS)
    return [
        Race(spec=spec, count=count, steps=steps_to_target(found, spec), synchronous=synchronous) for spec in RACERS
    ]
