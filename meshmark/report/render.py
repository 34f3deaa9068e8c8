"""The Markdown report: first the answer, then the evidence, then how it was obtained."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from meshmark.judge.tolerance_model import shown
from meshmark.records.record import Record
from meshmark.records.record_file import Reading
from meshmark.report import tables
from meshmark.report.baseline import Baseline
from meshmark.report.communication import sent_bytes
from meshmark.report.guard import rendered, write_page
from meshmark.report.missing_failures import failing, missing_failures, unrecorded
from meshmark.report.plots import memory_plot, ranks_plot, throughput_plot, tradeoff_plot
from meshmark.report.profiles import TOLD, memory_curves, profile_rows
from meshmark.report.results import CaseResult, newest, results
from meshmark.report.scale import fake_worlds, scale_headline
from meshmark.report.sections import sections
from meshmark.report.table import Table, block, bytes_text, code, inline, table
from meshmark.run.throughput import LEAST_CLAIMED, fastest_of, throughput
from meshmark.text import pluralize

_DRAWN = 50
"""Number of cases that a plot can show."""


def write_report(
    reading: Reading, path: Path, command: str, baseline: Reading | None = None, glossary: str = ""
) -> list[str]:
    """Write Markdown to `path`, and plots next to it with names derived from it.

    `command` is the command that made the report. With a `baseline`, times, peaks and verdicts are compared with its
    own. `glossary` is the address of docs/glossary.md as seen from `path`, if it is there. Returns complaints about
    cases that are missing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    found = results(reading.records)
    drawn, undrawn = _pictures(found, fake_worlds(reading.records), path)

    def page(some: Sequence[CaseResult], complaints: Sequence[str]) -> list[str]:
        read = dataclasses.replace(reading, complaints=[*reading.complaints, *undrawn, *complaints])
        evidence = [*_evidence(some, read, baseline), *_profiles(reading.records, path)]
        return [*_answer(some, read, glossary), *drawn, *evidence, *_origin(some, read, command)]

    parts, complaints = rendered(page, found, lambda result: result.case.id)
    write_page(path, parts)
    return [*undrawn, *complaints]


def _pictures(found: Sequence[CaseResult], fake: Sequence[Record], path: Path) -> tuple[list[str], list[str]]:
    """Draw the plots next to `path`. Returns the lines that show them, and complaints about missing cases."""
    drawn, undrawn = list[str](), list[str]()
    pictures = {
        "Speed against memory: a dot a correct case; better is up and to the left": tradeoff_plot,
        "Memory at the peak, by category": memory_plot,
        "Model states as ranks are added, by category": lambda some, file: ranks_plot(some, fake, file),
        "Throughput, with its spread": throughput_plot,
    }
    for (title, draw), stem in zip(pictures.items(), ("tradeoff", "memory", "ranks", "throughput"), strict=True):
        file = path.with_name(f"{path.stem}-{stem}.svg")
        there, complaints = rendered(
            lambda some, _, draw=draw, file=file: draw(some, file),  # type: ignore[misc]
            found[:_DRAWN],
            lambda result, stem=stem: f"{result.case.id}: its {stem}",  # type: ignore[misc]
        )
        drawn += [f"![{title}]({quote(file.name)})"] if there else []
        undrawn += complaints
    if drawn and len(found) > _DRAWN:
        drawn.append(f"Drawn are the first {_DRAWN} of {len(found):,} cases; the tables hold all.")
    return drawn, undrawn


def _profiles(records: Sequence[Record], path: Path) -> list[str]:
    """Return the section of profiled passes, if there are any. Its plot is written next to the page."""
    if not (rows := profile_rows(records)):
        return []
    picture = path.with_name(f"{path.stem}-over-time.svg")
    drawn = memory_curves(records, picture)
    shown = [f"![Memory over time]({quote(picture.name)})"] if drawn else []
    return ["## Profile", TOLD, table(rows), *shown]


def headline(found: Sequence[CaseResult], reading: Reading) -> str:
    """Return the result in a paragraph of Markdown."""
    missing = unrecorded(reading.sessions, reading.records, conforming=False)
    if not reading.records:
        return f"**No case left a record**: {_listed(missing)}."
    if not found and (fake := fake_worlds(reading.records)):
        return scale_headline(fake)
    return _headline(found, missing, len(failing(reading.sessions, conforming=False)))


