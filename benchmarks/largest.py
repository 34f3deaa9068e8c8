"""The largest size that fits a budget, found with few measurements."""

from __future__ import annotations

import math
from collections.abc import Callable


class Probe:
    """Measures a size once, and remembers."""

    def __init__(self, measure: Callable[[int], dict[str, int]]) -> None:
        self.measure = measure
        self.seen: dict[int, dict[str, int]] = {}

    def number(self, name: str, size: int) -> int:
        if size not in self.seen:
            self.seen[size] = self.measure(size)
        return self.seen[size][name]


def largest(held: Callable[[int], int], budget: int, *, step: int, start: int = 128) -> int:
    """The largest multiple of `step` that holds at most `budget` bytes: it fits, and the next one does not.

    A bisection whose guesses are interpolated: the bytes of a model grow with about the square of its width, so the
    root of the bytes is nearly a line. Raises `ValueError` when not even one step fits.
    """
    fits, fails = 0, 0  # the largest size that fits and the smallest that does not, zero while unknown
    size = max(start // step, 1) * step
    while True:
        if held(size) <= budget:
            fits = size
        else:
            fails = size
        if fails and fails - fits == step:
            break
        guess = int(size * math.sqrt(budget / held(size))) // step * step
        above = fails - step if fails else 4 * size
        size = min(max(guess, fits + step), above)
    if not fits:
        raise ValueError(f"{held(step)} bytes at size {step}, the smallest: more than the budget of {budget}")
    return fits
