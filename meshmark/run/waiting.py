"""A wait for other nodes."""

from __future__ import annotations

import time
from collections.abc import Callable

_POLL_SECONDS = 0.02
_SAY_SECONDS = 10.0


class Waiting:
    """A wait that says so from time to time, and has an end."""

    def __init__(self, say: Callable[[str], None], seconds: float) -> None:
        self._say = say
        self._started = self._said = time.monotonic()
        self._seconds = seconds

    def over(self, text: str) -> bool:
        """A moment later: whether the wait has taken too long. `text`: what is waited for."""
        time.sleep(_POLL_SECONDS)
        now = time.monotonic()
        if now - self._said > _SAY_SECONDS:
            self._said = now
            self._say(f"{text}, {now - self._started:.0f} s of {self._seconds:.0f}")
        return now - self._started > self._seconds
