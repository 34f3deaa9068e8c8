"""Pipelines that do not wait: which versions are prescribed, transitions by hand, the engines in float64, and what
breaks them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

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
from meshmark.judge.truth import assess_replicas
from meshmark.reference.data import Batch
from meshmark.spec.algorithm import algorithm_named
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Schedule
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.precision import Precision
from meshmark.spec.workload import workload
from tests.broken.algorithm_mutants import ALGORITHM_MUTANTS
from tests.factories import make_workload
from tests.trained import Trial, diagnosed, furthest, train_all

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


NAMED = {
    "pipedream-StashTooOld": "weights are a version too old at every stage",
    "pipedream-NothingInFlight": "every micro-batch is of the newest weights, as if none were on their way",
    "pipedream-FirstStageTooOld": "weights of stage 0 alone are a version too old",
    "pipedream-WeightsOfStart": "every micro-batch is of the weights that the step began with",
    "pipedream-NotStashed": "backward passes take the newest weights, not those of the forward passes",
    "pipedream-vertical-VerticalTooOld": "weights are a version too old at every stage",
    "pipedream-vertical-OwnNewest": "versions are those of pipedream",
    "pipedream-vertical-VerticalOfStart": "every micro-batch is of the weights that the step began with",
    "pipedream-vertical-LastStageTooOld": "weights of stage 1 alone are a version too old",
    "pipemare-MareNotCorrected": "backward passes take the newest weights, without the correction of the discrepancy",
    "pipemare-MareOneTooLate": "the discrepancy is corrected for an update too many",
    "pipemare-MareStashes": "backward passes take the weights of the forward passes, which PipeMare does not stash",
    "pipemare-MareForgetsVelocity": "the velocity of the weights is forgotten between steps",
    "pipemare-MareNotRescheduled": "learning rates are not rescheduled: early stages start with the whole rate",
    "pipemare-MareNeverAnnealed": "learning rates of early stages stay divided by their delay: they are not annealed",
    "pipedream-2bw-NoShadow": "weights are a version too new at every stage",
    "pipedream-2bw-ShadowTooOld": "weights are a version too old at every stage",
    "pipedream-2bw-LastStageFresh": "weights of stage 1 alone are a version too new",
    "pipedream-2bw-ShadowIsStepped": "the update changes the weights of the step before, not the newest",
}


def trials() -> Iterator[tuple[str, Trial]]:
    """With a name where there is a defect."""
    adamw = OptimizerSpec(clip_norm=0.5)
    cases = {
        name: Case(
            adapter="pipedream",
            workload=make_workload(optimizer=adamw if "2bw" in name else PLAIN, algorithm=algorithm_named(name)),
            layout=TWO,
            precision=Precision.FP64,
        )
        for name in ("pipedream", "pipedream-vertical", "pipedream-2bw", "pipemare")
    }
    for name, case in cases.items():
        yield "", Trial(case=case, steps=4)
        for mutant in ALGORITHM_MUTANTS:
            if mutant.adapter == "pipedream" and mutant.workload.algorithm == case.workload.algorithm:
                yield f"{name}-{mutant.defect.__name__}", Trial(case=case, defect=mutant.defect, steps=4)  # type: ignore[arg-type]


@pytest.mark.slow
def test_engines_take_the_prescribed_versions_and_broken_ones_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    names, every = zip(*trials(), strict=True)
    assert NAMED.keys() == set(names) - {""}
    honest, said = {}, {}
    for name, trial, traces in zip(names, every, train_all(every, tmp_path), strict=True):
        if not name:
            honest[trial.case] = traces
            deviations = assess_replicas(traces, trial.case.workload, layout=trial.case.layout)
            assert furthest(deviations) < 1e-13, trial.case.id
            continue
        diagnosis = diagnosed(trial, traces, honest[trial.case])
        said[name] = diagnosis and diagnosis.detail
    assert said == NAMED
