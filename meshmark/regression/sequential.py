"""A sequential test that keeps its error rates at any stopping time, and may be evaluated after every pair.

Differences of logarithms of seconds, pair by pair, are tested for mean zero by a mixture t-test: the Bayes factor of
an effect size that is N(0, g) against none (Gönen et al., Am. Statist. 59, 252, 2005), with the right Haar prior on
the scale. Without an effect it is a martingale of mean one in the data's scale-free part (Hendriksen, de Heide and
Grünwald, Bayesian Analysis 16, 961, 2021; the mixture is Robbins', Ann. Math. Statist. 41, 1397, 1970). By Ville's
inequality, the chance that it ever reaches 1/alpha is therefore at most alpha. The mean of two such martingales, one
for small and one for large effects, is again one. The values that it does not reject form a confidence sequence, which
contains the true value at all times at once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

EFFECT_VARIANCES = (0.25, 16.0)
"""Values of g. Effects of half the scatter of a pair, and of four times that, are detected soonest.

With only the first value, no effect, however large, can be decided before the tenth pair. With both, five suffice.
"""
LEAST_PAIRS = 4


def evidence(differences: Sequence[float], variances: Sequence[float] = EFFECT_VARIANCES) -> float:
    """Return the Bayes factor of a mean other than zero, averaged over `variances`."""
    n = len(differences)
    if n < 2:
        return 1.0
    mean, variance = statistics.fmean(differences), statistics.variance(differences)
    if not variance:
        return math.inf if mean else 1.0
    return _bayes_factor(n, n * mean**2 / variance / (n - 1), variances)


def _bayes_factor(n: int, square: float, variances: Sequence[float]) -> float:
    """Return the mixture's Bayes factor. `square` is the square of Student's t divided by its degrees of freedom."""
    spreads = [1 + n * g for g in variances]
    logs = [n / 2 * (math.log1p(square) - math.log1p(square / s)) - math.log(s) / 2 for s in spreads]
    return statistics.fmean(math.exp(min(log, 700.0)) for log in logs)


def half_width(differences: Sequence[float], alpha: float, variances: Sequence[float] = EFFECT_VARIANCES) -> float:
    """Return the half width of the confidence sequence around the mean. Infinite while it has no bound."""
    n = len(differences)
    if n < 2:
        return math.inf
    low, high = 0.0, 1.0
    while _bayes_factor(n, high, variances) < 1 / alpha:
        high *= 4
        if high > 1e30:  # the largest t there is would not reach it
            return math.inf
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _bayes_factor(n, middle, variances) >= 1 / alpha else (middle, high)
    return math.sqrt(high * (n - 1) / n) * statistics.stdev(differences)