def _answer(found: Sequence[CaseResult], reading: Reading, glossary: str) -> list[str]:
    if not reading.records:
        return ["# Meshmark report", headline(found, reading)]
    environment = newest(reading.records).environment
    if not found and fake_worlds(reading.records):
        machine = f"{inline(environment.machine)}, {environment.num_cpus} CPUs, {inline(environment.device)}"
        return [f"# Meshmark report: fake worlds on {machine}", headline(found, reading)]
    return [
        f"# Meshmark report: {inline(environment.machine)}, {environment.num_cpus} CPUs, {inline(environment.device)}",
        headline(found, reading),
        "*Smallest detectable error*: the smallest scaling of any parameter's gradient that the verdict *correct* "
        "would have caught. *Peak*: bytes alive at once on the fullest rank. The leanest case of each number of ranks "
        f"comes first.{f' More words are in [the glossary]({glossary}).' if glossary else ''}",
        Table(title="Cases", rows=tables.answer(found)).markdown,
        "*correct*: every loss, gradient norm, gradient and parameter of every step equals a float64 single-process "
        "truth, within a factor of the rounding noise that correct runs show in this precision. "
        f"Correct runs that fail: {shown()}. *cannot tell*: the noise hides too much for a verdict. Memory and speed "
        "are struck out where a run is wrong, or keeps narrower states than its precision promises. "
        f"All values are *measured*. Speeds stand last.{_not_timed(found)}",
    ]


def _not_timed(found: Sequence[CaseResult]) -> str:
    """Return the sentence on cases without a speed; empty where all were timed, or none was asked to be."""
    ran = [result for result in found if not result.skipped]
    missing = sum(result.timed is None for result in ran)
    if missing in (0, len(ran)):
        return ""
    return f" {pluralize(missing, 'case')} without a speed {'was' if missing == 1 else 'were'} not timed."


def _speeds_of(found: Sequence[CaseResult]) -> str:
    """Return what the speeds are of: `Speed is of a model of ... parameters on 2 CPUs, ...`."""
    models = {r.case.workload.model.num_parameters for r in found if not r.skipped}
    sizes = " to ".join(f"{size:,}" for size in sorted({min(models), max(models)})) if models else "no"
    devices = sorted({r.any.environment.device for r in found})
    on = f" on {newest([r.any for r in found]).environment.num_cpus} CPUs" if devices == ["cpu"] else ""
    toys = ", and ranks nothing that you would train" if on and models and max(models) < _TOY else ""
    return f"Speed is of a model of {sizes} parameters{on}{toys}"


_TOY = 10_000_000
"""Parameters below which the speed of a model says nothing of those that people train."""


_MANY = 3
"""So many cases that are tied with the fastest are counted, not named."""


def _headline(found: Sequence[CaseResult], missing: Sequence[str], failed_tests: int) -> str:
    """Return the headline: what is correct, what does not depend on the machine, and speed last.

    `missing` is the cases without a record.
    """
    right = [r for r in found if r.correct and not r.skipped]
    equal = [r for r in right if r.comparable]
    parts, speeds = [_counts(found, missing, failed_tests)], list[str]()
    units = sorted({r.case.workload.unit for r in right}, reverse=True)
    for ranks, unit in itertools.product(sorted({r.case.world_size for r in right if r.case.world_size > 1}), units):
        peers = [r for r in equal if r.case.world_size == ranks and r.case.workload.unit == unit]
        timed = [r for r in peers if r.timed and r.timed.timing.rank_step_seconds]
        measured = [r for r in peers if r.observed and r.observed.memory.readings]
        if len(measured) > 1:
            leanest = min(measured, key=_peak)
            sending = [(sent_bytes(r.observed), r) for r in peers if r.observed and r.observed.traffic.readings]
            least = min((sent for sent, _ in sending), default=0.0)
            quietest = [code(r.case.id) for sent, r in sending if sent == least] if len(sending) > 1 else []
            sends = f"; {' and '.join(quietest)} send{'s' * (len(quietest) == 1)} least ({bytes_text(least)} a step)"
            parts.append(
                f"On {ranks} ranks the leanest is {code(leanest.case.id)} "
                f"({bytes_text(_peak(leanest))} at its fullest rank's peak){sends if quietest else ''}."
            )
        if timed:
            speeds.append(f"on {ranks} ranks {_fastest([r.timed for r in timed if r.timed])}")
    return " ".join([*parts, *([f"{_speeds_of(found)}: {'; '.join(speeds)}."] if speeds else [])])


def _fastest(timed: Sequence[Record]) -> str:
    """Name the fastest case. Where others are tied with it, name up to three, else give their number."""
    if not (ordered := fastest_of(timed)):
        return f"no case was launched often enough ({LEAST_CLAIMED} times) to be called the fastest"
    first, *tied = ordered
    best = throughput(first)
    speed = f"{best.per_second:,.0f} {best.unit}/s {tables.interval_text(best)}"
    if not tied:
        return f"the fastest correct case is {code(first.case.id)} ({speed})"
    if len(tied) >= _MANY:
        return (
            f"{code(first.case.id)} ({speed}) and {len(tied)} more meet within their intervals, so that none is ahead"
        )
    *between, last = [code(record.case.id) for record in tied]
    listed = ", ".join([f"{code(first.case.id)} ({speed})", *between]) + f" and {last}"
    return f"the fastest correct cases are {listed}, whose intervals meet, so that none is ahead"


