"""The page of the roster: every adapter beside every capability, from what records hold and nothing else."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.trials import Trial
from meshmark.adapter.contract import Adapter
from meshmark.adapter.registry import core_adapters
from meshmark.conformance.finding import ClauseResult, Finding
from meshmark.errors import LayoutError
from meshmark.models.transformer import Family, ModelSpec
from meshmark.records.record import Record, Status
from meshmark.records.request import Task
from meshmark.report.conformance import columns
from meshmark.report.table import Markup, inline, table
from meshmark.run.throughput import throughput
from meshmark.spec.case import Case
from meshmark.spec.layout import AXES
from meshmark.spec.precision import Precision
from meshmark.text import pluralize

SUITES = {"equivalence": "E", "memory": "M", "communication": "C"}
"""That judge a cell, with the letters that stand for them."""
_DEGREE = re.compile(r"(dp|tp|pp|cp)=\d+")
_RESULTS = {
    "yes": (ClauseResult.PASS, ClauseResult.TOLD),
    "gap": (ClauseResult.KNOWN_GAP,),
    "stale gap": (ClauseResult.STALE_GAP,),
    "**no**": (ClauseResult.FAIL, ClauseResult.UNDECIDED),
    "–": (ClauseResult.UNSUPPORTED,),
}
_INTRO = """A cell is *yes* where gradients, updates, memory and traffic of every case of that capability are what they
should be; *yes EM* where the suites of those letters alone decide (Equivalence, Memory, Communication), for theory does
not plan what the other would hold it to; **no** where one fails; – where the adapter refuses it; *?* where it would run
and was not. An adapter of three ZeRO stages has every clause three times. Speeds are of a small model on this machine,
taken in several sessions: they rank nothing."""

_ELSEWHERE = Markup("[conformance](conformance.md)")
"""Cell of an adapter of the core, whose clauses have a page of their own."""

Adapters = Mapping[str, type[Adapter]]
Notes = dict[str, list[str]]
"""Whom it concerns, by what is said."""


@dataclass(kw_only=True)
class Footnotes:
    """Notes below the tables, gathered while the tables are filled."""

    wrong: Notes = field(default_factory=Notes)
    reasons: Notes = field(default_factory=Notes)
    gaps: Notes = field(default_factory=Notes)


def page(records: Sequence[Record], adapters: Adapters, trials: Sequence[Trial], made_on: str) -> str:
    """Markdown. Without records of an adapter its cells say that it was not run. `made_on`: the machine."""
    found, plain = Footnotes(), [record for record in records if not record.conformance.scenario]
    observed = [record for record in plain if record.task is Task.OBSERVE]
    tables = [_matrix(title, observed, adapters, found) for title in _PARTS]
    overview = [_overview(name, adapters[name], plain, records, found) for name in adapters]
    overview.sort(key=lambda row: [row[column] for column in ("cases right", "clauses", "fastest")].count("not run"))
    parts = [
        "# The roster: system by capability",
        f"Made by `make roster` on {inline(made_on)}, of {_commits(records)}.\n\n{_INTRO}",
        table(overview),
        *[part for part in tables if part],
        "## What is wrong",
        _lines(found.wrong, adapters) or "Nothing that was run.",
        "## Known gaps",
        _lines(found.gaps, adapters) or ("None in what was run." if columns(records) else "No clause was run."),
        "## Why not",
        _lines(found.reasons, adapters),
        "## Broken on purpose",
        table([_trial(trial) for trial in trials]) or "Not tried.",
    ]
    return _narrow("\n\n".join(parts) + "\n")


def _narrow(text: str) -> str:
    """Without what pads tables' columns, which is nearly half of so wide a page; rendered, it is the same."""

    def narrowed(line: str) -> str:
        return re.sub("-{4,}", "---", re.sub(r" {2,}\|", " |", line)) if line.startswith("|") else line

    return "\n".join(map(narrowed, text.split("\n")))


def _commits(records: Sequence[Record]) -> str:
    """Describe the commits of the records: several where a run was resumed after a commit."""
    count = Counter(record.environment.commit for record in records)
    return ", ".join(f"{pluralize(number, 'record')} at {commit}" for commit, number in count.items()) or "no records"


