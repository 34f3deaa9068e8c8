"""1-bit LAMB and 0/1 Adam: their transitions by hand, and what they send and keep. Their engines and what breaks them
are trained with the others' in test_compressed.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshmark.algorithms.one_bit import SignMomenta, ZeroOneAdam
from meshmark.algorithms.one_bit.transition import OneBitLAMBTransition, ZeroOneAdamTransition, within
from meshmark.errors import InputError
from meshmark.spec.algorithm import algorithm_named
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.optimizer import OptimizerKind
from meshmark.spec.workload import workload
from meshmark.theory.traffic import step_traffic
from tests.test_served import ADAM, SIGN, exact, replicas, signs

LAMB = replace(ADAM, kind=OptimizerKind.LAMB)
ZERO_ONE, ONE_BIT_LAMB = "zero-one-adam2-signw2", "one-bit-lamb-signw2"


class Squeeze:
    """Compression of two replicas' vectors, by hand."""

    def __init__(self) -> None:
        self.left, self.server = [np.zeros((6, 10))] * 2, np.zeros((6, 10))

    def __call__(self, own: list[Any]) -> Any:  # noqa: ANN401
        wanted = [x + e for x, e in zip(own, self.left, strict=True)]
        self.left = [p - signs(p) for p in wanted]
        mean = np.mean([signs(p) for p in wanted], axis=0) + self.server
        self.server = mean - signs(mean)
        return signs(mean)


def test_one_bit_lamb_goes_on_from_the_warm_ups_rates() -> None:
    """Five steps by hand (arXiv:2104.06069, algorithm 1), of which two warm up."""
    algorithm, squeeze = exact(ONE_BIT_LAMB, LAMB, 2), Squeeze()
    assert isinstance(algorithm, OneBitLAMBTransition)
    x, m, v, a, f = np.ones((6, 10)), np.zeros((6, 10)), np.zeros((6, 10)), 0.0, 1.0
    for step in range(5):
        own = [g["a.weight"] * (np.arange(10) > 0) for g in replicas(step, 2)]  # one column has no gradient
        if step < 2:
            own = [np.mean(own, axis=0)] * 2
            m, v = 0.9 * m + 0.1 * own[0], 0.95 * v + 0.05 * own[0] ** 2
            w = v
        else:
            before, m = m, squeeze([0.9 * m + 0.1 * g for g in own])
            w = 0.95 * w + 0.05 * ((m - 0.9 * before) / 0.1) ** 2
            ratio = ((np.sqrt(v) + 1e-3) / (np.sqrt(w) + 1e-3))[:, 1:].max()
            f = min(max(ratio, 0.5, 0.9 * f), 4.0, 1.1 * f)
        u = np.where(v > 0, m / (np.sqrt(v) + 1e-3), 0) + 0.1 * x
        c = f * a if step >= 2 else np.linalg.norm(x) / np.linalg.norm(u)
        a = a if step >= 2 else 0.9 * a + 0.1 * c
        after = algorithm.transition([{"a.weight": x}] * 2, [{"a.weight": g} for g in own])
        x = x - 0.01 * c * u
        np.testing.assert_allclose([t["a.weight"] for t in after], [x] * 2, rtol=1e-12)
    assert f not in (1.0, 0.5, 4.0)


def test_a_factor_stays_within_bounds_and_near_the_last() -> None:
    assert [within(*pair) for pair in ((1.05, 1), (2, 1), (0.2, 1), (9, 3.9), (0.1, 0.52))] == [1.05, 1.1, 0.9, 4, 0.5]


