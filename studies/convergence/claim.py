"""A claim that something goes as a formula says when one thing is swept, and what measuring it finds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from studies.convergence.quadratics import Array

GROUPS, PER_GROUP = 10, 40
"""Seeds, and the coordinates of each: a group of coordinates is a sample."""
EXACT = 1e-6
"""By how much an exponent or a constant may be off where nothing is drawn but the problem: what is left of the start,
and rounding."""
CONFIDENCE = 0.999
"""Confidence of an interval. Draws have fixed seeds, so a claim that holds keeps holding."""

Sample = Callable[[float], Array]
"""From the swept value to what is measured, by coordinate."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """That something goes as a formula says when one thing is swept."""

    name: str
    swept: str
    values: tuple[float, ...]
    measured: Sample
    formula: Sample
    paper: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """Slopes are of logarithm over logarithm."""

    claim: Claim
    measured: Array
    """By value, then group: root mean squares over its coordinates."""
    formula: Array

    def slopes(self, of: Array) -> Array:
        """By group."""
        x = np.log(self.claim.values)
        return np.asarray(np.polyfit(x, np.log(of), 1)[0])

    @property
    def exponent(self) -> tuple[float, float]:
        """Measured, and half its interval over groups."""
        return _interval(self.slopes(self.measured))

    @property
    def expected(self) -> float:
        return float(self.slopes(self.formula).mean())

    @property
    def constant(self) -> tuple[float, float]:
        """Measured over formula, and half its interval over groups."""
        return _interval(np.exp(np.log(self.measured / self.formula).mean(axis=0)))

    def __str__(self) -> str:
        (slope, around), (ratio, within) = self.exponent, self.constant
        return (
            f"{self.claim.name}, by {self.claim.swept}: exponent {slope:.4f} ± {around:.1e}, by formula "
            f"{self.expected:.4f}; measured over formula {ratio:.7f} ± {within:.1e}"
        )

    @property
    def holds(self) -> bool:
        off, half = _interval(self.slopes(self.measured) - self.slopes(self.formula))
        ratio, around = self.constant
        return abs(off) <= max(half, EXACT) and abs(ratio - 1) <= max(around, EXACT)


def _interval(samples: Array) -> tuple[float, float]:
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(samples) - 1) * samples.std(ddof=1) / math.sqrt(len(samples))
    return float(samples.mean()), float(half)


def measure(claim: Claim) -> Result:
    def grouped(sample: Sample) -> Array:
        found = np.array([sample(value) for value in claim.values])
        return np.asarray(np.sqrt(np.mean(np.square(found.reshape(len(claim.values), GROUPS, PER_GROUP)), axis=2)))

    return Result(claim=claim, measured=grouped(claim.measured), formula=grouped(claim.formula))