def capability(case: Case) -> str:
    """Describe what a case shows of an adapter: the name of a workload that is no GPT; else its layout in words (axes,
    stage, schedule), the precision if it is not fp32, and tuning."""
    if _part(case) == _WORKLOADS:
        return case.workload.name
    layout = case.layout
    parts = [" x ".join(axis for axis in AXES if getattr(layout, axis) > 1) or "one rank"]
    parts += [f"zero{layout.zero_stage}"] if layout.zero_stage else []
    parts += [str(layout.schedule)] if layout.pp > 1 else []
    parts += ["folded"] if layout.folded else []
    parts += ["sp"] if layout.sequence_parallel else []
    parts += [f"offload {layout.offload}"] if layout.offload != "none" else []
    parts += [f"recompute {layout.recompute}"] if layout.recompute != "none" else []
    parts += [str(case.precision)] if case.precision != Precision.FP32 else []
    parts += [str(case.tuning)] if case.tuning else []
    return ", ".join(parts)


def _part(case: Case) -> str:
    """The title of the table that it stands in."""
    if not isinstance(model := case.workload.model, ModelSpec) or model.family is not Family.GPT or not model.causal:
        return _WORKLOADS
    if case.tuning:
        return _TUNED
    if case.precision != Precision.FP32:
        return "In other precisions"
    layout = case.layout
    return "Over data-parallel ranks" if layout.tp == layout.pp == layout.cp == 1 else "Over axes of the model"


_WORKLOADS = "On other workloads than a GPT"
_TUNED = "Tuned"
_PARTS = ("Over data-parallel ranks", "Over axes of the model", "In other precisions", _TUNED, _WORKLOADS)


def _matrix(title: str, observed: Sequence[Record], adapters: Adapters, found: Footnotes) -> str:
    """Adapters that run none of a part's capabilities are left out of its table."""
    examples: dict[str, Case] = {}
    for record in observed:
        if _ran(record) and _part(record.case) == title and record.case.layout.world_size > 1:
            examples.setdefault(capability(record.case), record.case)
    rows = []
    for name, adapter in adapters.items():
        row: dict[str, object] = {"adapter": name}
        for what, example in sorted(examples.items()):
            own = [r for r in observed if r.case.adapter == name and capability(r.case) == what]
            row[what] = _cell(own, name, adapter, replace(example, adapter=name), found)
        if any(mark != "–" for mark in list(row.values())[1:]):
            rows.append(row)
    return f"## {title}\n\n{table(rows)}" if rows else ""


def _cell(own: Sequence[Record], name: str, adapter: type[Adapter], example: Case, found: Footnotes) -> str:
    ran = [record for record in own if _ran(record)]
    if not ran:
        reasons = _refusal(own, adapter, example)
        for reason in reasons or [f"not run: {capability(example)}"]:
            _note(found.reasons, reason, name)
        return "–" if reasons else "?"
    failing = [(record, why) for record in ran if (why := wrong(record))]
    for record, why in failing:
        _note(found.wrong, why, f"{name} {record.case.layout.id} {record.case.precision}")
    if failing:
        return "**no**"
    judged = {letter for suite, letter in SUITES.items() if all(record.verdict(suite) for record in ran)}
    return "yes" if len(judged) == len(SUITES) else f"yes {''.join(sorted(judged, key='EMC'.index))}"


def _ran(record: Record) -> bool:
    return record.outcome.status is not Status.SKIPPED


def wrong(record: Record) -> str:
    """Describe what is wrong with a record; empty if nothing is."""
    if record.outcome.status not in (Status.OK, Status.SKIPPED):
        first = record.outcome.message.partition("\n")[0]
        return f"{record.outcome.status}: {first}"
    return next((f"{v.suite}: {v.summary}" for v in record.verdicts if v.suite in SUITES and not v.passed), "")


def _refusal(own: Sequence[Record], adapter: type[Adapter], example: Case) -> list[str]:
    """Why it is not run, one reason each, without the numbers of the example; none where it could be. What is missing
    altogether comes before what an adapter says of this very layout; of another workload, whose example may have any
    layout, its own record says it."""
    try:
        if _part(example) == _WORKLOADS:
            return _skip_reasons(own)
        lacking = adapter.capabilities.refusal(example, "cpu", "gloo")
        text = lacking or (own[0].outcome.message if own else adapter.refusal(example, "cpu", "gloo"))
    except LayoutError as error:
        text = str(error)
    return _reasons_of(text)


