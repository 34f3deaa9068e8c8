"""The planner against the committed records: what was measured, case by case, rank by rank, category by category."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from meshmark.plan.states import model_states
from meshmark.record import Record, read_records
from meshmark.registry import load_adapter

BASELINES = Path(__file__).parents[1] / "baselines"
RECORDS = {
    f"{path.parent.name}/{record.case.id}": record
    for path in sorted(BASELINES.glob("*/records.jsonl")) for record in read_records(path).records if record.memory
}  # fmt: skip
TOLERANCE = 0.02
"""The issue's, on each category."""


def categories(record: Record) -> Iterator[tuple[int, str, float, float]]:
    """Rank, category, measured and planned bytes, as the planner of today plans them."""
    adapter, case = load_adapter(record.adapter), record.case
    for rank, reading in enumerate(record.memory):
        plan, declared = model_states(case, rank, adapter.recipe(case)), adapter.remainders(case, rank)
        assert reading.held is not None and plan.activations is not None
        for name, measured, planned in (
            ("parameters", reading.states.parameters, plan.parameters),
            ("gradients", reading.states.gradients, plan.gradients),
            ("optimizer_states", reading.states.optimizer_states, plan.optimizer_states),
            ("activations", reading.held.activations, plan.activations),
        ):
            yield rank, name, measured, planned + sum(r.num_bytes for r in declared if r.category == name)


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_every_category_is_as_planned(record: Record) -> None:
    for rank, name, measured, planned in categories(record):
        assert measured == pytest.approx(planned, rel=TOLERANCE), f"{name} of rank {rank}"


def test_every_adapter_and_axis_is_measured() -> None:
    """The test above stands on this."""
    cases = [record.case for record in RECORDS.values()]
    assert len({case.adapter for case in cases}) >= 10
    assert {case.layout.zero_stage for case in cases} == {0, 1, 2, 3}
    assert max(case.layout.tp for case in cases) == max(case.layout.pp for case in cases) == 4
