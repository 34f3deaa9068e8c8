"""All errors that Meshmark raises on purpose.

A user's mistake is an `InputError` (a `ValueError`). Its message says what was got, what was expected and what to do.
A failure inside a rank is not an error here but an outcome, which the record of its case holds.

Signals that end a command are raised as an exception too, so that the command cleans up.
"""

from __future__ import annotations

import contextlib
import difflib
import glob
import os
import signal
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path


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


_LONGEST_NAME = 80
"""Length in characters to which an unknown name is cut."""


class MeshmarkError(Exception):
    """Base class of all errors below."""


class InputError(MeshmarkError, ValueError):
    """The user asked for something impossible. Nothing was run."""


class UnknownNameError(InputError):
    """A name that is not in its registry. The message lists near matches, or all known names."""

    def __init__(self, kind: str, got: str, known: Iterable[str]) -> None:
        names = sorted(map(str, known))
        near = difflib.get_close_matches(got[:_LONGEST_NAME], names, n=3, cutoff=0.5)  # its time grows with its square
        got = got if len(got) <= _LONGEST_NAME else f"{got[:_LONGEST_NAME]}... ({len(got)} characters)"
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(names)}"
        super().__init__(f"unknown {kind} {got!r}: {hint}")


def refuse_device(path: str | Path) -> None:
    """Raise `InputError` if `path` is a device such as /dev/zero, which may have no end. Pipes are allowed."""
    mode = _mode(path)
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise InputError(f"{str(path)!r} is a device; name a file")


def refuse_pipe(path: str | Path) -> None:
    """Raise `InputError` if `path` is a pipe or a socket: to open one waits for its other end."""
    mode = _mode(path)
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        raise InputError(f"{str(path)!r} is a pipe or a socket; remove it, or name another folder of results")


def _mode(path: str | Path) -> int:
    """Return the mode of a file; 0 if there is none. Whoever opens the file says why it cannot be opened."""
    try:
        return Path(path).stat().st_mode
    except (OSError, ValueError):
        return 0


def refuse_records(output: str | Path, *sources: str | Path) -> None:
    """Raise `InputError` if a page would be written over records, as by `-o results/records.jsonl`, or over one of its
    `sources`, also through a link."""
    path = Path(output).resolve()
    held = {Path(source).resolve() for source in sources if Path(source).is_file()}
    if path in held or (path.name.endswith((".jsonl", ".jsonl.gz")) and path.exists()):
        raise InputError(f"-o {str(output)!r}: it holds records, which a page would replace; name another file")


def refuse_page(output: str | Path, *sources: str | Path) -> None:
    """Raise `InputError` if a page would be written over records, over one of its `sources`, or through a link at its
    place or at that of a picture or page beside it.
    """
    refuse_records(output, *sources)
    path = Path(output)
    beside = path.parent.glob(f"{glob.escape(path.stem)}-*") if path.parent.is_dir() else []
    for file in (path, *beside):
        if file.is_symlink():
            raise InputError(
                f"{str(file)!r} is a link to {os.readlink(file)!r}; remove it, or name another file with -o"
            )


def refuse_strangers(folder: Path) -> None:
    """Raise `InputError` if `folder` is another user's, who could have links there, to files of this user's."""
    if folder.exists() and folder.stat().st_uid != os.geteuid():
        raise InputError(f"{str(folder)!r} belongs to another user: name a page elsewhere with -o")


class JudgingError(MeshmarkError):
    """Judging a run failed by a mistake of its own. That says nothing about the run."""


class LayoutError(InputError):
    """A layout that does not fit this model, batch or world size."""


class AlgorithmError(InputError):
    """An algorithm that is not defined for this optimizer."""


class CorpusError(InputError):
    """A corpus that is missing, empty or too short, or images of different shapes."""


class ResultsError(InputError):
    """A results folder that cannot be used: not writable, in use by another run, or of another version."""


class EvidenceError(InputError):
    """An evidence file of a record that is missing or damaged."""


class AdapterError(InputError):
    """An adapter that cannot be imported or violates the contract."""


class TrafficError(MeshmarkError):
    """The traffic of a rank is unknown, because the requested and the issued operations do not match."""


class ClockError(MeshmarkError):
    """The machine's clock was set during a measurement that orders events by it."""


class NoSpaceError(MeshmarkError):
    """A disk has no room for the files of a launch."""


class ClusterError(MeshmarkError):
    """The nodes of a run cannot connect, lost each other, or disagree about what they run. Ends the run."""


class NodeLostError(ClusterError):
    """A node ended, shows no sign of life, or cannot be reached."""


class NodesDisagreeError(ClusterError):
    """Nodes were given different commands, or have different code, packages or data."""