def _skip_reasons(skipped: Sequence[Record]) -> list[str]:
    return _reasons_of(skipped[0].outcome.message) if skipped else []


def _reasons_of(text: str) -> list[str]:
    if not text:
        return []
    _, is_list, several = text.partition(" does not support ")
    if not is_list:
        return [text.partition(", got ")[0]]
    return [_DEGREE.sub(r"ranks along \1", reason) for reason in _reasons(several)]


def _reasons(several: str) -> list[str]:
    """At every comma that is in no parentheses."""
    found: list[str] = []
    for part in several.split(", "):
        within = bool(found) and found[-1].count("(") > found[-1].count(")")
        found[-1:] = [f"{found[-1]}, {part}"] if within else [*found[-1:], part]
    return found


def _overview(
    name: str, adapter: type[Adapter], plain: Sequence[Record], records: Sequence[Record], found: Footnotes
) -> dict[str, object]:
    """Return an adapter's overview: its cases, its clauses, and its speed."""
    own = [record for record in plain if record.case.adapter == name and _ran(record)]
    cases = [record for record in own if record.task is Task.OBSERVE]
    right = sum(not wrong(record) for record in cases)
    findings = [finding for c in columns(records) if c.base.adapter == name for finding in c.findings.items()]
    for clause, finding in findings:
        _note_finding(name, clause, finding, found)
    timed = [record for record in own if record.task is Task.TIME and record.outcome.status is Status.OK]
    fastest = max(timed, key=lambda record: throughput(record).per_second, default=None)
    clauses = _counts([finding.result for _, finding in findings])
    return {
        "adapter": name,
        "cases right": f"{right} of {len(cases)}" if cases else "not run",
        "clauses": _ELSEWHERE if clauses == "not run" and name in core_adapters() else clauses,
        "fastest": f"{throughput(fastest).per_second:,.0f} tokens/s, {fastest.case.layout.id}" if fastest else "",
        "track": adapter.track.value,
    }


def _note_finding(name: str, clause: str, finding: Finding, found: Footnotes) -> None:
    if finding.result in _RESULTS["gap"]:
        _note(found.gaps, f"{clause}: {finding.evidence}", name)
    elif finding.result in (*_RESULTS["**no**"], *_RESULTS["stale gap"]):
        _note(found.wrong, f"clause {clause}, {finding.result}: {finding.evidence}", name)


def _counts(found: Sequence[ClauseResult]) -> str:
    counts = {mark: sum(result in results for result in found) for mark, results in _RESULTS.items()}
    return ", ".join(f"{count} {mark}" for mark, count in counts.items() if count) or "not run"


def _note(notes: Notes, what: str, whom: str) -> None:
    concerned = notes.setdefault(what, [])
    if whom not in concerned:
        concerned.append(whom)


def _lines(notes: Notes, adapters: Adapters) -> str:
    """One line a reason, those that concern most first."""
    ordered = sorted(notes.items(), key=lambda item: (-len(item[1]), item[0]))
    return "\n".join(f"- {inline(what)}: {_those(whom, list(adapters))}" for what, whom in ordered)


def _those(named: Sequence[str], everyone: Sequence[str]) -> str:
    """Or, where that is shorter, all but those that are not."""
    others = [name for name in everyone if name not in named]
    if len(others) < len(named) <= len(everyone) and set(named) <= set(everyone):
        return f"all but {', '.join(others)}" if others else "all"
    return ", ".join(named)


def _trial(trial: Trial) -> dict[str, object]:
    told: Iterable[str] = trial.explanation.splitlines()[:1]
    text = inline("".join(told)[:160])
    return {
        "adapter": trial.mutant.adapter,
        "defect": (trial.mutant.defect.__doc__ or "").partition("\n")[0],
        "caught by": trial.mutant.catcher if trial.caught else Markup("**not caught**"),
        "told as": text if trial.named else Markup(f"**{text}**"),
    }
