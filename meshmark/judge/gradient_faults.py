"""Explain wrong gradients as combinations of gradients that could have been computed instead.

Every hypothesis is a few candidate gradients, computed in float64. The run's gradient is fitted as their weighted sum.
The first hypothesis that leaves no more than rounding (or 5 % of the deviation) is accepted. The most informative
candidates are the gradients of the batch's single sequences: their weights show what was dropped, reduced, or
averaged, and how.

Wrong running statistics of batch norms are explained in the same way. So are gradients that hold one rank's part only.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshmark.algorithms.contract import Tensors
from meshmark.judge.deviation import global_norm
from meshmark.judge.failed_step import LEFT_OVER, SAME, Explanation, FailedStep, Fit, block_of
from meshmark.judge.faults import MOST_NAMES, Fault, named_factor
from meshmark.judge.function_faults import (
    is_clear,
    narrow_loss,
    no_input_gradient,
    other_function,
    other_objective,
    returning,
)
from meshmark.judge.partial_faults import (
    FEW,
    altered_weight,
    describe_region,
    elements_of_neighbours,
    in_other_places,
    in_region,
    old_block,
    old_weights_on_ranks,
    on_ranks,
    other_mask,
    other_mask_in_rows,
    other_reduction,
    part_of_other_block,
    replaced,
    shifted_targets,
    wrong_region,
)
from meshmark.judge.trace import Trace, low_precisions
from meshmark.judge.twin import Change, exact_buffers, known_parameters, replica_truth, together
from meshmark.models.module import Model
from meshmark.models.transformer import ModelSpec
from meshmark.reference.data import Batch, make_batch
from meshmark.spec.case import Case
from meshmark.text import pluralize

# --- Gradients that are one rank's part only.


def shards_of_owners(failed: FailedStep) -> Explanation | None:
    """Explain tensors made of different sequences: each shard is the part of the rank that owns it."""
    batch, own, parts = failed.batch, failed.trace.gradients[failed.step], set()
    rows = [failed.truth(failed.step, part) for part in failed.parts(batch)]
    for name in failed.names:
        basis = np.stack([row[name].ravel() for row in rows], axis=1)
        gradient = np.asarray(own[name], dtype=np.float64).ravel()
        weights = np.linalg.lstsq(basis, gradient, rcond=None)[0]
        if np.linalg.norm(gradient - basis @ weights) < LEFT_OVER * np.linalg.norm(gradient):
            parts.add(tuple(int(i) for i in np.flatnonzero(np.abs(weights) > SAME * np.abs(weights).max())))
    if len(parts) < 2 or sum(map(len, parts)) > len(rows):
        return None
    listed = " or ".join(str(list(part)) for part in sorted(parts))
    return Fault.NOT_REDUCED, f"each tensor is made of its owner's {failed.parts_name} alone: {listed}"


def nobody_reduced(case: Case, trace: Trace, step: int) -> str | None:
    """Return a text if every drifting rank, and the lowest, has gradients of one data-parallel rank's sequences only.

    None if some rank's gradients are made of several ranks' sequences, or of something else.
    """
    names = sorted(set.intersection(*(set(held) for held in trace.drifted.values()))) if trace.drifted else []
    if not names or step >= len(trace.gradients) or any(name not in trace.gradients[step] for name in names):
        return None
    batch = make_batch(case.workload, step)
    failed = FailedStep(case=case, trace=trace, step=step, tolerances=dict.fromkeys(names, 0.0))
    rows = [failed.truth(step, part) for part in failed.parts(batch)]
    held = {0: trace.gradients[step], **trace.drifted}
    parts = {rank: _whose(held[rank], rows, names, case.layout.dp) for rank in sorted(held)}
    if any(part is None for part in parts.values()) or len(set(parts.values())) < 2:
        return None
    listed = ", ".join(f"rank {rank} that of {part}" for rank, part in parts.items())
    return f"no rank reduced, each holds the part of one data-parallel rank alone: {listed}"


def not_summed_over_tp(case: Case, trace: Trace, step: int, tolerance: Callable[[str], float]) -> list[str]:
    """Return the parameters whose gradients on the tensor-parallel ranks differ, and add up to the truth.

    Other gradients may drift as well: what reached them over a residual connection was summed, or was whole.
    """
    tp = case.layout.tp
    held = {0: trace.gradients[step], **trace.drifted} if step < len(trace.gradients) else {}
    if tp == 1 or not held.keys() >= set(range(tp)):
        return []
    names = set.intersection(*(set(held[rank]) for rank in range(tp)))
    failed = FailedStep(case=case, trace=trace, step=step, tolerances=dict.fromkeys(names, 0.0))
    exact = failed.exact
    totals = {name: sum(np.asarray(held[rank][name], dtype=np.float64) for rank in range(tp)) for name in names}
    return sorted(name for name in names if np.linalg.norm(totals[name] - exact[name]) <= tolerance(name))


def _whose(own: Tensors, rows: Sequence[Tensors], names: Sequence[str], dp: int) -> int | None:
    """Return the data-parallel rank whose sequences alone produce all these gradients, or None."""
    basis = np.stack([np.concatenate([row[n].ravel() for n in names]) for row in rows], axis=1)
    gradient = np.concatenate([np.asarray(own[n], dtype=np.float64).ravel() for n in names])
    if gradient.size < basis.shape[1]:  # any number is some sum of more numbers
        of_ranks = basis.reshape(gradient.size, dp, -1).sum(axis=2).T
        near = [
            rank
            for rank, part in enumerate(of_ranks)
            if any(np.linalg.norm(gradient - times * part) <= _ALONE * np.linalg.norm(gradient) for times in (1, dp))
        ]
        return near[0] if len(near) == 1 else None
    weights = np.linalg.lstsq(basis, gradient, rcond=None)[0]
    if np.linalg.norm(gradient - basis @ weights) > LEFT_OVER * np.linalg.norm(gradient):
        return None
    shares = np.abs(weights.reshape(dp, -1)).max(axis=1)
    present = np.flatnonzero(shares > SAME * shares.max())
    return int(present[0]) if len(present) == 1 else None


# --- Explain wrong gradients as combinations of gradients that could have been computed instead.

_ALONG = 0.3
"""Share of a rounding deviation that lies along the gradient itself."""

_LEAST_ROUNDING = 0.03
"""Share of bf16's own rounding from which a deviation is rounding: a quarter of what TF32 and fp16 do."""
_FEWEST_ROUNDED = 8
"""Number of elements that are not all bf16 numbers by chance: each is with probability 2**-16."""
_CLEARLY = 3.0
"""An explanation with one more constant is better if it leaves this many times less unexplained."""
_VARIES = 0.01
"""Relative difference of a factor between steps from which it is no constant."""
_ALONE = 1e-4
"""Relative difference up to which a few numbers are one rank's part."""
_ONE = 5e-5
"""Difference from 1 that four digits do not show: such weights explain nothing."""
_PER_PART = 16
"""Number of elements per part of the batch that is needed to fit weights of the parts."""
_ALIKE = 3.0
"""Ratio of that share in tensors at the 90th and at the 10th percentile, up to which they are alike.

It is 1.1 for autocast, 1.8 for products in TF32, 2.3 for one block in bf16; 2.2 and more for other functions.
"""


