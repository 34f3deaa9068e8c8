"""Algorithms that compress to a server and back: their transitions by hand, and what they send. Their engines and what
breaks them are trained with the others' in test_compressed.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshmark.algorithms.compressed import DoubleSqueeze
from meshmark.algorithms.compressed.compressor import Compressor, CompressorKind
from meshmark.algorithms.compressed.compressors import Draw, compressed
from meshmark.algorithms.compressed.transition import DoubleSqueezeTransition
from meshmark.algorithms.contract import Tensors
from meshmark.algorithms.one_bit import OneBitAdam
from meshmark.algorithms.one_bit.transition import OneBitAdamTransition
from meshmark.errors import InputError
from meshmark.judge.truth import local_rules
from meshmark.spec.algorithm import algorithm_named
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.workload import workload
from meshmark.theory.traffic import step_traffic
from tests.factories import make_workload

PLAIN = OptimizerSpec(kind=OptimizerKind.SGD, learning_rate=0.1, weight_decay=0.0, clip_norm=None)
ADAM = OptimizerSpec(learning_rate=0.01, weight_decay=0.1, clip_norm=None, eps=1e-3)
SIGN = Compressor(kind=CompressorKind.SIGN)


def exact(name: str, optimizer: OptimizerSpec, count: int = 3) -> Any:  # noqa: ANN401
    problem = make_workload(optimizer=optimizer, algorithm=algorithm_named(name))
    return problem.algorithm.transition(problem, local_rules(problem, count))


def replicas(step: int, count: int = 3) -> list[Tensors]:
    drawn = np.random.default_rng(step).standard_t(3, size=(count, 6, 10))
    return [{"a.weight": x} for x in drawn]


def signs(x: Any) -> Any:  # noqa: ANN401
    return np.float32(np.abs(x).mean()).astype(float) * np.where(x >= 0, 1, -1)


@pytest.mark.parametrize(
    "wrong, reason",
    [
        ({"kind": CompressorKind.QSGD, "rounds": 2}, "2 rounds of qsgd; expected 1, or more of one of sign, top-k"),
        ({"kind": CompressorKind.SIGN, "rounds": 0}, "0 rounds of sign; expected 1"),
    ],
)
def test_rounds_of_what_does_not_contract_are_an_error(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        Compressor(**wrong)


def test_one_bit_adam_must_warm_up_and_is_adam() -> None:
    with pytest.raises(InputError, match="warmup_steps is 0, expected at least 1 with one-bit-adam: its variance is"):
        OneBitAdam(compressor=SIGN)
    for name in ("gpt-mini-sgd", "gpt-mini"):  # another rule; and one that clips
        with pytest.raises(InputError, match="algorithm one-bit-adam-signw2 is Adam, .* take kind adamw without clip"):
            workload(f"{name}-one-bit-adam-signw2")


@pytest.mark.parametrize("kind", [CompressorKind.SIGN, CompressorKind.TOP_K])
def test_rounds_contract_as_often(kind: CompressorKind) -> None:
    """|x - C_R(x)|^2 <= (1 - d)^R |x|^2 (arXiv:2206.03665, lemma 1); of top-k, R rounds send the R k largest."""
    algorithm = exact("double-squeeze-signx3", PLAIN)
    x = replicas(0)[0]["a.weight"]
    for rounds in (1, 2, 3):
        algorithm.algorithm = DoubleSqueeze(compressor=Compressor(kind=kind, rounds=rounds))
        told = algorithm.received(x, Draw(seed=0, step=0, replica=0, name="a"))
        left, worst = x, 0.0
        for _ in range(rounds):
            share = 0.1 if kind is CompressorKind.TOP_K else np.abs(left).sum() ** 2 / (left.size * np.sum(left**2))
            worst = max(worst, 1 - share)
            left = left - (signs(left) if kind is CompressorKind.SIGN else top(left))
        np.testing.assert_allclose(x - told, left, atol=1e-12)
        assert np.sum(left**2) <= worst**rounds * np.sum(x**2) * (1 + 1e-6)
    if kind is CompressorKind.TOP_K:
        whole = compressed(Compressor(kind=kind, percent=30), x, Draw(seed=0, step=0, replica=0, name="a"))
        np.testing.assert_array_equal(told, whole)


def top(x: Any) -> Any:  # noqa: ANN401
    return np.where(np.abs(x) >= np.sort(np.abs(x).ravel())[-x.size // 10], x, 0)


@pytest.mark.parametrize("name", ["top-k10", "sign", "signx3"])
def test_what_is_stepped_on_and_left_on_both_sides_is_all_gradients(name: str) -> None:
    algorithm = exact(f"double-squeeze-{name}", PLAIN)
    assert isinstance(algorithm, DoubleSqueezeTransition)
    stepped, wanted = np.zeros((6, 10)), np.zeros((6, 10))
    for step in range(6):
        gradients = replicas(step)
        algorithm.transition(replicas(99), gradients)
        stepped += algorithm.taken[0]["a.weight"]
        wanted += np.mean([g["a.weight"] for g in gradients], axis=0)
        assert algorithm.left and algorithm.left_of_server
        workers = np.mean([e["a.weight"] for e in algorithm.left], axis=0)
        server = algorithm.left_of_server["a.weight"]
        np.testing.assert_allclose(stepped + workers + server, wanted, atol=1e-12)
    assert min(np.abs(workers).max(), np.abs(server).max()) > 0.1


def test_one_bit_adam_freezes_the_variance_and_squeezes_the_momentum() -> None:
    """Four steps by hand (arXiv:2102.02888, algorithm 1), of which two warm up."""
    algorithm = exact("one-bit-adam-signw2", ADAM, 2)
    assert isinstance(algorithm, OneBitAdamTransition)
    x, m, v = np.ones((6, 10)), np.zeros((6, 10)), np.zeros((6, 10))
    left, server = [np.zeros((6, 10))] * 2, np.zeros((6, 10))
    for step in range(4):
        own = [g["a.weight"] * (np.arange(10) > 0) for g in replicas(step, 2)]  # one column has no gradient
        if step < 2:
            own = [np.mean(own, axis=0)] * 2
            m, v = 0.9 * m + 0.1 * own[0], 0.95 * v + 0.05 * own[0] ** 2
        else:
            wanted = [0.9 * m + 0.1 * g + e for g, e in zip(own, left, strict=True)]
            left = [p - signs(p) for p in wanted]
            mean = np.mean([signs(p) for p in wanted], axis=0) + server
            m, server = signs(mean), mean - signs(mean)
        after = algorithm.transition([{"a.weight": x}] * 2, [{"a.weight": g} for g in own])
        x = x - 0.01 * (np.where(v > 0, m / (np.sqrt(v) + 1e-3), 0) + 0.1 * x)
        np.testing.assert_allclose([a["a.weight"] for a in after], [x] * 2, rtol=1e-12)


def test_bytes_go_to_the_server_and_back_and_it_keeps_more() -> None:
    def sent(algorithm: str, rank: int = 0) -> dict[str, int]:
        case = Case(adapter="a", workload=workload(f"gpt-mini-sgd-{algorithm}"), layout=Layout(dp=4))
        return {flow.kind: flow.num_bytes for flow in step_traffic(case, rank) or []}

    gathered = sent("error-feedback-sign")["all_gather"]
    both = {"gather": gathered, "broadcast": gathered // 4}
    assert sent("double-squeeze-sign") == both == sent("double-squeeze-sign", 3)
    assert sent("double-squeeze-signx3") == {"gather": 3 * gathered, "broadcast": 3 * gathered // 4}
    served = Case(adapter="a", workload=workload("gpt-mini-sgd-double-squeeze-sign"), layout=Layout(dp=4))
    assert [served.workload.algorithm.vectors_kept(served, rank) for rank in range(4)] == [2, 1, 1, 1]
