"""Tables of the report: one for the answer, then one per suite."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from meshmark.measure.readings import MemoryReading
from meshmark.records.record import Record, Verdict
from meshmark.report.baseline import Baseline
from meshmark.report.memory_by_ranks import fullest_states
from meshmark.report.results import CaseResult
from meshmark.report.table import EMPTY, Cell, Rows, block, bytes_cell, details, inline, milliseconds, number, yes_or_no
from meshmark.run.throughput import Throughput, drift, throughput
from meshmark.text import pluralize
from meshmark.theory.bubble import bubble_fraction


def answer(found: Sequence[CaseResult]) -> Rows:
    """Return which cases are correct, how much memory they need, and how fast they are.

    Of each number of ranks, the case with the smallest peak comes first. What is wrong, or not judged, comes last.
    """
    shown = [result for result in found if not result.skipped]
    return [
        {
            **names(result),
            "ranks": result.case.world_size,
            "correct": result.correctness,
            "smallest detectable error": _detects(result),
            "model states / rank": _of_observed(result, fullest_states),
            "peak / rank": _of_observed(result, _peak),
            f"{result.case.workload.unit}/s": _speed(result),
            "MFU": _mfu(result),
        }
        for result in sorted(shown, key=_leanest_first)
    ]


def _leanest_first(result: CaseResult) -> tuple[int, bool, float]:
    readings = result.observed.memory.readings if result.observed else []
    good = bool(result.correct and result.comparable)
    return result.case.world_size, not good, _peak(readings) if readings else math.inf


def equivalence(found: Sequence[CaseResult], baseline: Baseline) -> Rows:
    rows: Rows = []
    with_samples = any(result.sampled for result in found)
    for result in found:
        verdict = result.observed.verdict("equivalence") if result.observed else None
        if result.observed is None or verdict is None:
            continue
        e, losses = verdict.evidence, result.observed.training.losses
        row: dict[str, object] = {
            **names(result),
            "verdict": Cell(text="cannot tell", bad="cannot tell") if verdict.undecided else yes_or_no(verdict.passed),
            "worst quantity": e["worst_quantity"],
            "step": e["worst_step"],
            "distance / noise": number(e["ratio"]),
            "limit": number(e["factor"]),
            "smallest detectable error": number(e["detection_limit"]),
            "compared": e["compared"],
            **({"judged": judged(result.observed)} if with_samples else {}),
            "loss, first to last": f"{losses[0]:.4f} to {losses[-1]:.4f}",
        }
        rows.append(row | ({"baseline's": baseline.verdict(result)} if baseline else {}))
    return rows


def judged(record: Record) -> str:
    """Return what was judged of a run: all of it, or which sample."""
    sample = record.equivalence.sample
    return f"{record.steps} of {record.steps} steps" if sample is None else f"{sample.text}, of {record.steps} steps"


def memory(found: Sequence[CaseResult], baseline: Baseline) -> Rows:
    """Return rows for the rank with the highest peak, by category at that instant."""
    rows: Rows = []
    for result in found:
        if not result.observed or not result.observed.memory.readings:
            continue
        readings = result.observed.memory.readings
        rank = max(range(len(readings)), key=lambda r: readings[r].peak.total)
        reading, peak, verdict = readings[rank], readings[rank].peak, result.observed.verdict("memory")
        row: dict[str, object] = {
            **names(result),
            "correct": result.correctness,
            "states in": result.states,
            "as planned": yes_or_no(verdict.passed) if verdict else EMPTY,
            "worst error": _worst_error(verdict),
            "rank": rank,
            "parameters": bytes_cell(reading.states.parameters),
            "gradients": bytes_cell(reading.states.gradients),
            "optimizer": bytes_cell(reading.states.optimizer_states),
            # Where it is not known which storages had ended, the total alone is right.
            **{
                name: bytes_cell(getattr(peak, name)) if reading.ends_known else "not known"
                for name in ("activations", "communication", "other")
            },
            "peak": bytes_cell(peak.total),
            "steady": bytes_cell(reading.steady.total),
        }
        if reading.allocator_peak_bytes is not None and reading.allocator_reserved_bytes is not None:
            row |= {
                "allocator peak": bytes_cell(reading.allocator_peak_bytes),
                "reserved": bytes_cell(reading.allocator_reserved_bytes),
            }
        rows.append(row | ({"peak / baseline's": baseline.peak(result)} if baseline else {}))
    return rows


def extra_memory(found: Sequence[CaseResult]) -> Rows:
    """Return the memory that adapters declare beyond the closed form. Empty without any."""
    return [
        {
            **names(result),
            "category": declared.category,
            "bytes": number(declared.num_bytes, ",.0f"),
            "why": declared.reason,
        }
        for result in found
        if result.observed and result.observed.memory.extra_memory
        for declared in result.observed.memory.extra_memory[0]
    ]


def speed(found: Sequence[CaseResult], baseline: Baseline) -> Rows:
    """Return the speed, its interval, and how steps scatter.

    With a `baseline`, each median is also given as a multiple of the baseline's. With pipelines, rows include the
    share of a step that equal stages would wait, each with its own processor.
    """
    rows: Rows = []
    with_pipelines = any(result.case.layout.pp > 1 for result in found)
    for result in found:
        if not result.timed or not result.timed.timing.rank_step_seconds:
            continue
        seconds, measured = result.timed.timing.step_seconds, throughput(result.timed)
        gaps = [gap for lap in result.timed.timing.laps for gap in lap.gaps]
        percentiles = (f"{1000 * p:.3g}" for p in np.percentile(seconds, [5, 50, 95]))
        unsettled = measured.is_claimed and not measured.settled
        row: dict[str, object] = {
            **names(result),
            "correct": result.correctness,
            f"{measured.unit}/s": number(measured.per_second, ",.0f"),
            "95 % interval": Cell(
                text=interval_text(measured) + (" (budget)" if unsettled else ""),
                order=measured.relative if measured.is_claimed else None,
            ),
            "launches": measured.num_launches,
            "steps": len(seconds),
            "p5 / p50 / p95": Cell(text=" / ".join(percentiles) + " ms", order=float(np.median(seconds))),
            "rank gap": milliseconds(float(np.median(gaps)), ".2f") if result.case.world_size > 1 else EMPTY,
            "drift": number(drift(result.timed.timing), "+.1%"),
            "MFU": number(measured.mfu, ".1%"),
        }
        if with_pipelines:
            idle = bubble_fraction(result.case.layout)
            row["bubble, planned"] = number(idle, ".1%") if idle else EMPTY
        rows.append(row | ({"median / baseline's": baseline.time(result)} if baseline else {}))
    return rows


def time_spent(found: Sequence[CaseResult]) -> Rows:
    """Return seconds by adapter: from process start to end, and the part until the engines were built."""
    rows: dict[str, dict[str, float]] = {}
    for result in found:
        for record in filter(None, (result.observed, result.timed)):
            row = rows.setdefault(
                result.case.adapter, {"launches": 0, "seconds": 0.0, "of these building engines": 0.0}
            )
            row["launches"] += record.timing.num_launches if record.launch.seconds > 0 else 0
            row["seconds"] += record.launch.seconds
            row["of these building engines"] += record.launch.build_seconds
    total = {
        key: sum(row[key] for row in rows.values()) for key in ("launches", "seconds", "of these building engines")
    }
    rows["all"] = total
    return [
        {
            "adapter": name,
            "launches": int(row["launches"]),
            "seconds": number(row["seconds"], ".1f"),
            "of these building engines": number(row["of these building engines"], ".1f"),
        }
        for name, row in rows.items()
    ]


def names(result: CaseResult) -> dict[str, object]:
    """Return the columns that identify the case of a row."""
    case = result.case
    return {
        "adapter": case.adapter,
        "layout": case.layout.id,
        "workload": " ".join([case.workload.name, *case.computed]),
    }


def _worst_error(verdict: Verdict | None) -> Cell:
    """Return the worst error, or an empty cell if the adapter could not provide what to judge by."""
    error = verdict.evidence.get("relative_error") if verdict else None
    return EMPTY if error is None else number(float(error), ".2%")


def _detects(result: CaseResult) -> Cell:
    record = result.observed
    verdict = record.verdict("equivalence") if record else None
    return number(verdict.evidence["detection_limit"]) if verdict else EMPTY


def _of_observed(result: CaseResult, count: Callable[[list[MemoryReading]], int]) -> Cell:
    """Return bytes of the observed pass, struck out where it is no result."""
    if not result.observed or not result.observed.memory.readings:
        return EMPTY
    cell = bytes_cell(count(result.observed.memory.readings))
    return cell if result.comparable else cell.strike()


def _peak(readings: list[MemoryReading]) -> int:
    return max(r.peak.total for r in readings)


def _speed(result: CaseResult) -> Cell:
    if not result.timed or not result.timed.timing.rank_step_seconds:
        return EMPTY
    measured = throughput(result.timed)
    cell = Cell(text=f"{measured.per_second:,.0f} {interval_text(measured)}", order=measured.per_second)
    if result.states_as_requested is False and result.correct is not False:
        return cell.strike("other states")
    if not result.comparable:
        return cell.strike("wrong run")
    return cell if result.undisturbed else cell.strike(", ".join(result.timed.timing.spoilt))


def _mfu(result: CaseResult) -> Cell:
    if not result.timed or not result.timed.timing.rank_step_seconds or not result.comparable:
        return EMPTY
    return number(throughput(result.timed).mfu, ".1%")


def interval_text(measured: Throughput) -> str:
    """Format an interval, such as `±1.8%`.

    With too few launches, it gives their number instead, because steps do not show how far another launch may differ.
    """
    if not measured.is_claimed:
        return f"({pluralize(measured.num_launches, 'launch', 'launches')})"
    return f"±{measured.relative:.1%}" if measured.relative < 1 else "±100% or more"


def failures(records: Sequence[Record]) -> str:
    """Return every pass that did not end and every verdict that failed, each with its evidence."""
    parts = []
    for record in records:
        outcome, case = record.outcome, f"- **{inline(record.case.id)}**"
        if outcome.status not in ("ok", "skipped"):
            stacks = "".join(f"\n--- stack of rank {rank}\n{stack}" for rank, stack in outcome.stacks.items())
            where = "" if outcome.rank is None else f", rank {outcome.rank}"
            told = f"{case} ({record.task}): {outcome.status}{where}: {inline(outcome.message)}"
            parts.append(f"{told}\n\n{details('evidence', block(f'{outcome.traceback or outcome.log_tail}{stacks}'))}")
        for verdict in record.verdicts:
            if not verdict.passed:
                facts = "\n".join(f"{name}: {value}" for name, value in verdict.evidence.items())
                likely = f"; likely {inline(verdict.evidence['diagnosis'])}" if "diagnosis" in verdict.evidence else ""
                told = f"{case}: {inline(verdict.suite)}: {inline(verdict.summary)}{likely}"
                parts.append(f"{told}\n\n{details('evidence', block(facts))}")
    return "\n\n".join(parts)  # a tag goes on until an empty line


def not_judged(found: Sequence[CaseResult]) -> Rows:
    """Return what no verdict covers, with the number of cases, largest first."""
    cases: dict[str, list[str]] = {}
    for result in found:
        for text in result.observed.not_judged if result.observed else []:
            cases.setdefault(text, []).append(result.case.id)
    by_count = sorted(cases.items(), key=lambda each: -len(each[1]))
    return [{"what": text, "cases": len(ids), "such as": f"`{ids[0]}`"} for text, ids in by_count]


def skips(found: Sequence[CaseResult]) -> Rows:
    return [{**names(r), "why": r.any.outcome.message} for r in found if r.skipped]
