"""Texts of failing tests in at most ten lines: what, the likely cause, how much, and where.

The plugin adds the command that repeats the test. Everything, including stacks and logs, is in the record: `meshmark
show CASE`.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence

from meshmark.records.record import Outcome, Record, Verdict
from meshmark.report.table import visible
from meshmark.text import clip, pluralize

MOST_LINES = 8
"""Lines of the texts made here. Two more lines say how to repeat the test and where the rest is."""
WORSE = "worse than baseline"
"""Phrase for failures that no record shows on its own."""
_CHARACTERS = 400
_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+),? in (?P<name>.*)')
_OWN = re.compile(r"(^|/)meshmark/(?!adapters?/|suites/|reference/|algorithms/)")
"""Files of Meshmark that run around an engine: hooks and meters stand between a framework's frames."""
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})


def of_outcome(record: Record) -> str:
    """Return the text for a pass that did not end."""
    outcome = record.outcome
    where = "" if outcome.rank is None else f" on rank {outcome.rank}"
    first, *more = outcome.message.splitlines() or [""]
    rows = [("", line.strip()) for line in more[:2] if line.strip()]
    return _text(f"{record.case.id}: {outcome.status}{where}: {first}", [*rows, *_places(outcome)])


def _places(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """Yield where it failed: an exception's innermost frame outside Meshmark's meters and launchers, each rank's frame
    if ranks hang, or else the end of the log.
    """
    if found := _frames(outcome.traceback):
        yield "where", next((frame for frame in reversed(found) if not _OWN.search(frame)), found[-1])
    yield from list(_unmatched_collectives(outcome.stacks))[:2]
    for rank, stack in list(outcome.stacks.items())[:4]:
        yield f"rank {rank}", " < ".join(_innermost(stack)) or "no Python frame"
    if not outcome.traceback and not outcome.stacks:
        for line in [line for line in outcome.log_tail.splitlines() if line.strip()][-3:]:
            yield "log", line


def _frames(text: str) -> list[str]:
    return [f"{each['file']}:{each['line']} in {each['name']}" for each in _FRAME.finditer(text)]


def _innermost(stack: str) -> list[str]:
    """Return the innermost frame of a stack, and the innermost one outside libraries.

    Of several threads, faulthandler writes the one that was asked, the rank's main thread, last.
    """
    found = _frames(stack.rpartition("Current thread")[2])
    own = [frame for frame in found[1:] if not frame.startswith(_LIBRARIES)]
    return [*found[:1], *own[:1]]


_COLLECTIVE = re.compile(r"^(\S+), number (\d+) of group (.*), of (.*): \w+$", re.MULTILINE)
"""A line of `flight_recorder.under_way`: call, number, group, tensors. Calls of sends and receives hold a space."""
_OF_EQUAL_SIZES = ("all_reduce", "allreduce", "reduce_scatter", "all_gather", "broadcast")
"""Collectives to which every rank of a group gives tensors of the same sizes."""


def _unmatched_collectives(stacks: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    """Yield the first collective of each group on which its ranks do not agree: other calls or sizes under one number,
    or a number that not every rank has reached."""
    calls, reached = dict[tuple[int, str], dict[int, str]](), dict[str, dict[int, int]]()
    for rank, stack in stacks.items():
        for call, number, group, tensors in _COLLECTIVE.findall(stack):
            described = f"{call} of {tensors}" if any(kind in call for kind in _OF_EQUAL_SIZES) else call
            calls.setdefault((int(number), group), {})[rank] = described
            reached.setdefault(group, {})[rank] = int(number)
    for (number, group), by_rank in sorted(calls.items()):
        if group not in reached:
            continue
        where = f"collective {number} of group {group}"
        each = ", ".join(f"{described} on rank {rank}" for rank, described in sorted(by_rank.items()))
        if len(set(by_rank.values())) > 1:
            yield "differs", f"{where}: {each}"
            del reached[group]
        elif behind := sorted(rank for rank, last in reached[group].items() if last < number):
            yield "missing", f"{where}: {each}, not called on rank {', '.join(map(str, behind))}"
            del reached[group]


def of_verdict(record: Record, verdict: Verdict) -> str:
    """Return the text for a suite's verdict that is not good. The hints come after the semicolons of its summary."""
    facts, (summary, *mend) = verdict.evidence, verdict.summary.split("; ")
    likely = str(facts.get("diagnosis", ""))
    rows = [("how much", summary)] if likely else []
    if begins := facts.get("begins"):
        rows.append(("begins", str(begins)))
    rows += [*_of_tensors(facts), *_of_bytes(facts), *(("mend", line) for line in mend)]
    return _text(f"{record.case.id}: {likely or summary}", rows)


def _of_tensors(facts: Mapping[str, float | int | str]) -> Iterator[tuple[str, str]]:
    if "worst_quantity" not in facts:
        return
    yield "where", f"{facts['worst_quantity']}, step {facts['worst_step']}: the worst of those that are off"
    compared = pluralize(int(facts["compared"]), "comparison")
    yield "off", f"{facts['failing']} of {compared}; {facts['factor']:.3g} x noise is allowed"


def _of_bytes(facts: Mapping[str, float | int | str]) -> Iterator[tuple[str, str]]:
    if "measured_bytes" not in facts or "planned_bytes" not in facts:
        return
    measured, planned = float(facts["measured_bytes"]), float(facts["planned_bytes"])
    group = f" among ranks {facts['ranks']}" if "ranks" in facts else ""
    yield "where", f"{facts.get('category') or facts.get('kind')} on rank {facts['rank']}{group}"
    yield "how much", f"{measured - planned:+,.0f} bytes of {planned:,.0f}"
    if facts.get("declared"):
        yield "declared", str(facts["declared"])


def of_changes(case: str, folder: str, changes: Sequence[str]) -> str:
    """Return the text for changes that are worse than a baseline.

    Each change names its metric, both sides, and where.
    """
    first, *others = changes
    rows = [("also", change) for change in others[: MOST_LINES - 2]]
    if len(others) > len(rows):
        rows.append(("also", f"{len(others) - len(rows)} more"))
    return _text(f"{case}: {WORSE} {folder}: {first}", rows)


def _text(first: str, rows: Sequence[tuple[str, str]]) -> str:
    lines = [clip(visible(first), _CHARACTERS)]
    lines += [row(name, text) for name, text in rows[: MOST_LINES - 1]]
    return "\n".join(lines)


def row(name: str, text: str) -> str:
    """Return one line below the first. Commands are not clipped, because they are pasted."""
    shown = visible(text)
    return f"  {name:<10} {shown if name == 'again' else clip(shown, _CHARACTERS)}"
