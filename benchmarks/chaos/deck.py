"""Which faults are tried, how often, and how they are dealt out to sessions."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.chaos.faults import (
    Ended,
    Fault,
    Filled,
    RankKilled,
    RankStopped,
    ResultsGone,
    ServerKilledImporting,
    ServerStruck,
)
from benchmarks.chaos.nodes import NodeStruck
from benchmarks.chaos.settings import SETTINGS, Setting

CASES = 20
"""Most cases of one session."""
_UNHARMED = 8
"""One case of so many is left alone."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of fault: how many of 1,000, and how to make one."""

    share: int
    make: Callable[[], Fault]
    needs_root: bool = False
    """True if it needs a file system or a network of its own."""


def _killed(number: signal.Signals, share: int, when: str = "at work") -> Kind:
    name = f"rank: {number.name}" + ("" if when == "at work" else f", {when}")
    return Kind(share=share, make=lambda: RankKilled(kind=name, number=number, when=when))


def _ended(number: signal.Signals, share: int, when: str = "ranks at work") -> Kind:
    return Kind(share=share, make=lambda: Ended(kind=f"pytest: {number.name}, {when}", number=number, when=when))


def _gone(how: str, share: int) -> Kind:
    return Kind(share=share, make=lambda: ResultsGone(kind=f"results: {how}", how=how), needs_root=how == "filled")


def _node(kind: str, share: int) -> Kind:
    return Kind(share=share, make=lambda: NodeStruck(kind=f"two nodes: {kind}", what=kind), needs_root=True)


def _server(kind: str, share: int, number: signal.Signals, *, is_parent: bool = False) -> Kind:
    return Kind(share=share, make=lambda: ServerStruck(kind=kind, number=number, is_parent=is_parent))


KINDS = [
    _killed(signal.SIGKILL, 210),
    _killed(signal.SIGKILL, 60, "starting"),
    _killed(signal.SIGKILL, 40, "done"),
    _killed(signal.SIGTERM, 70),
    _killed(signal.SIGSEGV, 70),
    _killed(signal.SIGABRT, 70),
    Kind(share=80, make=lambda: RankKilled(kind="all ranks: SIGKILL", number=signal.SIGKILL, all_ranks=True)),
    Kind(share=90, make=lambda: RankStopped(kind="rank: stopped for 0.5 s", seconds=0.5)),
    Kind(share=30, make=lambda: RankStopped(kind="rank: stopped")),
    _server("forkserver: SIGKILL", 50, signal.SIGKILL),
    _server("forkserver: stopped", 10, signal.SIGSTOP),
    _server("forkserver's parent: SIGKILL", 20, signal.SIGKILL, is_parent=True),
    Kind(share=20, make=lambda: ServerKilledImporting(kind="forkserver: SIGKILL, importing")),
    Kind(share=50, make=lambda: Filled(kind="temporary files: disk full"), needs_root=True),
    *(_ended(signal.SIGKILL, 6, when) for when in ("importing", "ranks at work", "judging", "writing", "ending")),
    *(_ended(signal.SIGTERM, 4, when) for when in ("importing", "ranks at work", "judging", "writing")),
    *(_ended(signal.SIGINT, 4, when) for when in ("importing", "ranks at work", "judging", "writing")),
    _ended(signal.SIGHUP, 6),
    _gone("moved", 6),
    _gone("removed", 6),
    _gone("filled", 6),
    _node("link cut", 6),
    _node("node 1 killed", 5),
    _node("node 1 stopped", 5),
    _node("node 0 killed", 4),
    _node("a stranger floods the port", 4),
    _node("a stranger sends a byte a second", 4),
    _node("a stranger has another secret", 4),
]


class Deck:
    """Faults that are still to be tried. Several threads may deal from it."""

    def __init__(self, faults: int, draw: random.Random, *, root: bool) -> None:
        """Make about `faults`, each kind by its share and at least once; without `root`, only those that need none."""
        self._lock = threading.Lock()
        whole = sum(kind.share for kind in KINDS)
        made = [
            kind.make()
            for kind in KINDS
            if root or not kind.needs_root
            for _ in range(max(1, round(kind.share * faults / whole)))
        ]
        draw.shuffle(made)
        self.size = len(made)
        self.nodes = [fault for fault in made if isinstance(fault, NodeStruck)]
        self._last = [fault for fault in made if fault.ends_session and not isinstance(fault, NodeStruck)]
        self._amid = [fault for fault in made if not fault.ends_session]

    def deal(self, draw: random.Random) -> tuple[Setting, list[Fault | None]]:
        """Return a session's setting, and a fault or None for each of its cases.

        The first case is left alone, as are some others. A fault that ends the session comes last, if one is left. The
        list is empty when all have been dealt.
        """
        (setting,) = draw.choices(SETTINGS, weights=[setting.share for setting in SETTINGS])
        with self._lock:
            sessions = max(1, len(self._last))
            share = min(CASES, -(-len(self._amid) // sessions))
            amid = _take(self._amid, share, setting)
            last = _take(self._last, 1, setting)
            if not amid and not last:  # what is left fits no such session
                left = [*self._amid, *self._last]
                setting = next((each for each in SETTINGS if any(fault.fits(each) for fault in left)), setting)
                amid, last = _take(self._amid, share, setting), _take(self._last, 1, setting)
        if not amid and not last:
            return setting, []
        plan: list[Fault | None] = [None]
        for fault in amid:
            plan += [None, fault] if draw.randrange(_UNHARMED) == 0 else [fault]
        return setting, [*plan, last[0] if last else None]

    def take_back(self, faults: list[Fault]) -> None:
        """Put back faults that were not tried, because the case or its session was over before."""
        with self._lock:
            self._amid += [fault for fault in faults if not fault.ends_session]
            self._last += [fault for fault in faults if fault.ends_session]


def _take(pile: list[Fault], count: int, setting: Setting) -> list[Fault]:
    """Remove and return up to `count` faults that fit the setting."""
    taken = [fault for fault in pile if fault.fits(setting)][:count]
    chosen = set(map(id, taken))  # equal faults are still several
    pile[:] = [fault for fault in pile if id(fault) not in chosen]
    return taken
