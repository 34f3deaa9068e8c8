"""Where theory is exact: replica i minimises a_i |x - c_i|^2 / 2, whose optimum and whose every step are known.

With one curvature a for all, a step is linear in the states, and along an eigenvector of a symmetric W, of eigenvalue
L, a number: what is left of a replica's own optimum c, and at what rate a start is forgotten, follow in closed form.
Coordinates are independent: each is a draw of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshmark.algorithms.contract import Tensors, Transition
from meshmark.algorithms.decentralised import Decentralised
from meshmark.reference.data import Batch, make_batch
from meshmark.spec.algorithm import Algorithm
from meshmark.spec.layout import Layout
from meshmark.spec.workload import workload

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Quadratic:
    """Rows are replicas, columns coordinates."""

    centres: Array
    curvatures: Array
    """By replica."""
    noise: float = 0.0
    """Standard deviation of every gradient's every coordinate, drawn anew for each step."""
    seed: int = 0

    @property
    def optimum(self) -> Array:
        return np.average(self.centres, axis=0, weights=self.curvatures)

    def gradients(self, states: Array, step: int) -> Array:
        exact = self.curvatures[:, None] * (states - self.centres)
        return exact + self.noise * np.random.default_rng([self.seed, step]).normal(size=states.shape)


class PlainStep:
    """Plain SGD."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def step(self, parameters: Tensors, gradients: Tensors) -> Tensors:
        return {name: x - self.rate * gradients[name] for name, x in parameters.items()}


def plain_transition(spec: Algorithm, rate: float, count: int) -> Transition:
    """On plain SGD over `count` replicas: what engines are judged by."""
    plain = workload("gpt-mini-sgd")
    asked = replace(plain, algorithm=spec, optimizer=replace(plain.optimizer, learning_rate=rate))
    return spec.transition(asked, [PlainStep(rate) for _ in range(count)])


def states(problem: Quadratic, spec: Algorithm, rate: float, steps: int) -> Iterator[Array]:
    """After each step, from zero."""
    algorithm = plain_transition(spec, rate, len(problem.centres))
    here = np.zeros_like(problem.centres)
    for step in range(steps):
        gradients = problem.gradients(here, step)
        after = algorithm.transition([{"x": row} for row in here], [{"x": row} for row in gradients])
        here = np.stack([np.asarray(tensors["x"], dtype=np.float64) for tensors in after])
        yield here


def stale_states(problem: Quadratic, spec: Algorithm, rate: float, steps: int) -> Iterator[Array]:
    """The same of one replica by a pipeline that does not wait."""
    plain = workload("gpt-mini-sgd")
    asked = replace(plain, algorithm=spec, optimizer=replace(plain.optimizer, learning_rate=rate))
    past: list[Tensors] = [{"head.x": np.zeros(problem.centres.shape[1])}]

    def compute(parameters: Tensors, part: Batch, changed: Tensors | None) -> tuple[float, Tensors]:
        here = np.asarray(parameters["head.x"], dtype=np.float64)
        return 0.0, {"head.x": problem.gradients(here[None], len(past))[0]}

    rule = spec.gradient_rule(asked, Layout())
    assert rule is not None
    for step in range(steps):
        found = rule.step(past, make_batch(asked, step), compute)
        past.append(found.after or PlainStep(rate).step(past[-1], found.gradients))
        yield np.asarray(past[-1]["head.x"])


def drawn(count: int, coordinates: int, seed: int = 0) -> Array:
    """Centres of unit variance, that differ from replica to replica."""
    return np.random.default_rng(seed).normal(size=(count, coordinates))


def spectrum(spec: Decentralised, count: int) -> tuple[Array, Array]:
    """Return the spectrum of its symmetric matrix: eigenvalues in descending order, and eigenvectors as columns."""
    matrix = np.array(spec.graph.matrix(count, 0))
    assert np.array_equal(matrix, matrix.T), f"{spec.graph.id} is not symmetric"
    values, vectors = np.linalg.eigh(matrix)
    return values[::-1], vectors[:, ::-1]


def steady_error(shares: Callable[[Array], Array], problem: Quadratic, spec: Decentralised) -> Array:
    """By coordinate, the root mean square over replicas of what is left of their own centres: `shares` of them along
    each eigenvector but the first, that of the mean."""
    values, vectors = spectrum(spec, len(problem.centres))
    along = vectors.T @ problem.centres
    left = shares(values)[1:, None] * along[1:]
    return np.asarray(np.sqrt(np.mean(np.square(vectors[:, 1:] @ left), axis=0)))


def dsgd_share(values: Array, step: float) -> Array:
    """x = L ((1 - ra) x + ra c), the fixed point of DSGD along an eigenvector; `step` is ra."""
    return step * values / (1 - (1 - step) * values)


def dpsgd_share(values: Array, step: float) -> Array:
    """x = L x - ra (x - c)."""
    return np.asarray(step / (1 - values + step))


def tracking_recurrence(value: float, step: float) -> tuple[float, float]:
    """Return p and s of gradient tracking: x(t+2) = p x(t+1) + s x(t) along an eigenvector, as y is the change of x."""
    return 2 * value - step, step - value**2


def diffusion_recurrence(value: float, step: float) -> tuple[float, float]:
    """Return the coefficients of exact diffusion, with V = (1 + L) / 2: x(t+2) = V (2 - ra) x(t+1) - V (1 - ra)
    x(t)."""
    lazy = (1 + value) / 2
    return lazy * (2 - step), -lazy * (1 - step)


def two_buffered_recurrence(step: float) -> tuple[float, float]:
    """Return those of PipeDream-2BW, whose gradient is a step old: x(t+2) = x(t+1) - ra x(t), relative to the
    optimum."""
    return 1.0, -step


def root(recurrence: tuple[float, float]) -> float:
    """The factor by which a step forgets, in the long run."""
    first, second = recurrence
    return float(max(abs(np.roots([1.0, -first, -second]))))


def fitted_root(series: Array) -> float:
    """That of a series which follows some recurrence of two terms: Prony's method."""
    known = np.stack([series[1:-1], series[:-2]], axis=1)
    first, second = np.linalg.lstsq(known, series[2:], rcond=None)[0]
    return root((float(first), float(second)))


def mean_deviation(noise: float, count: int, rate: float, curvature: float) -> float:
    """Standard deviation of the mean over replicas in the long run: it goes as 1 / sqrt(n), the linear speed-up."""
    return noise * math.sqrt(rate / (count * curvature * (2 - rate * curvature)))


def local_sgd_end(problem: Quadratic, rate: float, period: int) -> Array:
    """Where local SGD stands after an averaging, in the long run: replicas that forget more weigh more, by 1 - q_i with
    q_i = (1 - r a_i)^H, where the optimum weighs by a_i."""
    return np.average(problem.centres, axis=0, weights=1 - (1 - rate * problem.curvatures) ** period)
