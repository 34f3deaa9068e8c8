"""The suite of convergence holds of what is right, and fails of what is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from meshmark.algorithms.compressed import Compressed, ErrorFeedback
from meshmark.algorithms.compressed.faults import DrawnAlike, NotTakenOff
from meshmark.algorithms.decentralised import DSGD, Decentralised, GradientTracking
from meshmark.algorithms.decentralised.faults import NotSubtracted, Stale
from meshmark.spec.algorithm import Algorithm, algorithm_named
from studies.convergence import claims_compressed, quadratics
from studies.convergence.claim import PER_GROUP, Claim, measure
from studies.convergence.claims import CLAIMS

BIAS, RATE, STALE = (
    next(claim for claim in CLAIMS if claim.name.startswith(start))
    for start in ("bias of dsgd on a ring", "steps of gradient-tracking", "steps of PipeDream-2BW")
)


@pytest.mark.parametrize("claim", [BIAS, RATE, STALE], ids=["bias", "rate", "stale"])
def test_a_formula_and_its_algorithm_agree(claim: Claim) -> None:
    result = measure(claim)
    assert result.holds, str(result)


def test_a_constant_that_is_a_thousandth_off_fails_and_so_does_another_exponent() -> None:
    off = dataclasses.replace(BIAS, formula=lambda rate: 1.001 * BIAS.formula(rate))
    assert not measure(off).holds
    other = dataclasses.replace(BIAS, formula=lambda rate: BIAS.formula(rate) * (rate / 0.06) ** 0.01)
    assert not measure(other).holds


@pytest.mark.parametrize(
    "claim, algorithm, wrong",
    [(BIAS, DSGD, Stale), (RATE, GradientTracking, NotSubtracted)],
    ids=["stale", "not subtracted"],
)
def test_another_algorithm_fails(
    claim: Claim, algorithm: type[Decentralised], wrong: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    if claim is BIAS:  # which what is heard a step late has none of its own: it is the way there that differs
        claim = dataclasses.replace(
            claim, measured=lambda rate: _after(3, rate), formula=lambda rate: _by_hand(3, rate), name="the way there"
        )
        assert measure(claim).holds
    monkeypatch.setattr(algorithm, "transition_class", lambda self: wrong)
    assert not measure(claim).holds


@pytest.mark.slow
@pytest.mark.parametrize(
    "start, rival", [("noise of QSGD", DrawnAlike), ("noise of error feedback by random-k, step", NotTakenOff)]
)
def test_another_compression_fails(start: str, rival: type, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = next(claim for claim in CLAIMS if claim.name.startswith(start))
    claim = dataclasses.replace(whole, values=whole.values[1:3])
    monkeypatch.setattr(claims_compressed, "STEPS", 400)
    result = measure(claim)
    assert result.holds, str(result)
    off = dataclasses.replace(claim, formula=lambda value: 1.1 * claim.formula(value))
    assert not measure(dataclasses.replace(off, measured=_found(claim, result.measured))).holds
    for algorithm in (Compressed, ErrorFeedback):
        monkeypatch.setattr(algorithm, "transition_class", lambda self: rival)
    assert not measure(claim).holds


def _found(claim: Claim, measured: quadratics.Array) -> Callable[[float], quadratics.Array]:
    """Return a claim's measured values by group, for every coordinate of it."""
    return lambda value: np.repeat(measured[claim.values.index(value)], PER_GROUP)


def _after(steps: int, rate: float) -> quadratics.Array:
    problem, spec = _problem()
    *_, last = quadratics.states(problem, spec, rate, steps)
    return np.linalg.norm(last, axis=0)


def _by_hand(steps: int, rate: float) -> quadratics.Array:
    problem, spec = _problem()
    assert isinstance(spec, Decentralised)
    here, matrix = np.zeros_like(problem.centres), np.array(spec.graph.matrix(8, 0))
    for _ in range(steps):
        here = matrix @ (here - rate * (here - problem.centres))
    return np.linalg.norm(here, axis=0)


def _problem() -> tuple[quadratics.Quadratic, Algorithm]:
    return quadratics.Quadratic(centres=quadratics.drawn(8, 400), curvatures=np.ones(8)), algorithm_named("dsgd-ring")


def test_prony_finds_the_root_of_what_oscillates_too() -> None:
    for recurrence in ((1.2, -0.9), (1.5, -0.56), (0.3, 0.2)):
        series = [1.0, 0.4]
        while len(series) < 20:
            series.append(recurrence[0] * series[-1] + recurrence[1] * series[-2])
        assert quadratics.fitted_root(np.array(series)) == pytest.approx(quadratics.root(recurrence), rel=1e-9)