def test_zero_one_adam_steps_alone_and_meets_by_what_it_has_stepped() -> None:
    """Seven steps by hand (arXiv:2202.06009, algorithm 1): all meet after 0, 1, 2, 4 and 6."""
    algorithm, squeeze = exact(ZERO_ONE, replace(ADAM, weight_decay=0.0, warmup_steps=3), 2), Squeeze()
    assert isinstance(algorithm, ZeroOneAdamTransition)
    x, m, u = [np.ones((6, 10))] * 2, [np.zeros((6, 10))] * 2, [np.zeros((6, 10))] * 2
    met, v, rates = x[0], np.zeros((6, 10)), 0.0
    for step in range(7):
        own = [g["a.weight"] * (np.arange(10) > 0) for g in replicas(step, 2)]
        if step in (0, 1):
            v = 0.95 * v + 0.05 * np.mean(own, axis=0) ** 2
        m, rate = [0.9 * y + 0.1 * g for y, g in zip(m, own, strict=True)], 0.01 * min((step + 1) / 3, 1)
        u, rates = [a + rate * b for a, b in zip(u, m, strict=True)], rates + rate
        after = algorithm.transition([{"a.weight": y} for y in x], [{"a.weight": g} for g in own])
        inverse = np.where(v > 0, 1 / (np.sqrt(v) + 1e-3), 0)
        x = [a - rate * inverse * b for a, b in zip(x, m, strict=True)]
        if step in (0, 1, 2, 4, 6):
            together = squeeze(u)
            x = [met - inverse * together] * 2
            m, u, met, rates = [together / rates] * 2, [np.zeros((6, 10))] * 2, x[0], 0.0
        np.testing.assert_allclose([t["a.weight"] for t in after], x, rtol=1e-12)


def test_the_variance_moves_ever_more_seldom() -> None:
    """By whole gradients; and nothing is sent between meetings."""
    spec = ZeroOneAdam(compressor=SIGN, warmup_steps=9, period=3)
    assert [step for step in range(20) if spec.adapts(step)] == [0, 1, 3, 7]
    assert [step for step in range(20) if spec.compresses(step)] == [*range(9), 9, 12, 15, 18]
    assert not spec.replicas_agree and spec.id == "zero-one-adam3-signw9"


def test_what_they_send_and_keep() -> None:
    def case(name: str, warmup: int = 2) -> Case:
        problem = workload(name)
        if isinstance(problem.algorithm, SignMomenta):
            problem = replace(problem, algorithm=replace(problem.algorithm, warmup_steps=warmup))
        return Case(adapter="a", workload=problem, layout=Layout(dp=4))

    def sent(found: Case) -> list[tuple[str, int]]:
        return [(flow.kind, flow.num_bytes) for flow in step_traffic(found, 0) or []]

    adam, lamb = f"gpt-mini-plain-adam-{ZERO_ONE}", f"gpt-mini-unclipped-lamb-{ONE_BIT_LAMB}"
    both = sent(case("gpt-mini-sgd-double-squeeze-sign"))
    whole = ("all_reduce", 4 * workload("gpt-mini").model.num_parameters)
    assert [kind for kind, _ in both] == ["gather", "broadcast"]
    assert sent(case(adam)) == sent(case(lamb)) == both
    assert sent(case(lamb, 3)) == [whole], "the third step is metered"
    assert sent(case(adam, 1)) == [], "which replicas step alone"
    assert sent(case(adam, 4)) == both, "no variance is due"
    assert [
        case(name).workload.algorithm.vectors_kept(case(name), rank) for name in (adam, lamb) for rank in (0, 1)
    ] == [4, 3, 3, 2]


@pytest.mark.parametrize(
    "name, reason",
    [
        (f"gpt-mini-adam-{ZERO_ONE}", "is specified for Adam alone; take kind adamw without weight decay and clipping"),
        (f"gpt-mini-lamb-{ONE_BIT_LAMB}", "is LAMB, and no gradient of all .* take kind lamb without clipping"),
    ],
)
def test_other_rules_are_refused(name: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        workload(name)


@pytest.mark.parametrize("name", [ZERO_ONE, ONE_BIT_LAMB])
def test_they_must_warm_up(name: str) -> None:
    with pytest.raises(InputError, match="warmup_steps is 0, expected at least 1"):
        replace(algorithm_named(name), warmup_steps=0)
