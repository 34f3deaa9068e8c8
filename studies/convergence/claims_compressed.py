"""The long-run effect of compression on noise, against its closed form."""

from __future__ import annotations

import math

import numpy as np

from meshmark.algorithms.compressed import Compressed, ErrorFeedback
from meshmark.algorithms.compressed.compressor import Compressor, CompressorKind
from meshmark.spec.algorithm import Algorithm
from studies.convergence import quadratics as q
from studies.convergence.claim import GROUPS, PER_GROUP, Claim
from studies.convergence.quadratics import Array, Quadratic

COUNT, NOISE = 4, 1.0
STEPS = 1600
"""That are measured, after as many as the start takes to be forgotten."""


def spread(problem: Quadratic, spec: Algorithm, rate: float) -> Array:
    """By coordinate, root mean square from the optimum, where the start is forgotten."""
    found, burn_in = np.zeros_like(problem.optimum), math.ceil(20 / rate)
    for step, here in enumerate(q.states(problem, spec, rate, burn_in + STEPS)):
        if step >= burn_in:
            found += np.square(here[0] - problem.optimum)
    return np.asarray(np.sqrt(found / STEPS))


def error_feedback(percent: int) -> Algorithm:
    compressor = Compressor(kind=CompressorKind.RANDOM_K, percent=percent)
    return ErrorFeedback(compressor=compressor)


def error_feedback_deviation(rate: float, share: float, noise: float) -> float:
    """Standard deviation of x in the long run, of curvature one. With b = 1 where the coordinate is sent, u = x less
    the optimum, e what is left on the mean and w the gradients' mean noise: u <- u - r b (u + e + w), e <- (1 - b)
    (u + e + w). The second moments S = E M S M' + E N N' var w, linear in S."""

    def step(sent: float) -> tuple[Array, Array]:
        kept = 1 - sent
        return np.array([[1 - rate * sent, -rate * sent], [kept, kept]]), np.array([-rate * sent, kept])

    ways = [(share, *step(1.0)), (1 - share, *step(0.0))]
    moved = sum(weight * np.kron(matrix, matrix) for weight, matrix, _ in ways)
    added = sum(weight * np.kron(vector, vector) for weight, _, vector in ways) * noise**2
    return float(np.sqrt(np.linalg.solve(np.eye(4) - moved, added)[0]))


def qsgd(levels: int) -> Algorithm:
    compressor = Compressor(kind=CompressorKind.QSGD, levels=levels)
    return Compressed(compressor=compressor)


def qsgd_deviation(problem: Quadratic, rate: float, levels: int) -> Array:
    """By coordinate, of curvature one. At the optimum replica i's gradient stays g_i, and rounding it to multiples of
    l = |g_i| / s adds the variance l^2 f (1 - f), f the fraction that it is above one; so their mean's over n^2."""
    gradients = problem.optimum - problem.centres
    places = np.abs(gradients) / np.linalg.norm(gradients, axis=1, keepdims=True) * levels
    fraction = places % 1
    unit = np.linalg.norm(gradients, axis=1, keepdims=True) / levels
    variance = np.sum(unit**2 * fraction * (1 - fraction), axis=0) / len(gradients) ** 2
    return np.asarray(np.sqrt(rate / (2 - rate) * variance))


def _problem(noise: float) -> Quadratic:
    return Quadratic(centres=q.drawn(COUNT, GROUPS * PER_GROUP), curvatures=np.ones(COUNT), noise=noise)


def _error_feedback(name: str, swept: str, values: tuple[float, ...], fixed: float) -> Claim:
    """`fixed`: the step size, or the share that is sent, where the other is swept."""

    def chosen(value: float) -> tuple[float, float]:
        return (fixed, value) if swept == "share sent" else (value, fixed)

    def measured(value: float) -> Array:
        rate, share = chosen(value)
        return spread(_problem(NOISE), error_feedback(round(100 * share)), rate)

    def formula(value: float) -> Array:
        return np.full(GROUPS * PER_GROUP, error_feedback_deviation(*chosen(value), NOISE / math.sqrt(COUNT)))

    return Claim(name=name, swept=swept, values=values, measured=measured, formula=formula, paper="arXiv:1809.07599")


def _qsgd() -> Claim:
    rate, problem = 0.05, _problem(0.0)
    return Claim(
        name=f"noise of QSGD on {COUNT} replicas, step {rate}",
        swept="levels",
        values=(4, 8, 16, 32),
        measured=lambda levels: spread(problem, qsgd(round(levels)), rate),
        formula=lambda levels: qsgd_deviation(problem, rate, round(levels)),
        paper="arXiv:1610.02132",
    )


COMPRESSED_CLAIMS = [
    _error_feedback("noise of error feedback by random-k, step 0.05", "share sent", (0.1, 0.2, 0.4, 0.8), 0.05),
    _error_feedback("noise of error feedback by random-k, a tenth", "step size", (0.01, 0.02, 0.04), 0.1),
    _qsgd(),
]
