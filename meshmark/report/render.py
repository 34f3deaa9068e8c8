"""The report: the answer first, then the evidence, then how it was obtained."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from meshmark.judge.yardstick import FALSE_ALARMS
from meshmark.report import tables
from meshmark.report.planned import planned_memory
from meshmark.report.plots import memory_plot, throughput_plot
from meshmark.report.results import CaseResult, results
from meshmark.run.record import Reading, Record
from meshmark.run.throughput import throughput


def write_report(reading: Reading, path: Path, command: str, baseline: Reading | None = None) -> None:
    """Markdown at `path`, and its pictures beside it, named after it. `command` is what made the report; with
    a `baseline`, times are compared with its."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = results(reading.records)
    pictures = {
        "Memory at the peak, by category": (memory_plot, path.with_name(f"{path.stem}-memory.svg")),
        "Throughput, with its spread": (throughput_plot, path.with_name(f"{path.stem}-throughput.svg")),
    }
    drawn = [f"![{title}]({file.name})" for title, (draw, file) in pictures.items() if draw(found, file)]
    path.write_text(
        "\n\n".join(
            [*_answer(found, reading), *drawn, *_evidence(found, reading, baseline), *_origin(found, reading, command)]
        )
        + "\n"
    )


def _answer(found: Sequence[CaseResult], reading: Reading) -> list[str]:
    environment = reading.records[-1].environment
    return [
        f"# Meshmark report: {environment.machine}, {environment.num_cpus} CPUs, {environment.device}",
        f"{_headline(found)}",
        tables.answer(found),
        "*correct*: every loss, gradient norm, gradient and parameter of every step stands no further "
        "from a float64 single-process truth than rounding in its precision carries a correct run; the factor on that "
        f"noise is such that a correct case fails with probability {FALSE_ALARMS:g}. "
        "*detects*: the smallest scaling of any single parameter's gradient that this verdict would have caught. "
        "*peak / rank*: exact bytes alive on the fullest rank. Memory and speed of a run that is wrong, "
        "or that keeps narrower states than its precision promises, are struck out: they are no result.",
    ]


def _headline(found: Sequence[CaseResult]) -> str:
    ran = [r for r in found if not r.skipped]
    right = [r for r in ran if r.correct]
    equal = [r for r in right if r.comparable]
    lines = [f"**{len(right)} of {len(ran)} cases train correctly**"]
    if wrong := [r.case.id for r in ran if r.correct is False]:
        lines.append(f"wrong or failed: {', '.join(f'`{w}`' for w in wrong)}")
    if unjudged := sum(r.correct is None for r in ran):
        lines.append(f"{unjudged} not judged")
    if skipped := len(found) - len(ran):
        lines.append(f"{skipped} not run, with reasons below")
    parts = ["; ".join(lines) + "."]
    units = sorted({r.case.workload.unit for r in right}, reverse=True)
    for ranks, unit in itertools.product(sorted({r.case.world_size for r in right if r.case.world_size > 1}), units):
        peers = [r for r in equal if r.case.world_size == ranks and r.case.workload.unit == unit]
        timed = [r for r in peers if r.timed and r.timed.rank_step_seconds]
        measured = [r for r in peers if r.observed and r.observed.memory]
        if timed and measured:
            fastest = max(timed, key=lambda r: throughput(r.timed).per_second if r.timed else 0.0)
            leanest = min(measured, key=_peak)
            speed = throughput(fastest.timed).per_second if fastest.timed else 0.0
            parts.append(
                f"On {ranks} ranks the fastest correct case is `{fastest.case.id}` ({speed:,.0f} {unit}/s), "
                f"the leanest `{leanest.case.id}` ({tables.bytes_text(_peak(leanest))} at its fullest rank's peak)."
            )
    return " ".join(parts)


def _peak(result: CaseResult) -> int:
    return max(m.peak.total for m in result.observed.memory) if result.observed else 0


_PLANNED = (
    "What was measured beside what the planner computes today, with what adapters declare: the worst rank's error by "
    "category, and the peak of the fullest stage without what nobody named. Ranks that hold the same by plan differ at "
    "the peak by buffers of collectives that gloo's threads release late, or where the meter cannot see it: the error "
    "is that of the rank that holds least beyond its plan."
)


def _evidence(found: Sequence[CaseResult], reading: Reading, baseline: Reading | None) -> list[str]:
    latest = [record for r in found for record in (r.observed, r.timed) if record]
    failed = tables.failures(latest)
    parts = ["## What failed", failed or "Nothing: every case that ran reached its end and passed every suite."]
    sections: dict[str, tuple[Callable[[Sequence[CaseResult]], str], str]] = {
        "Equivalence": (
            tables.equivalence,
            "Each step is judged on its own: loss and gradients against float64 at the parameters where the run is, "
            "the update against a float64 optimizer fed the run's own gradients.",
        ),
        "Memory": (
            tables.memory,
            "Fullest rank. Model states as held at their fullest, the rest at the instant of the peak; the verdict "
            "compares states, and on a CPU activations, of every rank with the closed form.",
        ),
        "Communication": (
            tables.communication,
            "One step, on the rank that sends most. Bytes are full tensors; *sent* counts ring algorithms. What a "
            "backend issues can differ from what was asked for.",
        ),
        "Throughput": (
            functools.partial(tables.speed, baseline=results(baseline.records) if baseline else ()),
            "Untouched pass, slowest rank of each step, after warm-up. MFU counts 6 operations a matrix parameter and "
            "token, and full attention (PaLM, appendix B).",
        ),
    }
    for title, (table, text) in sections.items():
        if body := table(found):
            parts += [f"## {title}", text, body]
        if title == "Memory" and (declared := tables.remainders(found)):
            parts += ["Declared beyond the closed form, rank 0:", declared]
        if title == "Memory" and (compared := planned_memory(found)):
            parts += [_PLANNED, compared]
    if any(r.skipped for r in found):
        parts += ["## Not run", tables.skips(found)]
    if reading.complaints:
        parts += ["## Lines that could not be read", "\n".join(f"- {c}" for c in reading.complaints)]
    return parts


def _origin(found: Sequence[CaseResult], reading: Reading, command: str) -> list[str]:
    last: Record = reading.records[-1]
    environment = last.environment
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
        "## How it was obtained",
        "Records by:\n\n```\n" + "\n".join(commands) + "\n```\n\nThis page by:\n\n```\n" + command + "\n```",
        tables.markdown([{"what": name, "value": str(value)} for name, value in facts.items()]),
        "## Where the time went",
        tables.time_spent(found),
        "A launch is one pass over one case in fresh processes; the noise floors, which each workload and "
        "precision needs once, are not in it.",
    ]
