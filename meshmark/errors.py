"""Every error that Meshmark raises on purpose.

A user's mistake is an `InputError` (a `ValueError`): its message says what was got, what was expected and what to do.
What goes wrong inside a rank is not an error here but an outcome, carried by the record of its case.
"""

from __future__ import annotations

import difflib
import stat
from collections.abc import Iterable
from pathlib import Path

_LONGEST_NAME = 80
"""Characters of an unknown name that are worth a look."""


class MeshmarkError(Exception):
    """Base of all errors below."""


class InputError(MeshmarkError, ValueError):
    """The user asked for something that cannot be; nothing was run."""


class UnknownNameError(InputError):
    """A name that is not in its registry; the message lists near matches, or all known names."""

    def __init__(self, kind: str, got: str, known: Iterable[str]) -> None:
        names = sorted(map(str, known))
        near = difflib.get_close_matches(got[:_LONGEST_NAME], names, n=3, cutoff=0.5)  # its time grows with its square
        got = got if len(got) <= _LONGEST_NAME else f"{got[:_LONGEST_NAME]}... ({len(got)} characters)"
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(names)}"
        super().__init__(f"unknown {kind} {got!r}: {hint}")


def refuse_device(path: str | Path) -> None:
    """Raise `InputError` if `path` is a device, such as /dev/zero: it may have no end. A pipe may be read."""
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):
        return  # whoever opens the file says why it cannot be opened
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise InputError(f"{str(path)!r} is a device; name a file")


class LayoutError(InputError):
    """A layout that cannot be laid over this model, batch or world size."""


class AlgorithmError(InputError):
    """An algorithm that is not defined with this optimizer."""


class CorpusError(InputError):
    """A corpus that is missing, empty or too short, or images that do not go together."""


class ResultsError(InputError):
    """A results folder that cannot be used: not writable, in use by another run, or of another version."""


class EvidenceError(InputError):
    """Evidence beside a record that is not there, or damaged."""


class AdapterError(InputError):
    """An adapter that cannot be imported or does not honour the contract."""


class TrafficError(MeshmarkError):
    """What a rank sent cannot be told: what was asked for and what was issued do not go together."""


class NoSpaceError(MeshmarkError):
    """A disk has no room for what a launch writes."""


class ClusterError(MeshmarkError):
    """The nodes of one run cannot come together, lost each other, or disagree about what they run; it ends the run."""


class NodeLostError(ClusterError):
    """A node has ended, gives no sign of life, or cannot be reached."""


class NodesDisagreeError(ClusterError):
    """Nodes were given other commands, or hold other code, packages or data."""
