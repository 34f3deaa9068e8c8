"""Waits, within reason, until nobody else computes on this machine."""

from __future__ import annotations

import time
from pathlib import Path

_STAT = Path("/proc/stat")
_SAMPLE_SECONDS = 0.25


class Quiet:
    """Spends at most `patience_seconds` in all, so that a machine that is never quiet is measured all the same."""

    def __init__(self, patience_seconds: float) -> None:
        self.patience_seconds = patience_seconds

    def wait(self, busy: float = 0.05) -> None:
        """Return once less than `busy` of all cores' time is used, or patience is at its end."""
        while self.patience_seconds > 0 and _STAT.is_file():
            before = _times()
            time.sleep(_SAMPLE_SECONDS)
            self.patience_seconds -= _SAMPLE_SECONDS
            idle, total = (after - then for after, then in zip(_times(), before, strict=True))
            if idle >= (1 - busy) * total:
                return


def _times() -> tuple[int, int]:
    """Ticks since boot of all cores: idle (waiting for disks included), and in all."""
    ticks = [int(field) for field in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)
