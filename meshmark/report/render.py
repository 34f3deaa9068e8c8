"""The report: the answer first, then the evidence, then how it was obtained."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

from meshmark.judge.false_alarms import shown
from meshmark.pluralize import pluralize
from meshmark.report import tables
from meshmark.report.baseline import Baseline
from meshmark.report.communication import communication, traffic_exceptions
from meshmark.report.guard import rendered, write_page
from meshmark.report.markdown import block, code, inline, table
from meshmark.report.missing_failures import failing, missing_failures, unrecorded
from meshmark.report.planned import planned_memory
from meshmark.report.plots import memory_plot, throughput_plot
from meshmark.report.profiles import TOLD, memory_curves, profile_rows
from meshmark.report.results import CaseResult, newest, results
from meshmark.run.record import Record
from meshmark.run.record_file import Reading
from meshmark.run.throughput import LEAST_CLAIMED, fastest_of, peak_flops_per_second, throughput

_DRAWN = 50
"""Cases that a picture can show."""


def write_report(reading: Reading, path: Path, command: str, baseline: Reading | None = None) -> list[str]:
    """Markdown at `path`, and its pictures beside it, named after it. `command` is what made the report; with
    a `baseline`, times, peaks and verdicts are compared with its. Returns complaints about cases that it lacks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = results(reading.records)
    drawn, undrawn = _pictures(found, path)

    def page(some: Sequence[CaseResult], complaints: Sequence[str]) -> list[str]:
        read = dataclasses.replace(reading, complaints=[*reading.complaints, *undrawn, *complaints])
        evidence = [*_evidence(some, read, baseline), *_profiles(reading.records, path)]
        return [*_answer(some, read), *drawn, *evidence, *_origin(some, read, command)]

    parts, complaints = rendered(page, found, lambda result: result.case.id)
    write_page(path, parts)
    return [*undrawn, *complaints]


def _pictures(found: Sequence[CaseResult], path: Path) -> tuple[list[str], list[str]]:
    """Drawn beside `path`: lines of the page that show them, and complaints about cases that they lack."""
    drawn, undrawn = list[str](), list[str]()
    pictures = {"Memory at the peak, by category": memory_plot, "Throughput, with its spread": throughput_plot}
    for (title, draw), stem in zip(pictures.items(), ("memory", "throughput"), strict=True):
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
    """The section of profiled passes, where there are any, with its picture beside the page."""
    if not (rows := profile_rows(records)):
        return []
    picture = path.with_name(f"{path.stem}-over-time.svg")
    drawn = memory_curves(records, picture)
    shown = [f"![Memory over time]({quote(picture.name)})"] if drawn else []
    return ["## Profile", TOLD, table(rows), *shown]


def headline(found: Sequence[CaseResult], reading: Reading) -> str:
    """What it came to, in a paragraph of markdown."""
    missing = unrecorded(reading.sessions, reading.records, conforming=False)
    if not reading.records:
        return f"**No case left a record**: {_listed(missing)}."
    return _headline(found, missing, len(failing(reading.sessions, conforming=False)))


def _answer(found: Sequence[CaseResult], reading: Reading) -> list[str]:
    if not reading.records:
        return ["# Meshmark report", headline(found, reading)]
    environment = newest(reading.records).environment
    return [
        f"# Meshmark report: {inline(environment.machine)}, {environment.num_cpus} CPUs, {inline(environment.device)}",
        headline(found, reading),
        tables.case_table(tables.answer(found)),
        "*correct*: every loss, gradient norm, gradient and parameter of every step stands no further "
        "from a float64 single-process truth than rounding in its precision carries a correct run, told by a factor on "
        f"that noise; of how often it fails a correct run, there is shown: {shown()}. *cannot tell*: the noise hides "
        "too much for a verdict. "
        "*detects*: the smallest scaling of any single parameter's gradient that this verdict would have caught. "
        "*peak / rank*: exact bytes alive on the fullest rank. Memory and speed of a run that is wrong, "
        "or that keeps narrower states than its precision promises, are struck out: they are no result.",
    ]


def _headline(found: Sequence[CaseResult], missing: Sequence[str], failed_tests: int) -> str:
    """`missing`: cases without a record."""
    right = [r for r in found if r.correct and not r.skipped]
    equal = [r for r in right if r.comparable]
    parts = [_counts(found, missing, failed_tests)]
    units = sorted({r.case.workload.unit for r in right}, reverse=True)
    for ranks, unit in itertools.product(sorted({r.case.world_size for r in right if r.case.world_size > 1}), units):
        peers = [r for r in equal if r.case.world_size == ranks and r.case.workload.unit == unit]
        timed = [r for r in peers if r.timed and r.timed.timing.rank_step_seconds]
        measured = [r for r in peers if r.observed and r.observed.memory.readings]
        if timed and measured:
            leanest = min(measured, key=_peak)
            peak = f"{tables.bytes_text(_peak(leanest))} at its fullest rank's peak"
            parts.append(
                f"On {ranks} ranks {_fastest([r.timed for r in timed if r.timed])}; "
                f"the leanest is {code(leanest.case.id)} ({peak})."
            )
    return " ".join(parts)


def _fastest(timed: Sequence[Record]) -> str:
    """One case, or all that are tied for it."""
    if not (ordered := fastest_of(timed)):
        return f"no case was launched often enough ({LEAST_CLAIMED} times) to be called the fastest"
    first, *tied = ordered
    best = throughput(first)
    speed = f"{best.per_second:,.0f} {best.unit}/s {tables.interval_text(best)}"
    if not tied:
        return f"the fastest correct case is {code(first.case.id)} ({speed})"
    *between, last = [code(record.case.id) for record in tied]
    listed = ", ".join([f"{code(first.case.id)} ({speed})", *between]) + f" and {last}"
    return f"the fastest correct cases are {listed}, whose intervals meet, so that none is ahead"


