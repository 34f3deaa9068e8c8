"""Options that `meshmark check` and `python -m meshmark.check` share, and the folder for recordings."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from pathlib import Path

from meshmark.errors import InputError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `meshmark check` and `python -m meshmark.check` share."""
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="optimizer steps to observe (default: 3)")
    parser.add_argument(
        "--objective",
        choices=["tokens", "rows", "ranks"],
        help="what the script should optimise: the mean over all targets, of rows' means, or of ranks' means; any "
        "other objective fails",
    )
    parser.add_argument("--keep", metavar="DIR", help="keep the recordings in this new folder")
    parser.add_argument(
        "--max-disk", type=float, default=8.0, metavar="GB", help="disk space for the ranks' recordings (default: 8)"
    )
    parser.add_argument("script", metavar="SCRIPT.py", help="a training script, as `python` would take it")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's arguments")
    parser.add_argument("-o", "--output", metavar="FILE.md", help="write the verdict as a page too")


def mistake_in(parsed: argparse.Namespace, *, makes_folder: bool = True) -> str | None:
    """Return what is wrong with the options, or None. Of several ranks, one makes the folder that must be new."""
    if parsed.steps < 1:
        return f"--steps must be 1 or more, got {parsed.steps}"
    if not 0 < parsed.max_disk < math.inf:
        return f"--max-disk must be a number of GB above 0, got {parsed.max_disk:g}"
    if makes_folder and parsed.keep and Path(parsed.keep).exists():
        return f"--keep {parsed.keep}: it exists, and recordings need a new folder"
    if parsed.output and not Path(parsed.output).absolute().parent.is_dir():
        return f"there is no folder for {parsed.output}"
    if parsed.output and Path(parsed.output).is_dir():
        return f"-o {parsed.output}: it is a folder, and the page is a file"
    if not Path(parsed.script).is_file():
        return f"there is no script {parsed.script}"
    if parsed.output and Path(parsed.output).resolve() == Path(parsed.script).resolve():
        return f"-o {parsed.output}: it is the script, which the page would replace"
    return None


def no_space(place: Path) -> str:
    """Return what to do where the disk of the folder for recordings is full."""
    return f"no space for recordings in {place.parent}: make room there, or name another folder by TMPDIR or --keep"


def write_page(path: Path, text: str) -> bool:
    """Write the page, or print in a line why it cannot be written and return False. The old page is kept then."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.exists() and not path.is_file():  # such as /dev/stdout
            path.write_text(text)
        else:
            part.write_text(text)
            part.replace(path)
        return True
    except OSError as error:
        print(f"meshmark check: {path} cannot be written: {error.strerror}", file=sys.stderr)
        with contextlib.suppress(OSError):
            part.unlink()
        return False


def make_private(path: Path) -> None:
    """Make a folder that only this user can read. Raises `InputError` if it cannot be made."""
    try:
        path.mkdir(mode=0o700)
    except OSError as error:
        raise InputError(f"the folder {path} for recordings cannot be made: {error.strerror}") from None