def _counts(found: Sequence[CaseResult], missing: Sequence[str], failed_tests: int) -> str:
    """Return what was judged, and how. A case that was never judged is neither right nor wrong."""
    ran = [r for r in found if not r.skipped]
    judged = [r for r in ran if r.correct is not None]
    unjudged = len(ran) - len(judged)
    right = sum(bool(r.correct) for r in judged)
    if judged:
        of = pluralize(len(judged), "judged case" if unjudged else "case")
        lines = [f"**{right} of {of} train{'s' * (len(judged) == 1)} correctly**"]
    elif ran:
        cases = pluralize(unjudged, "case")
        lines = [f"**Correctness was not judged in this run** (not judged: {cases}; judged: 0, correct: 0)"]
    else:
        lines = ["**No case was run**"]
    if wrong := [r.case.id for r in ran if r.correct is False or (r.failed and not r.blameless)]:
        lines.append(f"wrong or failed: {_listed(wrong)}")
    elif not judged and ran:
        lines.append("failed: 0")
    if unjudged and judged:
        lines.append(f"{unjudged} not judged")
    if slow := sum(r.slow for r in ran):
        lines.append(f"{slow} with a pass too slow for its time limit")
    if outside := [r.case.id for r in ran if r.blameless and not r.slow]:
        lines.append(f"ended by what stands outside their ranks: {_listed(outside)}")
    if missing:
        lines.append(f"unfinished, without a record: {_listed(missing)}")
    if failed_tests:
        lines.append(f"{pluralize(failed_tests, 'test')} failed")
    if skipped := len(found) - len(ran):
        lines.append(f"{skipped} not run, with reasons below")
    return "; ".join(lines) + "."


def _listed(cases: Sequence[str]) -> str:
    return ", ".join(map(code, cases))


def _peak(result: CaseResult) -> int:
    return max(m.peak.total for m in result.observed.memory.readings) if result.observed else 0


def _evidence(found: Sequence[CaseResult], reading: Reading, baseline: Reading | None) -> list[str]:
    latest = [record for r in found for record in (r.observed, r.timed) if record]
    unfinished = missing_failures(reading.sessions, reading.records, conforming=False)
    failed = [tables.failures([*latest, *fake_worlds(reading.records)]), unfinished]
    before = Baseline(results(baseline.records) if baseline else ())
    nothing = "Nothing: every case that ran reached its end and passed every suite."
    parts = ["## What failed", *(filter(None, failed) if any(failed) else [nothing])]
    for section in sections(found, reading.records, before):
        parts += [f"## {section.title}", section.note]
        if section.id == "speed" and (warning := before.warning(found)):
            parts.append(warning)
        for one in section.tables:
            parts += [*filter(None, [one.note]), one.markdown]
    if left_out := tables.not_judged(found):
        parts += ["## What was not judged", _NOT_JUDGED, Table(title="Not judged", rows=left_out).markdown]
    if any(r.skipped for r in found):
        parts += ["## Not run", Table(title="Not run", rows=tables.skips(found)).markdown]
    if reading.complaints:
        parts += ["## What could not be read", "\n".join(f"- {inline(c)}" for c in reading.complaints)]
    return parts


_NOT_JUDGED = "Of cases that ran, what no verdict speaks of."
_OBTAINED = "## How it was obtained"


def _commands(of_records: Sequence[str], of_page: str) -> str:
    return "Records by:\n\n" + block("\n".join(of_records)) + "\n\nThis page by:\n\n" + block(of_page)


def _origin(found: Sequence[CaseResult], reading: Reading, command: str) -> list[str]:
    if not reading.records:
        commands = sorted({session.command for session in reading.sessions})
        return [_OBTAINED, _commands(commands, command)]
    facts: dict[str, dict[str, None]] = {}  # distinct values, the newest first
    for environment in sorted((r.environment for r in reading.records), key=lambda each: each.date, reverse=True):
        described = {
            "machine": environment.machine,
            "CPUs": environment.num_cpus,
            "memory": bytes_text(environment.memory_bytes),
            "system": environment.system,
            "device and backend": f"{environment.device}, {environment.backend}",
            "nodes": environment.nnodes,
            "commit": environment.commit or "unknown",
            "date": environment.date.partition("T")[0],
            **environment.versions,
        }
        for name, value in described.items():
            facts.setdefault(name, {})[str(value)] = None
    commands = sorted({record.environment.command for record in reading.records})
    return [
        _OBTAINED,
        _commands(commands, command),
        table([{"what": name, "value": "; ".join(values)} for name, values in facts.items()]),
        *(_time_went(found) if found else []),
    ]


def _time_went(found: Sequence[CaseResult]) -> list[str]:
    return [
        "## Where the time went",
        table(tables.time_spent(found)),
        "A launch is one pass over one case in fresh processes; the noise floors, which each workload and "
        "precision needs once, are not in it.",
    ]
