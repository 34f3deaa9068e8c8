"""What records do not tell: tests that failed, with the commands that repeat them, and tests that were not run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshmark.report.tables import fence
from meshmark.run.record import Record
from meshmark.run.session import Attempt, Ending, Session, standing

_CHARACTERS = 300


def unrecorded(sessions: Iterable[Session], records: Iterable[Record], *, conforming: bool) -> list[str]:
    """Cases of tests that failed, or were not run to their end, of which there is no record at all."""
    known = {(record.conformance.base or record.case).id for record in records}
    bad = (Ending.FAILED, Ending.UNFINISHED)
    cases = (attempt.case for attempt, _ in standing(sessions, conforming=conforming) if attempt.ending in bad)
    return [case for case in dict.fromkeys(cases) if case not in known]


def failing(sessions: Iterable[Session], *, conforming: bool) -> list[Attempt]:
    return [attempt for attempt, _ in standing(sessions, conforming=conforming) if attempt.ending is Ending.FAILED]


def untold(sessions: Sequence[Session], records: Sequence[Record], *, conforming: bool) -> str:
    """Every test that failed, and what was not run; empty when all ended well."""
    stand = standing(sessions, conforming=conforming)
    failed = failing(sessions, conforming=conforming)
    parts = [_failures(failed)] if failed else []
    for session in {each.session: each for each in sessions}.values():
        left = [a for a, by in stand if by.session == session.session and a.ending is Ending.UNFINISHED]
        if session.exit_code is None:  # its tests ran as far as their records go
            left = [a for a in left if a.case in unrecorded(sessions, records, conforming=conforming)]
        if left:
            parts.append(_unfinished(session, left))
    return "\n\n".join(parts)


def _failures(failed: Sequence[Attempt]) -> str:
    lines = [f"- `{attempt.test}`: {_first_line(attempt.message)}" for attempt in failed]
    commands = "\n".join(attempt.command for attempt in failed)
    marks = fence(commands)
    told = f"{len(failed)} tests failed:" if len(failed) > 1 else "1 test failed:"
    return "\n".join([told, "", *lines, "", "Again, one at a time, by:", "", marks, commands, marks])


def _unfinished(session: Session, left: Sequence[Attempt]) -> str:
    how = "did not end (killed?)" if session.exit_code is None else f"ended early, with exit code {session.exit_code}"
    marks = fence(session.command)
    lines = [f"- `{attempt.test}`: unfinished" for attempt in left]
    return "\n".join([f"This run {how}:", "", marks, session.command, marks, "", *lines])


def _first_line(text: str) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no message")
    return line if len(line) <= _CHARACTERS else f"{line[:_CHARACTERS]} ..."
