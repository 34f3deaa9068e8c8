"""Explain gradients that are wrong by one rank, one block of the model, or some elements.

The hypotheses of `gradient_faults` change the whole run. Those here change a part of it: what one data-parallel rank
computes, what one block of the model computes with, or which elements of a tensor a buffer or a bucket covers.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from meshmark.judge.deviation import Tensors
from meshmark.judge.failed_step import LEFT_OVER, SAME, Explanation, FailedStep, Fit
from meshmark.judge.faults import MOST_NAMES, Fault, named_factor
from meshmark.reference.data import IGNORED, Batch, make_batch
from meshmark.text import pluralize

_SMALL = 1e-2
"""Errors below this share of a tensor's largest do not mark an element as wrong: rounding differs between elements."""
_MOST_WRONG = 0.7
"""Share of wrong elements from which they are not a part of the tensors, but about all."""
_FEW = 64
_FEW_LEFT_OVER = 1e-3
"""Share of the deviation of fewer than _FEW elements that may remain unexplained: few fit much by chance."""
_MOST_BLOCKS = 24
"""Number of gradients of the batch that are computed to find one block with old weights."""
_MOST_WEIGHTS = 128
"""Number of gradients of the batch that are computed to find one altered weight."""
_TOUCHED = 0.02
"""Rows with an error below this share of the other rows' are right."""


# --- One data-parallel rank.


