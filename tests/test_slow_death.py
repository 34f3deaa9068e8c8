"""A rank that takes longer to die of its crash than its peers to notice is blamed all the same."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from pathlib import Path

import pytest

from meshmark import rank_progress
from meshmark.launch import watchdog
from meshmark.launch.rank import RankInfo
from meshmark.launch.watchdog import Watchdog
from meshmark.rank_progress import Phase
from meshmark.records.rank_report import RankFailure
from meshmark.records.record import Status
from meshmark.serial import encode
from tests.test_launchers import make_request


def make_ranks(folder: Path) -> list[RankInfo]:
    return [
        RankInfo(
            rank=rank,
            local_rank=rank,
            local_world_size=2,
            world_size=2,
            host="127.0.0.1",
            port=0,
            prefix="alone",
            folder=folder,
        )
        for rank in range(2)
    ]


class Dying:
    """Rank 0 has lost its peer; rank 1 is alive until it is killed, and `dies` of something else."""

    grace_seconds, is_gone = 0.0, False

    def __init__(self, dies: int) -> None:
        self._dies, self._ended = dies, False

    def start(self) -> None:
        pass

    def wait(self, seconds: float) -> None:
        pass

    def pid(self, info: RankInfo) -> int | None:
        return None

    def exit_code(self, info: RankInfo) -> int | None:
        return 1 if info.rank == 0 else self._dies if self._ended else None

    def spared(self, info: RankInfo) -> bool:
        return False

    def end(self) -> list[int]:
        self._ended = True
        return []


class Frozen(Dying):
    """All processes are stopped while the launcher waits, as in a paused container. Then rank 1 ends well, or hangs."""

    grace_seconds = 60.0

    def __init__(self, ends: bool) -> None:
        super().__init__(0)
        self._ends, self._waits = ends, 0

    def wait(self, seconds: float) -> None:
        self._waits += 1
        time.sleep(1.5 if self._waits == 1 else 0.01)

    def exit_code(self, info: RankInfo) -> int | None:
        ended = self._ended or info.rank == 0 or (self._ends and self._waits > 5)
        return 0 if ended else None


@pytest.mark.parametrize("ends", [True, False])
def test_a_pause_of_all_processes_is_no_hang(tmp_path: Path, ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`docker pause`, `scontrol suspend`, a machine that moves: the adapter was blamed for *no progress*."""
    monkeypatch.setattr(watchdog, "_FROZEN_SECONDS", 1.0)
    monkeypatch.setattr(watchdog, "_STACK_SECONDS", 0.0)
    ranks = make_ranks(tmp_path)
    for info in ranks[: 1 + ends]:
        info.file("report").write_text("{}")
    request = dataclasses.replace(make_request("ddp"), time_limit_seconds=1.0)
    found = Watchdog(Frozen(ends), None, request, ranks, "failed").run()
    assert [(one.rank, one.kind) for one in found] == ([] if ends else [(1, Status.UNFINISHED)])
    assert ends or "was stopped for 1 s; then: no end within 1 s" in found[0].message


class Explaining(Dying):
    """Rank 1 searches for the name of a defect for a second."""

    def __init__(self, progresses: bool) -> None:
        super().__init__(0)
        self._started, self._progresses = time.monotonic(), progresses

    def wait(self, seconds: float) -> None:
        time.sleep(0.05)
        if self._progresses:
            rank_progress.tick()

    def exit_code(self, info: RankInfo) -> int | None:
        return 0 if self._ended or info.rank == 0 or time.monotonic() > self._started + 1 else None


@pytest.mark.parametrize("allowed, progresses, late", [(60.0, True, []), (0.1, True, [1]), (60.0, False, [1])])
def test_the_search_for_a_defects_name_may_exceed_the_time_limit(
    tmp_path: Path, allowed: float, progresses: bool, late: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verdict was lost when its search reached the limit, although the training had ended in time."""
    monkeypatch.setattr(watchdog, "EXPLAIN_SECONDS", allowed)
    monkeypatch.setattr(watchdog, "_STACK_SECONDS", 0.0)
    monkeypatch.setattr(rank_progress, "_marker", rank_progress._Marker())
    ranks = make_ranks(tmp_path)
    for info in ranks:
        info.file("report").write_text("{}")
    rank_progress.watch(ranks[1].file("progress"))
    rank_progress.begin(rank_progress.Phase.EXPLAIN)
    request = dataclasses.replace(make_request("ddp"), time_limit_seconds=0.2)
    failures = Watchdog(Explaining(progresses), None, request, ranks, "failed").run()
    assert [failure.rank for failure in failures] == late


@pytest.mark.parametrize("dies, blamed", [(-signal.SIGABRT, [0, 1]), (-signal.SIGKILL, [0])])
def test_a_crash_that_the_kill_came_too_late_for_is_told(tmp_path: Path, dies: int, blamed: list[int]) -> None:
    ranks = make_ranks(tmp_path)
    failure = RankFailure(rank=0, kind="raised", message="connection closed by peer", time=1.0)
    ranks[0].file("failure").write_text(json.dumps(encode(failure)))
    found = Watchdog(Dying(dies), None, make_request("ddp"), ranks, "failed").run()
    assert [one.rank for one in found] == blamed
    assert dies == -signal.SIGKILL or "SIGABRT" in found[1].message


@pytest.mark.parametrize(
    "words, phase, limited, kind",
    [
        ("terminate called without an active exception", Phase.JOIN, True, Status.UNFINISHED),
        ("terminate called without an active exception", Phase.JOIN, False, Status.KILLED),
        ("terminate called without an active exception", Phase.TRAIN, True, Status.KILLED),
        ("what(): Resource temporarily unavailable", Phase.TRAIN, True, Status.UNFINISHED),
        ("double free or corruption", Phase.JOIN, True, Status.KILLED),
    ],
)
def test_an_abort_for_want_of_a_thread_says_nothing_of_the_adapter(
    tmp_path: Path, words: str, phase: Phase, limited: bool, kind: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo's threads are started before an adapter is built, and C++ aborts where one cannot be."""
    monkeypatch.setattr(watchdog, "is_process_limit_reached", lambda ended: limited and ended > 0)
    monkeypatch.setattr(rank_progress, "_marker", rank_progress._Marker())
    ranks = make_ranks(tmp_path)
    ranks[1].file("log").write_text(f"{words}\n")
    rank_progress.watch(ranks[1].file("progress"))
    rank_progress.begin(phase)
    _, found = Watchdog(Dying(-signal.SIGABRT), None, make_request("ddp"), ranks, "failed").run()
    assert found.kind == kind and ("`ulimit -u`" in found.message) == (kind is Status.UNFINISHED)
