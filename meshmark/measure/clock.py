"""Notice that somebody set the machine's clock while it was used to order events.

PyTorch's profiler and flight recorder stamp events with the time of day. A clock that is set meanwhile, by a person, a
virtual machine that wakes up, or a first answer of NTP, puts events into the wrong order.
"""

from __future__ import annotations

import time

from meshmark.errors import ClockError

_LIMIT_NS = 10_000_000
"""Jumps of up to 10 ms go unnoticed. Reading both clocks takes less, also on a busy machine."""
_SLEW = 1e-3
"""NTP corrects a running clock by at most 0.5 ms a second, which changes no order."""


class SteadyClock:
    """Compare the time of day with the monotonic clock, which nobody can set."""

    def __init__(self) -> None:
        self._offset_ns, self._read_ns = _offset_ns()

    def check(self) -> None:
        """Raise `ClockError` if the clock was set since the last call, or since this object was made."""
        before, since = self._offset_ns, self._read_ns
        self._offset_ns, self._read_ns = _offset_ns()
        moved = self._offset_ns - before
        if abs(moved) > _LIMIT_NS + _SLEW * (self._read_ns - since):
            raise ClockError(
                f"this machine's clock was set by {moved / 1e9:+.3g} s during the measurement, and the profiler orders"
                " events by it: run the case again"
            )


def _offset_ns() -> tuple[int, int]:
    """Return the time of day less the monotonic time, and the latter. A reading that was interrupted is repeated."""
    best = None
    for _ in range(3):
        before = time.monotonic_ns()
        now = time.time_ns()
        after = time.monotonic_ns()
        if best is None or after - before < best[0]:
            best = after - before, now - before, before
    assert best
    return best[1], best[2]
