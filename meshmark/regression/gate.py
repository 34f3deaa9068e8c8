"""Parse and apply `--fail-on`: the kinds of change that fail, their least size, and whether undecided ones fail."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from meshmark.errors import InputError
from meshmark.regression.change import Change, ChangeOutcome, Kind

_SHARE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)%")
UNSURE = "unsure"
"""Word in `--fail-on` for a gate that also fails if it cannot decide."""
_SIZED = (Kind.BIGGER, Kind.SLOWER, Kind.SLOWER_START)


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Which changes fail."""

    limits: dict[Kind, float]
    """Least share that fails, by kind."""
    fails_unsure: bool = False
    """True if undecided changes fail too."""

    def failing(self, changes: Sequence[Change]) -> list[Change]:
        """Return certain changes for the worse whose best estimate reaches the limit, and undecided ones if
        `fails_unsure`.
        """
        worse = [
            change
            for change in changes
            if change.gated and change.kind in self.limits and change.outcome is ChangeOutcome.WORSE
            if change.by >= self.limits[change.kind]
        ]
        return [*worse, *self.unsure(changes)] if self.fails_unsure else worse

    def unsure(self, changes: Sequence[Change]) -> list[Change]:
        """Return undecided changes of the gate's kinds."""
        return [c for c in changes if c.gated and c.kind in self.limits and c.outcome is ChangeOutcome.UNDECIDED]

    @property
    def timed(self) -> bool:
        """True if times can fail."""
        return Kind.SLOWER in self.limits or Kind.SLOWER_START in self.limits

    @property
    def margin(self) -> float | None:
        """The slow-down that must be distinguished from none."""
        return self.limits.get(Kind.SLOWER) or None


DEFAULT_GATE = "wrong,bigger:1%,slower:3%"


def parse_gate(text: str) -> Gate:
    """Parse a text such as `wrong,bigger:1%,slower:3%`. Raises `InputError` with the position of the mistake."""
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
