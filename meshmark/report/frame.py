"""Recorded results as a pandas table, for further analysis."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from meshmark.records.record_file import read_records
from meshmark.report.results import CaseResult, results
from meshmark.run.throughput import throughput
from meshmark.spec.case import Case


def load(folder: str | Path) -> pd.DataFrame:
    """Return one row per case of a results folder's matrix. Conformance is left out, because it is judged by clause.

    Columns: case, adapter, layout, workload, precision, ranks; status (of the pass that failed, else ok or skipped),
    reason; correct (True, False, or None if undecided), memory_as_planned, traffic_as_planned, detects (the smallest
    scaling of a gradient that would have been detected); peak_bytes (of the fullest rank), launch_seconds; per_second
    with its 95 % interval lowest to highest, unit (tokens or images), step_seconds (median), mfu; date, commit,
    machine. Values that were not measured are None or NaN. Raises `ResultsError` if nothing can be read.
    """
    reading = read_records(Path(folder))
    found = results(record for record in reading.records if not record.conformance.scenario)
    return pd.DataFrame([_row(result) for result in found], columns=None if found else _COLUMNS)


def _row(result: CaseResult) -> dict[str, object]:
    record = result.failed or result.any
    return {
        **_names(result.case),
        "status": str(record.outcome.status),
        "reason": record.outcome.message,
        "correct": result.correct,
        **_judged(result),
        **_timed(result),
        "date": record.environment.date,
        "commit": record.environment.commit,
        "machine": record.environment.machine,
    }


def _names(case: Case) -> dict[str, object]:
    return {
        "case": case.id,
        "adapter": case.adapter,
        "layout": case.layout.id,
        "workload": case.workload.id,
        "precision": str(case.precision),
        "ranks": case.world_size,
    }


def _judged(result: CaseResult) -> dict[str, object]:
    observed = result.observed
    verdicts = {verdict.suite: verdict for verdict in observed.verdicts} if observed else {}
    passed = {suite: verdict.passed for suite, verdict in verdicts.items()}
    return {
        "memory_as_planned": passed.get("memory"),
        "traffic_as_planned": passed.get("communication"),
        "detects": verdicts["equivalence"].evidence.get("detection_limit") if "equivalence" in verdicts else None,
        "peak_bytes": max((m.peak.total for m in observed.memory.readings), default=None) if observed else None,
        "launch_seconds": observed.launch.seconds if observed else None,
    }


def _timed(result: CaseResult) -> dict[str, object]:
    names = ("per_second", "lowest", "highest", "unit", "mfu")
    if not (result.timed and result.timed.timing.rank_step_seconds):
        return dict.fromkeys((*names, "step_seconds"))
    rate = throughput(result.timed)
    seconds = sorted(result.timed.timing.step_seconds)
    return {name: getattr(rate, name) for name in names} | {"step_seconds": seconds[len(seconds) // 2]}


_COLUMNS = pd.Index(["case", "adapter", "layout", "workload", "precision", "ranks", "status", "reason", "correct"])
