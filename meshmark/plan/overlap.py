"""The share of tensor-, data- and pipeline-parallel communication that computation hides, as a user states it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from meshmark.errors import InputError
from meshmark.plan.rates import Rates
from meshmark.theory.recipe import TrainingRecipe

AXES = ("tp", "dp", "pp")


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Shares from 0 to 1. None leaves what the stack's rates or the recipe say."""

    tp: float | None = None
    """Share of tensor-parallel collectives that products hide."""
    dp: float | None = None
    """Share of a backward pass behind which gradients are reduced, or of a step behind which FSDP gathers."""
    pp: float | None = None
    """1 if interleaved stages send while they compute, 0 if they wait for it."""

    def rates(self, given: Rates) -> Rates:
        """Return the rates with these shares."""
        numbers = {"network.tensor_overlap": self.tp, "network.overlap": self.dp}
        return given.moved({name: share for name, share in numbers.items() if share is not None})

    def recipe(self, using: TrainingRecipe) -> TrainingRecipe:
        """Return the recipe with these sends."""
        if self.pp is None:
            return using
        return dataclasses.replace(using, wire=dataclasses.replace(using.wire, hides_sends=self.pp == 1.0))


def overlap_of(text: str | None) -> Overlap:
    """Parse `tp=0.5,dp=0.9,pp=1`. Raises `InputError` for another axis or for no share from 0 to 1."""
    shares: dict[str, float] = {}
    for part in text.split(",") if text else ():
        axis, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or axis not in AXES or axis in shares:
            raise InputError(f"--overlap {text!r}: {part!r}, expected AXIS=SHARE, each of {', '.join(AXES)} once")
        try:
            share = float(value)
        except ValueError:
            share = -1.0
        if not 0.0 <= share <= 1.0 or (axis == "pp" and share not in (0.0, 1.0)):
            least = "0 or 1" if axis == "pp" else "a share from 0 to 1"
            raise InputError(f"--overlap {text!r}: {axis} is {value!r}, expected {least}")
        shares[axis] = share
    return Overlap(**shares)
