"""A test that may be looked at after every pair and keeps its error rates, whenever one stops.

Logarithms of B's over A's seconds, pair by pair, are tested for mean zero by a mixture t-test: the Bayes factor of an
effect size that is N(0, g) against none (Gönen et al., Am. Statist. 59, 252, 2005), with the right Haar prior on the
scale. Without an effect it is a martingale of mean one in the data's scale-free part (Hendriksen, de Heide and
Grünwald, Bayesian Analysis 16, 961, 2021; the mixture is Robbins', Ann. Math. Statist. 41, 1397, 1970), so that by
Ville's inequality the chance that it ever reaches 1/alpha is at most alpha. What it does not reject is a confidence
sequence, which holds the truth at all times at once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

EFFECT_VARIANCE = 0.25
"""g: effects of half the scatter of a pair are found soonest."""
LEAST_PAIRS = 4


def evidence(differences: Sequence[float], g: float = EFFECT_VARIANCE) -> float:
    """The Bayes factor of a mean other than zero."""
    n = len(differences)
    if n < 2:
        return 1.0
    mean, variance = statistics.fmean(differences), statistics.variance(differences)
    if not variance:
        return math.inf if mean else 1.0
    square, spread = n * mean**2 / variance / (n - 1), 1 + n * g
    log = n / 2 * (math.log1p(square) - math.log1p(square / spread)) - math.log(spread) / 2
    return math.exp(min(log, 700.0))


def half_width(differences: Sequence[float], alpha: float, g: float = EFFECT_VARIANCE) -> float:
    """Of the confidence sequence around the mean; infinite while it is not bounded."""
    n = len(differences)
    if n < 2:
        return math.inf
    spread = 1 + n * g
    ratio = (math.sqrt(spread) / alpha) ** (2 / n)
    if ratio >= spread:
        return math.inf
    return math.sqrt((n - 1) * (ratio - 1) / (1 - ratio / spread) / n) * statistics.stdev(differences)
