"""One session under faults, and whether what it left is right."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.chaos import processes
from benchmarks.chaos.faults import Ended, Fault, Filled, ResultsGone
from benchmarks.chaos.session import PATIENCE_SECONDS, Session
from meshmark.records.record import Record, Status
from meshmark.records.record_file import Reading, read_records
from meshmark.records.session import Ending

_START_SECONDS = 120.0
"""For pytest to collect, and for a server to import a framework."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One fault and what became of it."""

    kind: str
    case: str
    """Its session and adapter."""
    survived: bool
    """It has its record, what came before and after it is whole, nothing is left, and nobody waited too long."""
    named: bool
    seconds: float
    """Until its record, or until all of its run had ended."""
    complaint: str = ""


@dataclass(kw_only=True)
class Found:
    """What one session came to."""

    trials: list[Trial] = field(default_factory=list)
    unharmed: int = 0
    """Cases that nothing was done to."""
    complaints: list[str] = field(default_factory=list)
    """What was wrong that belongs to no fault."""


def run_session(session: Session, plan: Sequence[Fault | None], draw: random.Random) -> Found:
    """`plan`: a fault, or none, for each of its cases; one that ends the session comes last."""
    found, struck = Found(), dict[str, Fault]()
    session.start()
    try:
        for name, fault in zip(session.names, plan, strict=False):
            if not session.wait(lambda name=name: _came(session, name), _START_SECONDS):  # type: ignore[misc]
                found.complaints.append(f"{session.mark} {name}: did not begin; {session.output()[-600:]}")
                break
            if name not in session.begun():
                struck[name] = _harmed_by(list(struck.values()), session, name, found)
                continue
            if fault is not None and fault.strike(session, draw):
                struck[name] = fault
                if fault.ends_session:
                    break
            if not session.wait(lambda name=name: name in session.recorded(), session.limit_seconds + PATIENCE_SECONDS):  # type: ignore[misc]
                found.complaints.append(f"{session.mark} {name}: no record in time after {fault and fault.kind}")
                break
            if name in struck:
                found.trials.append(_trial(session, name, struck[name]))
                struck[name].undo(session)
        last = next((fault for fault in struck.values() if fault.ends_session), None)
        quick = session.await_end(session.limit_seconds + PATIENCE_SECONDS)
        seconds = time.monotonic() - last.struck if last else 0.0
        if not quick:
            found.complaints.append(f"{session.mark}: left processes {processes.marked(session.mark)}")
    finally:
        session.end()
    _check(session, found, struck)
    if last:
        found.trials.append(_last_trial(session, last, seconds, survived=quick))
    return found


def _harmed_by(before: Sequence[Fault], session: Session, name: str, found: Found) -> Fault:
    """The fault of an earlier case that kept this one from beginning, which a disk that is still full does."""
    (record,) = [r for r in session.reading().records if r.adapter.endswith(f":{name}")]
    if not before or not isinstance(before[-1], Filled) or record.outcome.status is not Status.NO_SPACE:
        found.complaints.append(f"{session.mark} {name}: did not begin, and was {record.outcome.status}")
    return before[-1] if before else Filled(kind="none")


def _came(session: Session, name: str) -> bool:
    """Whether its case has begun, or was recorded without."""
    return name in session.begun() or name in session.recorded()


def _trial(session: Session, name: str, fault: Fault) -> Trial:
    seconds = time.monotonic() - fault.struck
    (record,) = [r for r in session.reading().records if r.adapter.endswith(f":{name}")]
    named = fault.named(record.outcome)
    got = f"got {record.outcome.status} of rank {record.outcome.rank}: {record.outcome.message[:300]!r}"
    late = "" if seconds < session.limit_seconds + PATIENCE_SECONDS else f"{seconds:.0f} s to notice"
    return Trial(
        kind=fault.kind,
        case=f"{session.folder.name} {name}",
        survived=not late,
        named=named,
        seconds=seconds,
        complaint=late or ("" if named else f"expected {fault.expected}, {got}"),
    )


def _check(session: Session, found: Found, struck: dict[str, Fault]) -> None:
    """Unharmed cases are correct, no line is broken, what began has its record, and no file is left."""
    reading = _all_readings(session)
    by_name = {record.adapter.rpartition(":")[2]: record for record in reading.records}
    found.complaints += [f"{session.mark}: {complaint}" for complaint in reading.complaints]
    ended = [name for name, fault in struck.items() if fault.ends_session]
    listed = {attempt.case: attempt for line in reading.sessions for attempt in line.attempts}
    for name in session.begun():
        if name in by_name and name not in struck:
            found.unharmed += 1
            found.complaints += [f"{session.mark} {name}: unharmed, but {why}" for why in _wrong(by_name[name])]
        if name not in by_name and not (name in ended and any(c.startswith(name.lower()) for c in listed)):
            found.complaints.append(f"{session.mark} {name}: lost, for it has begun and has neither record nor session")
    left = [path.name for path in session.temporary.iterdir() if path.name.startswith("meshmark-")]
    found.complaints += [f"{session.mark}: left temporary files {left}"] if left else []


def _all_readings(session: Session) -> Reading:
    """Of every records file that the run left, wherever its folder went."""
    found = [read_records(path) for path in sorted(session.folder.glob("*/records*.jsonl")) if path.stat().st_size]
    return Reading(
        records=[record for reading in found for record in reading.records],
        complaints=[complaint for reading in found for complaint in reading.complaints],
        sessions=[line for reading in found for line in reading.sessions],
    )


def _wrong(record: Record) -> list[str]:
    if record.outcome.status is not Status.OK:
        return [f"{record.outcome.status} of rank {record.outcome.rank}: {record.outcome.message[:300]}"]
    return [verdict.summary for verdict in record.verdicts if not verdict.passed]


def _last_trial(session: Session, fault: Fault, seconds: float, *, survived: bool) -> Trial:
    assert isinstance(fault, Ended | ResultsGone) and session.process
    code, output = session.process.returncode, session.output()
    named = code == fault.exit_code
    if isinstance(fault, ResultsGone):
        named = named and fault.words in output
    elif code == 2:
        endings = [a.ending for s in _all_readings(session).sessions for a in s.attempts]
        named = named and Ending.UNFINISHED in endings
    return Trial(
        kind=fault.kind,
        case=session.folder.name,
        survived=survived,
        named=named,
        seconds=seconds,
        complaint="" if named else f"expected {fault.expected}, got exit code {code}: {output[-500:]}",
    )
