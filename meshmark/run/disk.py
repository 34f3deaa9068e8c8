"""Whether a disk has room: what a full one does to a run is no fault of what runs."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from meshmark.clip import text_of
from meshmark.errors import NoSpaceError

NEEDED_BYTES = 16 * 2**20
"""Of a launch: logs, marks and reports are a few megabytes."""
_FULL_BYTES = 2**16
_FULL = (errno.ENOSPC, errno.EDQUOT)


def expect_space(folder: Path) -> None:
    """Raise `NoSpaceError` where a launch would not find room."""
    free = _free_bytes(folder)
    if free < NEEDED_BYTES:
        raise NoSpaceError(
            f"{str(folder)!r} has room for {free:,} bytes, and a launch needs {NEEDED_BYTES:,}: make room there, or "
            "name another folder in TMPDIR"
        )


def is_full(folder: Path) -> bool:
    """Whether next to nothing can be written in `folder`."""
    return _free_bytes(folder) < _FULL_BYTES


def means_no_space(error: BaseException, folders: Iterable[Path]) -> bool:
    """Whether a full disk, or a quota that is spent, is why it was raised. What an error only says, as C++'s do, counts
    where one of `folders`, in which it may have written, is as good as full: anybody can say it."""
    causes = list(_causes(error))
    if any(isinstance(cause, OSError) and cause.errno in _FULL for cause in causes):
        return True
    said = any(os.strerror(errno.ENOSPC) in text_of(cause) for cause in causes)
    return said and any(folder.exists() and _free_bytes(folder) < NEEDED_BYTES for folder in folders)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _free_bytes(folder: Path) -> int:
    """0 also where no file can be added."""
    found = os.statvfs(folder)
    return 0 if found.f_files and not found.f_favail else found.f_bavail * found.f_frsize
