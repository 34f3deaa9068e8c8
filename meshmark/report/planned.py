"""What the suites measured of memory beside what the planner computed for the same cases when they were run.

All of it stands in the record: a reader imports nothing that a record names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshmark.report.markdown import table as markdown
from meshmark.report.results import CaseResult
from meshmark.report.tables import bytes_text, names
from meshmark.run.record import Record
from meshmark.run.verdict import memory_categories
from meshmark.spec.model_spec import ModelSpec
from meshmark.theory.states import ModelStates, Remainder, declared_bytes


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes of one rank at its peak, without what was there before the step and nobody named."""

    planned: float
    measured: int
    communication: int
    """Of these, buffers of collectives: gloo's threads release them late, or where the meter cannot see it."""

    @property
    def error(self) -> float:
        return self.planned / self.measured - 1.0


def plans(record: Record) -> list[tuple[ModelStates | None, list[Remainder]]]:
    """By rank, the plan and what the adapter declared, as recorded; nothing where a record holds no plan."""
    if not len(record.memory.readings) == len(record.memory.planned) == len(record.memory.remainders):
        return []
    return list(zip(record.memory.planned, record.memory.remainders, strict=True))


def peaks(record: Record) -> list[Peak]:
    """Of the ranks of the stage whose plan is fullest; none where it is not planned."""
    layout, found = record.case.layout, dict[int, list[Peak]]()
    for rank, (reading, (plan, declared)) in enumerate(zip(record.memory.readings, plans(record), strict=False)):
        if plan and plan.peak is not None and record.environment.device == "cpu":
            found.setdefault(layout.coordinates(rank).pp, []).append(
                Peak(
                    planned=plan.peak + declared_bytes(declared, "peak"),
                    communication=reading.peak.communication,
                    measured=reading.peak.total - reading.peak.other,
                )
            )
    return max(found.values(), key=lambda ranks: max(peak.planned for peak in ranks), default=[])


def least(ranks: Sequence[Peak]) -> Peak:
    """The one that holds least beyond its plan."""
    return max(ranks, key=lambda peak: peak.error)


def planned_memory(found: Sequence[CaseResult]) -> str:
    """The worst rank's error of every category, and the peak."""
    rows = []
    for result in found:
        record = result.observed
        if not record or not record.memory.readings:
            continue
        worst: dict[str, float] = {}
        for reading, (plan, declared) in zip(record.memory.readings, plans(record), strict=False):
            if plan is None:
                continue
            on_cpu = record.environment.device == "cpu"
            for name, measured, planned in memory_categories(reading, plan, declared, with_activations=on_cpu):
                worst[name] = max(worst.get(name, 0.0), abs(planned - measured) / max(measured, 1.0))
        row: dict[str, object] = {**names(result), **{name: f"{error:.2%}" for name, error in worst.items()}}
        if not isinstance(record.case.workload.model, ModelSpec):
            row |= {name: "not planned" for name in ("activations", "peak, planned")}
        if ranks := peaks(record):
            row |= {
                "peak, planned": bytes_text(max(peak.planned for peak in ranks)),
                "measured, least": bytes_text(min(peak.measured for peak in ranks)),
                "most": bytes_text(max(peak.measured for peak in ranks)),
                "error": f"{least(ranks).error:+.2%}",
            }
        elif not worst:
            row["peak, planned"] = "–"
        rows.append(row)
    return markdown(rows)
