"""Judge the randomness of dropout by its effect on the loss and the gradients."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from meshmark.conformance.finding import Finding, all_of, decide, drift_text
from meshmark.judge.tolerance_model import FALSE_ALARMS
from meshmark.records.record import Record
from meshmark.text import pluralize

EVALUATION_TOLERANCE = 1e-5
"""Relative tolerance for the evaluation loss, which has no measured noise. Dropout left on moves it a hundred times
more.
"""
SAME = 1e-5
"""Relative tolerance between runs that differ only by rounding.

Other masks move gradients by half a per cent or more.
"""
TINY = 1e-30
_ALIKE = 3
"""Number of equal losses in a row that dropout does not draw."""


def dropout(record: Record) -> Finding:
    samples, drifts = record.conformance.samples, record.equivalence.drifts
    by_rank = {rank: np.array(s["losses"]) for rank, s in enumerate(samples) if any(s["losses"])}
    first, losses = samples[0], [*by_rank.values()]
    draws = np.concatenate(losses)
    reference = np.array(first["reference"])
    again = sum(len(own) - len(set(own)) for own in losses)
    off = _off(by_rank, first["exact"][0])
    alike = sum(float(np.sum(a == b)) for i, a in enumerate(losses) for b in losses[:i])
    chance = len(draws) // 16  # float32 has some 1e5 numbers in the spread of the losses: a pair may be equal
    z = statistics.NormalDist().inv_cdf(1 - FALSE_ALARMS / 8)
    away = _away(draws, reference)
    spread = math.log(max(draws.std(ddof=1), TINY) / max(reference.std(ddof=1), TINY))
    # The logarithm of a sample's standard deviation scatters by 1 / sqrt(2 (n - 1)), if its draws are near normal.
    spread /= math.sqrt(0.5 / (len(draws) - 1) + 0.5 / (len(reference) - 1))
    along, size = (_away(np.array(first[n]), np.array(first[f"reference_{n}"])) for n in ("along", "size"))
    few = student(z, len(first["size"]) - 1)
    shift = first["evaluation"][0] / first["exact"][0] - 1
    return all_of(
        decide(again <= chance, f"{again} of {len(draws)} losses came twice on a rank{off}"),
        decide(alike <= chance, f"{int(alike)} losses equal on different data-parallel ranks"),
        decide(
            abs(away) < z and abs(spread) < z,
            f"mean {away:+.1f} and spread {spread:+.1f} standard errors from plain PyTorch's, {z:.1f} allowed",
        ),
        decide(
            abs(along) < few and abs(size) < few,
            f"gradients {along:+.1f} in multiple and {size:+.1f} in size of "
            f"the exact ones, {few:.1f} standard errors allowed",
        ),
        _spreads(first),
        decide(not drifts, f"gradients reported by several ranks {drift_text(drifts)}"),
        decide(abs(shift) < EVALUATION_TOLERANCE, f"evaluation without dropout off by {shift:.1e}"),
    )


def _spreads(samples: Mapping[str, Sequence[float]]) -> Finding:
    """Judge how the gradient of each tensor scatters from step to step.

    Masks that repeat in one module, or on one rank, hardly show in the loss, and take a part of the scatter of the
    gradients next to them.
    """
    names = [name.removeprefix("spread ") for name in samples if name.startswith("spread ")]
    z = statistics.NormalDist().inv_cdf(1 - FALSE_ALARMS / 16 / max(len(names), 1))
    found = list[tuple[float, float, float, str]]()
    for name in names:
        (own, error, steps), (reference, its_error, draws) = (
            samples[f"{prefix}spread {name}"] for prefix in ("", "reference_")
        )
        if min(steps, draws) > 1:
            away = (own - reference) / max(math.hypot(error, its_error), TINY)
            found.append((away, student(z, int(min(steps, draws)) - 1), math.exp(own - reference), name))
    off = [each for each in found if abs(each[0]) >= each[1]]
    if not off:
        worst = max((abs(away) for away, *_ in found), default=0.0)
        return decide(True, f"gradients scatter as plain PyTorch's, to {worst:.1f} standard errors")
    away, allowed, ratio, name = max(off, key=lambda each: abs(math.log(each[2])))
    others = f" (and {pluralize(len(off) - 1, 'more', 'more')})" if len(off) > 1 else ""
    return decide(
        False,
        f"the gradient of {name}{others} scatters {ratio:.2f} times as much from step to step as plain PyTorch's, "
        f"{away:+.1f} standard errors, {allowed:.1f} allowed{': a mask that repeats?' if ratio < 1 else ''}",
    )


def _off(losses: Mapping[int, NDArray[np.float64]], exact: float) -> str:
    """Return what `_off_since` says of the losses of each rank, and of which rank, if it does not hold for all."""
    found = {rank: told for rank, own in losses.items() if (told := _off_since(own, exact))}
    if len(found) == len(losses) and len(set(found.values())) == 1:
        return next(iter(found.values()))
    return "".join(f"{told.removesuffix(')')}, on rank {rank})" for rank, told in found.items())


def _off_since(losses: NDArray[np.float64], exact: float) -> str:
    """Return since when all losses of a rank are equal, and whether to the one without dropout, which is `exact`. Empty
    if the last ones differ.
    """
    first = next((i for i in range(len(losses)) if len(set(losses[i:])) == 1), len(losses))
    if len(losses) - first < _ALIKE:
        return ""
    if abs(losses[-1] / exact - 1) > EVALUATION_TOLERANCE:
        return f" (the same masks from step {first} on)"
    why = ": it stays off after the evaluation" if first == len(losses) // 2 else ""
    return f" (no dropout from step {first} on{why})"


def draws_again(kept: Record, recomputed: Record) -> Finding:
    """Judge that recomputation draws the same masks.

    The first step's forward pass draws the same masks from the same seed. Its gradient is also the same if the
    backward pass draws them again.
    """
    loss = abs(recomputed.training.losses[0] / kept.training.losses[0] - 1)
    gradients = [
        abs(recomputed.conformance.samples[0][name][0] / kept.conformance.samples[0][name][0] - 1)
        for name in ("along", "size")
    ]
    others = " (other masks in the recomputation?)" if loss < SAME <= max(gradients) else ""
    return all_of(
        decide(loss < SAME, f"loss of the first step {loss:.1e} from that without recomputation"),
        decide(max(gradients) < SAME, f"its gradients {max(gradients):.1e}{others}"),
    )


def _away(draws: NDArray[np.float64], reference: NDArray[np.float64]) -> float:
    """Return the difference of two means in standard errors."""
    error = math.sqrt(draws.var(ddof=1) / len(draws) + reference.var(ddof=1) / len(reference))
    return float(draws.mean() - reference.mean()) / max(error, TINY)


def student(z: float, freedom: int) -> float:
    """Return the quantile of Student's t that is as unlikely as `z` for a normal variable.

    See Abramowitz and Stegun, 26.7.5.
    """
    return float(z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2))
