"""Compare a script's gradients with the sum over all ranks and micro-batches, and explain a difference."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meshmark.judge.faults import Fault, named_factor

Tensors = Mapping[str, Tensor]
FACTOR = 8.0
"""Tolerances are this multiple of the noise, as in `meshmark.judge.tolerance_model` for single numbers."""
CLAMPED = 1e-3
"""Relative error up to which gradients are the right ones clipped by value, or each by a factor."""
ROW = 4
"""Smallest number of elements of a row for which a single factor can be recognised."""
SAME_FACTOR = 1e-3
"""Relative difference up to which factors of gradients are the same."""
LEFT_OVER = 0.05
"""Fraction of a deviation that an explanation may leave unexplained."""
UNSEEN = 0.3
"""Largest undetected relative error of the whole gradient at which a verdict is still given."""


@dataclass(kw_only=True)
class Comparison:
    """Comparison of one replica's gradients with the right ones."""

    wrong: list[str]
    """Parameters beyond their tolerance, the worst first."""
    worst: float
    """The largest distance, relative to the gradient."""
    detects: float
    """The smallest relative error that would have been detected in every gradient."""
    widest: str
    """The parameter for which that error is needed."""
    unseen: float
    """The smallest relative error of the whole gradient that would have been detected."""


RESOLVED = 0.01
"""Noise of a gradient, relative to its norm, up to which it is judged by that noise alone, however small it is."""
COARSE = 8.0
"""Multiple of a format's epsilon up to which gradients in that format are off because of it."""


def compare(own: Tensors, exact: Tensors, noise: Mapping[str, float], eps: float) -> Comparison:
    """Compare gradients with the exact ones.

    `noise` gives each gradient's distance from the truth due to rounding alone, relative to the gradient's norm.
    """
    scales = {name: float(x.norm()) for name, x in exact.items()}
    whole = float(np.sqrt(sum(s * s for s in scales.values()))) or 1.0
    usual = float(np.median([n for n in noise.values()] or [0.0]))
    wrong, worst, detects, widest, tolerances = [], 0.0, 0.0, "", 0.0
    for name, x in exact.items():
        y, scale = own.get(name), scales[name]
        distance = float((y.double() - x).norm()) if y is not None else scale
        if not np.isfinite(distance):
            distance = float("inf")
        tolerance = FACTOR * max(noise[name], usual, eps) * scale
        is_resolved = 0.0 < scale and noise[name] <= RESOLVED  # however small: Adam moves such a parameter as far
        if not is_resolved:  # zero but for rounding, as of a bias in front of a normalisation
            tolerance += FACTOR * 1e-3 * eps * whole
        tolerances += tolerance**2
        if is_resolved or scale > 1e-5 * whole:
            worst = max(worst, distance / scale)
            detects, widest = max((detects, widest), (tolerance / scale, name))
        if distance > tolerance:
            wrong.append((distance / (tolerance or 1.0), name))
    return Comparison(
        wrong=[name for _, name in sorted(wrong, reverse=True)],
        worst=worst,
        detects=detects,
        widest=widest,
        unseen=float(np.sqrt(tolerances)) / whole,
    )


@dataclass(frozen=True, kw_only=True)
class Penalty:
    """A penalty on weights, as found in gradients."""

    gradients: dict[str, Tensor]
    """Its gradients, by parameter."""
    text: str
    """Such as `an L2 penalty of 0.01 x the sum of squares of weight`. Empty if it is too small to be seen."""


def penalty_in(
    own: Tensors, parts: Sequence[Tensors], weights: Tensors, names: Sequence[str], noise: float
) -> Penalty | None:
    """Return the penalty on `names` that gradients contain in addition to some weighted sum of `parts`.

    Its gradient is a multiple of the weights for an L2 penalty, and of their signs for an L1 penalty. The factor is
    that of all parameters, or each has its own, as for a sum of norms. Returns None if gradients hold something else.
    `noise` is the usual rounding of gradients, relative to their norm.
    """
    for kinds in (("L2",), ("L1",), ("L2", "L1")):
        if found := _fitted_penalty(own, parts, weights, names, kinds, noise):
            factors, gradients = found
            told = [f"{_PENALTIES[kind].format(x, shortened(names))}" for kind, x in factors.items()]
            return Penalty(gradients=gradients, text=" and ".join(told) if gradients else "")
    single = [_fitted_penalty(own, parts, weights, [name], ("L2",), noise) for name in names]
    if not all(single):
        return None
    gradients = {name: g for found in single if found for name, g in found[1].items()}
    norms = [float(gradients[name].norm()) for name in names if name in gradients]
    if not norms:
        return Penalty(gradients={}, text="")
    if max(norms) - min(norms) <= 0.01 * max(norms):
        return Penalty(
            gradients=gradients, text=f"a penalty of {norms[0]:.4g} x the sum of the norms of {shortened(names)}"
        )
    return Penalty(gradients=gradients, text=f"L2 penalties on {shortened(names)}, each with a factor of its own")


_PENALTIES = {
    "L2": "an L2 penalty of {:.4g} x the sum of squares of {}",
    "L1": "an L1 penalty of {:.4g} x the sum of absolute values of {}",
}