def old_weights_on_ranks(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    """Explain by ranks that compute with the previous step's weights."""
    layout = failed.case.layout
    if failed.step == 0 or layout.dp == 1:
        return None
    where = _replaced(fit, failed.rank_parts, failed.parts_of_ranks(failed.step - 1, failed.batch))
    if where is None:
        return None
    return Fault.STALE_WEIGHTS, f"the gradient at the parameters before step {failed.step - 1}{where}"


def other_mask(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    """Explain by ranks that count masked positions, or whose mask is one position off.

    Batches without masks are cut from the same places.
    """
    workload = failed.case.workload
    if not workload.masked:
        return None
    whole = make_batch(dataclasses.replace(workload, masked=False), failed.step)
    batches = {
        "positions that are masked count like the others": whole,
        "the mask is one position too early": _shifted(failed.batch, whole, -1),
        "the mask is one position too late": _shifted(failed.batch, whole, 1),
    }
    for detail, batch in batches.items():
        where = _replaced(fit, failed.rank_parts, failed.parts_of_ranks(failed.step, batch))
        if where is not None:
            return Fault.MASK, f"{detail}{where}"
    return None


def _shifted(batch: Batch, whole: Batch, shift: int) -> Batch:
    """Return `batch` with its mask moved by `shift` positions. `whole` is the batch without a mask."""
    masked = (batch.targets == IGNORED).roll(shift, -1)
    return dataclasses.replace(
        batch,
        targets=torch.where(masked, IGNORED, whole.targets),
        weights=torch.where(masked, 0.0, whole.weights),
    )


def _replaced(fit: Fit, right: Sequence[Tensors], other: Sequence[Tensors]) -> str | None:
    """Return on which ranks the part is `other`'s instead of `right`'s, if the gradient is such a sum, else None.

    The text is empty for all ranks, and ` on data-parallel rank 1` for one. Weights are fitted, so that a scaled part
    still tells its rank.
    """
    count = len(right)
    weights = fit.weights(*(fit.flat(part) for part in (*right, *other)))
    if weights is None:
        return None
    ranks = [rank for rank in range(count) if abs(weights[count + rank]) > SAME > abs(weights[rank])]
    if not ranks:
        return None
    return "" if len(ranks) == count else f" on data-parallel rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def other_reduction(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    """Explain by another operation than the sum over data-parallel ranks."""
    if failed.case.layout.dp == 1:
        return None
    for name, candidate in _other_reductions(failed):
        if (weights := fit.weights(fit.flat(candidate))) is not None:
            factor = named_factor(float(weights[0]), failed.known_factors())
            return Fault.OTHER_REDUCTION, f"{factor} times the {name} of the ranks' parts"
    return None


def _other_reductions(failed: FailedStep) -> Iterator[tuple[str, Tensors]]:
    for name, operation in (("maximum", np.maximum), ("minimum", np.minimum)):
        yield name, {n: operation.reduce([part[n] for part in failed.rank_parts]) for n in failed.names}


def on_ranks(failed: FailedStep, exact: Tensors) -> list[int]:
    """Return the data-parallel ranks that compute wrongly, as far as rows show that only one rank's data touches.

    An embedding has such rows. The list is empty if no such row is right, or none is wrong.
    """
    dp, own = failed.case.layout.dp, failed.trace.gradients[failed.step]
    if dp == 1:
        return []
    errors: dict[int, list[float]] = {}
    for name in failed.names:
        if exact[name].ndim < 2:
            continue
        touched = np.stack([part[name].reshape(len(part[name]), -1).any(axis=1) for part in failed.rank_parts])
        alone = touched.sum(axis=0) == 1
        if not alone.any() or touched.all():
            continue
        off = np.linalg.norm((own[name] - exact[name]).reshape(len(exact[name]), -1), axis=1)
        size = np.linalg.norm(exact[name].reshape(len(exact[name]), -1), axis=1)
        for rank in range(dp):
            rows = alone & touched[rank] & (size > _TOUCHED * size.max())  # what is tiny has a large relative error
            if rows.any():
                errors.setdefault(rank, []).append(float(np.max(off[rows] / size[rows])))
    if len(errors) < dp:
        return []
    largest = {rank: max(values) for rank, values in errors.items()}
    wrong = [rank for rank in largest if largest[rank] > _TOUCHED * max(largest.values())]
    return wrong if len(wrong) < dp else []


# --- One block of the model.


def old_block(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    """Explain by one block's weights of the previous step, on all data-parallel ranks or on one."""
    if failed.step == 0:
        return None
    now, before = failed.trace.parameters[failed.step], failed.trace.parameters[failed.step - 1]
    blocks = list(dict.fromkeys(block_of(name) for name in now))
    if len(blocks) > _MOST_BLOCKS or not failed.affords(len(blocks)):
        return None
    for block in blocks:
        mixed = {name: before[name] if block_of(name) == block else value for name, value in now.items()}
        where = _replaced(fit, failed.rank_parts, failed.parts_of_ranks(failed.step, failed.batch, mixed))
        if where is not None:
            detail = f"the gradient with the weights of {block} before step {failed.step - 1}{where}"
            return Fault.STALE_WEIGHTS, detail
    return None


def altered_weight(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    """Explain by one weight that is computed with as it was a step before, or with its parts in another order.

    It may be so on all data-parallel ranks or on some. The parts are those that ranks gather.
    """
    now = failed.trace.parameters[failed.step]
    candidates = list(_altered_weights(failed))
    if len(candidates) > _MOST_WEIGHTS or not failed.affords(len(candidates)):
        return None
    for fault, detail, name, value, back in candidates:
        other = failed.parts_of_ranks(failed.step, failed.batch, {**now, name: value})
        # The weight's own gradient is in the order of what was computed with, or put back in that of the parameter.
        for parts in (other, [{**part, name: back(part[name])} for part in other if name in part]):
            where = _replaced(fit, failed.rank_parts, parts) if len(parts) == len(other) else None
            if where is not None:
                return fault, f"{detail}{where}"
    return None


_Move = Callable[[NDArray[np.floating]], NDArray[np.floating]]


def _altered_weights(failed: FailedStep) -> Iterator[tuple[Fault, str, str, NDArray[np.floating], _Move]]:
    """Yield what a weight could be instead, with its name and what undoes the order in its gradient."""
    trace, layout = failed.trace, failed.case.layout
    now = trace.parameters[failed.step]
    if failed.step:
        for name, before in trace.parameters[failed.step - 1].items():
            if not np.array_equal(before, now[name]):
                detail = f"the gradient with {name} of before step {failed.step - 1}"
                yield Fault.STALE_WEIGHTS, detail, name, before, _as_it_is
    for name, weight in now.items():
        if layout.tp > 1 and name.endswith(".bias") and weight.any():
            detail = f"the gradient with {name} added {layout.tp} times, as if by every tensor-parallel rank"
            yield Fault.FORWARD, detail, name, layout.tp * weight, _as_it_is
    shards = layout.dp if layout.zero_stage == 3 else layout.tp
    for name, weight in now.items():
        if shards > 1 and weight.ndim and len(weight) % shards == 0:
            detail = f"the gradient with the {shards} ranks' rows of {name} in the reversed order"
            reverse = functools.partial(_reversed_parts, shards)
            value = reverse(weight)
            if not np.array_equal(value, weight):
                yield Fault.MISPLACED, detail, name, value, reverse


def _as_it_is(tensor: NDArray[np.floating]) -> NDArray[np.floating]:
    return tensor


def _reversed_parts(count: int, tensor: NDArray[np.floating]) -> NDArray[np.floating]:
    return np.concatenate(np.split(tensor, count)[::-1])


def block_of(name: str) -> str:
    """Return the block that a parameter belongs to: `blocks.1`, or the first module where none is numbered."""
    first, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return f"{first}.{number}" if number.isdigit() else first


# --- Some elements of tensors.


def in_region(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    """Explain gradients that are right but in some elements. Nothing is fitted there, for few elements fit much."""
    own = failed.trace.gradients[failed.step]
    if (region := wrong_region(failed, own, exact)) is None:
        return None
    where = describe_region(region)
    for fault, detail, candidate in _candidates(failed, exact):
        if all(name in candidate for name in failed.names) and all(
            _explains(own[name], exact[name], candidate[name], region[name], failed.tolerances[name])
            for name in failed.names
        ):
            return fault, f"{where} alone: {detail}"
    return None


def wrong_region(failed: FailedStep, own: Tensors, exact: Tensors) -> dict[str, NDArray[np.bool_]] | None:
    """Return which elements of each wrong tensor are wrong, or None if about all are."""
    region = {}
    for name in failed.names:
        error = np.abs(own[name] - exact[name])
        per_element = failed.tolerances[name] / np.sqrt(error.size)  # a wrong tensor has an element beyond it
        region[name] = error > max(per_element, _SMALL * float(error.max()))
    share = sum(int(mask.sum()) for mask in region.values()) / sum(mask.size for mask in region.values())
    # Where an error is no number, no element is marked.
    return region if share <= _MOST_WRONG and all(mask.any() for mask in region.values()) else None


def _explains(
    own: NDArray[np.floating],
    exact: NDArray[np.floating],
    candidate: NDArray[np.floating],
    mask: NDArray[np.bool_],
    tolerance: float,
) -> bool:
    deviation = float(np.linalg.norm((own - exact)[mask]))
    share = LEFT_OVER if mask.sum() >= _FEW else _FEW_LEFT_OVER
    return float(np.linalg.norm((own - candidate)[mask])) <= max(tolerance, share * deviation)


_Candidate = tuple[Fault, str, Mapping[str, NDArray[np.floating]]]


def _candidates(failed: FailedStep, exact: Tensors) -> Iterator[_Candidate]:
    """Yield what gradients could be instead, by fault, with its description."""
    names, dp = failed.names, failed.case.layout.dp
    yield Fault.DROPPED, "nothing is in them", {n: np.zeros_like(exact[n]) for n in names}
    if failed.step:
        before = failed.trace.gradients[failed.step - 1]
        held = [n for n in names if n in before]
        yield Fault.STALE_GRADIENT, f"the gradient of step {failed.step - 1}", {n: before[n] for n in held}
        yield (
            Fault.NOT_CLEARED,
            f"the truth plus the gradient of step {failed.step - 1}",
            {n: exact[n] + before[n] for n in held},
        )
    if dp > 1:
        # Of two ranks, one's part alone is the sum without the other's. Ranks that differ tell that none was reduced.
        kept, dropped = _kept_parts(failed), _dropped_parts(failed, exact)
        yield from itertools.chain(kept, dropped) if failed.drifted else itertools.chain(dropped, kept)
        for name, candidate in _other_reductions(failed):
            yield Fault.OTHER_REDUCTION, f"the {name} of the ranks' parts", candidate
    known = failed.known_factors()
    for value in dict.fromkeys(known.values()):
        yield Fault.SCALED, f"{named_factor(value, known)} times the truth", {n: value * exact[n] for n in names}
    if failed.step:
        old = failed.truth(failed.step - 1, failed.batch)
        yield Fault.STALE_WEIGHTS, f"the gradient at the parameters before step {failed.step - 1}", old


def _kept_parts(failed: FailedStep) -> Iterator[_Candidate]:
    for rank, part in enumerate(failed.rank_parts):
        for factor in (1, failed.case.layout.dp):
            times = f"{factor} times " * (factor > 1)
            detail = f"{times}the part of data-parallel rank {rank}"
            yield Fault.NOT_REDUCED, detail, {n: factor * part[n] for n in failed.names}


def _dropped_parts(failed: FailedStep, exact: Tensors) -> Iterator[_Candidate]:
    for rank, part in enumerate(failed.rank_parts):
        detail = f"without the part of data-parallel rank {rank}"
        yield Fault.DROPPED, detail, {n: exact[n] - part[n] for n in failed.names}


def describe_region(region: Mapping[str, NDArray[np.bool_]]) -> str:
    """Return in words which elements of which tensors `region` marks."""
    if len(region) == 1:
        (mask,) = region.values()
        return f"in {_place(mask)}"
    starts = [_start_of_tail(mask) for mask in region.values()]
    tensors = pluralize(len(region), "tensor")
    tails = [mask.size - start for mask, start in zip(region.values(), starts, strict=True) if start is not None]
    if len(tails) == len(region):
        return f"in the last elements of {tensors}, {sum(tails) / sum(m.size for m in region.values()):.0%} of each"
    count, size = sum(int(m.sum()) for m in region.values()), sum(m.size for m in region.values())
    return f"in {count:,} of {size:,} elements of {tensors}"


def _start_of_tail(mask: NDArray[np.bool_]) -> int | None:
    """Return where the last elements begin, if the marked ones are about those; else None."""
    places = np.flatnonzero(mask)
    start = int(places[0])
    return start if places[-1] >= mask.size - 1 - (mask.size - start) // 10 and _is_run(places) else None


def _is_run(places: NDArray[np.intp]) -> bool:
    """Return whether places follow one another, but for a few whose error is too small to be seen."""
    return len(places) >= 0.9 * (int(places[-1]) - int(places[0]) + 1)


def _place(mask: NDArray[np.bool_]) -> str:
    """Return in words which elements of one tensor are marked."""
    places, size = np.flatnonzero(mask), mask.size
    first, last = int(places[0]), int(places[-1])
    if len(places) == 1:
        return f"element {first} of {size}"
    if _is_run(places):
        if last == size - 1:
            return f"the last {size - first} of {size} elements"
        return f"the first {last + 1} of {size} elements" if first == 0 else f"elements {first} to {last} of {size}"
    if mask.ndim > 1:
        rows = np.flatnonzero(mask.reshape(len(mask), -1).any(axis=1))
        if len(rows) <= len(mask) / 2:
            more = ", ..." if len(rows) > MOST_NAMES else ""
            return f"{len(rows)} of {len(mask)} rows ({', '.join(map(str, rows[:MOST_NAMES]))}{more})"
    return f"{len(places):,} of {size:,} elements"


# --- Right values in wrong places.


def misplaced(own: NDArray[np.floating], exact: NDArray[np.floating], tolerance: float) -> str:
    """Return how `own`, which has the values of `exact`, has them in other places; empty if it has other values."""
    if own.shape != exact.shape or np.linalg.norm(np.sort(own, axis=None) - np.sort(exact, axis=None)) > tolerance:
        return ""
    for count in range(2, 17):
        for axis in range(exact.ndim):
            if exact.shape[axis] % count:
                continue
            parts, right = (np.split(tensor, count, axis=axis) for tensor in (own, exact))
            order = [_same_part(part, right, tolerance) for part in parts]
            if None not in order:
                along = ("rows", "columns")[axis] if exact.ndim == 2 else f"dimension {axis}"
                return f"its {count} parts by {along} are in the order {', '.join(map(str, order))}"
    return "its values are the right ones, in other places"


def _same_part(part: NDArray[np.floating], right: Sequence[NDArray[np.floating]], tolerance: float) -> int | None:
    """Return the index of the part of `right` that `part` equals, or None."""
    return next((i for i, other in enumerate(right) if np.linalg.norm(part - other) <= tolerance), None)
