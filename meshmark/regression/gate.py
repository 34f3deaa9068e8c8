"""What `--fail-on` asks for: kinds of change that fail, each from a size on."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from meshmark.errors import InputError
from meshmark.regression.change import Change, ChangeOutcome, Kind

_SHARE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)%")
_SIZED = (Kind.BIGGER, Kind.SLOWER, Kind.SLOWER_START)


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Which changes fail."""

    limits: dict[Kind, float]
    """By kind, the least share that fails."""

    def failing(self, changes: Iterable[Change]) -> list[Change]:
        """Changes for the worse, surely, that are as large as a limit by the best estimate."""
        return [
            change
            for change in changes
            if change.gated and change.kind in self.limits and change.outcome is ChangeOutcome.WORSE
            if change.by >= self.limits[change.kind]
        ]

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
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, colon, size = part.partition(":")
        where = f"--fail-on {text!r}, at {part!r} (character {text.index(part) + 1})"
        if name not in list(Kind):
            raise InputError(f"{where}: expected {', '.join(Kind)}, such as {DEFAULT_GATE!r}")
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
    return Gate(limits=limits)
