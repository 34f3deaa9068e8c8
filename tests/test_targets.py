"""Steps to a target: as many as synchronous training takes; a slower and a faster algorithm are told."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from meshmark.spec.algorithm import algorithm_named
from meshmark.spec.workload import workload
from studies.convergence import logistic, targets
from studies.convergence.map import MODEL, compute_seconds, step_cost, winner
from studies.convergence.targets import Race, Regression, Sampled


@pytest.fixture(scope="module")
def problems() -> list[Sampled]:
    """Return problems of random images, which need no file."""
    drawn = np.random.default_rng(0)
    right = drawn.normal(size=5)
    features = drawn.normal(size=(12, 4, 200, 5))
    labels = np.where(features @ right + drawn.logistic(size=(12, 4, 200)) > 0, 1.0, -1.0)
    return [Sampled(features=f, labels=y, seed=s) for s, (f, y) in enumerate(zip(features, labels, strict=True))]


def raced(problems: list[Sampled], name: str, synchronous: np.typing.NDArray[np.float64]) -> Race:
    steps = targets.steps_to_target(Regression(problems=problems), algorithm_named(name))
    return Race(task="", spec=algorithm_named(name), count=4, steps=steps, synchronous=synchronous)


def test_a_slow_and_a_fast_one_fail(problems: list[Sampled], monkeypatch: pytest.MonkeyPatch) -> None:
    synchronous = targets.steps_to_target(Regression(problems=problems), targets.SYNCHRONOUS)
    assert raced(problems, "dsgd-ring", synchronous).verdict == "as promised"

    def at(factor: float) -> Callable[..., object]:
        return lambda found, spec, rate, steps: whole(found, spec, factor * rate, steps)

    whole = logistic.states
    for factor, verdict in ((0.5, "too slow"), (2.0, "suspiciously fast"), (1e-4, "never there")):
        monkeypatch.setattr(logistic, "states", at(factor))
        assert raced(problems, "dsgd-ring", synchronous).verdict == verdict


def test_one_seed_of_many_does_not_decide(problems: list[Sampled]) -> None:
    steps = np.full(8, 50.0)
    run = Race(task="", spec=algorithm_named("dsgd-ring"), count=4, steps=steps, synchronous=steps)
    assert run.verdict == "as promised" and run.bounds == (1, 1)
    assert dataclasses.replace(run, steps=np.array([50.0] * 7 + [99])).verdict == "as promised"


def test_gradients_of_a_step_are_of_images_of_the_replicas_own(problems: list[Sampled]) -> None:
    problem = problems[0]
    own = problem.drawn(3)
    assert own.features.shape == (4, targets.ROWS, 5)
    assert all(np.isin(own.features[r], problem.features[r]).all() for r in range(4))
    assert not np.array_equal(own.features, problem.drawn(4).features)
    np.testing.assert_array_equal(own.features, problem.drawn(3).features)


def test_the_cheapest_step_wins_where_links_are_slow_and_the_fewest_where_they_are_not() -> None:
    whole = 4 * workload(MODEL).model.num_parameters
    sent = {name: step_cost(algorithm_named(name), 4).num_bytes / whole for name in ("dsgd-ring", "dsgd-one-peer")}
    assert sent == {"dsgd-ring": 2, "dsgd-one-peer": 1}
    both = step_cost(targets.SYNCHRONOUS, 4)
    assert (both.num_bytes / whole, both.hops) == (2 * 3 / 4, 6)
    assert step_cost(algorithm_named("local-sgd2"), 4).num_bytes == both.num_bytes / 2
    alike = np.full(4, 50.0)
    sign, ring = (
        Race(task="", spec=algorithm_named(name), count=4, steps=steps, synchronous=alike)
        for name, steps in (("error-feedback-sign", 1.2 * alike), ("dsgd-ring", 0.95 * alike))
    )
    assert winner([sign, ring], 0.01, compute=0.1).name == "error-feedback-sign"
    assert winner([sign, ring], 1e7, compute=0.1).name == "dsgd-ring", "whose step waits once"
    assert winner([sign, ring], 1e6, compute=10.0).times_sooner < 1.001, "fewer steps are chance"
    assert winner([sign], 1e6, compute=10.0).name == "synchronous"
    assert compute_seconds() > 0.001
