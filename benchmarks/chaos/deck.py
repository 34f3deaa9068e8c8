"""Which faults are tried, how often, and how they are dealt out to sessions."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.chaos.faults import Ended, Fault, Filled, RankKilled, RankStopped, ResultsGone, ServerStruck
from benchmarks.chaos.nodes import NodeStruck

CASES = 30
"""Of one session, at most."""
_UNHARMED = 8
"""Of so many cases, one is left alone."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of fault: how many of 500, and one of it."""

    share: int
    make: Callable[[], Fault]
    mounts: bool = False
    """It needs a file system of its own, or a network, and so root."""


def _killed(number: signal.Signals, share: int) -> Kind:
    return Kind(share=share, make=lambda: RankKilled(kind=f"rank: {number.name}", number=number))


def _ended(number: signal.Signals, share: int) -> Kind:
    return Kind(share=share, make=lambda: Ended(kind=f"pytest: {number.name}", number=number))


def _gone(how: str, share: int) -> Kind:
    return Kind(share=share, make=lambda: ResultsGone(kind=f"results: {how}", how=how), mounts=how == "filled")


def _node(kind: str, share: int) -> Kind:
    return Kind(share=share, make=lambda: NodeStruck(kind=f"two nodes: {kind}", what=kind), mounts=True)


def _server(kind: str, share: int, number: signal.Signals, *, trunk: bool = False) -> Kind:
    return Kind(share=share, make=lambda: ServerStruck(kind=kind, number=number, trunk=trunk))


KINDS = [
    _killed(signal.SIGKILL, 140),
    _killed(signal.SIGTERM, 40),
    _killed(signal.SIGSEGV, 40),
    _killed(signal.SIGABRT, 40),
    Kind(share=50, make=lambda: RankKilled(kind="both ranks: SIGKILL", number=signal.SIGKILL, all_ranks=True)),
    Kind(share=60, make=lambda: RankStopped(kind="rank: stopped for 0.5 s", seconds=0.5)),
    Kind(share=22, make=lambda: RankStopped(kind="rank: stopped")),
    _server("forkserver: SIGKILL", 28, signal.SIGKILL),
    _server("forkserver: stopped", 6, signal.SIGSTOP),
    _server("forkserver's parent: SIGKILL", 14, signal.SIGKILL, trunk=True),
    Kind(share=20, make=lambda: Filled(kind="temporary files: disk full"), mounts=True),
    _ended(signal.SIGKILL, 7),
    _ended(signal.SIGTERM, 4),
    _ended(signal.SIGINT, 3),
    _ended(signal.SIGHUP, 3),
    _gone("moved", 4),
    _gone("removed", 3),
    _gone("filled", 4),
    _node("link cut", 4),
    _node("node 1 killed", 3),
    _node("node 1 stopped", 3),
    _node("node 0 killed", 2),
]


class Deck:
    """Faults that are still to be tried; safe to deal from in several threads."""

    def __init__(self, faults: int, draw: random.Random, *, root: bool) -> None:
        """About `faults`, each kind by its share and at least once; those that need root where there is none are not
        tried."""
        self._lock = threading.Lock()
        whole = sum(kind.share for kind in KINDS)
        made = [
            kind.make()
            for kind in KINDS
            if root or not kind.mounts
            for _ in range(max(1, round(kind.share * faults / whole)))
        ]
        draw.shuffle(made)
        self.size = len(made)
        self.nodes = [fault for fault in made if isinstance(fault, NodeStruck)]
        self._last = [fault for fault in made if fault.ends_session and not isinstance(fault, NodeStruck)]
        self._amid = [fault for fault in made if not fault.ends_session]

    def deal(self, draw: random.Random) -> list[Fault | None]:
        """One session's: now and then none, the first never, and at the end one that ends it, if any is left. Empty
        when all have been dealt."""
        with self._lock:
            sessions = max(1, len(self._last))
            share = min(CASES, -(-len(self._amid) // sessions))
            amid, self._amid = self._amid[:share], self._amid[share:]
            last, self._last = self._last[:1], self._last[1:]
        if not amid and not last:
            return []
        plan: list[Fault | None] = [None]
        for fault in amid:
            plan += [None, fault] if draw.randrange(_UNHARMED) == 0 else [fault]
        return [*plan, *(last or [None])]

    def take_back(self, faults: list[Fault]) -> None:
        """Those that were not tried, for the case was over before, or its session."""
        with self._lock:
            self._amid += [fault for fault in faults if not fault.ends_session]
            self._last += [fault for fault in faults if fault.ends_session]
