"""The conformance table, adapter by clause, with reasons below for every cell that is not a plain yes."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from meshmark.conformance.clauses import CLAUSES, Clause, judge_clause, point_back
from meshmark.conformance.finding import ClauseResult, Finding
from meshmark.conformance.scenario import SCENARIOS
from meshmark.environment import Environment
from meshmark.errors import ResultsError
from meshmark.models.config import Dataset
from meshmark.records.record import Record, Status
from meshmark.records.record_file import Reading
from meshmark.report.guard import rendered, write_page
from meshmark.report.missing_failures import missing_failures
from meshmark.report.results import newest
from meshmark.report.table import Markup, block, inline
from meshmark.report.table import table as markdown
from meshmark.serial import decode, encode
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from meshmark.text import clip, describe_error, pluralize

_MARKS = {
    ClauseResult.PASS: "yes",
    ClauseResult.FAIL: "**no**",
    ClauseResult.UNSUPPORTED: "–",
    ClauseResult.KNOWN_GAP: "gap",
    ClauseResult.STALE_GAP: "yes, **stale gap**",
    ClauseResult.UNDECIDED: "**too slow**",
    ClauseResult.TOLD: "reported",
}


_PICTURED = {
    ClauseResult.PASS: "yes",
    ClauseResult.FAIL: "no",
    ClauseResult.UNSUPPORTED: "no answer",
    ClauseResult.KNOWN_GAP: "gap",
    ClauseResult.STALE_GAP: "no",
    ClauseResult.UNDECIDED: "no",
    ClauseResult.TOLD: "reported",
}
"""Colour of a result in the heat map, as `plots.CLAUSE_COLOURS` names it."""


_LINK = re.compile(r"https://[\w./#?=&%+-]+")
_TOLD = (ClauseResult.FAIL, ClauseResult.STALE_GAP, ClauseResult.UNDECIDED)


@dataclass(frozen=True, kw_only=True)
class AdapterColumn:
    """One adapter in one layout."""

    base: Case
    findings: dict[str, Finding]
    """Findings by clause, without clauses that were not run."""
    launch_seconds: float
    """Seconds of all its scenarios."""
    complaints: tuple[str, ...] = ()
    """Clauses that could not be judged, for example because evidence is missing."""

    @property
    def title(self) -> str:
        layout = self.base.layout
        stage = f" ZeRO-{layout.zero_stage}" if layout.zero_stage and "fsdp" not in self.base.adapter else ""
        own = f" on {self.base.workload.id}" if self.base.workload.dataset is Dataset.OWN else ""
        precision = f" in {self.base.precision}" if self.base.precision != Precision.FP32 else ""
        return f"{self.base.adapter}{stage}{own}{precision}"


@dataclass(frozen=True, kw_only=True)
class Conformance:
    """The clauses of every adapter as judged, which is all that their page shows.

    Judging takes the evidence of every record, some 30 MB. What came of it is kept in some 100 kB.
    """

    columns: Sequence[AdapterColumn]
    environment: Environment
    """Environment of the newest record."""
    commands: Sequence[str] = field(default_factory=list)
    """Commands that made the records."""


def judged(records: Sequence[Record]) -> Conformance | None:
    """Return the clauses of the records of scenarios, or None if there are none."""
    return _judged(columns(records), [record for record in records if record.conformance.scenario])


def _judged(found: Sequence[AdapterColumn], records: Sequence[Record]) -> Conformance | None:
    if not found:
        return None
    commands = sorted({record.environment.command for record in records})
    return Conformance(columns=found, environment=newest(records).environment, commands=commands)


def keep_conformance(kept: Conformance, path: Path) -> None:
    """Write judged clauses as lines of JSON: what they were judged from, then an adapter a line."""
    head = {"environment": encode(kept.environment), "commands": encode(kept.commands)}
    lines = [head, *map(encode, kept.columns)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def read_conformance(path: Path) -> Conformance:
    """Return what `keep_conformance` wrote. Raises `ResultsError` if the file holds anything else."""
    try:
        head, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        return Conformance(
            environment=decode(Environment, head["environment"]),
            commands=head["commands"],
            columns=[decode(AdapterColumn, line) for line in lines],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultsError(f"no judged clauses at {str(path)!r}: {describe_error(error)}") from error


def columns(records: Iterable[Record]) -> list[AdapterColumn]:
    """Return the columns of the conformance suite, in order of first appearance.

    The last record of a scenario counts.
    """
    return [_column(base, found) for base, found in _by_base(records)]


def _by_base(records: Iterable[Record]) -> list[tuple[Case, dict[str, Record]]]:
    """Group records by the case that their scenarios vary, then by scenario."""
    found: dict[Case, dict[str, Record]] = {}
    for record in records:
        if record.conformance.base:
            found.setdefault(record.conformance.base, {})[record.conformance.scenario] = record
    return list(found.items())


def _column(base: Case, found: Mapping[str, Record]) -> AdapterColumn:
    """Judge an adapter's clauses. A defect that several clauses show is described at length only once."""
    judged, complaints = dict[str, Finding](), list[str]()
    for clause in CLAUSES.values():
        try:
            finding = _finding(clause, found)
        except Exception as error:  # of one clause, which costs no other
            complaints.append(f"{base.id}, clause {clause.name} cannot be judged: {clip(describe_error(error), 500)}")
            finding = None
        if finding:
            judged[clause.name] = finding
    return AdapterColumn(
        base=base,
        findings={name: point_back(name, finding, judged) for name, finding in judged.items()},
        launch_seconds=sum(r.launch.seconds for r in found.values()),
        complaints=tuple(complaints),
    )


