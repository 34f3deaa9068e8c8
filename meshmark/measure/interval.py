"""Confidence interval of the mean of an autocorrelated series: block means and Student's t."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
LEAST_BLOCKS = 8
"""Least number of blocks. With fewer, the interval would be dominated by Student's t."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean and its uncertainty."""

    mean: float
    half_width: float
    """Half width of the interval that contains the true mean with CONFIDENCE. Infinite for fewer than two samples."""
    block: int
    """Samples per block."""

    @property
    def relative(self) -> float:
        return self.half_width / self.mean


def mean_interval(samples: Sequence[float], repeat: int = 0) -> Interval:
    """Return the interval of the mean of `samples`, in order.

    Uses means of blocks of 1, 2, 4, ... samples. With correlated neighbours, the error estimate rises with the block
    length until blocks exceed the correlation length (Flyvbjerg and Petersen, J. Chem. Phys. 91, 461, 1989). The
    widest interval therefore counts, among lengths with at least LEAST_BLOCKS blocks. `repeat` is how many samples
    share the same processes, if there are several such repeats; these count as blocks however few they are.
    """
    lengths = [1]
    while len(samples) // (2 * lengths[-1]) >= LEAST_BLOCKS:
        lengths.append(2 * lengths[-1])
    lengths += [repeat] if repeat else []
    widths = [_half_width(_block_means(samples, length)) for length in lengths]
    widest = max(widths)
    return Interval(mean=statistics.fmean(samples), half_width=widest, block=lengths[widths.index(widest)])


def ratio_interval(ones: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Return the geometric mean of one / other over pairs, in order, and half its interval."""
    logs = mean_interval([math.log(one / other) for one, other in zip(ones, others, strict=True)])
    return math.exp(logs.mean), math.exp(logs.mean) * logs.half_width


def _block_means(samples: Sequence[float], length: int) -> list[float]:
    """Return means of whole blocks.

    Surplus samples at the start are dropped, because the end is further from warm-up.
    """
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
    """Return the two-sided quantile of Student's t at CONFIDENCE for `degrees` degrees of freedom."""
    low, high = 0.0, 1.0
    while _within(high, degrees) < CONFIDENCE:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < CONFIDENCE else (low, middle)
    return high


def _within(t: float, degrees: int) -> float:
    """Return the probability that Student's t is between -t and t: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan2(t, math.sqrt(degrees))
    odd = degrees % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for power in range(2 + odd, degrees + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power - 1) / power
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
