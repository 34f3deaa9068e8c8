"""One session under faults, and whether what it left is right."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos import processes
from benchmarks.chaos.faults import Ended, Fault, Filled, ResultsGone
from benchmarks.chaos.session import Session
from meshmark.records.record import Record, Status
from meshmark.records.record_file import CUT_OFF, Ending, Reading, read_records

_START_SECONDS = 120.0
"""For pytest to collect, and for a server to import a framework."""
_CHILD_SECONDS = 5.0
"""For processes that ranks started to be gone, once their case has its record."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One fault and what became of it."""

    kind: str
    case: str
    """Its session and adapter."""
    setting: str = "two nodes"
    survived: bool
    """It has its record, what came before and after it is whole, nothing is left, and nobody waited too long."""
    named: bool
    seconds: float
    """Until its record, or until all of its run had ended."""
    complaint: str = ""


@dataclass(kw_only=True)
class Results:
    """Results of one session, or of many."""

    trials: list[Trial] = field(default_factory=list)
    unharmed: int = 0
    """Cases to which nothing was done."""
    resumed: int = 0
    """Runs that a fault ended, and that `--resume` completed."""
    complaints: list[str] = field(default_factory=list)
    """Complaints that belong to no fault."""


def run_session(session: Session, plan: Sequence[Fault | None], draw: random.Random) -> Results:
    """Run a session. `plan` has a fault or None for each of its cases; one that ends the session comes last."""
    results, struck = Results(), dict[str, Fault]()
    session.start()
    try:
        for name, fault in zip(session.names, plan, strict=False):
            if not session.wait(lambda name=name: _came(session, name), _START_SECONDS):  # type: ignore[misc]
                results.complaints.append(f"{session.mark} {name}: did not begin; {session.output()[-600:]}")
                break
            if name not in session.begun():
                struck[name] = _harmed_by(list(struck.values()), session, name, results)
                continue
            session.current = name
            if fault is not None and not session.is_over and fault.strike(session, draw):
                struck[name] = fault
                if fault.ends_session:
                    break
            if not session.wait(lambda name=name: name in session.recorded(), session.latest_seconds):  # type: ignore[misc]
                results.complaints.append(f"{session.mark} {name}: no record in time after {fault and fault.kind}")
                break
            if name in struck:
                results.trials.append(_trial(session, name, struck[name]))
                struck[name].undo(session)
            session.servers_before = frozenset(processes.servers_of(session.pid))
            if session.setting.takes_rank_faults:
                results.complaints += _children_left(session, name)
        last = next((fault for fault in struck.values() if fault.ends_session), None)
        quick = session.await_end(session.latest_seconds)
        seconds = time.monotonic() - last.struck if last else 0.0
        if not quick:
            left = [processes.describe(pid) for pid in processes.marked(session.mark)]
            results.complaints.append(f"{session.mark}: left processes: {'; '.join(left)}")
    finally:
        session.end()
    _check(session, results, struck)
    if last:
        results.trials.append(_last_trial(session, last, seconds, survived=quick))
        if not isinstance(last, ResultsGone):
            results.complaints += _resume(session, set(struck), draw)
            results.resumed += 1
    return results


def _harmed_by(before: Sequence[Fault], session: Session, name: str, results: Results) -> Fault:
    """Return the fault of an earlier case that kept this one from beginning, as a disk that is still full does."""
    (record,) = [r for r in session.reading().records if r.adapter.endswith(f":{name}")]
    if not before or not isinstance(before[-1], Filled) or record.outcome.status is not Status.NO_SPACE:
        results.complaints.append(f"{session.mark} {name}: did not begin, and was {record.outcome.status}")
    return before[-1] if before else Filled(kind="none")


def _came(session: Session, name: str) -> bool:
    """Return whether its case has begun, or was recorded without."""
    return name in session.begun() or name in session.recorded()


def _trial(session: Session, name: str, fault: Fault) -> Trial:
    seconds = time.monotonic() - fault.struck
    (record,) = [r for r in session.reading().records if r.adapter.endswith(f":{name}")]
    named = fault.is_named(record.outcome)
    got = f"got {record.outcome.status} of rank {record.outcome.rank}: {record.outcome.message[:300]!r}"
    late = "" if seconds < session.latest_seconds else f"{seconds:.0f} s to notice"
    return Trial(
        kind=fault.kind,
        case=f"{session.folder.name} {name}",
        setting=session.setting.name,
        survived=not late,
        named=named,
        seconds=seconds,
        complaint=late or ("" if named else f"expected {fault.expected}, {got}, {record.outcome.peers}"),
    )


def _children_left(session: Session, name: str) -> list[str]:
    """Complain of processes that ranks of this case started, and that outlive it."""
    deadline = time.monotonic() + _CHILD_SECONDS
    while left := processes.marked(session.mark, child=name):
        if time.monotonic() > deadline:
            described = "; ".join(map(processes.describe, left))
            return [f"{session.mark} {name}: processes of its ranks are left: {described}"]
        time.sleep(0.1)
    return []


