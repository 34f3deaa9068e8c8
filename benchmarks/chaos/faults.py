"""Faults that strike a session, and what its record must then say."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos import processes
from benchmarks.chaos.processes import Rank
from benchmarks.chaos.session import Session
from benchmarks.chaos.settings import Setting
from meshmark.records.record import Outcome, Status


@dataclass(kw_only=True)
class Fault:
    """One thing that happens to one case."""

    kind: str
    struck: float = 0.0
    """When, on the monotonic clock."""
    victims: list[int] = field(default_factory=list)
    """Ranks, where some were chosen."""

    ends_session = False
    codes_of_the_end: tuple[int, ...] = ()
    """Exit codes that are right too, where the run was ending when it was struck."""
    needs_import = False
    """True if it strikes while a server imports a framework, which only the first case of a framework does."""
    expected = ""
    """The outcome that is right, in words."""

    def fits(self, setting: Setting) -> bool:
        """Return whether it can be done in such a session."""
        return setting.takes_rank_faults

    def strike(self, session: Session, draw: random.Random) -> bool:
        """Do it. Return False if the case was over before, so that nothing was done."""
        raise NotImplementedError

    def is_named(self, outcome: Outcome) -> bool:
        """Return whether the record calls it by its name."""
        raise NotImplementedError

    def undo(self, session: Session) -> None:
        """Make good what would harm later cases. Called once the case has its record."""

    def _ranks_at_work(self, session: Session, draw: random.Random) -> list[Rank]:
        """Return the ranks of the case that has just begun, some time later. Empty if one has reported by then."""
        await_ranks(session)
        time.sleep(draw.uniform(0.0, session.setting.spread_seconds))
        found = session.ranks()
        at_work = len(found) == session.setting.num_ranks and not any(rank.reported for rank in found)
        return sorted(found, key=lambda rank: rank.rank) if at_work else []


def await_ranks(session: Session) -> None:
    """Wait until all ranks of the case that has just begun live, or the case is over."""
    recorded = len(session.recorded())
    session.wait(
        lambda: len(session.ranks()) >= session.setting.num_ranks or len(session.recorded()) > recorded,
        session.limit_seconds,
    )


@dataclass(kw_only=True)
class RankKilled(Fault):
    """A signal that ends one rank, or all."""

    number: signal.Signals
    all_ranks: bool = False
    when: str = "at work"
    """Or "starting" (at first sight of all ranks), or "done" (its report is written, and its process still lives)."""

    def fits(self, setting: Setting) -> bool:
        # torchrun's agent ends ranks by SIGTERM itself, and takes a rank that has reported as done.
        quiet = self.number is not signal.SIGTERM and self.when == "at work" and not self.all_ranks
        return setting.takes_rank_faults and (setting.is_forked or quiet)

    def strike(self, session: Session, draw: random.Random) -> bool:
        if not (ranks := self._ranks(session, draw)):
            return False
        chosen = ranks if self.all_ranks else [draw.choice(ranks)]
        if self.when != "done" and not processes.hold(chosen):
            return False
        self.victims, self.struck = [rank.rank for rank in chosen], time.monotonic()
        for rank in chosen:
            processes.send(rank.pid, self.number)
            processes.send(rank.pid, signal.SIGCONT)  # a stopped process dies of SIGKILL alone
        self.expected = f"killed by {self.number.name}, rank {' and '.join(map(str, self.victims))}"
        if self.when == "done":
            self.expected += ", or ok where it had exited"
        return True

    def _ranks(self, session: Session, draw: random.Random) -> list[Rank]:
        if self.when == "at work":
            return self._ranks_at_work(session, draw)
        await_ranks(session)
        if self.when == "starting":
            return [rank for rank in session.ranks() if not rank.reported]
        known = session.ranks()
        session.wait(lambda: any(rank.reported for rank in known), session.limit_seconds)
        return [rank for rank in known if rank.reported and processes.alive(rank.pid)]

    def is_named(self, outcome: Outcome) -> bool:
        if self.when == "done" and outcome.status is Status.OK:
            return True
        if outcome.status is not Status.KILLED or self.number.name not in outcome.message:
            return False
        # Of ranks that die at one time, the launcher may see the first and end the others before their deaths show.
        others = {peer.rank for peer in outcome.peers if peer.kind in ("killed", "ended")}
        return outcome.rank in self.victims and {outcome.rank, *others} >= set(self.victims)


@dataclass(kw_only=True)
class RankStopped(Fault):
    """A rank is stopped for ever, or for a while, which must do no harm."""

    seconds: float | None = None

    def fits(self, setting: Setting) -> bool:
        return setting.takes_rank_faults and (self.seconds is not None or setting.limit_seconds < 20)

    def strike(self, session: Session, draw: random.Random) -> bool:
        if not (ranks := self._ranks_at_work(session, draw)):
            return False
        chosen = draw.choice(ranks)
        if not processes.hold([chosen]):
            return False
        self.victims, self.struck = [chosen.rank], time.monotonic()
        self.expected = f"unfinished, rank {chosen.rank}, stopped" if self.seconds is None else "ok"
        if self.seconds is not None:
            time.sleep(self.seconds)
            processes.send(chosen.pid, signal.SIGCONT)
        return True

    def is_named(self, outcome: Outcome) -> bool:
        if self.seconds is not None:
            return outcome.status is Status.OK
        stopped = outcome.status is Status.UNFINISHED and "had stopped it" in outcome.message
        return stopped and outcome.rank in self.victims


@dataclass(kw_only=True)
class ServerStruck(Fault):
    """The process from which ranks are forked, or its parent, is killed or stopped while ranks are at work."""

    number: signal.Signals
    is_parent: bool = False

    def fits(self, setting: Setting) -> bool:
        return setting.takes_rank_faults and setting.is_forked

    def strike(self, session: Session, draw: random.Random) -> bool:
        if not (ranks := self._ranks_at_work(session, draw)):
            return False
        server = processes.parent(ranks[0].pid)
        self.struck = time.monotonic()
        processes.send(processes.parent(server) if self.is_parent else server, self.number)
        if self.is_parent or self.number is signal.SIGSTOP:
            self.expected = "ok"  # it forks no more ranks, which does not harm those that run
        elif all(rank.reported for rank in ranks):
            return False  # they ended while it was struck: either outcome is right
        else:
            self.expected = "an outcome outside the case's ranks"
        return True

    def is_named(self, outcome: Outcome) -> bool:
        return outcome.status is Status.OK if self.expected == "ok" else outcome.status.outside


@dataclass(kw_only=True)
class ServerKilledImporting(Fault):
    """The process that imports the framework, and would then fork ranks, is killed before it has any."""

    needs_import = True
    expected = "an outcome outside the case's ranks"

    def fits(self, setting: Setting) -> bool:
        return setting.takes_rank_faults and setting.is_forked

    def strike(self, session: Session, draw: random.Random) -> bool:
        def own() -> list[int]:
            return [pid for pid in processes.servers_of(session.pid) if pid not in session.servers_before]

        session.wait(lambda: own() or session.is_over, session.latest_seconds)
        time.sleep(draw.uniform(0.0, 0.3))
        if session.ranks() or not (servers := own()):
            return False
        self.struck = time.monotonic()
        processes.send(servers[-1], signal.SIGKILL)
        return True

    def is_named(self, outcome: Outcome) -> bool:
        return outcome.status.outside


@dataclass(kw_only=True)
class Filled(Fault):
    """The disk of temporary files has no room left."""

    def fits(self, setting: Setting) -> bool:
        return setting.takes_rank_faults and setting.is_forked

    def strike(self, session: Session, draw: random.Random) -> bool:
        await_ranks(session)
        time.sleep(draw.uniform(0.0, session.setting.spread_seconds))
        if session.is_over:
            return False
        ranks = session.ranks()
        self.struck = time.monotonic()
        fill(session.temporary)
        # What is written after the last report depends on the suite.
        must_fail = len(ranks) == session.setting.num_ranks and any(not rank.reported for rank in ranks)
        self.expected = "no space" if must_fail else "ok or no space"
        return True

    def is_named(self, outcome: Outcome) -> bool:
        return outcome.status is Status.NO_SPACE or (outcome.status is Status.OK and self.expected != "no space")

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
    """pytest itself is ended by a signal."""

    number: signal.Signals
    when: str = "ranks at work"
    """Or "importing" (no rank lives yet), "judging" (all ranks have ended, and there is no record yet), "writing" (its
    record is being written), "ending" (the last case has its record)."""
    ends_session = True

    def fits(self, setting: Setting) -> bool:
        return setting.judges or self.when != "judging"

    def strike(self, session: Session, draw: random.Random) -> bool:
        self._await_moment(session, draw)
        if session.ended:
            return False
        if session.is_over:  # pytest may be through with its tests, and ends by the signal or without it
            self.codes_of_the_end = (0, 1, -self.number)
        self.struck = time.monotonic()
        os.kill(session.pid, self.number)
        self.expected = f"exit code {self.exit_code}"
        return True

    def _await_moment(self, session: Session, draw: random.Random) -> None:
        recorded = len(session.recorded())
        limit = session.latest_seconds
        match self.when:
            case "importing":
                time.sleep(draw.uniform(0.0, 0.3))
            case "ranks at work":
                session.wait(session.ranks, limit)
                time.sleep(draw.uniform(0.0, session.setting.spread_seconds))
            case "judging":
                session.wait(session.ranks, limit)
                session.wait(lambda: not session.ranks() or len(session.recorded()) > recorded, limit)
                time.sleep(draw.uniform(0.0, 0.5))
            case "writing":
                size = session.num_bytes()
                session.wait(lambda: session.num_bytes() > size, limit, poll=0.0)
            case "ending":
                session.wait(lambda: len(session.recorded()) > recorded, limit)
                time.sleep(draw.uniform(0.0, 0.1))
            case _:
                raise ValueError(self.when)

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
        session.wait(session.ranks, session.latest_seconds)
        time.sleep(draw.uniform(0.0, session.setting.spread_seconds / 2))
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
