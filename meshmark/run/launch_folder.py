"""The private folder of one launch: gone when the launch is, or, where its launcher was killed, with its servers."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from meshmark.run.disk import expect_space

FOLDERS = "MESHMARK_FOLDERS"
"""Variable of servers: the path that every folder of their launcher starts with."""


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Of mode 0700, and gone afterwards. Raises `NoSpaceError` where there is no room for a launch."""
    expect_space(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=folder_prefix()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_folders(start: str) -> None:
    """Remove this user's folders whose path begins with `start`: those of a launcher that is gone."""
    for folder in Path(start).parent.glob(f"{Path(start).name}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.geteuid():
                shutil.rmtree(folder, ignore_errors=True)  # which follows no link


def folder_prefix() -> str:
    """What the names of this process's folders begin with."""
    return f"meshmark-{os.getpid()}-{_token()}-"


@functools.cache
def _token() -> str:
    """A process's number is not enough: containers that share a temporary folder count from 1 each."""
    return secrets.token_hex(8)
