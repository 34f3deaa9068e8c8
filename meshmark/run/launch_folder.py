"""The private folder of one launch: gone when the launch is, or, where its launcher was killed, with its servers."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from meshmark.run.disk import expect_space


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Of mode 0700, and gone afterwards. Raises `NoSpaceError` where there is no room for a launch."""
    expect_space(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_prefix(os.getpid())))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_folders(launcher: int) -> None:
    """Those of this user that the process `launcher`, which is gone, has left."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_prefix(launcher)}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.geteuid():
                shutil.rmtree(folder, ignore_errors=True)  # which follows no link


def _prefix(launcher: int) -> str:
    return f"meshmark-{launcher}-"
