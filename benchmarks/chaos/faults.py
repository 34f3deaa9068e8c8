"""What is done to a session, and by what its record must call it."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos import processes
from benchmarks.chaos.processes import Rank
from benchmarks.chaos.session import PATIENCE_SECONDS, Session
from meshmark.records.record import Outcome, Status

SPREAD_SECONDS = 0.7
"""From the start of its ranks a case is struck at any time within so long: about as long as it takes."""


@dataclass(kw_only=True)
class Fault:
    """One thing that happens to one case."""

    kind: str
    struck: float = 0.0
    """When, on the monotonic clock."""
    victims: list[int] = field(default_factory=list)
    """Ranks, where some were chosen."""

    ends_session = False
    expected = ""
    """In words, for a complaint."""

    def strike(self, session: Session, draw: random.Random) -> bool:
        """Do it while the case's ranks run; False when they were too quick, so that nothing was done."""
        raise NotImplementedError

    def named(self, outcome: Outcome) -> bool:
        """Whether the record calls it by its name."""
        raise NotImplementedError

    def undo(self, session: Session) -> None:
        """Once the case has its record."""

    def _find(self, session: Session, draw: random.Random, *, num_ranks: int = 2) -> list[Rank]:
        """The ranks of the case that has just begun, some time later; empty when they are done by then."""
        recorded = len(session.recorded())
        session.wait(
            lambda: len(session.ranks()) >= num_ranks or len(session.recorded()) > recorded, session.limit_seconds
        )
        time.sleep(draw.uniform(0.0, SPREAD_SECONDS))
        found = session.ranks()
        whole = len(found) == num_ranks and not any(rank.reported for rank in found)
        return sorted(found, key=lambda rank: rank.rank) if whole else []


@dataclass(kw_only=True)
class RankKilled(Fault):
    """A signal that ends one rank, or all."""

    number: signal.Signals
    all_ranks: bool = False

    def strike(self, session: Session, draw: random.Random) -> bool:
        if not (ranks := self._find(session, draw)):
            return False
        chosen = ranks if self.all_ranks else [draw.choice(ranks)]
        self.victims, self.struck = [rank.rank for rank in chosen], time.monotonic()
        for rank in chosen:
            processes.send(rank.pid, self.number)
        self.expected = f"killed, rank {' or '.join(map(str, self.victims))}, {self.number.name}"
        return True

    def named(self, outcome: Outcome) -> bool:
        by_name = self.number.name in outcome.message
        return outcome.status is Status.KILLED and outcome.rank in self.victims and by_name


@dataclass(kw_only=True)
class RankStopped(Fault):
    """For ever, or for a while, which must do no harm."""

    seconds: float | None = None

    def strike(self, session: Session, draw: random.Random) -> bool:
        if not (ranks := self._find(session, draw)):
            return False
        chosen = draw.choice(ranks)
        self.victims, self.struck = [chosen.rank], time.monotonic()
        processes.send(chosen.pid, signal.SIGSTOP)
        self.expected = f"hung, rank {chosen.rank}" if self.seconds is None else "ok"
        if self.seconds is not None:
            time.sleep(self.seconds)
            processes.send(chosen.pid, signal.SIGCONT)
        return True

    def named(self, outcome: Outcome) -> bool:
        if self.seconds is not None:
            return outcome.status is Status.OK
        return outcome.status is Status.HUNG and outcome.rank in self.victims


@dataclass(kw_only=True)
class ServerStruck(Fault):
    """The process that the ranks are forked from, or the one that it was forked from."""

    number: signal.Signals
    trunk: bool = False
    expected = "an outcome outside the case's ranks"

    def strike(self, session: Session, draw: random.Random) -> bool:
        if not (ranks := self._find(session, draw)):
            return False
        server = processes.parent(ranks[0].pid)
        self.struck = time.monotonic()
        processes.send(processes.parent(server) if self.trunk else server, self.number)
        self.expected = "ok" if self._harmless else ServerStruck.expected
        return True

    @property
    def _harmless(self) -> bool:
        """The trunk forks no ranks, and who stopped forking does not harm those that run."""
        return self.trunk or self.number is signal.SIGSTOP

    def named(self, outcome: Outcome) -> bool:
        return outcome.status is Status.OK or (not self._harmless and outcome.status.outside)


@dataclass(kw_only=True)
class Filled(Fault):
    """The disk of temporary files has no room left."""

    def strike(self, session: Session, draw: random.Random) -> bool:
        session.wait(session.ranks, session.limit_seconds)
        time.sleep(draw.uniform(0.0, SPREAD_SECONDS))
        self.struck = time.monotonic()
        fill(session.temporary)
        self.expected = "no space, or ok where all had been written"
        return True

    def named(self, outcome: Outcome) -> bool:
        return outcome.status in (Status.NO_SPACE, Status.OK)

    def undo(self, session: Session) -> None:
        (session.temporary / "filled").unlink()


def fill(folder: Path) -> None:
    """Take all the room that its file system has."""
    with open(folder / "filled", "wb", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue


@dataclass(kw_only=True)
class Ended(Fault):
    """pytest itself is ended."""

    number: signal.Signals
    ends_session = True

    def strike(self, session: Session, draw: random.Random) -> bool:
        session.wait(session.ranks, session.limit_seconds + PATIENCE_SECONDS)
        time.sleep(draw.uniform(0.0, SPREAD_SECONDS))
        if session.ended:
            return False
        self.struck = time.monotonic()
        os.kill(session.pid, self.number)
        self.expected = f"exit code {self.exit_code}"
        return True

    @property
    def exit_code(self) -> int:
        return -signal.SIGKILL if self.number is signal.SIGKILL else 2


@dataclass(kw_only=True)
class ResultsGone(Fault):
    """The results folder is moved, removed or filled while a case runs."""

    how: str
    ends_session = True
    exit_code = 4

    def strike(self, session: Session, draw: random.Random) -> bool:
        session.wait(session.ranks, session.limit_seconds + PATIENCE_SECONDS)
        time.sleep(draw.uniform(0.0, SPREAD_SECONDS / 2))
        if session.ended:
            return False
        self.struck = time.monotonic()
        if self.how == "moved":
            session.results.rename(session.folder / "elsewhere")
        elif self.how == "removed":
            session.results.rename(session.folder / "kept")  # for this program to look into, and then:
            for file in (session.folder / "kept").glob("*.jsonl"):
                file.unlink()
        else:
            fill(session.results)
        self.expected = "exit code 4 and " + self.words
        return True

    @property
    def words(self) -> str:
        return "cannot be written: No space left" if self.how == "filled" else "was moved or removed"