def _fitted_penalty(
    own: Tensors,
    parts: Sequence[Tensors],
    weights: Tensors,
    names: Sequence[str],
    kinds: Sequence[str],
    noise: float,
) -> tuple[dict[str, float], dict[str, Tensor]] | None:
    """Return the factor of each kind of penalty and the gradients of all, or None if they do not fit."""
    target, weight = _flat(own, names, own), _flat(weights, names, own)
    directions = {"L2": 2 * weight, "L1": weight.sign()}
    columns = [_flat(part, names, own) for part in parts] + [directions[kind] for kind in kinds]
    if target.numel() < 4 * len(columns):
        return None
    matrix = torch.stack(columns, 1)
    solution = torch.linalg.lstsq(matrix, target.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    factors = dict(zip(kinds, solution[len(parts) :].tolist(), strict=True))
    size = float(torch.stack([x * directions[kind] for kind, x in factors.items()]).sum(0).norm())
    left = float((target - matrix @ solution).norm())
    if left > LEFT_OVER * size:
        # It may still be too small to be seen.
        return (factors, {}) if left <= FACTOR * noise * float(target.norm()) else None
    shapes = {name: own[name].shape for name in names}
    gradients = {
        name: sum(
            (x * (2 * weights[name] if kind == "L2" else weights[name].sign()).double() for kind, x in factors.items()),
            torch.zeros(shapes[name], dtype=torch.float64),
        )
        for name in names
    }
    return factors, gradients


@dataclass(frozen=True, kw_only=True)
class Single:
    """Gradients that the script has clipped one by one."""

    gradients: dict[str, Tensor]
    """Gradients before clipping, by parameter."""
    factors: list[float]
    """Distinct factors of the clipping, the smallest first."""
    text: str
    """Description, such as `by factors of 0.1 to 0.5, each tensor by its own`."""


def clipped_singly(own: Tensors, exact: Tensors, names: Sequence[str]) -> Single | None:
    """Return how tensors, or their rows, are the exact ones times factors of at most 1.

    Adaptive gradient clipping (Brock et al., 2021) has one factor for each unit, which is a row of a matrix. Returns
    None if something else has changed a gradient. Also returns None if all gradients have the same factor, because
    clipping by the norm of all gradients does that too.
    """
    gradients, factors, by_row = {}, [], False
    for name in names:
        if name not in own or not own[name].any() or not exact[name].any():
            return None
        found = _factors(own[name].double(), exact[name], ())
        if found is None and exact[name].dim() > 1 and exact[name][0].numel() >= ROW:
            by_row, found = True, _factors(own[name].double(), exact[name], tuple(range(1, exact[name].dim())))
        if found is None:
            return None
        gradients[name] = own[name].double() / found
        factors += found.reshape(-1).tolist()
    low, high = min(factors), max(factors)
    rest = sum(float(x.square().sum()) for name, x in exact.items() if name not in names)
    whole = sum(float(x.square().sum()) for x in exact.values())
    if high - low <= SAME_FACTOR * high and rest <= (SAME_FACTOR**2) * whole:
        return None
    once = sorted({float(f"{x:.6g}") for x in factors})
    told = f"by {once[0]:.3g}" if len(once) == 1 else f"by factors of {low:.3g} to {high:.3g}"
    told += f", each {'row' if by_row else 'tensor'} by its own" if len(once) > 1 else ""
    return Single(gradients=gradients, factors=once, text=told)


def _factors(own: Tensor, exact: Tensor, within: tuple[int, ...]) -> Tensor | None:
    """Return the factors of `exact` that make `own`, one for the whole or one for each row, or None."""
    if not within:
        own, exact = own.reshape(1, -1), exact.reshape(1, -1)
        factors = _factors(own, exact, (1,))
        return None if factors is None else factors.reshape(())
    squares = (exact * exact).sum(within, keepdim=True)
    factors = torch.where(squares > 0, (own * exact).sum(within, keepdim=True) / squares, torch.ones(()).double())
    left = float((own - factors * exact).norm())
    if left > CLAMPED * float(own.norm()) or float(factors.min()) <= 0.0 or float(factors.max()) > 1.0 + CLAMPED:
        return None
    return factors


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The class of a difference, in the judge's classes, and its details."""

    fault: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Facts about a replica's gradients that are known before they are compared."""

    ranks: Sequence[int]
    """Ranks that hold this replica."""
    factor: float
    """Weight that the gradient of each rank and micro-batch should have."""
    known: Mapping[str, float]
    """Factors that have a name, such as the number of ranks."""


def explain(
    own: Tensors,
    parts: Sequence[Sequence[Tensors]],
    previous: Tensors | None,
    names: Sequence[str],
    expected: Expected,
) -> Explanation:
    """Explain why the gradients of `names` are wrong.

    Finds the weights with which the `parts` (by rank and micro-batch) and the previous step's gradient add up to them.
    """
    ranks, factor = expected.ranks, expected.factor
    absent = [name for name in names if name not in own]
    if absent:
        return Explanation(fault=Fault.MISSING, detail=f"{shortened(absent)} got no gradient on rank {ranks[0]}")
    target = _flat(own, names, own)
    columns = [_flat(part, names, own) for of_rank in parts for part in of_rank]
    labels = [(rank, call) for rank, of_rank in enumerate(parts) for call in range(len(of_rank))]
    right = factor * torch.stack(columns).sum(0)
    if previous is not None:
        columns.append(_flat(previous, names, own))
    matrix = torch.stack(columns, 1)
    solution = torch.linalg.lstsq(matrix, target.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    left = float((target - matrix @ solution).norm())
    where = shortened(names)
    if left > LEFT_OVER * float((target - right).norm()):
        for low in (torch.bfloat16, torch.float16):
            is_low = bool((target.to(low).double() == target).all()) and bool(target.any())
            if is_low and left <= COARSE * torch.finfo(low).eps * float(target.norm()):
                return Explanation(fault=Fault.PRECISION, detail=f"every value of {where} is a {low} number")
        return Explanation(
            fault=Fault.BACKWARD,
            detail=f"no weighing of the ranks' and micro-batches' gradients makes those of {where}",
        )
    weights = {label: float(solution[i]) for i, label in enumerate(labels)}
    of_previous = float(solution[-1]) if previous is not None else 0.0
    return _explain(weights, of_previous, expected, where)


def _explain(
    weights: Mapping[tuple[int, int], float],
    of_previous: float,
    expected: Expected,
    where: str,
) -> Explanation:
    """Explain the weights that were fitted to the parts."""
    ranks, factor, known = expected.ranks, expected.factor, expected.known

    def near(x: float, y: float) -> bool:
        return abs(x - y) <= 0.02 * max(abs(y), 0.5 * factor)

    everyone = {rank for rank, _ in weights}
    others = everyone - set(ranks)
    last = {rank: max(c for r, c in weights if r == rank) for rank in everyone}
    several = any(last.values())
    if near(of_previous, 1.0) or of_previous > 0.2 * factor:
        return Explanation(
            fault=Fault.NOT_CLEARED,
            detail=f"the step before's gradient is still in {where}, {of_previous:.3g} times (zero_grad missing?)",
        )
    values = list(weights.values())
    if all(near(v, values[0]) for v in values):
        return Explanation(
            fault=Fault.SCALED,
            detail=f"{where}: {named_factor(values[0] / factor, known, 5e-3)} times the right gradient",
        )
    if others and all(near(weights[key], 0.0) for key in weights if key[0] in others):
        rank = ", ".join(map(str, ranks))
        return Explanation(
            fault=Fault.NOT_REDUCED,
            detail=f"rank {rank} steps on the gradient of its own rows only ({where}); other ranks' are left out",
        )
    early = [key for key in weights if key[1] < last[key[0]]]
    if several and all(near(weights[key], 0.0) for key in early):
        return Explanation(
            fault=Fault.DROPPED,
            detail=f"only the last of {max(last.values()) + 1} micro-batches is in {where} (cleared between them?)",
        )
    number = max(last.values()) + 1
    alone = [c for c in range(number) if all(near(weights[k], 0.0) for k in weights if k[1] == c and k[0] in others)]
    kept = [c for c in alone if any(not near(weights[k], 0.0) for k in weights if k[1] == c and k[0] in ranks)]
    if several and others and kept and len(alone) < number:
        reduced = ["the last" if c == number - 1 else f"number {c + 1}" for c in range(number) if c not in alone]
        return Explanation(
            fault=Fault.NOT_REDUCED,
            detail=f"of {number} micro-batches only {' and '.join(reduced)} is reduced over ranks ({where})",
        )
    gone = [rank for rank in sorted(everyone) if all(near(weights[k], 0.0) for k in weights if k[0] == rank)]
    if gone:
        return Explanation(
            fault=Fault.DROPPED, detail=f"rows of rank {', '.join(map(str, gone))} have no part in {where}"
        )
    skipped = [c for c in range(max(last.values()) + 1) if all(near(weights[k], 0.0) for k in weights if k[1] == c)]
    if skipped:
        which = ", ".join(str(c + 1) for c in skipped)
        return Explanation(
            fault=Fault.DROPPED,
            detail=f"micro-batch {which} of {max(last.values()) + 1} has no part in {where} on any rank (are gradients "
            "reduced before it?)",
        )
    told = ", ".join(
        f"rank {r}{f' micro-batch {c}' if several else ''}: {w / factor:.3g}" for (r, c), w in list(weights.items())[:8]
    )
    return Explanation(fault=Fault.UNEVEN, detail=f"{where}: parts count, where each should count 1: {told}")


def _flat(tensors: Tensors, names: Sequence[str], shapes: Tensors) -> Tensor:
    return torch.cat(
        [tensors[n].double().reshape(-1) if n in tensors else torch.zeros(shapes[n].numel()).double() for n in names]
    )


def shortened(names: Collection[str]) -> str:
    """Return the first name, and how many there are besides."""
    return next(iter(names)) + (f" and {len(names) - 1} more" if len(names) > 1 else "")