def explain_gradients(failed: FailedStep) -> Explanation | None:
    """Return the first hypothesis that fits all wrong tensors together, or None."""
    own = failed.trace.gradients[failed.step]
    if absent := [name for name in failed.names if name not in own or not np.any(own[name])]:
        if len(absent) < len(failed.names) and (found := elements_of_neighbours(failed, own, failed.exact)):
            return found
        wrong = pluralize(len(failed.names), "wrong gradient")
        return Fault.MISSING, f"{len(absent)} of {wrong} {'is' if len(absent) == 1 else 'are'} absent or all zero"
    if not all(np.isfinite(own[name]).all() for name in failed.names):
        return None  # no hypothesis can fit, and trying all of them takes long
    exact = failed.exact
    fit = Fit(failed, own, exact)
    hypotheses: Sequence[Callable[[FailedStep, Fit, Tensors], Explanation | None]] = (
        _scaled,
        _in_other_places,
        _another_tensor_added,
        _weighed,
        _weighed_rows,
        _previous,
        _old_weights,
        _other_batch,
        _other_data,
        other_mask,
        shifted_targets,
        other_mask_in_rows,
        other_reduction,
        old_weights_on_ranks,
        part_of_other_block,
        in_region,
        _of_neighbours,
        old_block,
        _fitted_in_region,
        other_objective,
        narrow_loss,
        _other_activations,
        other_function,
        no_input_gradient,
        _low_precision,
        altered_weight,
        _rounded,
    )
    return next((found for hypothesis in hypotheses if (found := hypothesis(failed, fit, exact))), None)


