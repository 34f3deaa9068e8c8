"""Signals that end a command, as an exception, so that it cleans up."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def signals_end_like_ctrl_c() -> Iterator[None]:
    """Make SIGTERM and SIGHUP interrupt the run as Ctrl-C does, for `timeout`, `scancel` and a closed terminal.

    What is to be cleaned up is cleaned up. A signal that is ignored (by `nohup`) stays ignored.
    """
    endings = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]

    def interrupt(number: int, frame: object) -> None:
        for ending in endings:  # one interrupts; a second, such as a shell's own SIGHUP, would break the clean-up off
            signal.signal(ending, signal.SIG_IGN)
        raise KeyboardInterrupt(signal.Signals(number).name)

    for ending in endings:
        signal.signal(ending, interrupt)
    try:
        yield
    finally:
        for ending in endings:
            signal.signal(ending, signal.SIG_DFL)
