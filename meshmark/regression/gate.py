"""What `--fail-on` asks for: kinds of change that fail, each from a size on, and whether not to know fails too."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from meshmark.errors import InputError
from meshmark.regression.change import Change, ChangeOutcome, Kind

_SHARE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)%")
UNSURE = "unsure"
"""Stands among the kinds where a gate is to fail that cannot tell."""
_SIZED = (Kind.BIGGER, Kind.SLOWER, Kind.SLOWER_START)


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Which changes fail."""

    limits: dict[Kind, float]
    """By kind, the least share that fails."""
    fails_unsure: bool = False
    """Whether what it cannot tell fails it."""

    def failing(self, changes: Sequence[Change]) -> list[Change]:
        """Changes for the worse, surely, that are as large as a limit by the best estimate; with `fails_unsure` also
        those that it cannot tell."""
        worse = [
            change
            for change in changes
            if change.gated and change.kind in self.limits and change.outcome is ChangeOutcome.WORSE
            if change.by >= self.limits[change.kind]
        ]
        return [*worse, *self.unsure(changes)] if self.fails_unsure else worse

    def unsure(self, changes: Sequence[Change]) -> list[Change]:
        """Changes of its kinds that cannot be told."""
        return [c for c in changes if c.gated and c.kind in self.limits and c.outcome is ChangeOutcome.UNDECIDED]

    @property
    def timed(self) -> bool:
        """Whether times fail."""
        return Kind.SLOWER in self.limits or Kind.SLOWER_START in self.limits

    @property
    def margin(self) -> float | None:
        """The slow-down that must be told apart from none."""
        return self.limits.get(Kind.SLOWER) or None


DEFAULT_GATE = "wrong,bigger:1%,slower:3%"


def parse_gate(text: str) -> Gate:
    """Of `wrong,bigger:1%,slower:3%`. Raises `InputError`, with the place of the mistake."""
    limits: dict[Kind, float] = {}
    fails_unsure = False
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, colon, size = part.partition(":")
        where = f"--fail-on {text!r}, at {part!r} (character {text.index(part) + 1})"
        if part == UNSURE:
            fails_unsure = True
            continue
        if name not in list(Kind):
            known = ", ".join([*Kind, UNSURE])
            raise InputError(f"{where}: expected {known}, such as {DEFAULT_GATE!r}")
        kind = Kind(name)
        if kind in limits:
            raise InputError(f"{where}: {name} stands there twice")
        if colon and kind not in _SIZED:
            raise InputError(f"{where}: {name} has no size; write {name!r} alone")
        share = _SHARE.fullmatch(size) if colon else None
        if colon and share is None:
            raise InputError(f"{where}: {size!r} is no share; expected a per cent, such as {name}:3%")
        limits[kind] = float(share[1]) / 100 if share else 0.0
    if not limits:
        raise InputError(f"--fail-on {text!r}: expected at least one of {', '.join(Kind)}, such as {DEFAULT_GATE!r}")
    return Gate(limits=limits, fails_unsure=fails_unsure)