def _scaled(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    weights = fit.weights(fit.exact)
    if weights is None:
        return None
    factor = float(weights[0])
    told = f"{named_factor(factor, failed.known_factors())} times the truth"
    _, left = fit.fitted(fit.exact)
    # In 16 bits a term that is much like the loss hides beneath what a factor may leave.
    if " = " not in told and (found := other_objective(failed, fit, exact, left / _CLEARLY)):
        return found
    later = list(_later_factors(failed))
    if any(abs(f - factor) > _VARIES * abs(factor) for f in later):
        others = f", and {', '.join(f'{f:.5g}' for f in later)} times in the next steps"
        if by_scale := _by_loss_scale(failed, factor):
            return Fault.SCALED, f"{factor:.5g} times the truth{others}: {by_scale}"
        told += f"{others}: no constant"
    elif " = " not in told and not is_clear(failed, fit):
        told += "; one more term in the loss may hide beneath the rounding"
    return Fault.SCALED, told


def _by_loss_scale(failed: FailedStep, factor: float) -> str:
    """Return a text if a factor is that by which the loss scale changes before or after the step."""
    scales, step = failed.trace.loss_scales, failed.step
    for other, which in ((step + 1, "next"), (step - 1, "last")):
        pair = [scales[each] if 0 <= each < len(scales) else None for each in (step, other)]
        if pair[0] and pair[1] and pair[0] != pair[1] and abs(pair[0] / pair[1] / factor - 1) <= _VARIES:
            return f"the loss was multiplied by {pair[0]:g}, and gradients divided by {pair[1]:g}, the {which} step's"
    return ""


def _later_factors(failed: FailedStep) -> Iterator[float]:
    """Yield the factor by which the wrong gradients are off in each step after the failed one, while they have one.

    It is 1 in a step where they are right.
    """
    for step in range(failed.step + 1, len(failed.trace.gradients)):
        own = failed.trace.gradients[step]
        if not failed.affords(1) or not all(name in own for name in failed.names):
            return
        found = replace(failed, step=step, twin=None).exact
        told, right = (np.concatenate([x[n].ravel() for n in failed.names]) for x in (own, found))
        if np.linalg.norm(told - right) <= _VARIES * np.linalg.norm(right):
            yield 1.0
            continue
        factor = float(told @ right / (right @ right)) if right.any() else np.nan
        if not np.linalg.norm(told - factor * right) <= LEFT_OVER * np.linalg.norm(told - right):
            return
        yield factor


def _in_other_places(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    return in_other_places(failed, failed.trace.gradients[failed.step], exact)


def _of_neighbours(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    return elements_of_neighbours(failed, failed.trace.gradients[failed.step], exact)


def _another_tensor_added(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    """Explain tensors that hold a multiple of another tensor's gradient besides their own, as if the two were tied."""
    if len(failed.names) > MOST_NAMES:
        return None
    own = failed.trace.gradients[failed.step]
    found = [_added(failed, name, own[name] - exact[name], exact) for name in failed.names]
    if not all(found):
        return None
    told = "; ".join(f"{name} holds {what} besides its own" for name, what in zip(failed.names, found, strict=True))
    return Fault.BACKWARD, f"{told}, as where tied tensors are summed"


_OF_ANOTHER = 0.01
"""Share that may remain unexplained. Gradients of biases along a residual stream differ from one another by little."""


def _added(failed: FailedStep, name: str, excess: NDArray[np.floating], exact: Tensors) -> str:
    """Return the gradient that `excess` is a multiple of, in words; empty if there is none."""
    for other, gradient in exact.items():
        square = float(np.vdot(gradient, gradient))
        if other == name or gradient.shape != excess.shape or not square:
            continue
        factor = float(np.vdot(excess, gradient)) / square
        left = float(np.linalg.norm(excess - factor * gradient))
        if left <= max(failed.tolerances[name], _OF_ANOTHER * float(np.linalg.norm(excess))):
            times = "" if abs(factor - 1) < SAME else f"{named_factor(factor, failed.known_factors())} times "
            return f"{times}the gradient of {other}"
    return ""


def _weighed(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    batch = failed.batch
    parts = failed.parts(batch)
    counted = [i for i, part in enumerate(parts) if part.weights.any()]
    weights = fit.weights(*(fit.flat(failed.row_parts[i]) for i in counted))
    if weights is None or _is_by_chance(weights) or bool(np.all(np.abs(weights - 1) < _ONE)):
        return None
    found = np.full(len(parts), np.nan)  # of a part that is masked whole, nothing can be known
    found[counted] = weights
    return read_weights(found, failed, batch)


def _weighed_rows(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    """Explain one tensor that is wrong in only a few rows: those of tokens that only some ranks or micro-batches
    saw.
    """
    (name, *others), batch = failed.names, failed.batch
    own, right = (np.asarray(t[name], dtype=np.float64) for t in (failed.trace.gradients[failed.step], exact))
    if others or own.ndim < 2:
        return None
    off = np.linalg.norm((own - right).reshape(len(own), -1), axis=1)
    rows = np.flatnonzero(off > LEFT_OVER * off.max())
    if len(rows) > len(own) / 4:
        return None
    basis = np.stack([part[name][rows].ravel() for part in failed.row_parts], axis=1)
    counted = np.flatnonzero(basis.any(axis=0))
    found = np.full(len(failed.row_parts), np.nan)
    found[counted] = np.linalg.lstsq(basis[:, counted], own[rows].ravel(), rcond=None)[0]
    left = np.linalg.norm(own[rows].ravel() - basis[:, counted] @ found[counted])
    if left > max(failed.tolerances[name], LEFT_OVER * float(off.max())):
        return None
    where = f"in {len(rows)} of {len(own)} rows, {', '.join(map(str, rows[:MOST_NAMES]))}, alone"
    if not np.any(np.abs(found[counted]) > LEFT_OVER):
        return Fault.MISSING, f"{where}: nothing is in them"
    if len(counted) > 1 and np.ptp(found[counted]) < SAME * np.abs(found[counted]).max():
        factor = named_factor(float(found[counted].mean()), failed.known_factors())
        return Fault.SCALED, f"{where}: {factor} times the truth"
    fault, detail = read_weights(found, failed, batch)
    return fault, f"{where}: {detail}"


def _is_by_chance(weights: NDArray[np.float64]) -> bool:
    """Return whether fitted weights of parts of the batch are meaningless.

    They are if some are negative and no two are alike. A small or noisy tensor fits such weights whatever was done to
    it.
    """
    largest = float(np.abs(weights).max())
    sizes = np.sort(np.abs(weights[np.abs(weights) >= SAME * largest]))
    return bool((weights < -SAME * largest).any() and not (np.diff(sizes) < SAME * sizes[1:]).any())


def read_weights(weights: NDArray[np.float64], failed: FailedStep, batch: Batch) -> Explanation:
    """Return what the weights of the batch's parts (sequences) in a gradient mean.

    All should be one; NaN is ignored.
    """
    layout = failed.case.layout
    size = layout.dp * layout.num_micro_batches
    grid = weights.reshape(layout.dp, layout.num_micro_batches, -1)
    masked = np.isnan(grid)
    nothing = np.abs(grid) < SAME * np.nanmax(np.abs(weights))
    listed = f"weights of the {failed.parts_name}: " + ", ".join(f"{w:.4g}" for w in weights)
    absent = (nothing | masked).all(axis=2) & ~masked.all(axis=2)
    alone = [micro for micro, ranks in enumerate(absent.T) if ranks.any() and not ranks.all()]
    # A rank whose part is dropped leaves the others' as they are, and replicas the same.
    dropped = not failed.drifted and (failed.loss_is_wrong or np.allclose(grid[~nothing & ~masked], 1, atol=SAME))
    if alone and not dropped:
        ranks = [int(rank) for rank in np.flatnonzero(~absent[:, alone[0]])]
        which = "" if len(alone) == layout.num_micro_batches else f" in micro-batches {alone}"
        return Fault.NOT_REDUCED, f"the part of data-parallel ranks {ranks} alone{which}; {listed}"
    if nothing.any():
        few = f"{int(nothing.sum())} of {int((~masked).sum())} {failed.parts_name}"
        # Data that was left out is in no gradient.
        if elsewhere := failed.others_with(np.flatnonzero(nothing.ravel())):
            here = "it" if len(failed.names) == 1 else "them"
            return Fault.MISSING, f"{few} are in {elsewhere} other gradients, but not in {here}; {listed}"
        return Fault.DROPPED, f"{few} are not in it{_of_others(grid, absent)}; {listed}"
    unit = failed.case.workload.unit
    for parts, name in ((layout.dp, "ranks"), (size, "micro-batches"), (weights.size, failed.parts_name)):
        totals = np.array([float(b.weights.sum()) for b in batch.micro_batches(parts)])
        means = np.array([w[~np.isnan(w)].mean() for w in weights.reshape(parts, -1)[totals > 0]]) * totals[totals > 0]
        unlike = float(np.ptp(totals) / totals.max())  # as far as `means` vary if every part counts once
        if parts > 1 and np.ptp(means) < min(SAME, unlike / _CLEARLY) * np.abs(means).max():
            return Fault.UNEVEN, f"a mean of the means of {parts} {name} with unequal numbers of {unit}; {listed}"
    if told := _of_micro_batches(failed, grid) or _clipped_by_ranks(failed, grid) or _of_one_rank(grid):
        return Fault.UNEVEN, f"{told}; {listed}"
    return Fault.UNEVEN, listed


def _of_others(grid: NDArray[np.float64], absent: NDArray[np.bool_]) -> str:
    """Return whose sequences ranks may have read in the place of their own: others then count several times.

    `grid` holds the weights of sequences by rank and micro-batch. `absent` tells by rank and micro-batch whether none
    of them counts.
    """
    away = np.flatnonzero(absent.all(axis=1))
    there = np.flatnonzero(~absent.any(axis=1))
    if not away.size or not there.size or away.size + there.size != len(absent) or len(absent) % there.size:
        return ""
    times = len(absent) // there.size
    if not np.allclose(grid[there][~np.isnan(grid[there])], times, rtol=SAME):
        return ""
    given = f"the sequences of {there.tolist()}, which count {times} times"
    return f", as where data-parallel ranks {away.tolist()} read {given} (or as a mean over the rest of the batch)"


def _of_micro_batches(failed: FailedStep, grid: NDArray[np.float64]) -> str:
    """Return how often micro-batches count, if all sequences of one count the same, on all ranks. Empty otherwise.

    `grid` holds the weights of sequences by rank and micro-batch.
    """
    layout, clip = failed.case.layout, failed.case.workload.optimizer.clip_norm
    low, high = np.nanmin(grid, axis=(0, 2)), np.nanmax(grid, axis=(0, 2))
    if layout.num_micro_batches < 2 or not np.all(high - low < SAME * np.abs(high)):
        return ""
    degrees = {"dp": layout.dp, "tp": layout.tp, "cp": layout.cp, "num_micro_batches": layout.num_micro_batches}
    known = {name: float(n) for name, n in degrees.items() if n > 1}
    numbers = np.arange(grid.size).reshape(grid.shape)
    told, ends = list[str](), set[str]()
    for micro, weight in enumerate(low):
        if abs(weight - 1) < SAME:
            continue
        parts = [failed.row_parts[i] for i in numbers[:, micro].ravel()]
        norm = global_norm({n: np.sum([part[n] for part in parts], axis=0) for n in parts[0]})
        own = known | ({_CLIPPED_ALONE: clip / norm} if clip is not None and norm else {})
        named = named_factor(float(weight), own)
        told.append(f"micro-batch {micro} counts {named} times")
        ends |= {"clipped before the next one is added?"} if _CLIPPED_ALONE in named else set()
        ends |= {"reduced again with a later one?"} if layout.dp > 1 and abs(weight - layout.dp) < SAME else set()
    return f"{', '.join(told)} on every rank{f' ({ends.pop()})' if ends else ''}" if told else ""


_LIKE_CLIPPED = 0.01
"""Relative error up to which weights are those of clipping, in 16 bits too."""


def _clipped_by_ranks(failed: FailedStep, grid: NDArray[np.float64]) -> str:
    """Return that each rank clips its own gradient after every micro-batch, if that gives these weights. Else empty.

    What is clipped may be the micro-batch's own gradient, or the sum so far, which is then clipped again and again.
    """
    layout, clip = failed.case.layout, failed.case.workload.optimizer.clip_norm
    if clip is None or np.isnan(grid).any():
        return ""
    numbers = np.arange(grid.size).reshape(grid.shape)
    parts = [
        [
            {n: np.asarray(np.sum([failed.row_parts[i][n] for i in rows], axis=0)) for n in failed.row_parts[0]}
            for rows in of_rank
        ]
        for of_rank in numbers
    ]
    for scale, is_running in itertools.product((layout.dp, 1), (True, False)):
        found = np.array([_clipped_shares(each, clip / scale, is_running) for each in parts])
        if np.allclose(grid, found[:, :, None], rtol=_LIKE_CLIPPED, atol=0):
            what = "the sum so far" if is_running else "its own gradient"
            return f"each rank has clipped {what} after every micro-batch, before ranks are summed"
    return ""


def _clipped_shares(parts: Sequence[Tensors], clip: float, is_running: bool) -> list[float]:
    """Return what is left of each micro-batch's gradient when all are added up and clipped to `clip` on the way."""
    total, shares = {name: np.zeros_like(x) for name, x in parts[0].items()}, list[float]()
    for part in parts:
        total = {name: x + part[name] for name, x in total.items()} if is_running else dict(part)
        factor = min(1.0, clip / (global_norm(total) or 1.0))
        shares = [share * factor for share in shares] if is_running else shares
        shares.append(factor)
        total = {name: x * factor for name, x in total.items()}
    return shares


def _of_one_rank(grid: NDArray[np.float64]) -> str:
    """Return how often one rank's sequences count, or those of one of its micro-batches, if all others count once.

    `grid` holds the weights of sequences by rank and micro-batch.
    """
    numbers = np.arange(grid.size).reshape(grid.shape)
    places = {f"data-parallel rank {rank}": numbers[rank] for rank in range(grid.shape[0])}
    places |= {
        f"micro-batch {micro} of data-parallel rank {rank}": numbers[rank, micro]
        for rank, micro in np.ndindex(grid.shape[:2])
    }
    counts = ~np.isnan(grid.ravel())
    for place, part in places.items():
        inside = np.isin(numbers.ravel(), part)
        within, others = grid.ravel()[inside & counts], grid.ravel()[~inside & counts]
        if grid.shape[0] == 1 or not within.size or not others.size:
            continue
        weight = float(within.mean())
        spread = max(float(np.abs(others - 1).max()), float(np.abs(within - weight).max()))
        if abs(weight - 1) > _CLEARLY * spread:
            return f"{place} counts {weight:.4g} times"
    return ""


_CLIPPED_ALONE = "clip_norm / the norm of its own gradient"


def _fitted_in_region(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    """Explain some elements, all others of which are right, by hypotheses about whole tensors."""
    own = failed.trace.gradients[failed.step]
    if (region := wrong_region(failed, own, exact)) is None:
        return None
    if sum(int(mask.sum()) for mask in region.values()) < max(FEW, _PER_PART * len(failed.parts(failed.batch))):
        return None
    there = Fit(failed, own, exact, region)
    if np.linalg.norm(there.own - there.exact) <= there.allowed:
        return None  # anything would fit that is almost right
    for hypothesis in (_weighed, _previous, _old_weights, _other_batch):
        if found := hypothesis(failed, there, exact):
            return found[0], f"{describe_region(region)} alone: {found[1]}"
    return None


def _previous(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    """Explain by the previous step's gradient, alone or added."""
    if failed.step == 0 or any(name not in failed.trace.gradients[failed.step - 1] for name in failed.names):
        return None
    weights = fit.weights(fit.exact, fit.flat(failed.trace.gradients[failed.step - 1]))
    if weights is None:
        return None
    now, before = (float(w) for w in weights)
    if abs(now) < SAME:
        return Fault.STALE_GRADIENT, f"{before:.4g} times the gradient of step {failed.step - 1}"
    return Fault.NOT_CLEARED, f"{now:.4g} times the truth plus {before:.4g} times the gradient before"


def _old_weights(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    """Explain by the previous step's weights. The second step shows them first; greater ages are not distinguished."""
    if failed.step == 0:
        return None
    weights = fit.weights(fit.flat(failed.truth(failed.step - 1, failed.batch)))
    return (
        None
        if weights is None
        else (
            Fault.STALE_WEIGHTS,
            f"{weights[0]:.4g} times the gradient at the parameters before step {failed.step - 1}",
        )
    )


def _other_batch(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    """Explain by another step's batch, all of it or one data-parallel rank's part."""
    dp = failed.case.layout.dp
    for step in (failed.step - 1, failed.step + 1):
        if step < 0:
            continue
        other = make_batch(failed.case.workload, step)
        parts = [*failed.parts_of_ranks(failed.step, other), *failed.rank_parts]
        if (weights := fit.weights(*map(fit.flat, parts))) is not None:
            if ranks := [r for r in range(dp) if abs(weights[r]) > SAME]:
                return Fault.OTHER_BATCH, f"the batch of step {step} on data-parallel ranks {ranks}"
    return None


def _other_data(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    """Explain by micro-batches that have the inputs, the targets, or both, of another micro-batch, rank or step.

    The loss tells which of these are likely.
    """
    for fault, detail, other in _other_batches(failed) if failed.loss_is_wrong else ():
        if not failed.affords(1):
            return None
        if not any(failed.subsets_by_loss(failed.losses_of(other))):
            continue
        where = replaced(failed, fit, failed.parts_of_micro_batches(failed.step, other))
        if where is not None:
            return fault, f"{detail}{',' if where else ''}{where}"
    return None


def _other_batches(failed: FailedStep) -> Iterator[tuple[Fault, str, Batch]]:
    """Yield the batch with data from another place, the likeliest first.

    Data of the same step whose inputs and targets belong together is left out, because `_weighed` explains it.
    """
    batch, apart = failed.batch, "inputs and targets do not belong together"
    others = [(which, batch.take(order.flatten())) for which, order in _other_orders(failed)]
    for which, other in others:
        yield Fault.MISPLACED, f"{apart}: the targets are those of {which}", _mixed(batch, other)
    for which, other in others:
        yield Fault.MISPLACED, f"{apart}: the inputs are those of {which}", _mixed(other, batch)
    for step in (failed.step - 1, failed.step + 1):
        if step < 0:
            continue
        other = replace(make_batch(failed.case.workload, step), total_weight=batch.total_weight)
        yield Fault.OTHER_BATCH, f"the batch of step {step}", other
        yield Fault.OTHER_BATCH, f"the inputs of step {step} with the targets of this one", _mixed(other, batch)
        yield Fault.OTHER_BATCH, f"the targets of step {step} with the inputs of this one", _mixed(batch, other)


def _other_orders(failed: FailedStep) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield other orders of the rows, [dp, num_micro_batches, rows of a micro-batch], and where the rows come from."""
    layout, batch = failed.case.layout, failed.batch
    count = layout.num_micro_batches if failed.splits else 1
    places = torch.arange(len(batch)).view(layout.dp, count, -1)
    if count > 1:
        yield "the next micro-batch", places.roll(-1, 1)
    if count > 2:
        yield "the micro-batch before", places.roll(1, 1)
        for first in (0, 1):
            order = list(range(count))
            for i in range(first, count - 1, 2):
                order[i], order[i + 1] = order[i + 1], order[i]
            yield "the micro-batch that it exchanged them with", places[:, order]
        yield "the first micro-batch", places[:, :1].expand_as(places)
    if layout.dp > 1:
        yield f"the {'other' if layout.dp == 2 else 'next'} data-parallel rank", places.roll(-1, 0)
    if layout.dp > 2:
        yield "the data-parallel rank before", places.roll(1, 0)
    if places.shape[-1] > 1:
        yield "the next row", places.roll(-1, 2)
        if places.shape[-1] > 2:
            yield "the row before", places.roll(1, 2)


def _other_activations(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    """Explain by wrong activations between two blocks: those of another micro-batch, or of the step before.

    The later blocks compute with them. The earlier blocks get their gradient, and apply it to their own activations.
    The loss shows which of these are likely.
    """
    names = [name for name in dict.fromkeys(map(block_of, exact)) if name.rpartition(".")[2].isdigit()][:-1]
    if not names or failed.case.workload.couples_rows or not failed.loss_is_wrong:
        return None
    count, dp, batch = len(failed.micro_batch_parts), failed.case.layout.dp, failed.batch
    places = np.arange(count).reshape(dp, -1)
    sources = {
        "the micro-batch before": (failed.step, batch, np.roll(places, 1, 1)),
        "the next micro-batch": (failed.step, batch, np.roll(places, -1, 1)),
    }
    if failed.step:
        before = make_batch(failed.case.workload, failed.step - 1)
        sources = {f"step {failed.step - 1}": (failed.step - 1, before, places)} | sources
    for which, (step, other, order) in sources.items():
        if not failed.affords(2):
            return None
        activations = _activations(names, count, functools.partial(failed.losses_of, other, step=step))
        for name in names:
            changes = [Change(within=_passing(name, activations[i].get(name))) for i in order.flat]
            if not failed.affords(1) or not any(failed.subsets_by_loss(failed.losses_of(batch, changes))):
                continue
            if failed.twin:  # in its own arithmetic
                narrow = _activations(names, count, functools.partial(failed.parts_of_micro_batches, step, other))
                changes = [Change(within=_passing(name, narrow[i].get(name))) for i in order.flat]
            gradients = failed.parts_of_micro_batches(failed.step, batch, changes=changes)
            if (where := replaced(failed, fit, gradients)) is not None:
                fault = Fault.STALE_ACTIVATIONS if step < failed.step else Fault.MISPLACED
                return fault, f"what passes from {name} to the next block is that of {which}{',' * bool(where)}{where}"
    return None


def _activations(names: Sequence[str], count: int, run: Callable[..., object]) -> list[dict[str, torch.Tensor]]:
    """Return the outputs of these modules for each of `count` micro-batches, which `run` computes, by name."""
    found: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
    run(changes=[Change(within=_noting(names, outputs)) for outputs in found])
    return found


def _noting(names: Sequence[str], outputs: dict[str, torch.Tensor]) -> Callable[[Model], Any]:
    """Return a context in which the outputs of these modules are noted."""

    @contextlib.contextmanager
    def within(model: Model) -> Iterator[None]:
        with contextlib.ExitStack() as hooks:
            for name in names:

                def note(_module: object, _inputs: object, output: object, name: str = name) -> None:
                    if isinstance(output, torch.Tensor):
                        outputs[name] = output.detach()

                hooks.callback(model.get_submodule(name).register_forward_hook(note).remove)
            yield

    return within


def _passing(name: str, other: torch.Tensor | None) -> Callable[[Model], Any]:
    """Return a context in which the module `name` passes on `other`, whose gradient goes to its own output."""

    def output(_inputs: object, own: Any) -> torch.Tensor | None:  # noqa: ANN401
        if other is None or not isinstance(own, torch.Tensor) or own.shape != other.shape:
            return None
        return own + (other - own).detach()

    return returning(name, output)


def _mixed(inputs: Batch, targets: Batch) -> Batch:
    """Return the inputs of one batch with the targets of another."""
    return replace(targets, inputs=inputs.inputs)


def _low_precision(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    own = failed.trace.gradients[failed.step]
    if kinds := low_precisions(own[name] for name in failed.names):
        return Fault.PRECISION, f"every value of {pluralize(len(failed.names), 'gradient')} is a {kinds[0]} number"
    return low_precision_in_region(failed, own, exact)


def low_precision_in_region(failed: FailedStep, own: Tensors, exact: Tensors) -> Explanation | None:
    """Explain tensors of which all wrong elements are bf16 or fp16 numbers, such as one rank's shards."""
    region = wrong_region(failed, own, exact)
    if region is None or sum(int(mask.sum()) for mask in region.values()) < _FEWEST_ROUNDED:
        return None
    kinds = low_precisions(own[name][mask] for name, mask in region.items())
    if not kinds:
        return None
    return Fault.PRECISION, f"{describe_region(region)} alone: every value there is a {kinds[0]} number"


def _rounded(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    """Explain by rounding of values that are stored wider.

    The deviations must also be comparable with those of autocast to bf16 on the same gradients, and similar in all
    tensors. A slightly different function, by an approximation or an epsilon, deviates less, or less uniformly.
    """
    own = failed.trace.gradients[failed.step]
    if on_ranks(failed, exact):
        return None  # rounding would affect all ranks
    # Rounding errors point in all directions. Another function mostly changes the length of its gradients.
    along = sorted(
        abs(float(np.sum((own[n].astype(np.float64) - exact[n]) * exact[n]))) / unit**2 / fit.deviations[n]
        for n, unit in fit.units.items()
    )
    found = rounding(sorted(fit.deviations.values()), "gradients") if along[len(along) // 2] < _ALONG else None
    if found is not None:
        found = found[0], found[1] + _at_boundary(failed)
    if found is None or failed.twin:
        return found
    rounded = failed.in_bf16()
    shares = sorted(
        deviation * fit.units[name] / (float(np.linalg.norm(rounded[name] - exact[name])) or np.inf)
        for name, deviation in fit.deviations.items()
    )
    low, middle, high = (shares[int(place * (len(shares) - 1))] for place in (0.1, 0.5, 0.9))
    return found if middle >= _LEAST_ROUNDING and high <= _ALIKE * low else None


def _at_boundary(failed: FailedStep) -> str:
    """Return a remark if exactly the gradients of the first pipeline stages are wrong, else an empty text.

    Then the gradients that the next stage sends to them may be rounded.
    """
    layout, model = failed.case.layout, failed.case.workload.model
    if layout.pp < 2 or not isinstance(model, ModelSpec):
        return ""
    num_stages = layout.pp * layout.virtual_stages
    stages = model.stages_of(num_stages, failed.exact)
    wrong = {stages[name] for name in failed.names}
    if wrong != set(range(max(wrong) + 1)) or len(wrong) == num_stages:
        return ""
    sizes = {name: float(np.linalg.norm(gradient)) for name, gradient in failed.exact.items()}
    nothing = 1e-10 * max(sizes.values())  # such as that of a key's bias, which no rounding shows in
    if any(stages[name] in wrong for name in failed.right if sizes.get(name, 0.0) > nothing):
        return ""
    first = f"stages 0 to {max(wrong)}" if len(wrong) > 1 else "stage 0"
    return f"; those of {first} of {num_stages} alone: the gradients that stage {max(wrong) + 1} sends may be rounded"


def rounding(relative: Sequence[float], what: str) -> Explanation | None:
    """Explain (sorted) relative deviations of the size of bf16's or fp16's rounding that are similar in all
    tensors.
    """
    low, middle, high = relative[0], relative[len(relative) // 2], relative[-1]
    if not (2**-14 <= middle <= 2**-5 and high <= 20 * middle and low >= middle / 20):
        return None
    return (
        Fault.PRECISION,
        f"{what} off by {middle:.2g} in relative norm, alike in {pluralize(len(relative), 'tensor')}: rounding to "
        "16 bits, or noise of that size, such as dropout",
    )


# --- Wrong buffers: running statistics of a batch norm.

_MOMENTA = (0.9, 0.5, 0.2, 0.05, 0.01, 0.001, 1.0, 0.0)
"""Alternative momenta. Frameworks define momentum differently: 0.9 in one is 0.1 in another."""


def explain_buffers(failed: FailedStep, names: list[str]) -> tuple[Explanation, list[int]]:
    """Return why these buffers have their values after the step, and on which ranks."""
    workload, layout, replicas = failed.case.workload, failed.case.layout, failed.trace.buffers
    exact = [replica_truth(failed.trace, workload, layout, r, failed.step) for r in range(len(replicas))]
    distances = [_distance(told[failed.step + 1], x, names) for told, x in zip(replicas, exact, strict=True)]
    wrong = [r for r, distance in enumerate(distances) if not distance <= LEFT_OVER * max(distances)]
    worst = max(wrong, key=lambda r: distances[r])
    told, before = replicas[worst][failed.step + 1], replicas[worst][failed.step]
    if absent := [name for name in names if name not in told]:
        return (Fault.MISSING, f"{pluralize(len(absent), 'buffer is', 'buffers are')} absent"), wrong

    def fits(rival: Tensors) -> bool:
        return _distance(told, rival, names) <= LEFT_OVER * distances[worst]

    if fits(before):
        return (Fault.BUFFERS, "as before the step: not updated"), wrong
    if others := [r for r, x in enumerate(exact) if r != worst and fits(x)]:
        return (Fault.BUFFERS, f"those of rank {others[0]}"), wrong
    if kinds := low_precisions(told[name] for name in names if told[name].dtype.kind == "f"):
        return (Fault.BUFFERS, f"every value is a {kinds[0]} number"), wrong
    own = together(workload, failed.batch.shard(worst, len(replicas)), layout)
    here = known_parameters(failed.trace, workload, failed.step)
    for r, other in enumerate(replicas):
        if r != worst and fits(exact_buffers(workload, here, other[failed.step], own)):
            return (Fault.BUFFERS, f"as if the step had begun with those of rank {r}"), wrong
    if fits(exact_buffers(workload, here, before, [part for part in own for _ in range(2)])):
        return (Fault.BUFFERS, "as if every micro-batch had been seen twice, as where blocks are computed again"), wrong
    for momentum in _MOMENTA:
        if fits(exact_buffers(workload, here, before, own, momentum)):
            return (Fault.BUFFERS, f"with a momentum of {momentum:g}"), wrong
    return (Fault.BUFFERS, "no other momentum and no other replica's micro-batches explain them"), wrong


def _distance(told: Tensors, exact: Tensors, names: Iterable[str]) -> float:
    """Return the distance over all buffers together. Infinite if one is missing."""
    if any(name not in told or name not in exact for name in names):
        return float("inf")
    return float(np.sqrt(sum(np.sum(np.square(told[n].astype(np.float64) - exact[n])) for n in names)))
