"""Describe how a script has changed weights between two steps, beside its optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST = 1 << 16
"""Number of elements that are looked at, at most."""
LEFT_OVER = 0.01
"""Fraction of a change that a description may leave unexplained."""


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """Values of parameters at an earlier time."""

    when: str
    """Such as `after step 1`."""
    values: Mapping[str, Tensor]
    begins: bool = False
    """Whether the script had set these values itself: at the beginning, or between two steps."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """What weights were overwritten by."""

    text: str
    averaged: bool = False
    """Whether they are a weighted mean of their earlier values.

    An outer step, as of Lookahead or Reptile, is none: it goes from the values that the script set last to those of
    the optimizer, which has taken several steps since.
    """


def change_of(now: Mapping[str, Tensor], history: Sequence[Earlier]) -> Change:
    """Describe the change from the newest values of `history`, which are the optimizer's, to `now`."""
    share = max(1, MOST // len(now))

    def flat(values: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([values[name].reshape(-1)[:share].double() for name in now])

    new, old = flat(now), [flat(earlier.values) for earlier in history]
    newest = old[-1]
    rounding = max(torch.finfo(x.dtype).eps for x in now.values()) * float(newest.norm())
    allowed = LEFT_OVER * float((new - newest).norm()) + rounding
    if float((new - newest).norm()) <= rounding:
        return Change(text="the optimizer's, rounded anew")
    if not new.any():
        return Change(text="zero")
    for earlier, values in zip(history[:-1], old, strict=False):
        if float((new - values).norm()) <= rounding:
            return Change(text=f"its value {earlier.when}")
    bound = float(new.abs().max())
    if bound < float(newest.abs().max()) and float((new - newest.clamp(-bound, bound)).norm()) <= allowed:
        return Change(text=f"its own value, clipped to {bound:.4g}")
    factor = float(new @ newest / (newest @ newest)) if newest.any() else 0.0
    if float((new - factor * newest).norm()) <= allowed:
        return Change(text=f"{factor:.6g} x the optimizer's")
    number = len(old) - 1
    whose = [f"its value {earlier.when}" for earlier in history[:-1]] + ["the optimizer's"]
    for count in sorted({1, 2, 3, number} & set(range(1, number + 1))):
        for chosen in itertools.combinations(range(number), count) if new.numel() > 2 * count else ():
            differences = torch.stack([old[index] - newest for index in chosen], 1)
            solution = torch.linalg.lstsq(differences, (new - newest).unsqueeze(1), driver="gelsd").solution.squeeze(1)
            if float((new - newest - differences @ solution).norm()) > allowed:
                continue
            weights = dict(zip(chosen, solution.tolist(), strict=True)) | {number: 1 - float(solution.sum())}
            weights = {index: w for index, w in reversed(weights.items()) if abs(w) > 5e-4}
            told = [f"{w:.3g} x {whose[index]}" for index, w in weights.items()]
            begun = max(index for index, earlier in enumerate(history) if earlier.begins)
            outer_step = set(weights) == {begun, number} and number - begun > 1
            mean = len(weights) > 1 and all(0 < w < 1 for w in weights.values())
            return Change(text=" + ".join(told), averaged=mean and not outer_step)
    moved = float((new - newest).norm()) / (float(newest.norm()) or 1.0)
    return Change(text=f"another value, {moved:.2g} of its norm away, which is no mean of earlier ones")
