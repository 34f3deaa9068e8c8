"""Model states as ranks are added: measured ones stay what they are, others are computed by the plan's own recipe."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from meshmark.records.record import Record
from meshmark.report.memory_by_ranks import Kind, Source, memory_by_ranks, rows_beyond, rows_by_ranks
from meshmark.report.plots import ranks_plot
from studies import pages


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return [*pages.records_of("report"), *pages.records_of("scale")]


def kind(adapter: str, stage: int) -> Kind:
    return Kind(adapter=adapter, zero_stage=stage, precision="fp32")


def test_adamw_in_fp32_holds_sixteen_bytes_a_parameter_over_the_shards(records: list[Record]) -> None:
    """Textbook numbers: 4 of weights, 4 of gradients, 8 of moments; DeepSpeed's stage 3 keeps masters of 4 beside."""
    found = memory_by_ranks(records)
    assert found[kind("ddp", 0)][512].total == 16
    assert found[kind("fsdp2", 3)][512].total == pytest.approx(16 / 512)
    assert found[kind("deepspeed", 3)][128].total == pytest.approx(20 / 128)
    assert found[kind("deepspeed", 2)][512].total == pytest.approx(4 + 16 / 512)


def test_measured_numbers_are_marked_and_agree_with_the_closed_form(records: list[Record]) -> None:
    """A kind without its measured record of 64 ranks is computed there, and what was measured is that."""
    found = memory_by_ranks(records)[kind("fsdp2", 3)]
    marks = [found[world].source for world in (2, 8, 64, 512)]
    assert marks == [Source.REAL, Source.FAKE, Source.FAKE, Source.COMPUTED]
    less = [record for record in records if record.case.world_size != 64]
    computed = memory_by_ranks(less)[kind("fsdp2", 3)][64]
    assert computed.source is Source.COMPUTED and computed.total == pytest.approx(found[64].total, rel=1e-3)


def test_what_no_recipe_gives_is_not_computed(records: list[Record]) -> None:
    """Values with a plan that the closed form does not give stay as they were measured."""
    record = next(r for r in records if r.case.adapter == "fsdp2" and r.case.world_size == 2 and r.memory.planned)
    plan = record.memory.planned[0]
    assert plan is not None
    other = dataclasses.replace(plan, parameters=plan.parameters + 4)
    odd = dataclasses.replace(record, memory=dataclasses.replace(record.memory, planned=[other, other]))
    assert set(memory_by_ranks([odd])[kind("fsdp2", 3)]) == {2}
    assert rows_by_ranks([odd])[0]["512 ranks"].text == "–"  # type: ignore[attr-defined]


def test_what_is_measured_beyond_the_closed_form_has_a_reason(records: list[Record]) -> None:
    found = {(row["data parallelism of"], row["ranks"]): row for row in rows_beyond(records)}
    row = found["deepspeed ZeRO-1", 64]
    assert str(row["measured"]) == "4.39" and str(row["closed form"]) == "4.25"
    assert "tensors that reach over its ends whole" in str(row["why"])
    assert all(row["why"] != "no reason is declared" for row in found.values())


def test_the_picture_needs_several_ranks(tmp_path: Path, records: list[Record]) -> None:
    assert not ranks_plot([], [], tmp_path / "none.svg")
    assert ranks_plot([], records, tmp_path / "some.svg") and (tmp_path / "some.svg").stat().st_size > 10_000
