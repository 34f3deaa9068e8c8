"""LARS and LAMB under data parallelism, for real in float64, and what breaks them; their rules: test_optimizers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from meshmark.judge.truth import assess_replicas
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Precision
from meshmark.spec.workload import workload
from tests.broken.mutant import Mutant
from tests.broken.suite_mutants import SUITE_MUTANTS
from tests.factories import make_workload
from tests.trained import Trial, diagnosed, furthest, train_all

NAMED = {
    "OneRateForAll": "with one rate for all tensors",
    "ForgetsLarsMomentum": "moments forgotten after every step",
    "LarsWithoutDecay": "without weight decay",
    "OtherLarsMomentum": "with a momentum of 0.99",
    "OneRate": "with one rate for all tensors",
    "ForgetsLambMoments": "moments forgotten after every step",
    "LambWithoutDecay": "without weight decay",
    "OtherLambBetas": "with betas (0.9, 0.999)",
}


def trial(mutant: Mutant, broken: bool) -> Trial:
    # Without clipping, and with a decay that is seen in few steps.
    optimizer = dataclasses.replace(mutant.workload.optimizer, clip_norm=None, weight_decay=0.1)
    problem = make_workload(optimizer=optimizer)
    case = Case(adapter="ddp", workload=problem, layout=Layout(dp=2), precision=Precision.FP64)
    return Trial(case=case, defect=mutant.defect if broken else None, steps=4)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated")
def test_runs_are_exact_and_broken_ones_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    mutants = [m for m in SUITE_MUTANTS if m.defect.__name__ in NAMED]
    assert len(mutants) == len(NAMED)
    right = [
        trial(next(m for m in mutants if m.workload == workload(f"gpt-mini-{k}")), False) for k in ("lars", "lamb")
    ]
    found = train_all([*right, *(trial(mutant, True) for mutant in mutants)], tmp_path)
    honest = {each.case.workload.optimizer.kind: traces for each, traces in zip(right, found, strict=False)}
    for each, traces in zip(right, found, strict=False):
        assert furthest(assess_replicas(traces, each.case.workload)) < 1e-13
    for mutant, traces in zip(mutants, found[len(right) :], strict=True):
        each = trial(mutant, True)
        diagnosis = diagnosed(each, traces, honest[each.case.workload.optimizer.kind])
        assert diagnosis is not None and diagnosis.fault in mutant.faults, (mutant.name, diagnosis)
        assert NAMED[mutant.defect.__name__] in diagnosis.detail, (mutant.name, diagnosis)
