"""megatron-core's distributed checkpoint through the launcher: saved under one layout, gone on from under another."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from meshmark.adapter.contract import Feature
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.conformance.scenario import RESUMED_STEPS, plain_workload
from meshmark.launch.launch import ForkserverLauncher
from meshmark.records.record import Record, Status
from meshmark.records.request import Task
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.workload import workload
from tests.broken.mutant import LAYOUTS

SPLIT = Layout(tp=2, num_micro_batches=4)


@pytest.mark.slow
def test_what_tensor_parallel_ranks_save_a_pipeline_goes_on_from(launcher: ForkserverLauncher, tmp_path: Path) -> None:
    """Both halves are judged as one run, by the truth."""
    runner = Runner(launcher, builtin_adapters(), RunOptions(), tmp_path)

    def half(task: Task, layout: Layout) -> Record:
        case = Case(adapter="megatron-gpt", workload=plain_workload(), layout=layout)
        asked = dataclasses.replace(runner.request(task, case), steps=RESUMED_STEPS, checkpoint=str(folder))
        record = runner.once(asked, frozenset({Feature.SAVE}))
        assert record.outcome.status is Status.OK, record.outcome.message
        return record

    (folder := tmp_path / "saved").mkdir()
    half(Task.SAVE, SPLIT)
    verdict = half(Task.RESUME, LAYOUTS["pipeline"]).verdict("equivalence")
    runner.close()
    assert verdict and verdict.passed, verdict


def test_checkpoints_of_sgd_are_refused() -> None:
    adapter = load_adapter(builtin_adapters()["megatron-gpt"])
    plain = Case(adapter="megatron-gpt", workload=workload("gpt-mini-sgd"), layout=SPLIT)
    told = adapter.refusal(plain, "cpu", "gloo", frozenset({Feature.SAVE}))
    assert told and "checkpoints of SGD" in told
    assert adapter.refusal(plain, "cpu", "gloo") is None
