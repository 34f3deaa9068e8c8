"""How one quantity scatters from correct run to correct run, from its own noise runs, and how far out that reaches.

The square of a tensor's distance is a sum of squares in many directions, some of which take a larger share than others.
Relative to its mean its variance is 2 / d: d are its *degrees of freedom*, those of as many equal directions. A few
large shares make a longer tail than d equal ones, so the tail is that of d / 7 directions which make the same variance
(of one alone where d is below seven). The mean is known from a handful of runs: that makes chi-squared an F, and of a
single number, which has but one direction however little a few draws of it differ, Student's t.
reports/power.md sets what correct runs did beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TAIL_DIRECTIONS = 1 / 7
"""Of the degrees of freedom, those that carry the tail."""
MOST_DEGREES = 64.0
"""That a few dozen draws can show. Roundings take few values: draws that are all the same may be followed by one where
a single element was rounded the other way, which in a bias of 32 elements changes the square by a tenth. Independent
roundings of so many have 80 degrees of freedom."""
ONE_SIDED = 1.645
"""Standard errors below an estimate at which the 95 % limit lies."""


def _at_least(degrees: float, num_values: int) -> float:
    """The lower 95 % limit of degrees of freedom that were estimated from the variance of so many squared values: of
    many quantities, those whose few draws happened to differ little would be the ones that alarm. The sample variance
    of chi-squared values has a relative variance of (2 + 12 / d) / n."""
    return degrees / (1 + ONE_SIDED * math.sqrt((2 + 12 / degrees) / num_values))


@dataclass(frozen=True, kw_only=True)
class Spread:
    """One quantity's scatter."""

    level: list[float]
    """Root mean square over the runs, by step."""
    degrees: float
    """Of freedom of one squared value; below one where the steps differ more than their draws."""
    known: float
    """Degrees of freedom of `level`."""

    @classmethod
    def of(cls, values: NDArray[np.float64], *, of_number: bool) -> Spread:
        """Of runs x steps; `of_number`: of a single number, whose level at no step is below that of all together."""
        squares = np.square(values)
        own = squares.mean(axis=0)
        means = np.broadcast_to(np.maximum(squares.mean(), own) if of_number else own, squares.shape)
        num_draws = len(values)
        level = [float(x) for x in np.sqrt(means[0])]
        if not np.isfinite(means).all():
            return cls(level=level, degrees=1.0, known=float(num_draws))
        relative = np.divide(squares, means, out=np.ones_like(squares), where=means > 0)
        # The runs' own mean lies between them: they scatter less about it than about the true one.
        variance = float(np.mean((relative - 1) ** 2)) * num_draws / max(num_draws - 1, 1)
        most = 1.0 if of_number else MOST_DEGREES
        degrees = min(_at_least(2 / variance, squares.size), most) if variance else most
        return cls(level=level, degrees=degrees, known=num_draws * degrees)

    @property
    def _directions(self) -> float:
        return max(1.0, TAIL_DIRECTIONS * self.degrees)

    @property
    def _share(self) -> float:
        """Of a squared value, what its tail's directions make up."""
        return math.sqrt(self._directions / self.degrees)

    def factor(self, probability: float) -> float:
        """The multiple of its level that a value exceeds with `probability`."""
        from scipy.special import betaincinv  # takes a quarter of a second, and few commands need it

        y = float(betaincinv(self.known / 2, self._directions / 2, probability))
        tail = self.known * (1 - y) / (self._directions * y) if y else math.inf
        return math.sqrt(1 - self._share + self._share * tail)

    def probability(self, multiples: NDArray[np.float64]) -> NDArray[np.float64]:
        """That a correct run exceeds these multiples of the level: `factor` the other way round."""
        from scipy.special import betainc

        tail = np.maximum((np.square(multiples) - 1 + self._share) / self._share, 0.0)
        found: NDArray[np.float64] = betainc(
            self.known / 2, self._directions / 2, self.known / (self.known + self._directions * tail)
        )
        return found
