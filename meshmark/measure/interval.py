"""How well the mean of a series is known whose neighbours depend on one another: block means and Student's t."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
LEAST_BLOCKS = 8
"""Fewer longer blocks would be wide by Student's t rather than by what they show."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean and how far it may be off."""

    mean: float
    half_width: float
    """Of the interval that holds the true mean with CONFIDENCE; infinite of fewer than two samples."""
    block: int
    """Samples a block."""

    @property
    def relative(self) -> float:
        return self.half_width / self.mean


def mean_interval(samples: Sequence[float], repeat: int = 0) -> Interval:
    """The interval of the mean of `samples`, in their order.

    Means of blocks of 1, 2, 4, ... samples: where neighbours are alike, the error that blocks show rises with their
    length until they are longer than the likeness reaches (Flyvbjerg and Petersen, J. Chem. Phys. 91, 461, 1989), so
    the widest interval counts, of the lengths that leave LEAST_BLOCKS blocks. `repeat`: how many samples share
    whatever their processes met, where there are several such repeats; these are blocks however few they are.
    """
    lengths = [1]
    while len(samples) // (2 * lengths[-1]) >= LEAST_BLOCKS:
        lengths.append(2 * lengths[-1])
    lengths += [repeat] if repeat else []
    widths = [_half_width(_block_means(samples, length)) for length in lengths]
    widest = max(widths)
    return Interval(mean=statistics.fmean(samples), half_width=widest, block=lengths[widths.index(widest)])


def _block_means(samples: Sequence[float], length: int) -> list[float]:
    """Of whole blocks; what is over at the start is left out, for the end is further from warm-up."""
    over = len(samples) % length
    return [statistics.fmean(samples[i : i + length]) for i in range(over, len(samples), length)]


def _half_width(means: Sequence[float]) -> float:
    if len(means) < 2:
        return math.inf
    middle, degrees = statistics.fmean(means), len(means) - 1
    variance = math.fsum((mean - middle) ** 2 for mean in means) / degrees  # statistics.stdev takes ten times as long
    return student_t(degrees) * math.sqrt(variance / len(means))


@functools.cache
def student_t(degrees: int) -> float:
    """What Student's t of so many degrees of freedom stays within, on both sides, with CONFIDENCE."""
    low, high = 0.0, 1.0
    while _within(high, degrees) < CONFIDENCE:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < CONFIDENCE else (low, middle)
    return high


def _within(t: float, degrees: int) -> float:
    """Probability that Student's t is between -t and t: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan2(t, math.sqrt(degrees))
    odd = degrees % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for power in range(2 + odd, degrees + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power - 1) / power
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
