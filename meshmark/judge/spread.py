"""How one quantity scatters between correct runs, estimated from its noise runs, and the tail of that distribution.

The square of a tensor's distance is a sum of squares in many directions, some with larger shares than others. Its
variance relative to its mean is 2 / d. Here d is its *degrees of freedom*: the number of equal directions with that
variance. A few large shares make a longer tail than d equal ones, so the tail is that of d / 7 directions with the
same variance (one direction if d is below seven). The mean is estimated from a few runs, which turns chi-squared into
an F distribution. A single number has only one direction, however little a few draws differ; for it the distribution
is Student's t. reports/power.md compares this with correct runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TAIL_DIRECTIONS = 1 / 7
"""Share of the degrees of freedom that carries the tail."""
MOST_DEGREES = 64.0
"""Largest number of degrees of freedom that a few dozen draws can show.

Roundings take few values. Identical draws may be followed by one where a single element was rounded the other way,
which changes the square by a tenth in a bias of 32 elements. Independent roundings of as many have 80 degrees of
freedom.
"""
ONE_SIDED = 1.645
"""Standard errors between an estimate and its one-sided 95 % limit."""
APART = 3.1
"""Standard errors beyond which one step scatters more than all together, not by chance: one in 1,000."""


def _at_least(degrees: float, num_values: int) -> float:
    """Return the lower 95 % limit of degrees of freedom estimated from the variance of `num_values` squared values.

    Without it, the quantities whose few draws happened to differ little would cause alarms.
    """
    return degrees / (1 + ONE_SIDED * _error_of_variance(degrees, num_values))


def _error_of_variance(degrees: float, num_values: int) -> float:
    """Return the relative standard error of the sample variance of `num_values` chi-squared values over d.

    Its relative variance is (2 + 12 / d) / n.
    """
    return math.sqrt((2 + 12 / degrees) / num_values)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Scatter of one quantity."""

    level: list[float]
    """Root mean square over the runs, by step."""
    degrees: float
    """Degrees of freedom of one squared value, at the step that scatters most if one does more than by chance.

    Below one if steps differ more than their draws.
    """
    known: float
    """Degrees of freedom of `level`."""

    @classmethod
    def of(cls, values: NDArray[np.float64], *, of_number: bool) -> Spread:
        """Return the spread of values (runs x steps).

        `of_number` is for a single number, whose level at every step is at least that of all steps together.
        """
        squares = np.square(values)
        own = squares.mean(axis=0)
        means = np.broadcast_to(np.maximum(squares.mean(), own) if of_number else own, squares.shape)
        num_draws = len(values)
        level = [float(x) for x in np.sqrt(means[0])]
        if not np.isfinite(means).all():
            return cls(level=level, degrees=1.0, known=float(num_draws))
        relative = np.divide(squares, means, out=np.ones_like(squares), where=means > 0)
        # The runs' own mean lies between them: they scatter less about it than about the true one.
        variances = np.mean((relative - 1) ** 2, axis=0) * num_draws / max(num_draws - 1, 1)
        variance, widest = float(variances.mean()), float(variances.max())
        most = 1.0 if of_number else MOST_DEGREES
        degrees = min(_at_least(2 / variance, squares.size), most) if variance else most
        # Steps are draws of one distribution only if they scatter alike. Adagrad's first step is the sign of a
        # gradient that is zero but for rounding. From where that leads, runs differ more at some steps than at others.
        if not of_number and widest > variance * (1 + APART * _error_of_variance(degrees, num_draws)):
            degrees = min(_at_least(2 / widest, num_draws), degrees)
        return cls(level=level, degrees=degrees, known=num_draws * degrees)

    @property
    def _directions(self) -> float:
        return max(1.0, TAIL_DIRECTIONS * self.degrees)

    @property
    def _share(self) -> float:
        """Share of a squared value that is in the tail's directions."""
        return math.sqrt(self._directions / self.degrees)

    def factor(self, probability: float) -> float:
        """Return the multiple of its level that a value exceeds with `probability`."""
        from scipy.special import betaincinv  # takes a quarter of a second, and few commands need it

        y = float(betaincinv(self.known / 2, self._directions / 2, probability))
        tail = self.known * (1 - y) / (self._directions * y) if y else math.inf
        return math.sqrt(1 - self._share + self._share * tail)

    def probability(self, multiples: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the probability that a correct run exceeds these multiples of the level, the inverse of `factor`."""
        from scipy.special import betainc

        tail = np.maximum((np.square(multiples) - 1 + self._share) / self._share, 0.0)
        found: NDArray[np.float64] = betainc(
            self.known / 2, self._directions / 2, self.known / (self.known + self._directions * tail)
        )
        return found
