"""Memory of ranks of fake worlds, in a separate table without records of real worlds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshmark.records.record import Record, Status, Verdict
from meshmark.records.request import Task
from meshmark.report.memory_by_ranks import fullest_states
from meshmark.report.planned import totals, worst
from meshmark.report.table import EMPTY, Cell, Rows, bytes_cell, number
from meshmark.text import pluralize

NOTE = (
    "**Measured on single ranks of a fake world.** Each rank ran alone, in one process: its framework's real steps, "
    "over collectives that return at once without data. Real worlds of 2 and 4 ranks hold the same bytes "
    "(tests/test_fake_world.py). What such a rank computes means nothing: no loss is judged, and nothing is timed. "
    "*peak*: of the fullest of the ranks."
)


def fake_worlds(records: Iterable[Record]) -> list[Record]:
    """Return the last record of every case that was run in a fake world."""
    found = {(r.case.id, r.environment.device): r for r in records if r.task is Task.FAKE_WORLD}
    return list(found.values())


def scale_headline(records: Sequence[Record]) -> str:
    """Return what came of fake worlds alone, in a sentence of Markdown."""
    ran = [r for r in records if r.outcome.status is not Status.SKIPPED]
    good = [r for r in ran if r.outcome.status is Status.OK and all(verdict.passed for verdict in r.verdicts)]
    worlds = sorted({r.case.world_size for r in ran})
    not_run = f"; {len(records) - len(ran)} not run, with reasons below" if len(ran) < len(records) else ""
    what = f"{pluralize(len(ran), 'case')} {'holds and sends' if len(ran) == 1 else 'hold and send'} what is planned"
    return (
        f"**{len(good)} of {what}**, seen from single ranks of fake worlds of {', '.join(map(str, worlds)) or 'no'} "
        f"ranks{not_run}."
    )


def scale(records: Iterable[Record]) -> Rows:
    """Return a row a case: what the fullest of its ranks held at the peak, and whether it is what was planned.

    What was not run comes last.
    """
    rows: Rows = []
    for record in sorted(fake_worlds(records), key=lambda each: each.outcome.status is Status.SKIPPED):
        row: dict[str, object] = {
            "adapter": record.case.adapter,
            "layout": record.case.layout.id,
            "workload": " ".join([record.case.workload.name, *record.case.computed]),
            "ranks": record.case.world_size,
        }
        if record.outcome.status is not Status.OK:
            skipped = record.outcome.status is Status.SKIPPED
            why = record.outcome.message.partition("\n")[0]
            status = "not run" if skipped else str(record.outcome.status)
            rows.append(row | {"memory": Cell(text=status, bad="" if skipped else status), "why": why})
            continue
        memory, counted = record.verdict("memory"), totals(record)
        peak, steady = worst(counted, "peak"), worst(counted, "steady")
        readings = record.memory.readings
        row |= {
            "seen from": ", ".join(map(str, record.fake_ranks)),
            "memory": _as_planned(memory),
            "communication": _as_planned(record.verdict("communication")),
            "model states": bytes_cell(fullest_states(readings)) if readings else EMPTY,
            "peak": bytes_cell(max(r.peak.total - r.peak.inputs for r in readings)) if readings else EMPTY,
            "peak's error": number(peak.deviation, "+.2%") if peak else Cell(text="not planned"),
            "steady's error": number(steady.deviation, "+.2%") if steady else EMPTY,
            "worst error": number(memory.evidence.get("relative_error"), ".2%") if memory else EMPTY,
            "seconds": number(record.launch.seconds, ".1f"),
        }
        rows.append(row)
    return rows


def _as_planned(verdict: Verdict | None) -> Cell:
    if verdict is None:
        return Cell(text="not planned")
    return Cell(text="as planned") if verdict.passed else Cell(text="no", bad="no")
