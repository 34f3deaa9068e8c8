"""Where theory is exact and data are real: is a digit five or more, by logistic regression on scikit-learn's images.

Replica i minimises the mean of log(1 + exp(-y a.x)) over its images (a, y), plus MU |x|^2 / 2. Of each replica's images
a share is dealt by label, the others at random, so that replicas differ as much as one asks for. The optimum of all is
known by Newton's method, and so is where an algorithm comes to rest that never gets there:

- DSGD (arXiv:1310.7063, theorem 1): X = W (X - r G(X)), by Newton's method on all replicas' equations together. To
  first order replicas stand r (I - W)^+ W G(x*) from their mean: bias goes as the step size and the heterogeneity
- local SGD (arXiv:2003.10422): x = mean_i of H gradient steps of replica i from x. To first order the bias is
  r (H - 1) / 2 times mean_i(A_i)^-1 mean_i(A_i g_i), A_i and g_i being curvature and gradient of f_i at x*

Several seeds are dealt and trained at once, each a tensor of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmark.reference.data import load_digits
from meshmark.spec.algorithm import Algorithm
from studies.convergence.quadratics import Array, plain_transition

MU = 0.2
"""Coefficient of the squared parameters, which makes the loss strongly convex."""
FEATURES = 40
"""The images' principal components, of variance one each; the last is a constant."""
NEWTON_STEPS, AT_REST = 50, 1e-12


@functools.cache
def images() -> tuple[Array, Array]:
    """Features, and 1 or -1."""
    pixels, labels = (tensor.numpy() for tensor in load_digits())
    flat = pixels.reshape(len(pixels), -1).astype(np.float64)
    left, _, _ = np.linalg.svd(flat - flat.mean(axis=0), full_matrices=False)
    features = left[:, : FEATURES - 1] * np.sqrt(len(flat))
    return np.hstack([features, np.ones((len(flat), 1))]), np.where(labels >= 5, 1.0, -1.0)


@dataclass(frozen=True, kw_only=True)
class Logistic:
    """Axes: replica, image, feature."""

    features: Array
    labels: Array

    def gradients(self, states: Array) -> Array:
        """By replica, each at its own."""
        margins = self.labels * self.along(states)
        slopes = -self.labels / (1 + np.exp(margins)) / margins.shape[1]
        return np.asarray((slopes[:, None] @ self.features)[:, 0] + MU * states)

    def drawn(self, step: int) -> Logistic:
        """Return the problem that a step's gradients belong to: all images."""
        return self

    def along(self, states: Array) -> Array:
        """a.x, by replica and image."""
        return np.asarray((self.features @ states[:, :, None])[:, :, 0])

    def hessians(self, states: Array) -> Array:
        margins = self.along(states)
        curved = 1 / ((1 + np.exp(margins)) * (1 + np.exp(-margins))) / margins.shape[1]
        weighed = self.features.swapaxes(1, 2) * curved[:, None]
        return np.asarray(weighed @ self.features + MU * np.eye(states.shape[1]))

    @functools.cached_property
    def optimum(self) -> Array:
        state = np.zeros(self.features.shape[2])
        for _ in range(NEWTON_STEPS):
            every = np.repeat(state[None], len(self.features), axis=0)
            move = np.linalg.solve(self.hessians(every).mean(axis=0), self.gradients(every).mean(axis=0))
            state = state - move
            if np.abs(move).max() < AT_REST:
                return state
        raise AssertionError("Newton's method does not come to rest")


def dealt_rows(labels: NDArray[np.generic], count: int, sorted_share: float, seed: int) -> NDArray[np.intp]:
    """Which images are whose, by replica: equally many each, `sorted_share` of each one's by label."""
    order = np.random.default_rng(seed).permutation(len(labels))
    each = len(order) // count
    by_label = round(each * sorted_share) * count
    first, others = order[:by_label], order[by_label : each * count]
    first = first[np.argsort(labels[first], kind="stable")]
    return np.hstack([first.reshape(count, -1), others.reshape(count, -1)])


@functools.cache
def dealt(count: int, sorted_share: float, seed: int) -> Logistic:
    """To `count` replicas, as `dealt_rows` says."""
    features, labels = images()
    rows = dealt_rows(labels, count, sorted_share, seed)
    return Logistic(features=features[rows], labels=labels[rows])


def states(problems: Sequence[Logistic], spec: Algorithm, rate: float, steps: int) -> Iterator[Array]:
    """After each step, from zero, by problem, replica and feature."""
    count = len(problems[0].features)
    algorithm = plain_transition(spec, rate, count)
    here = np.zeros((len(problems), count, problems[0].features.shape[2]))
    for step in range(steps):
        found = np.stack([p.drawn(step).gradients(own) for p, own in zip(problems, here, strict=True)])
        told = [[{str(p): each[p, r] for p in range(len(problems))} for r in range(count)] for each in (here, found)]
        after = algorithm.transition(*told)
        here = np.stack([[tensors[str(p)] for tensors in after] for p in range(len(problems))]).astype(np.float64)
        yield here


def dsgd_rest(problem: Logistic, matrix: Array, rate: float) -> Array:
    """X = W (X - r G(X)), by replica and feature."""
    count, size = problem.features.shape[0], problem.features.shape[2]
    here = np.repeat(problem.optimum[None], count, axis=0)
    for _ in range(NEWTON_STEPS):
        off = here - matrix @ (here - rate * problem.gradients(here))
        moves = np.eye(size) - rate * problem.hessians(here)
        slope = np.eye(count * size) - np.einsum("rs,sfg->rfsg", matrix, moves).reshape(count * size, count * size)
        move = np.linalg.solve(slope, off.ravel()).reshape(here.shape)
        here = here - move
        if np.abs(move).max() < AT_REST:
            return here
    raise AssertionError("Newton's method does not come to rest")


def local_sgd_rest(problem: Logistic, rate: float, period: int) -> Array:
    """x = mean_i of `period` gradient steps of replica i from x, by feature."""
    count, size = problem.features.shape[0], problem.features.shape[2]
    state = problem.optimum
    for _ in range(NEWTON_STEPS):
        here, slopes = np.repeat(state[None], count, axis=0), np.repeat(np.eye(size)[None], count, axis=0)
        for _ in range(period):
            slopes = slopes - rate * problem.hessians(here) @ slopes
            here = here - rate * problem.gradients(here)
        move = np.linalg.solve(np.eye(size) - slopes.mean(axis=0), state - here.mean(axis=0))
        state = state - move
        if np.abs(move).max() < AT_REST:
            return state
    raise AssertionError("Newton's method does not come to rest")
