"""Pipelines that do not wait: which versions are prescribed, transitions by hand, the engines in float64, and what
breaks them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from meshmark.adapter.registry import load_adapter
from meshmark.adapters import ROSTER
from meshmark.algorithms.contract import Tensors
from meshmark.algorithms.pipedream import PipeDream, PipeDream2BW, PipeDreamVertical
from meshmark.algorithms.pipedream.pipemare import PipeMareRule, delay
from meshmark.algorithms.pipedream.schedule import Versions, in_flight, of_first_stage, of_step_before
from meshmark.errors import InputError
from meshmark.reference.data import Batch
from meshmark.spec.algorithm import algorithm_named
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Schedule
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.workload import workload
from tests.factories import make_workload

PLAIN = OptimizerSpec(kind=OptimizerKind.SGD, learning_rate=0.1, weight_decay=0.0, clip_norm=None)
TWO = Layout(pp=2, num_micro_batches=4, schedule=Schedule.ONE_F_ONE_B)
EMBEDDING, HEAD = "embedding.tokens.weight", "head.output.weight"


def test_versions_are_those_of_the_papers() -> None:
    """PipeDream's figure 4 and its vertical synchronisation, for four stages."""

    def table(versions: Versions) -> list[list[int]]:
        return [[versions(stage, index) for index in range(6)] for stage in range(4)]

    assert table(in_flight(4)) == [
        [0, 0, 0, 0, 1, 2],
        [0, 0, 0, 1, 2, 3],
        [0, 0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5],
    ]
    assert table(of_first_stage(4)) == [[0, 0, 0, 0, 1, 2]] * 4
    assert table(of_step_before(4)) == [[1] * 6] * 4


@pytest.mark.parametrize("kind", [PipeDream.kind, PipeDreamVertical.kind, PipeDream2BW.kind])
def test_gradients_are_of_the_composed_versions(kind: str) -> None:
    """Gradients of f = embedding * head by hand: each is the other's version."""
    problem = make_workload(optimizer=PLAIN, algorithm=algorithm_named(kind))
    seen: list[tuple[float, float]] = []

    def compute(p: Tensors, part: Batch, changed: Tensors | None) -> tuple[float, Tensors]:
        first, last = p[EMBEDDING], p[HEAD]
        seen.append((float(first), float(last)))
        return float(first * last), {EMBEDDING: last, HEAD: first}

    none = torch.zeros(4, 1)
    batch = Batch(inputs=none, targets=none.long(), weights=none, total_weight=1.0)
    history: list[Tensors] = [{EMBEDDING: np.float64(x), HEAD: np.float64(y)} for x, y in ((9, 9), (3, 4), (1, 2))]  # type: ignore[dict-item]
    rule = problem.algorithm.gradient_rule(problem, TWO)
    assert rule is not None
    found = rule.step(history, batch, compute)
    if kind == PipeDream2BW.kind:
        assert seen == [(3.0, 4.0)] and found.after is None
        return
    a, b = [1.0], [2.0]  # after every update
    for index in range(4):
        old = max(0, index - 1)
        new = index if kind == PipeDream.kind else old
        assert seen[index] == pytest.approx((a[old], b[new]), rel=1e-15)
        a, b = [*a, a[-1] - 0.1 * b[new]], [*b, b[-1] - 0.1 * a[old]]
    assert found.after is not None and float(found.after[EMBEDDING]) == pytest.approx(a[-1], rel=1e-15)
    assert float(found.gradients[HEAD]) == pytest.approx((b[0] - b[-1]) / 0.1, rel=1e-12)


def test_pipemare_by_hand() -> None:
    """f = embedding * head over two stages, 3 and 1 updates late: two steps of four micro-batches, K = 2."""
    algorithm = dataclasses.replace(algorithm_named("pipemare"), annealing_steps=2, discrepancy_decay=0.125)
    run = PipeMareRule(make_workload(optimizer=PLAIN, algorithm=algorithm), TWO)
    seen: list[tuple[float, ...]] = []

    def compute(p: Tensors, part: Batch, back: Tensors | None) -> tuple[float, Tensors]:
        assert back is not None
        seen.append((float(p[EMBEDDING]), float(p[HEAD]), float(back[EMBEDDING]), float(back[HEAD])))
        return 0.0, {EMBEDDING: back[HEAD], HEAD: p[EMBEDDING]}

    none = torch.zeros(4, 1)
    batch = Batch(inputs=none, targets=none.long(), weights=none, total_weight=1.0)
    start, velocity = {EMBEDDING: 1.0, HEAD: 2.0}, {EMBEDDING: 0.0, HEAD: 0.0}
    for rates in ((0.1 / 3, 0.1), (0.1 / 3**0.5, 0.1)):
        seen.clear()
        found = run.step([{name: np.float64(x) for name, x in start.items()}], batch, compute)  # type: ignore[misc]
        made = [start]
        for index in range(4):
            newest, late = made[-1], min(index, 1)
            back = {n: newest[n] - d * velocity[n] for n, d in ((EMBEDDING, index), (HEAD, late))}
            ahead = (start[EMBEDDING], made[index - late][HEAD])
            assert seen[index] == pytest.approx((*ahead, back[EMBEDDING], back[HEAD]), rel=1e-15)
            moves = {EMBEDDING: -rates[0] * back[HEAD], HEAD: -rates[1] * ahead[0]}
            made.append({name: newest[name] + move for name, move in moves.items()})
            for name, kept in ((EMBEDDING, 0.5), (HEAD, 0.125)):  # 0.125 to the power of 1/3, and of 1
                velocity[name] = kept * velocity[name] + (1 - kept) * moves[name]
        assert found.after is not None and float(found.after[HEAD]) == pytest.approx(made[-1][HEAD], rel=1e-14)
        start = {name: float(x) for name, x in found.after.items()}
    assert [delay(4, stage) for stage in range(4)] == [7, 5, 3, 1], "2 (P - i) + 1 of the paper's table 1"


def test_every_parameter_has_a_stage() -> None:
    problem = workload("gpt-mini")
    names: Tensors = {f"{x}.weight": np.zeros(1) for x in ("embedding.tokens", "blocks.0.a", "blocks.1.a", "head.norm")}
    assert list(problem.transformer.stages_of(2, names).values()) == [0, 0, 1, 1]


def test_what_means_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="pipedream is defined on plain SGD; take kind sgd"):
        workload("gpt-mini-pipedream")
    warmed = OptimizerSpec(kind=OptimizerKind.SGD, weight_decay=0.0, clip_norm=None, warmup_steps=2)
    with pytest.raises(InputError, match="makes several updates a step, all of one rate"):
        make_workload(optimizer=warmed, algorithm=algorithm_named("pipedream"))
    with pytest.raises(InputError, match="annealing_steps 0 and discrepancy_decay 0.135"):
        dataclasses.replace(algorithm_named("pipemare"), annealing_steps=0)
    shallow = Case(
        adapter="pipedream",
        workload=workload("gpt-mini-pipedream-2bw"),
        layout=Layout(pp=2, num_micro_batches=1, schedule=Schedule.ONE_F_ONE_B),
    )
    reason = load_adapter(ROSTER["pipedream"]).supports(shallow, "cpu", "gloo") or ""
    assert "1F1B over 2 stages takes at least as many micro-batches, got 1" in reason
