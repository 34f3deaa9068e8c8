"""Sections of a report with their tables. The Markdown page and the interactive page show the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshmark.records.record import Record
from meshmark.report import memory_by_ranks, tables
from meshmark.report.baseline import Baseline
from meshmark.report.communication import communication, traffic_exceptions
from meshmark.report.memory_by_ranks import rows_beyond, rows_by_ranks
from meshmark.report.planned import planned_memory
from meshmark.report.results import CaseResult
from meshmark.report.scale import NOTE, scale
from meshmark.report.table import Table, filled, inline
from meshmark.run.throughput import peak_flops_per_second


@dataclass(frozen=True, kw_only=True)
class Section:
    """One suite's part of a report."""

    id: str
    title: str
    note: str
    """Meaning of the first table's columns, in Markdown."""
    tables: Sequence[Table]


def sections(found: Sequence[CaseResult], records: Sequence[Record], baseline: Baseline) -> list[Section]:
    """Return the sections that have something to show: correctness first, speed last. `records`: all that were read,
    for what is no part of a case's result."""
    latest = [record for r in found for record in (r.observed, r.timed) if record]
    made = [
        Section(
            id="equivalence",
            title="Equivalence",
            note="Each step is judged on its own: loss and gradients against float64 at the parameters where the run "
            "is, the update against a float64 optimizer fed the run's own gradients.",
            tables=filled([Table(title="Equivalence: verdicts", rows=tables.equivalence(found, baseline))]),
        ),
        Section(
            id="memory",
            title="Memory",
            note="Fullest rank. Model states as held at their fullest, the rest at the instant of the peak; the "
            "verdict compares states, and on a CPU activations, of every rank with the closed form.",
            tables=filled(
                [
                    Table(title="Memory: fullest rank", rows=tables.memory(found, baseline)),
                    Table(
                        title="Memory: declared beyond the closed form",
                        note="Declared beyond the closed form: what the adapter says that its framework holds "
                        "besides on rank 0, and why.",
                        rows=tables.extra_memory(found),
                    ),
                    Table(title="Memory: planned and measured", note=_PLANNED, rows=planned_memory(found)),
                ]
            ),
        ),
        Section(
            id="by-ranks",
            title="Memory as ranks are added",
            note=memory_by_ranks.NOTE,
            tables=filled(
                [
                    Table(
                        title="Memory as ranks are added: bytes a parameter", rows=rows_by_ranks([*latest, *records])
                    ),
                    Table(
                        title="Memory as ranks are added: where what was measured is not the closed form",
                        rows=rows_beyond([*latest, *records]),
                    ),
                ]
            ),
        ),
        Section(
            id="traffic",
            title="Communication",
            note="One step, on the rank that sends most. Bytes are full tensors; *sent* counts ring algorithms. What "
            "a backend issues can differ from what was asked for. The verdict compares the bytes of every kind and "
            "group of ranks with theory and what adapters declare, exactly, and calls where theory fixes their number.",
            tables=filled(
                [
                    Table(title="Communication: busiest rank", rows=communication(found)),
                    Table(
                        title="Communication: declared exceptions from theory",
                        note="Declared exceptions from theory: what the adapter says that its framework sends "
                        "otherwise on rank 0, and why.",
                        rows=traffic_exceptions(found),
                    ),
                ]
            ),
        ),
        Section(
            id="scale",
            title="Memory at a scale that was not there",
            note=NOTE,
            tables=filled([Table(title="Memory at scale: single ranks of fake worlds", rows=scale(records), keys=4)]),
        ),
        Section(
            id="speed",
            title="Throughput",
            note=f"{_TIMED}{_peaks(latest)}.",
            tables=filled([Table(title="Throughput: steps", rows=tables.speed(found, baseline))]),
        ),
    ]
    return [section for section in made if section.tables]


_PLANNED = (
    "Measured bytes beside the plan of the run, which includes what adapters declare: the worst rank's error by "
    "category, and of all bytes that the allocator counted, after a step and at the peak, without the batch that the "
    "engine gets. `of it late`: buffers of collectives that the backend's thread alone held. Peaks are not planned "
    "for DeepSpeed's stage 3, whose modules gather weights one by one, nor for its mixed precision."
)

_TIMED = (
    "Untouched pass, after warm-up: all tokens over the time from the ranks' common start to the last rank's end. The "
    "interval (95 %) is the wider of what blocks of steps and what launches show, each in fresh processes, one after "
    "the other; of a single launch it does not say how far another may lie. Steps and launches were added until it was "
    "within ±2 %, or the budget of the case ended; a machine that changes within minutes moves it further. Steps last "
    "from the last rank's end to the next; *rank gap*: from the first rank's end of a step to the last one's, the "
    "median; *drift*: by how much the second half of a launch took longer. MFU counts 6 operations a matrix parameter "
    "and token, and full attention (PaLM, appendix B)"
)


def _peaks(records: Iterable[Record]) -> str:
    """Return the peaks that utilisation refers to."""
    told: dict[str, set[float]] = {}
    for peak, source in (peak_flops_per_second(r) for r in records if r.timing.rank_step_seconds):
        told.setdefault(source, set()).update([peak] if peak else [])
    parts = [f"{' or '.join(f'{p / 1e9:,.4g}' for p in sorted(p))} GFLOP/s ({inline(s)})" for s, p in told.items() if p]
    return f"; the peak is {', '.join(parts)}" if parts else ""
