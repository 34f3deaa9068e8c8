"""Sessions of pytest: what was asked for, and how each test ended, including tests without a record."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class Ending(StrEnum):
    """How a test ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    UNFINISHED = "unfinished"
    """Not run to its end, because the session ended before."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One test of a session."""

    test: str
    """Node id in pytest."""
    case: str
    """Id of its case, or of the case that its conformance scenarios vary."""
    conforming: bool
    """True if the test belongs to the conformance suite."""
    ending: Ending = Ending.UNFINISHED
    message: str = ""
    """Message of a failed test."""
    command: str = ""
    """Command that runs a failed test again, alone."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """A run of pytest over cases. Its line is written when it begins, and again, complete, when it ends."""

    schema: int
    session: str
    """Name of the session. Both of its lines have it, and no other session."""
    command: str
    device: str
    corpus: str | None = None
    exit_code: int | None = None
    """Exit code of pytest, or None until it has ended."""
    attempts: list[Attempt] = field(default_factory=list)


def by_defect(attempts: Iterable[Attempt]) -> list[list[Attempt]]:
    """Group failed attempts by defect.

    Failures of one case with the same first line belong together, such as all suites of a pass that crashed.
    """
    found: dict[tuple[str, str], list[Attempt]] = {}
    for attempt in attempts:
        if attempt.ending is Ending.FAILED:
            found.setdefault((attempt.case, attempt.message.partition("\n")[0]), []).append(attempt)
    return list(found.values())


def latest_attempts(sessions: Iterable[Session], *, conforming: bool) -> list[tuple[Attempt, Session]]:
    """Return the latest attempt of each test, with its session.

    An unfinished attempt counts only if no session finished the test.
    """
    found: dict[tuple[str, str, str | None], tuple[Attempt, Session]] = {}
    for session in {each.session: each for each in sessions}.values():
        for attempt in session.attempts:
            key = attempt.test, session.device, session.corpus
            if attempt.conforming is conforming and (attempt.ending is not Ending.UNFINISHED or key not in found):
                found[key] = attempt, session
    return list(found.values())
