"""The planner against the committed records: what was measured, case by case, rank by rank, category by category."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.records.record import Record
from meshmark.records.record_file import read_records
from meshmark.report.planned import plans, totals
from meshmark.run.verdict import memory_categories
from meshmark.theory import activations, backward_pass
from meshmark.theory.memory import model_states

BASELINES = Path(__file__).parents[1] / "baselines"
RECORDS = {
    f"{path.parent.name}/{record.case.id}": record
    for path in sorted(BASELINES.glob("*/records.jsonl"))
    for record in read_records(path).records
    if record.memory.readings
}
TOLERANCE = 0.02
"""The issue's, on each category."""


def replanned(record: Record) -> Record:
    """With the plan and the declarations of today's planner and today's adapter of that name."""
    case, adapter = record.case, load_adapter(builtin_adapters()[record.case.adapter])
    ranks = range(len(record.memory.readings))
    planned = [model_states(case, rank, adapter.recipe(case)) for rank in ranks]
    extra_memory = [list(adapter.extra_memory(case, rank)) for rank in ranks]
    return replace(record, memory=replace(record.memory, planned=planned, extra_memory=extra_memory))


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_every_category_is_as_planned(record: Record) -> None:
    record = replanned(record)
    for rank, (reading, (plan, declared)) in enumerate(zip(record.memory.readings, plans(record), strict=True)):
        found = list(memory_categories(reading, plan, declared, with_activations=True))
        assert [name for name, *_ in found] == ["parameters", "gradients", "optimizer_states", "activations"]
        for name, measured, planned in found:
            assert measured == pytest.approx(planned, rel=TOLERANCE), f"{name} of rank {rank}"


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_what_the_allocator_counted_is_as_planned(record: Record) -> None:
    """On every rank; of records that an earlier meter left, which on some ranks counted what gloo's threads had freed,
    the peak on one."""
    counted = all(reading.previous_steady_bytes is not None for reading in record.memory.readings)
    found = totals(replanned(record))
    for name in ("steady", "peak") if counted else ("peak",):
        errors = [held.error for held in found if held.category == name]
        assert (max if counted else min)(errors, default=0.0) <= TOLERANCE, f"{name}: {errors}"


def test_a_planner_that_is_wrong_by_more_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    record = next(iter(RECORDS.values()))
    block = backward_pass.block_bytes
    monkeypatch.setattr(activations, "block_bytes", lambda *sizes: 1.03 * block(*sizes))
    with pytest.raises(AssertionError, match="activations of rank 0"):
        test_every_category_is_as_planned(record)


def test_every_adapter_and_axis_is_measured() -> None:
    """The test above stands on this."""
    cases = [record.case for record in RECORDS.values()]
    assert len({case.adapter for case in cases}) >= 10
    assert {case.layout.zero_stage for case in cases} == {0, 1, 2, 3}
    assert max(case.layout.tp for case in cases) == max(case.layout.pp for case in cases) == 4