def _finding(clause: Clause, found: Mapping[str, Record]) -> Finding | None:
    """Judge a clause, or return None if one of its scenarios was not run to an end.

    If a scenario is missing because the scenario before it failed, the record of the earlier scenario is used.
    """
    needed = {}
    for name in clause.scenarios:
        record, before = found.get(name), found.get(SCENARIOS[name].after or "")
        if record is None and before and before.outcome.status is not Status.OK:
            record = before
        if record is None or record.outcome.status.outside:
            return None
        needed[name] = record
    return judge_clause(clause, needed)


def write_conformance(reading: Reading, path: Path, command: str) -> list[str]:
    """Write Markdown to `path`. `command` is the command that made it. Returns complaints about what is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [r for r in reading.records if r.conformance.scenario]
    failed = missing_failures(reading.sessions, records, conforming=True)
    tests = ["## Tests that failed", failed] if failed else []
    lacking = list[str]()

    def page(some: Sequence[tuple[Case, dict[str, Record]]], complaints: Sequence[str]) -> list[str]:
        found = [_column(base, by_scenario) for base, by_scenario in some]
        lacking[:] = [complaint for column in found for complaint in column.complaints]
        unread = [*reading.complaints, *complaints, *lacking]
        left_out = ["## What could not be read", "\n".join(f"- {inline(c)}" for c in unread)] if unread else []
        if not records:
            return ["# Conformance", "**No scenario left a record.**", *tests, *left_out]
        if not found:
            return ["# Conformance", "**No record can be shown.**", *tests, *left_out]
        kept = _judged(found, records)
        assert kept is not None
        return conformance_page(kept, command, [*tests, *left_out], picture=draw_clauses(kept, path))

    parts, complaints = rendered(page, _by_base(records), lambda one: one[0].id)
    write_page(path, parts)
    return [*complaints, *lacking]


def conformance_page(kept: Conformance, command: str, problems: Sequence[str] = (), *, picture: str = "") -> list[str]:
    """Return the page as paragraphs.

    `problems` are those about failed tests and unreadable records, `picture` the heat map's file beside the page.
    """
    found = kept.columns
    return [*_answer(found, picture), *problems, *_evidence(found), *_origin(kept, command)]


def draw_clauses(kept: Conformance, page: Path) -> str:
    """Draw the heat map of adapters by clause beside a page. Returns the name of its file."""
    from meshmark.report.plots import clause_plot  # which imports matplotlib

    names, numbers = _clauses_run(kept.columns), {gap: number for number, gap in enumerate(_gaps(kept.columns), 1)}
    rows: dict[str, list[tuple[str, str] | None]] = {}
    for column in _ranked(kept.columns):
        cells = [column.findings.get(name) for name in names]
        rows[f"{column.title}, {column.base.layout.id}"] = [
            (_PICTURED[cell.result], _pictured_mark(cell, numbers)) if cell else None for cell in cells
        ]
    file = page.with_name(f"{page.stem}-clauses.svg")
    clause_plot(names, rows, file)
    return file.name


def _pictured_mark(finding: Finding, numbers: Mapping[Finding, int]) -> str:
    """Return the mark of a cell of the heat map: the number of a gap, or a word where the colour is not enough."""
    marks = {
        ClauseResult.FAIL: "no",
        ClauseResult.UNSUPPORTED: "–",
        ClauseResult.STALE_GAP: "st",
        ClauseResult.TOLD: "t",
    }
    return str(numbers[finding]) if finding in numbers else marks.get(finding.result, "")


def _clauses_run(found: Sequence[AdapterColumn]) -> list[str]:
    """Return the clauses that were run for any adapter."""
    return [name for name in CLAUSES if any(name in column.findings for column in found)]


def _answer(found: Sequence[AdapterColumn], picture: str) -> list[str]:
    cells = Counter(f.result for column in found for f in column.findings.values())
    unjudged = (ClauseResult.UNSUPPORTED, ClauseResult.UNDECIDED, ClauseResult.TOLD)
    judged = sum(cells.values()) - sum(cells[result] for result in unjudged)
    headline = f"**{cells[ClauseResult.PASS]} of {pluralize(judged, 'cell')} hold{'s' * (judged == 1)}**"
    headline += f"; {pluralize(cells[ClauseResult.KNOWN_GAP], 'known gap')}"
    unanswered = pluralize(cells[ClauseResult.UNSUPPORTED], "cell")
    headline += f", {pluralize(cells[ClauseResult.FAIL], 'failure')}, {unanswered} without an answer, with reasons."
    if cells[ClauseResult.TOLD]:
        headline += f" {cells[ClauseResult.TOLD]} more tell what is not required."
    if cells[ClauseResult.UNDECIDED]:
        headline += f" {cells[ClauseResult.UNDECIDED]} rest on a pass that was too slow for its time limit."
    if cells[ClauseResult.STALE_GAP]:
        one, many = "known gap no longer shows: take it out of its", "known gaps no longer show: take them out of their"
        headline += f" {pluralize(cells[ClauseResult.STALE_GAP], f'{one} adapter', f'{many} adapters')}."
    asked = [CLAUSES[name] for name in _clauses_run(found)]
    numbers = {gap: number for number, gap in enumerate(_gaps(found), 1)}
    rows: list[dict[str, object]] = [
        {"adapter": c.title, **{clause.name: _mark(c, clause, numbers) for clause in asked}} for c in _ranked(found)
    ]
    return [
        "# Conformance",
        headline,
        markdown([*map(_count_row, _ranked(found))]),
        *(
            [f"![Adapters by clause: yes, a gap by its number below, or no answer]({quote(picture)})"]
            if picture
            else []
        ),
        "## Every cell",
        markdown(rows),
        "*yes*: the clause holds, by measurement. **no**: it does not. *gap*: the framework, in a documented "
        "configuration, really fails it; what and why is below, by its number. *reported*: not required, and counted "
        "with neither; what was found is in the records. –: not supported, or without meaning in this layout.",
    ]


def _ranked(found: Sequence[AdapterColumn]) -> list[AdapterColumn]:
    """Return the columns that keep most first: those with the fewest failures, gaps and clauses without an answer."""

    def lacks(column: AdapterColumn) -> tuple[int, ...]:
        counts = Counter(finding.result for finding in column.findings.values())
        order = (ClauseResult.FAIL, ClauseResult.KNOWN_GAP, ClauseResult.UNDECIDED, ClauseResult.UNSUPPORTED)
        return tuple(counts[result] for result in order)

    return sorted(found, key=lacks)


def _count_row(column: AdapterColumn) -> dict[str, object]:
    counts = Counter(finding.result for finding in column.findings.values())
    shown = (ClauseResult.PASS, ClauseResult.KNOWN_GAP, ClauseResult.UNSUPPORTED)
    return {
        "adapter": column.title,
        "layout": column.base.layout.id,
        **dict(zip(("hold", "known gaps", "no answer"), (counts[result] for result in shown), strict=True)),
        "other": counts.total() - sum(counts[result] for result in shown),
        "launches, s": f"{column.launch_seconds:.0f}",
    }


def _mark(column: AdapterColumn, clause: Clause, numbers: Mapping[Finding, int]) -> str:
    finding = column.findings.get(clause.name)
    if finding is None:
        return ""
    number = f" {numbers[finding]}" if finding.result is ClauseResult.KNOWN_GAP else ""
    return Markup(f"{_MARKS[finding.result]}{number}")


def _gaps(found: Sequence[AdapterColumn]) -> dict[Finding, list[str]]:
    """Return every gap, with the cells that show it."""
    gaps: dict[Finding, list[str]] = {}
    for column in found:
        for name, finding in column.findings.items():
            if finding.result is ClauseResult.KNOWN_GAP:
                gaps.setdefault(finding, []).append(f"{column.title} ({name})")
    return gaps


def _evidence(found: Sequence[AdapterColumn]) -> list[str]:
    every = [(column, CLAUSES[name], f) for column in found for name, f in column.findings.items()]
    parts = ["## What each clause says", "\n".join(f"- **{c.name}**: {c.statement}" for c in CLAUSES.values())]
    if failed := [_line(*cell) for cell in every if cell[2].result in _TOLD]:
        parts += ["## Failures", "\n".join(failed)]
    if gaps := _gaps(found):
        lines = [f"{i}. **{inline(', '.join(cells))}**: {_text(gap)}" for i, (gap, cells) in enumerate(gaps.items(), 1)]
        parts += [
            "## Known gaps",
            "\n".join(lines),
            "`meshmark gaps` prints a script for each that shows it without Meshmark.",
        ]
    reasons: dict[str, list[str]] = {}
    for column, clause, finding in every:
        if finding.result is ClauseResult.UNSUPPORTED:
            reasons.setdefault(finding.evidence, []).append(f"{column.title} ({clause.name})")
    if reasons:
        parts += [
            "## Without an answer",
            "\n".join(f"- {inline(why)}: {inline(', '.join(where))}" for why, where in reasons.items()),
        ]
    return parts


def _line(column: AdapterColumn, clause: Clause, finding: Finding) -> str:
    return f"- **{inline(column.title)} ({clause.name})**: {_text(finding)}"


def _text(finding: Finding) -> str:
    link = f"<{finding.link}>" if _LINK.fullmatch(finding.link) else inline(finding.link)
    return f"{inline(finding.evidence)} {link}".rstrip()


def _origin(kept: Conformance, command: str) -> list[str]:
    environment, model = kept.environment, kept.columns[0].base.workload.model
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    return [
        "## How it was obtained",
        f"Every cell rests on one or two of {len(SCENARIOS)} scenarios, each a launch of its own in fresh processes, "
        f"which train {inline(model.name)} ({model.num_parameters:,} parameters) in real text for a few steps; see "
        "meshmark/conformance/scenario.py. Correct means what it means in the report: every loss, gradient and update "
        "within the noise of its precision, measured, of a float64 truth.",
        "Records by:\n\n" + block("\n".join(kept.commands)) + "\n\nThis page by:\n\n" + block(command),
        "On "
        + inline(
            f"{environment.machine}, {environment.num_cpus} CPUs, {environment.device} and {environment.backend}, "
            f"commit {environment.commit or 'unknown'}, {environment.date}. {versions}."
        ),
        "*Launches*: of one adapter, all scenarios together, without the noise floors, which each workload and "
        "precision needs once for all adapters.",
    ]
