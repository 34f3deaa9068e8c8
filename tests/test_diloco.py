"""DiLoCo: its exact transition, the engine for real in float64, and what breaks it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshmark.algorithms.contract import Tensors, Transition
from meshmark.algorithms.local_sgd import DiLoCo, LocalSGD
from meshmark.errors import InputError
from meshmark.judge.truth import ExactOptimizer, assess_replicas
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.precision import Precision
from tests.factories import make_workload
from tests.trained import Trial, furthest, train_all

PLAIN = OptimizerSpec(kind=OptimizerKind.SGD, learning_rate=0.1, weight_decay=0.0, clip_norm=None)
SPEC = DiLoCo(period=2)


def exact(algorithm: LocalSGD | DiLoCo) -> Transition:
    problem = make_workload(algorithm=algorithm, optimizer=PLAIN)
    return algorithm.transition(problem, [ExactOptimizer(PLAIN) for _ in range(3)])


def states(seed: int) -> list[Tensors]:
    return [{"a": x} for x in np.random.default_rng(seed).normal(size=(3, 4))]


@pytest.mark.parametrize(
    "wrong, reason",
    [
        ({"period": 0}, "period is 0, expected at least 1"),
        ({"outer_rate": 0.0}, "outer_rate 0.0 and outer_momentum 0.9; expected a rate above 0"),
        ({"outer_momentum": 1.0}, "outer_momentum 1.0; expected a rate above 0, and a momentum of at least 0 and less"),
    ],
)
def test_a_diloco_that_means_nothing_is_an_error(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        DiLoCo(**{"period": 2, **wrong})


def test_an_outer_step_of_rate_one_without_momentum_is_local_sgd() -> None:
    plain = dataclasses.replace(SPEC, outer_rate=1.0, outer_momentum=0.0)
    outer, local = exact(plain), exact(LocalSGD(period=2))
    here = [states(0)[0]] * 3
    there = here
    for step in range(5):
        here, there = outer.transition(here, states(step + 1)), local.transition(there, states(step + 1))
        np.testing.assert_allclose([x["a"] for x in here], [x["a"] for x in there], rtol=1e-12)


def test_the_outer_momentum_is_nesterovs() -> None:
    """By hand: averages after steps 0 and 2, of drifts D0 and D2 (arXiv:2311.08105, with PyTorch's Nesterov)."""
    outer, here = exact(SPEC), [states(0)[0]] * 3
    first, momentum, met = np.zeros(4), np.zeros(4), here[0]["a"]
    for step in range(3):
        gradients = states(step + 1)
        alone = [x["a"] - 0.1 * g["a"] for x, g in zip(here, gradients, strict=True)]
        here = outer.transition(here, gradients)
        if step != 1:
            drift = met - np.mean(alone, axis=0)
            momentum = 0.9 * momentum + drift
            met = met - 0.7 * (drift + 0.9 * momentum)
            np.testing.assert_allclose([x["a"] for x in here], [met] * 3, rtol=1e-12)
        first = drift if step == 0 else first
    assert np.abs(momentum - drift).max() > 0.01, "the momentum of the first is in the second"


@pytest.mark.slow
def test_the_engine_steps_by_adamw_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    case = Case(
        adapter="diloco",
        workload=make_workload(algorithm=SPEC),
        layout=Layout(dp=2),
        precision=Precision.FP64,
    )
    (traces,) = train_all([Trial(case=case, steps=5)], tmp_path)
    assert furthest(assess_replicas(traces, case.workload)) < 1e-13, "an element of AdamW's may be all rounding"
