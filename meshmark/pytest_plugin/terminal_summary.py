"""Ends a run of the suites with a summary of at most one screen. Loaded by the plugin."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from meshmark.errors import ResultsError
from meshmark.pytest_plugin.selection import selection
from meshmark.pytest_plugin.session_log import ATTEMPTS
from meshmark.records.record import Record
from meshmark.records.record_file import read_records
from meshmark.records.session import Attempt, Ending, by_defect
from meshmark.report.markdown import visible
from meshmark.report.results import CaseResult, results
from meshmark.report.table import bytes_text
from meshmark.run.throughput import throughput
from meshmark.run.verdict import smallest_detectable
from meshmark.text import clip, pluralize

MOST_CASES = 20
"""Number of table rows. Cases that are not correct come first."""
MOST_DEFECTS = 10
MOST_LEFT_OUT = 4
_HEADINGS = ("case", "correct", "memory", "traffic", "peak / rank", "speed")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Hide pytest-benchmark's own table, unless the command line has one of its options."""
    asked = any(str(argument).startswith("--benchmark") for argument in config.invocation_params.args)
    if not asked and hasattr(config.option, "benchmark_quiet"):
        config.option.benchmark_quiet = True


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:  # noqa: ANN401
    attempts = list(config.stash.get(ATTEMPTS, {}).values())
    if not attempts:
        return
    folder = selection(config).results
    try:
        records = read_records(folder, latest=True).records
    except ResultsError:  # the run has already failed because of it
        records = []
    lines = summary(attempts, records)
    if not lines:
        return
    terminalreporter.section("meshmark")
    for line in lines:
        terminalreporter.write_line(visible(line))
    command = shlex.join(["meshmark", "report", str(folder), "-o", str(folder / "report.html")])
    terminalreporter.write_line(f"\nall results as a page: {command}")


def summary(attempts: Sequence[Attempt], records: Sequence[Record]) -> list[str]:
    """Return the summary's lines: a table of the cases that ran, then what failed, in words."""
    ids = {attempt.case for attempt in attempts if not attempt.conforming}
    plain = [record for record in records if record.case.id in ids and not record.conformance.scenario]
    ran = [result for result in results(plain) if not result.skipped]
    ran.sort(key=_is_right)
    lines = _table([_HEADINGS, *map(_row, ran[:MOST_CASES])]) if ran else []
    if len(ran) > MOST_CASES:
        rest = Counter(result.correctness.text for result in ran[MOST_CASES:])
        lines.append(f"and {pluralize(len(ran) - MOST_CASES, 'more case')}; correct: " + _counts(rest))
    lines += _left_out([result.observed for result in ran if result.observed])
    lines += _clauses(attempts)
    if defects := by_defect(attempts):
        lines.append("")
        for same in defects[:MOST_DEFECTS]:
            first = same[0].message.partition("\n")[0] or "failed"
            lines.append(f"- {clip(first, 300)}" + (f" ({pluralize(len(same), 'test')})" if len(same) > 1 else ""))
        if len(defects) > MOST_DEFECTS:
            lines.append(f"- and {len(defects) - MOST_DEFECTS} more, above")
    return lines


def _left_out(observed: Sequence[Record]) -> list[str]:
    """Return a few lines with what was not judged, and the smallest excess that would have been detected."""
    counted = Counter(text for record in observed for text in record.not_judged)
    lines = [
        f"not judged: {text}" + ("" if count == len(observed) else f" ({pluralize(count, 'case')})")
        for text, count in counted.most_common(MOST_LEFT_OUT)
    ]
    if len(counted) > MOST_LEFT_OUT:
        lines.append(f"not judged: and {len(counted) - MOST_LEFT_OUT} more, which `meshmark report` lists")
    if seen := smallest_detectable(observed):
        lines.append(f"smallest seen: {seen}")
    return ["", *lines] if lines else []


def _is_right(result: CaseResult) -> bool:
    records = [record for record in (result.observed, result.timed) if record]
    return result.correct is not False and all(verdict.passed for record in records for verdict in record.verdicts)


def _row(result: CaseResult) -> tuple[str, ...]:
    readings = result.observed.memory.readings if result.observed else []
    peak = bytes_text(max(reading.peak.total for reading in readings)) if readings else ""
    return (
        result.case.id,
        result.correctness.text,
        _judged(result.observed, "memory"),
        _judged(result.observed, "communication"),
        peak,
        _speed(result),
    )


def _judged(record: Record | None, suite: str) -> str:
    verdict = record.verdict(suite) if record else None
    if verdict is None:
        return ""
    if verdict.undecided:
        return "not judged"
    return "as planned" if verdict.passed else "NOT as planned"


def _speed(result: CaseResult) -> str:
    if result.timed is None or not result.timed.timing.step_seconds:
        return ""
    if not result.comparable:
        return "no result"
    measured = throughput(result.timed)
    return f"{_three_digits(measured.per_second)} {measured.unit}/s"


def _three_digits(value: float) -> str:
    """Return `value` with three significant digits and without an exponent: 11,500 or 3.05."""
    return f"{float(f'{value:.3g}'):,.10g}"


def _clauses(attempts: Sequence[Attempt]) -> list[str]:
    """Return a line for each adapter of the conformance suite: how its clauses ended."""
    endings: dict[str, Counter[str]] = {}
    for attempt in attempts:
        if attempt.conforming:
            endings.setdefault(attempt.case, Counter())[_CLAUSE[attempt.ending]] += 1
    return [f"clauses of {case}: {_counts(counted)}" for case, counted in endings.items()]


_CLAUSE = {
    Ending.PASSED: "yes",
    Ending.FAILED: "NO",
    Ending.SKIPPED: "unsupported or a known gap",
    Ending.UNFINISHED: "not run",
}


def _counts(counted: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counted.most_common())


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows in aligned columns, without the columns that no case fills."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    padded = [[cell.ljust(width) for cell in column] for column, width in zip(columns, widths, strict=True)]
    return ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]
