"""Logistic regression of the suite of convergence: its gradients, its optimum, and that algorithms rest where their
equations and, to first order, their papers say."""

from __future__ import annotations

import numpy as np
import pytest

from meshmark.algorithms.local_sgd import LocalSGD
from meshmark.spec.algorithm import Algorithm, algorithm_named
from studies.convergence import logistic
from studies.convergence.logistic import Logistic
from studies.convergence.quadratics import Array

COUNT, IMAGES, SIZE = 4, 6, 3
RING = np.array(algorithm_named("dsgd-ring").graph.matrix(COUNT, 0))  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def problem() -> Logistic:
    drawn = np.random.default_rng(1)
    labels = np.where(drawn.random((COUNT, IMAGES)) < np.linspace(0.1, 0.9, COUNT)[:, None], 1.0, -1.0)
    return Logistic(features=drawn.normal(size=(COUNT, IMAGES, SIZE)), labels=labels)


def test_gradients_and_curvatures_are_those_of_the_loss(problem: Logistic) -> None:
    x = np.random.default_rng(2).normal(size=(COUNT, SIZE))

    def loss(states: Array) -> Array:
        margins = problem.labels * problem.along(states)
        return np.asarray(np.log1p(np.exp(-margins)).mean(axis=1) + logistic.MU / 2 * np.square(states).sum(axis=1))

    for feature, step in enumerate(1e-5 * np.eye(SIZE)):
        slope = (loss(x + step) - loss(x - step)) / 2e-5
        np.testing.assert_allclose(problem.gradients(x)[:, feature], slope, atol=1e-9)
        bend = (problem.gradients(x + step) - problem.gradients(x - step)) / 2e-5
        np.testing.assert_allclose(problem.hessians(x)[:, :, feature], bend, atol=1e-9)
    at = np.repeat(problem.optimum[None], COUNT, axis=0)
    assert np.abs(problem.gradients(at).mean(axis=0)).max() < 1e-14 < np.abs(problem.gradients(at)).max()


def rest(problem: Logistic, spec: Algorithm) -> Array:
    """Return the point of rest for steps of 0.5, in the right phase of local SGD."""
    *_, last = logistic.states([problem], spec, 0.5, 200 * spec.steps_per_meeting + 1)
    return np.asarray(last[0])


def test_algorithms_rest_where_their_equations_say(problem: Logistic) -> None:
    right = logistic.dsgd_rest(problem, RING, 0.5)
    assert np.abs(rest(problem, algorithm_named("dsgd-ring")) - right).max() < 1e-9
    assert np.abs(rest(problem, algorithm_named("dpsgd-ring")) - right).max() > 1e-3, "another one rests elsewhere"
    there = logistic.local_sgd_rest(problem, 0.5, 3)
    assert np.abs(rest(problem, LocalSGD(period=3)) - there).max() < 1e-9
    assert np.abs(rest(problem, LocalSGD(period=2)) - there).max() > 1e-3


def test_to_first_order_they_rest_where_the_papers_say(problem: Logistic) -> None:
    """With the constant."""
    rate, optimum = 1e-4, np.repeat(problem.optimum[None], COUNT, axis=0)
    gradients, curvatures = problem.gradients(optimum), problem.hessians(optimum)
    apart = logistic.dsgd_rest(problem, RING, rate)
    right = -rate * np.linalg.pinv(np.eye(COUNT) - RING) @ RING @ gradients
    np.testing.assert_allclose(apart - apart.mean(axis=0), right, atol=2e-3 * np.abs(right).max())
    off = logistic.local_sgd_rest(problem, rate, 5) - problem.optimum
    drift = np.einsum("rfg,rg->f", curvatures, gradients) / COUNT
    right = rate * 2 * np.linalg.solve(curvatures.mean(axis=0), drift)
    np.testing.assert_allclose(off, right, atol=2e-3 * np.abs(right).max())


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_replicas_differ_as_much_as_is_asked_for(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = np.where(np.arange(4000) % 2, 1.0, -1.0)
    monkeypatch.setattr(logistic, "images", lambda: (np.arange(4000.0)[:, None], labels))
    found = logistic.dealt.__wrapped__(4, share, seed=3)
    assert len(set(found.features.ravel())) == 4000, "every image is somebody's"
    means = found.labels.mean(axis=1)
    np.testing.assert_allclose(means, share * np.array([-1, -1, 1, 1]), atol=0.1)
