"""Compare measured memory with the plan that was computed when the cases ran.

Everything is in the record, so a reader imports nothing that a record names.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshmark.records.record import Record
from meshmark.report.results import CaseResult
from meshmark.report.table import EMPTY, Rows, bytes_cell, number
from meshmark.report.tables import names
from meshmark.run.verdict import MemoryTotal, memory_categories, memory_totals
from meshmark.theory.memory import ExtraMemory, ModelStates
from meshmark.theory.model_theory import theory_of


def plans(record: Record) -> list[tuple[ModelStates | None, list[ExtraMemory]]]:
    """Return the plan and the adapter's declarations by rank, as recorded. Empty if the record has no plan."""
    if not len(record.memory.readings) == len(record.memory.planned) == len(record.memory.extra_memory):
        return []
    return list(zip(record.memory.planned, record.memory.extra_memory, strict=True))


def totals(record: Record) -> list[MemoryTotal]:
    """Return the allocator's total on every rank with its plan, after a step and (if planned) at the peak."""
    on_cpu = record.environment.device == "cpu"
    return [
        held
        for rank, reading, (plan, declared) in zip(record.ranks, record.memory.readings, plans(record), strict=False)
        if plan
        for held in memory_totals(rank, reading, plan, declared, on_cpu=on_cpu)
    ]


def worst(found: Sequence[MemoryTotal], category: str) -> MemoryTotal | None:
    """Return the rank that deviates most from its plan, or None."""
    return max(
        (held for held in found if held.category == category), key=lambda held: abs(held.deviation), default=None
    )


def planned_memory(found: Sequence[CaseResult]) -> Rows:
    """Return rows with the worst rank's error for every category and for the allocator's total."""
    rows: Rows = []
    for result in found:
        record = result.observed
        if not record or not record.memory.readings:
            continue
        errors: dict[str, float] = {}
        for reading, (plan, declared) in zip(record.memory.readings, plans(record), strict=False):
            if plan is None:
                continue
            on_cpu = record.environment.device == "cpu"
            for name, measured, planned in memory_categories(reading, plan, declared, with_activations=on_cpu):
                errors[name] = max(errors.get(name, 0.0), abs(planned - measured) / max(measured, 1.0))
        row: dict[str, object] = {
            **names(result),
            **{name.replace("_", " "): number(error, ".2%") for name, error in errors.items()},
        }
        if theory_of(record.case.workload.model).transformer is None:
            row["activations"] = "not planned"
        counted, lacking = totals(record), "not planned" if plans(record) else "–"
        for name in ("steady", "peak"):
            held = worst(counted, name)
            row |= {
                f"{name}, planned": bytes_cell(held.planned) if held else lacking,
                f"{name}, measured": bytes_cell(held.measured) if held else EMPTY,
                f"{name}'s error": number(held.deviation, "+.2%") if held else EMPTY,
            }
            if held and held.late:
                row["of it late"] = bytes_cell(held.late)
        rows.append(row)
    return rows
