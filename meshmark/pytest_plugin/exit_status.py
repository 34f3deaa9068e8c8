"""The exit status of a session whose adapters end pytest's process themselves.

Frameworks that hang at exit are often left by `atexit.register(os._exit, 0)`. A failed session would then end with 0.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Generator
from types import FrameType
from typing import NoReturn

import pytest

_CUT_OFF = pytest.ExitCode.INTERNAL_ERROR
"""Status of a process that ends before its session: nobody knows what would have come."""
_ENDED = pytest.StashKey[bool]()


def keep_exit_status(session: pytest.Session) -> None:
    """Give `os._exit(0)` of this process the status of `session`. Call it before adapters are imported.

    Other statuses, and those of forked processes, stay as they are. Does nothing if pytest runs inside another program,
    whose end is not pytest's to decide.
    """
    if not _is_program(sys._getframe()):
        return
    process, end = os.getpid(), os._exit

    def exit_with(status: int) -> NoReturn:
        if os.getpid() == process and not status:
            status = _status(session)
            if not _has_ended(session):
                print("meshmark: os._exit(0) was called before the session had ended", file=sys.stderr)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # closed, or a pipe that nobody reads
                    stream.flush()
        end(status)

    def forget_other_ends() -> None:
        if _status(session):  # of what was imported before this function was called
            atexit.unregister(end)

    os._exit = exit_with
    atexit.register(forget_other_ends)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_unconfigure(config: pytest.Config) -> Generator[None, object, object]:
    """Note that the session has ended, and that its status is final."""
    config.stash[_ENDED] = True
    return (yield)


def _has_ended(session: pytest.Session) -> bool:
    return session.config.stash.get(_ENDED, False)


def _status(session: pytest.Session) -> int:
    return int(session.exitstatus if _has_ended(session) else _CUT_OFF)


def _is_program(frame: FrameType | None) -> bool:
    """Return whether pytest was started from a shell, and `frame` belongs to the only session of its process."""
    called = list[str]()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("_pytest."):
            called.append(frame.f_code.co_name)
        frame = frame.f_back
    return called.count("wrap_session") == 1 and any(name.endswith("console_main") for name in called)