def _check(session: Session, results: Results, struck: dict[str, Fault]) -> None:
    """Unharmed cases are correct, no line is broken, what began has its record, and no file is left."""
    reading = read_all(session.folder)
    by_name = {record.adapter.rpartition(":")[2]: record for record in reading.records}
    torn = [complaint for complaint in reading.complaints if CUT_OFF in complaint]
    if len(torn) == 1 and any(isinstance(f, Ended) and f.number is signal.SIGKILL for f in struck.values()):
        reading.complaints.remove(torn[0])  # it was killed while it wrote this line, and the reading says so
    results.complaints += [f"{session.mark}: {complaint}" for complaint in reading.complaints]
    ended = [name for name, fault in struck.items() if fault.ends_session]
    listed = {attempt.case: attempt for line in reading.sessions for attempt in line.attempts}
    for name in session.begun():
        if name in by_name and name not in struck:
            results.unharmed += 1
            results.complaints += [f"{session.mark} {name}: unharmed, but {why}" for why in _wrong(by_name[name])]
        if name not in by_name and not (name in ended and any(c.startswith(name.lower()) for c in listed)):
            results.complaints.append(f"{session.mark} {name}: lost: it began, and has neither record nor session")
    results.complaints += temporary_left(session)


def temporary_left(session: Session) -> list[str]:
    """Complain of Meshmark's temporary files, if any is left."""
    left = [path.name for path in session.temporary.iterdir() if path.name.startswith("meshmark-")]
    return [f"{session.mark}: left temporary files {left}"] if left else []


def read_all(folder: Path) -> Reading:
    """Read every file of records that a run left, wherever its results went."""
    readings = [read_records(path) for path in sorted(folder.glob("*/records*.jsonl")) if path.stat().st_size]
    return Reading(
        records=[record for reading in readings for record in reading.records],
        complaints=[complaint for reading in readings for complaint in reading.complaints],
        sessions=[line for reading in readings for line in reading.sessions],
    )


def _wrong(record: Record) -> list[str]:
    if record.outcome.status is not Status.OK:
        return [f"{record.outcome.status} of rank {record.outcome.rank}: {record.outcome.message[:300]}"]
    return [verdict.summary for verdict in record.verdicts if not verdict.passed]


def _last_trial(session: Session, fault: Fault, seconds: float, *, survived: bool) -> Trial:
    assert isinstance(fault, Ended | ResultsGone) and session.process
    code, output = session.process.returncode, session.output()
    named = code == fault.exit_code or code in fault.codes_of_the_end
    if isinstance(fault, ResultsGone):
        named = named and fault.words in output
    elif code == 2:
        # What was under way is told, unless the last case had its record by then.
        endings = [a.ending for s in read_all(session.folder).sessions for a in s.attempts]
        told = fault.codes_of_the_end or fault.when in ("writing", "ending") or Ending.UNFINISHED in endings
        named = named and bool(told)
    return Trial(
        kind=fault.kind,
        case=session.folder.name,
        setting=session.setting.name,
        survived=survived,
        named=named,
        seconds=seconds,
        complaint="" if named else f"expected {fault.expected}, got exit code {code}: {output[-500:]}",
    )


def _resume(session: Session, struck: set[str], draw: random.Random) -> list[str]:
    """Complete a run that was ended, by `--resume`, at once or in two shards, and say what is wrong then.

    What was written stays as it is, byte for byte. Every case has a record, and those to which nothing was done are
    correct.
    """
    path = session.results / "records.jsonl"
    before = path.read_bytes() if path.exists() else b""
    parts: list[list[str]] = [["--shard", f"{k}/2"] for k in (1, 2)] if draw.random() < 0.5 else [[]]
    complaints = []
    for part in parts:
        session.start(options=["--resume", *part])
        limit = _START_SECONDS + len(session.names) * session.limit_seconds
        if not session.await_end(limit):
            complaints.append(f"{session.mark}: --resume {' '.join(part)} had not ended after {limit:.0f} s")
        session.end()
        if session.process and session.process.returncode not in (0, 1):
            complaints.append(
                f"{session.mark}: --resume {' '.join(part)} ended with {session.process.returncode}: "
                f"{session.output()[-500:]}"
            )
    after = path.read_bytes() if path.exists() else b""
    if not after.startswith(before):
        complaints.append(f"{session.mark}: --resume changed what was written before")
    newest = {record.adapter.rpartition(":")[2]: record for record in session.reading().records}
    for name in session.names:
        if name not in newest:
            complaints.append(f"{session.mark} {name}: no record after --resume")
        elif name not in struck or newest[name].outcome.status.outside:
            complaints += [f"{session.mark} {name}: resumed, but {why}" for why in _wrong(newest[name])]
    return complaints + temporary_left(session)