def _counts(found: Sequence[CaseResult], missing: Sequence[str], failed_tests: int) -> str:
    """What was judged, and how; a case that was never judged is neither right nor wrong."""
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


_TIMED = (
    "Untouched pass, after warm-up: all tokens over the time from the ranks' common start to the last rank's end. The "
    "interval (95 %) is the wider of what blocks of steps and what launches show, each in fresh processes, one after "
    "the other; of a single launch it does not say how far another may lie. Steps and launches were added until it was "
    "within ±2 %, or the budget of the case ended; a machine that changes within minutes moves it further. Steps last "
    "from the last rank's end to the next; *rank gap*: from the first rank's end of a step to the last one's, the "
    "median; *drift*: by how much the second half of a launch took longer. MFU counts 6 operations a matrix parameter "
    "and token, and full attention (PaLM, appendix B)"
)


def _peaks(records: Sequence[Record]) -> str:
    """What utilisation is of."""
    told: dict[str, set[float]] = {}
    for peak, source in (peak_flops_per_second(r) for r in records if r.timing.rank_step_seconds):
        told.setdefault(source, set()).update([peak] if peak else [])
    parts = [f"{' or '.join(f'{p / 1e9:,.4g}' for p in sorted(p))} GFLOP/s ({inline(s)})" for s, p in told.items() if p]
    return f"; the peak is {', '.join(parts)}" if parts else ""


PLANNED = (
    "What was measured beside what the planner computed when the case was run, with what adapters declare: the worst "
    "rank's error by category, and of all that the allocator counted, after a step and at the peak, less the batch "
    "that the engine is handed. `of it late`: buffers of collectives that only the backend's thread still had then. "
    "Peaks are not planned of DeepSpeed's stage 3, whose modules gather weights one by one, nor of its mixed precision."
)


_TOLD = {
    "Equivalence": "Each step is judged on its own: loss and gradients against float64 at the parameters where the "
    "run is, the update against a float64 optimizer fed the run's own gradients.",
    "Memory": "Fullest rank. Model states as held at their fullest, the rest at the instant of the peak; the verdict "
    "compares states, and on a CPU activations, of every rank with the closed form.",
    "Communication": "One step, on the rank that sends most. Bytes are full tensors; *sent* counts ring algorithms. "
    "What a backend issues can differ from what was asked for. The verdict compares the bytes of every kind and group "
    "of ranks with theory and what adapters declare, exactly, and calls where theory fixes their number.",
}


def told_of(title: str, latest: Sequence[Record]) -> str:
    """What a section's columns mean."""
    return _TOLD[title] if title in _TOLD else f"{_TIMED}{_peaks(latest)}."


def _evidence(found: Sequence[CaseResult], reading: Reading, baseline: Reading | None) -> list[str]:
    latest = [record for r in found for record in (r.observed, r.timed) if record]
    failed = [tables.failures(latest), missing_failures(reading.sessions, reading.records, conforming=False)]
    before = Baseline(results(baseline.records) if baseline else ())
    nothing = "Nothing: every case that ran reached its end and passed every suite."
    parts = ["## What failed", *(filter(None, failed) if any(failed) else [nothing])]
    sections: dict[str, Callable[[Sequence[CaseResult]], tables.Rows]] = {
        "Equivalence": functools.partial(tables.equivalence, baseline=before),
        "Memory": functools.partial(tables.memory, baseline=before),
        "Communication": communication,
        "Throughput": functools.partial(tables.speed, baseline=before),
    }
    for title, show in sections.items():
        if body := tables.case_table(show(found)):
            parts += [f"## {title}", told_of(title, latest), body]
        if title == "Throughput" and body and (warning := before.warning(found)):
            parts.insert(-1, warning)
        if title == "Memory" and (declared := tables.extra_memory(found)):
            parts += ["Declared beyond the closed form, rank 0:", tables.case_table(declared)]
        if title == "Communication" and (departed := traffic_exceptions(found)):
            parts += ["Declared exceptions from theory, rank 0:", tables.case_table(departed)]
        if title == "Memory" and (compared := planned_memory(found)):
            parts += [PLANNED, tables.case_table(compared)]
    if left_out := tables.not_judged(found):
        parts += ["## What was not judged", _NOT_JUDGED, table(left_out)]
    if any(r.skipped for r in found):
        parts += ["## Not run", tables.case_table(tables.skips(found))]
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
    environment = newest(reading.records).environment
    facts = {
        "machine": environment.machine,
        "CPUs": environment.num_cpus,
        "memory": tables.bytes_text(environment.memory_bytes),
        "system": environment.system,
        "device and backend": f"{environment.device}, {environment.backend}",
        "nodes": environment.nnodes,
        "commit": environment.commit or "unknown",
        "date": environment.date,
        **environment.versions,
    }
    commands = sorted({record.environment.command for record in reading.records})
    return [
        _OBTAINED,
        _commands(commands, command),
        table([{"what": name, "value": str(value)} for name, value in facts.items()]),
        "## Where the time went",
        table(tables.time_spent(found)),
        "A launch is one pass over one case in fresh processes; the noise floors, which each workload and "
        "precision needs once, are not in it.",
    ]
