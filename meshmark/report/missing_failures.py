"""Failures that records do not show: failed tests, with commands that repeat them, and tests that were not run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshmark.records.record import Record
from meshmark.records.record_file import Attempt, Ending, Session, by_defect, latest_attempts
from meshmark.report.table import block, code, inline
from meshmark.text import pluralize

_CHARACTERS = 500


def unrecorded(sessions: Iterable[Session], records: Iterable[Record], *, conforming: bool) -> list[str]:
    """Return cases of tests that failed or did not finish, and that have no record."""
    known = {(record.conformance.base or record.case).id for record in records}
    bad = (Ending.FAILED, Ending.UNFINISHED)
    cases = (attempt.case for attempt, _ in latest_attempts(sessions, conforming=conforming) if attempt.ending in bad)
    return [case for case in dict.fromkeys(cases) if case not in known]


def failing(sessions: Iterable[Session], *, conforming: bool) -> list[Attempt]:
    return [
        attempt for attempt, _ in latest_attempts(sessions, conforming=conforming) if attempt.ending is Ending.FAILED
    ]


def missing_failures(sessions: Sequence[Session], records: Sequence[Record], *, conforming: bool) -> str:
    """Return text about every failed test and every unfinished one. Empty if all ended well."""
    stand = latest_attempts(sessions, conforming=conforming)
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
    defects = by_defect(failed)
    lines = [failure_line(*same, told=_first_line(same[0].message)) for same in defects]
    told = f"{pluralize(len(failed), 'test')} failed:"
    commands = block("\n".join(one.command for one, *_ in defects if one.command))
    return "\n".join([told, "", *lines, "", "Again, one at a time, by:", "", commands])


def failure_line(one: Attempt, *others: Attempt, told: str) -> str:
    """Return a list item: a test, its text `told`, and the tests that failed by the same defect."""
    also = f"; the same: {', '.join(code(other.test) for other in others)}" if others else ""
    return f"- {code(one.test)}: {inline(told, _CHARACTERS)}{also}"


def _unfinished(session: Session, left: Sequence[Attempt]) -> str:
    how = "did not end (killed?)" if session.exit_code is None else f"ended early, with exit code {session.exit_code}"
    lines = [f"- {code(attempt.test)}: unfinished" for attempt in left]
    return "\n".join([f"This run {how}:", "", block(session.command), "", *lines])


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")
