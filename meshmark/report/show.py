"""Show one case's records in plain text."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from meshmark.errors import InputError
from meshmark.records.record import Record
from meshmark.report.table import bytes_text, one_line, visible
from meshmark.report.tables import interval_text
from meshmark.run.throughput import throughput
from meshmark.run.verdict import smallest_detectable
from meshmark.text import pluralize

_LOG_LINES = 30


def matching(records: Sequence[Record], asked: str) -> list[Record]:
    """Return the records of the case with the id `asked`, or with an id that is the only one to contain it.

    Raises `InputError` when there is none, or several.
    """
    ids = dict.fromkeys(record.case.id for record in records)
    found = [asked] if asked in ids else [case for case in ids if asked in case]
    starts = [case for case in found if case.startswith(asked)]
    found = starts if len(starts) == 1 else found
    if len(found) == 1:
        return [record for record in records if record.case.id == found[0]]
    if found:
        raise InputError(f"{asked!r} is part of {len(found)} cases: {', '.join(found[:10])}; give a longer part of one")
    if not ids:
        raise InputError(f"no record of {asked!r}: there is none of any case that can be read")
    near = difflib.get_close_matches(asked, ids, n=3, cutoff=0.3) or list(ids)[:3]
    raise InputError(f"no record of {asked!r} among {pluralize(len(ids), 'case')}; do you mean {', '.join(near)}?")


def show(records: Sequence[Record]) -> str:
    """Return text about all passes over one case."""
    parts = [line for record in records for line in ("", *_lines(record))]
    return "\n".join(visible(line) for line in [records[0].case.id, *parts]) + "\n"


def _lines(record: Record) -> Iterator[str]:
    outcome, environment = record.outcome, record.environment
    what, machine = record.conformance.scenario or record.task, f"{environment.machine}, {environment.num_cpus} CPUs"
    rank = "" if outcome.rank is None else f" on rank {outcome.rank}"
    yield f"{what}: {outcome.status}{rank}, {pluralize(record.steps, 'step')}, {record.launch.seconds:.1f} s"
    yield f"  adapter        {record.adapter}"
    yield f"  machine        {machine}, {environment.device}, {environment.backend}"
    yield f"  made           {environment.date}, commit {environment.commit or 'unknown'}, by {environment.command}"
    for verdict in record.verdicts:
        result = "cannot tell" if verdict.undecided else "passed" if verdict.passed else "FAILED"
        yield f"  {verdict.suite:<14} {result}: {one_line(verdict.summary)}"
        if "diagnosis" in verdict.evidence:
            yield f"  {'':<14} likely {one_line(str(verdict.evidence['diagnosis']))}"
        if not verdict.passed:
            facts = verdict.evidence.items()
            yield from (f"  {'':<14} {name}: {one_line(str(value))}" for name, value in facts if name != "diagnosis")
    if limits := smallest_detectable([record]):
        yield f"  smallest seen  {limits}"
    yield from _measured(record)
    for left_out in record.not_judged:
        yield f"  not judged     {one_line(left_out)}"
    for remark in record.remarks:
        yield f"  remark         {one_line(remark)}"
    if outcome.message:
        yield f"  message        {one_line(outcome.message)}"
    for line in (outcome.traceback or outcome.log_tail).splitlines()[-_LOG_LINES:]:
        yield f"    {line}"
    for number, stack in outcome.stacks.items():
        yield f"  stack of rank {number}"
        yield from (f"    {line}" for line in stack.splitlines())


def _measured(record: Record) -> Iterator[str]:
    if losses := record.training.losses:
        yield f"  losses         {' '.join(f'{loss:.4f}' for loss in losses[:12])}{' ...' if len(losses) > 12 else ''}"
    for rank, reading in zip(record.ranks, record.memory.readings, strict=False):
        peak = ", ".join(
            f"{name.replace('_', ' ')} {bytes_text(getattr(reading.peak, name))}"
            for name in ("parameters", "gradients", "optimizer_states", "activations", "communication", "other")
        )
        parts = peak if reading.ends_known else "of what is not known"
        yield f"  peak, rank {rank:<3} {bytes_text(reading.peak.total)}: {parts}"
    for rank, traffic in zip(record.ranks, record.traffic.readings, strict=False):
        sent = ", ".join(f"{c.count} {c.kind} {bytes_text(c.num_bytes)}" for c in traffic.asked) or "nothing"
        yield f"  sent, rank {rank:<3} {sent}"
    if record.timing.rank_step_seconds:
        rate = throughput(record)
        yield f"  rate           {rate.per_second:,.0f} {rate.unit}/s {interval_text(rate)}"
