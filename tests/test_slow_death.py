"""A rank that takes longer to die of its crash than its peers to notice is blamed all the same."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from meshmark.launch.rank import RankInfo
from meshmark.launch.watchdog import Watchdog
from meshmark.records.rank_report import RankFailure
from meshmark.serial import encode
from tests.test_launchers import make_request


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


@pytest.mark.parametrize("dies, blamed", [(-signal.SIGABRT, [0, 1]), (-signal.SIGKILL, [0])])
def test_a_crash_that_the_kill_came_too_late_for_is_told(tmp_path: Path, dies: int, blamed: list[int]) -> None:
    ranks = [
        RankInfo(
            rank=rank,
            local_rank=rank,
            local_world_size=2,
            world_size=2,
            host="127.0.0.1",
            port=0,
            prefix="alone",
            folder=tmp_path,
        )
        for rank in range(2)
    ]
    failure = RankFailure(rank=0, kind="raised", message="connection closed by peer", time=1.0)
    ranks[0].file("failure").write_text(json.dumps(encode(failure)))
    found = Watchdog(Dying(dies), None, make_request("ddp"), ranks, "failed").run()
    assert [one.rank for one in found] == blamed
    assert dies == -signal.SIGKILL or "SIGABRT" in found[1].message
