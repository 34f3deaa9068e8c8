"""One table for the answer, then one a suite."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from meshmark.measure.readings import MemoryReading
from meshmark.pluralize import pluralize
from meshmark.report.baseline import Baseline
from meshmark.report.markdown import block, details, inline
from meshmark.report.markdown import table as markdown
from meshmark.report.results import CaseResult
from meshmark.run.record import Record, Verdict
from meshmark.run.throughput import Throughput, drift, throughput
from meshmark.theory.bubble import bubble_fraction

KIB = 1024.0
Rows = list[dict[str, object]]
"""Of a table: by column."""


def bytes_text(count: float) -> str:
    """Three significant digits, binary units: `925 KiB`."""
    if math.isnan(count):
        return "unknown"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= KIB
    return f"{count:.3g} TiB"


def answer(found: Sequence[CaseResult]) -> Rows:
    """Which case is correct, how much memory it takes, how fast it is."""
    return [
        {
            **names(result),
            "ranks": result.case.world_size,
            "correct": result.correctness,
            "detects": _detects(result),
            "model states / rank": _of_observed(result, _states_text),
            "peak / rank": _of_observed(result, _peak_text),
            f"{result.case.workload.unit}/s": _speed(result),
            "MFU": _mfu(result),
        }
        for result in found
        if not result.skipped
    ]


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
            "verdict": "**cannot tell**" if verdict.undecided else passed(verdict.passed),
            "worst quantity": e["worst_quantity"],
            "step": e["worst_step"],
            "distance / noise": _number(e["ratio"]),
            "limit": _number(e["factor"]),
            "gradient errors seen from": _number(e["detection_limit"]),
            "compared": e["compared"],
            **({"judged": judged(result.observed)} if with_samples else {}),
            "loss, first to last": f"{losses[0]:.4f} to {losses[-1]:.4f}",
        }
        rows.append(row | ({"baseline's": baseline.verdict(result)} if baseline else {}))
    return rows


def judged(record: Record) -> str:
    """Of a run: all, or which sample."""
    sample = record.equivalence.sample
    return f"{record.steps} of {record.steps} steps" if sample is None else f"{sample.text}, of {record.steps} steps"


def memory(found: Sequence[CaseResult], baseline: Baseline) -> Rows:
    """The rank with the highest peak, by category at that instant."""
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
            "as planned": passed(verdict.passed) if verdict else "",
            "worst error": _worst_error(verdict),
            "rank": rank,
            "parameters": bytes_text(reading.states.parameters),
            "gradients": bytes_text(reading.states.gradients),
            "optimizer": bytes_text(reading.states.optimizer_states),
            "activations": bytes_text(peak.activations),
            "communication": bytes_text(peak.communication),
            "other": bytes_text(peak.other),
            "peak": bytes_text(peak.total),
            "steady": bytes_text(reading.steady.total),
        }
        if reading.allocator_peak_bytes is not None and reading.allocator_reserved_bytes is not None:
            row |= {
                "allocator peak": bytes_text(reading.allocator_peak_bytes),
                "reserved": bytes_text(reading.allocator_reserved_bytes),
            }
        rows.append(row | ({"peak / baseline's": baseline.peak(result)} if baseline else {}))
    return rows


def extra_memory(found: Sequence[CaseResult]) -> Rows:
    """What adapters declare beyond the closed form; empty when nothing is."""
    return [
        {**names(result), "category": declared.category, "bytes": f"{declared.num_bytes:,.0f}", "why": declared.reason}
        for result in found
        if result.observed and result.observed.memory.extra_memory
        for declared in result.observed.memory.extra_memory[0]
    ]


def speed(found: Sequence[CaseResult], baseline: Baseline) -> Rows:
    """How fast, how well that is known, and how steps scatter. With a `baseline`, each median also as a multiple of the
    same case's there. With pipelines, how much of a step
    equal stages would wait, each with a processor to itself."""
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
            f"{measured.unit}/s": f"{measured.per_second:,.0f}",
            "95 % interval": interval_text(measured) + (" (budget)" if unsettled else ""),
            "launches": measured.num_launches,
            "steps": len(seconds),
            "p5 / p50 / p95": " / ".join(percentiles) + " ms",
            "rank gap": f"{1000 * np.median(gaps):.2f} ms" if result.case.world_size > 1 else "",
            "drift": f"{drift(result.timed.timing):+.1%}",
            "MFU": _percent(measured.mfu),
        }
        if with_pipelines:
            idle = bubble_fraction(result.case.layout)
            row["bubble, planned"] = f"{idle:.1%}" if idle else ""
        rows.append(row | ({"median / baseline's": baseline.time(result)} if baseline else {}))
    return rows


def time_spent(found: Sequence[CaseResult]) -> Rows:
    """Seconds by adapter: processes from start to end, and of these until the engines stood."""
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
            "seconds": f"{row['seconds']:.1f}",
            "of these building engines": f"{row['of these building engines']:.1f}",
        }
        for name, row in rows.items()
    ]


def case_table(rows: Rows) -> str:
    """Of rows that begin with `names`."""
    return markdown(rows, keys=3)


def names(result: CaseResult) -> dict[str, object]:
    """The columns that say which case a row is of."""
    case = result.case
    return {
        "adapter": case.adapter,
        "layout": case.layout.id,
        "workload": " ".join([case.workload.name, *case.computed]),
    }


def passed(as_asked: bool) -> str:
    return "yes" if as_asked else "**no**"


def _worst_error(verdict: Verdict | None) -> str:
    """Nothing where the adapter could not tell what to judge by."""
    error = verdict.evidence.get("relative_error") if verdict else None
    return "" if error is None else f"{float(error):.2%}"


def _number(value: object) -> str:
    return "" if not isinstance(value, int | float) else f"{value:.3g}" if math.isfinite(value) else "no bound"


def _detects(result: CaseResult) -> str:
    record = result.observed
    verdict = record.verdict("equivalence") if record else None
    return _number(verdict.evidence["detection_limit"]) if verdict else ""


def _of_observed(result: CaseResult, text: Callable[[list[MemoryReading]], str]) -> str:
    if not result.observed or not result.observed.memory.readings:
        return ""
    shown = text(result.observed.memory.readings)
    return shown if result.comparable else f"~~{shown}~~"


def _states_text(readings: list[MemoryReading]) -> str:
    return bytes_text(max(r.states.parameters + r.states.gradients + r.states.optimizer_states for r in readings))


def _peak_text(readings: list[MemoryReading]) -> str:
    return bytes_text(max(r.peak.total for r in readings))


def _speed(result: CaseResult) -> str:
    if not result.timed or not result.timed.timing.rank_step_seconds:
        return ""
    measured = throughput(result.timed)
    text = f"{measured.per_second:,.0f} {interval_text(measured)}"
    if result.states_as_asked is False and result.correct is not False:
        return f"~~{text}~~ other states"
    if not result.comparable:
        return f"~~{text}~~ wrong run"
    return text if result.undisturbed else f"~~{text}~~ {', '.join(result.timed.timing.spoilt)}"


def _mfu(result: CaseResult) -> str:
    if not result.timed or not result.timed.timing.rank_step_seconds or not result.comparable:
        return ""
    return _percent(throughput(result.timed).mfu)


def interval_text(measured: Throughput) -> str:
    """`±1.8%`; of too few launches how many they are, for their steps say nothing of how far another may lie."""
    if not measured.is_claimed:
        return f"({pluralize(measured.num_launches, 'launch', 'launches')})"
    return f"±{measured.relative:.1%}" if measured.relative < 1 else "±?"


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{fraction:.1%}"


def failures(records: Sequence[Record]) -> str:
    """What did not reach its end or did not pass, each with its evidence."""
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
    """What no verdict speaks of, and of how many cases; those with the most cases first."""
    cases: dict[str, list[str]] = {}
    for result in found:
        for text in result.observed.not_judged if result.observed else []:
            cases.setdefault(text, []).append(result.case.id)
    by_count = sorted(cases.items(), key=lambda each: -len(each[1]))
    return [{"what": text, "cases": len(ids), "such as": f"`{ids[0]}`"} for text, ids in by_count]


def skips(found: Sequence[CaseResult]) -> Rows:
    return [{**names(r), "why": r.any.outcome.message} for r in found if r.skipped]
