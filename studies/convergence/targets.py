"""Steps to a target loss, over seeds, beside synchronous training on the very same data: of logistic regression and of
`nets`.

Each replica draws a few rows of its own in every step. The loss is at the mean of the replicas. An algorithm is
too slow where one can be sure that it takes more than AT_MOST times the steps of synchronous SGD, and suspiciously
fast where one can be sure that it takes fewer than AT_LEAST times as many: nothing that sends less knows more (in the
manner of MLPerf's reference convergence points, arXiv:1910.01500).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy import stats

from meshmark.algorithms.local_sgd import LocalSGD
from meshmark.spec.algorithm import Algorithm, algorithm_named
from studies.convergence import logistic, nets
from studies.convergence.claim import CONFIDENCE, GROUPS
from studies.convergence.logistic import Logistic
from studies.convergence.quadratics import Array

ROWS, RATE, TARGET, SORTED = 8, 0.1, 0.05, 0.5
"""Settings of logistic regression; its target is nearer to the optimum than the start by the factor TARGET."""
MOST_STEPS = 400
AT_LEAST, AT_MOST = 0.9, 1.25
SYNCHRONOUS = LocalSGD(period=1)
"""Averaged after every step."""


class Task(Protocol):
    """Something to train, by several seeds at once."""

    @property
    def name(self) -> str: ...

    @property
    def count(self) -> int:
        """Number of replicas."""

    def aims(self) -> Array:
        """The loss to come to, by seed."""

    def losses(self, spec: Algorithm) -> Iterator[Array]:
        """After each step, by seed, until it is no use to go on."""


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
        """Return the loss over all images."""
        margins = self.labels * (self.features @ state)
        return float(np.logaddexp(0, -margins).mean() + logistic.MU / 2 * state @ state)


@dataclass(frozen=True, kw_only=True)
class Regression:
    problems: Sequence[Sampled]
    """By seed."""
    name: str = "logistic regression"

    @property
    def count(self) -> int:
        return len(self.problems[0].features)

    def aims(self) -> Array:
        best = np.array([problem.loss(problem.optimum) for problem in self.problems])
        start = np.array([problem.loss(np.zeros_like(problem.optimum)) for problem in self.problems])
        return np.asarray(best + TARGET * (start - best))

    def losses(self, spec: Algorithm) -> Iterator[Array]:
        for here in logistic.states(self.problems, spec, RATE, MOST_STEPS):
            yield np.array([p.loss(own.mean(axis=0)) for p, own in zip(self.problems, here, strict=True)])


def regression(count: int) -> Regression:
    dealt = [logistic.dealt(count, SORTED, seed) for seed in range(GROUPS)]
    problems = [Sampled(features=p.features, labels=p.labels, seed=seed) for seed, p in enumerate(dealt)]
    return Regression(problems=problems)


@dataclass(frozen=True, kw_only=True)
class Race:
    task: str
    spec: Algorithm
    count: int
    """Number of replicas."""
    steps: Array
    """By seed; not a number where the target was not come to."""
    synchronous: Array

    @property
    def ratios(self) -> Array:
        return np.asarray(np.log(self.steps / self.synchronous))

    @property
    def ratio(self) -> float:
        return math.exp(float(self.ratios.mean()))

    @property
    def bounds(self) -> tuple[float, float]:
        """Bounds of the ratio, each by a one-sided test."""
        mean, deviation = float(self.ratios.mean()), float(self.ratios.std(ddof=1))
        half = float(stats.t.ppf(CONFIDENCE, len(self.ratios) - 1)) * deviation / math.sqrt(len(self.ratios))
        return math.exp(mean - half), math.exp(mean + half)

    @property
    def verdict(self) -> str:
        """Verdict on the papers' promise: as many steps as synchronous training."""
        least, most = self.bounds
        if not np.isfinite(self.ratio):
            return "never there"
        if least > AT_MOST:
            return "too slow"
        return "suspiciously fast" if most < AT_LEAST else "as promised"


def steps_to_target(task: Task, spec: Algorithm) -> Array:
    """By seed; not a number where the task's steps do not do."""
    aims = task.aims()
    taken = np.full(len(aims), np.nan)
    for step, losses in enumerate(task.losses(spec), start=1):
        taken[np.isnan(taken) & (losses <= aims)] = step
        if not np.isnan(taken).any():
            break
    return taken


def race(task: Task, specs: Sequence[Algorithm]) -> list[Race]:
    synchronous = steps_to_target(task, SYNCHRONOUS)
    return [
        Race(
            task=task.name,
            spec=spec,
            count=task.count,
            steps=steps_to_target(task, spec),
            synchronous=synchronous,
        )
        for spec in specs
    ]


RACERS = [
    algorithm_named(name)
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
DEEP_RACERS = [
    algorithm_named(name)
    for name in ("local-sgd2", "dsgd-one-peer", "error-feedback-top-k10", "error-feedback-sign", "double-squeeze-sign")
]
"""Races of nets, which take longer to train."""
TASKS: list[tuple[Callable[[int], Task], list[Algorithm]]] = [
    (regression, RACERS),
    (nets.language_model, DEEP_RACERS),
    (nets.vision_transformer, DEEP_RACERS),
]
"""Each by its number of replicas, and who races."""
