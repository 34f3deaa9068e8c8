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

from meshmark.algorithms.contract import Tensors
from meshmark.judge.failed_step import LEFT_OVER, Explanation, FailedStep, Fit, block_of, rows_of
from meshmark.judge.faults import MOST_NAMES, Fault, named_factor
from meshmark.reference.data import IGNORED, Batch, make_batch
from meshmark.text import pluralize

_SMALL = 1e-2
"""Errors below this share of a tensor's largest do not mark an element as wrong: rounding differs between elements."""
_MOST_WRONG = 0.7
"""Share of wrong elements above which about the whole tensors count as wrong."""
FEW = 64
_FEWEST = 4
"""Smallest number of elements to which a constant is fitted."""
FEW_LEFT_OVER = 1e-3
"""Share of the deviation of fewer than FEW elements that may remain unexplained: few fit much by chance."""
_MOST_BLOCKS = 24
"""Number of blocks up to which one with old weights is searched for."""
_MOST_WEIGHTS = 128
"""Number of weights up to which an altered one is searched for."""
_MOST_TRIED = 64
"""Number of candidates of one kind whose gradients are computed."""
_MOST_LIKELY = 16
"""The same where the loss tells which are likely."""
_SHARP = 1e-5
"""Share of a tensor's norm up to which a tolerance tells its values from others of the same distribution."""
_RUN = 16
"""Number of elements that are looked for in other tensors together."""
_ALIKE, _APART = 0.1, 0.5
"""Distances, in a run's norm, below which two runs are the same but for rounding, and above which they are others."""
_MOST_OF_RUNS = 0.8
"""Share of runs that must be found elsewhere."""
_MOST_RUNS, _MOST_TENSORS = 4, 16
"""Number of runs of a tensor, and of tensors, that are looked for."""
_MOST_FLAT = 1 << 21
"""Number of elements of a model up to which that is done."""
_MOST_PLACES = 16
"""Number of rows up to which a shift is told."""
_LEAST_RUN = 3
"""Smallest number of rows for which a shift is reported. With fewer rows, other shifts may look the same."""
_AS_CLOSE = 2.0
"""Explanations count as equally good if their unexplained parts differ by no more than this ratio."""
_MOST_ALIKE = 3
_MOST_OF_LINES = 0.5
"""Share of wrong elements from which rows or columns of a tensor are wrong, rather than some elements in them."""
_TOUCHED = 0.02
"""Rows with an error below this share of the other rows' are right."""


# --- One data-parallel rank.


def old_weights_on_ranks(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    """Explain by ranks that compute with the previous step's weights."""
    layout = failed.case.layout
    if failed.step == 0 or layout.dp == 1:
        return None
    where = replaced(failed, fit, failed.parts_of_micro_batches(failed.step - 1, failed.batch))
    if where is None:
        return None
    return Fault.STALE_WEIGHTS, f"the gradient at the parameters before step {failed.step - 1}{where}"


def other_mask(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    """Explain by ranks or micro-batches that count other targets: masked ones too, or not the last of a sequence.

    Batches without masks are cut from the same places.
    """
    for fault, detail, batch in _other_masks(failed):
        if not failed.affords(1):
            return None
        where = replaced(failed, fit, failed.parts_of_micro_batches(failed.step, batch))
        if where is not None:
            return fault, f"{detail}{where}"
    return None


def other_mask_in_rows(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    """Explain by single sequences that count other targets."""
    parts = failed.parts(failed.batch)
    if failed.twin or len(parts) <= failed.case.layout.dp * failed.case.layout.num_micro_batches:
        return None
    now = [fit.flat(part) for part in failed.row_parts]
    for fault, detail, batch in _other_masks(failed):
        if not failed.affords(len(parts)):
            return None
        then = [fit.flat(failed.truth(failed.step, part)) for part in failed.parts(batch)]
        if rows := _indices_replaced(fit, now, then):
            return fault, f"{detail}{_in_parts(failed, rows)}"
    return None


def _other_masks(failed: FailedStep) -> Iterator[tuple[Fault, str, Batch]]:
    """Yield the batch with other masks."""
    workload, batch = failed.case.workload, failed.batch
    if batch.targets.ndim < 2:
        return
    counted = batch.targets != IGNORED
    if workload.masked:
        whole = make_batch(dataclasses.replace(workload, masked=False), failed.step)
        everywhere = torch.ones_like(counted)
        yield Fault.MASK, "positions that are masked count like the others", _counting(batch, whole, everywhere)
        but_the_last = torch.cat((everywhere[:, :-1], counted[:, -1:]), 1)
        told = "positions that are masked count like the others, but for the last"
        yield Fault.MASK, told, _counting(batch, whole, but_the_last)
        yield Fault.MASK, "the mask is one position too early", _counting(batch, whole, counted.roll(-1, -1))
        yield Fault.MASK, "the mask is one position too late", _counting(batch, whole, counted.roll(1, -1))
        more = counted | torch.cat((counted[:, :1], counted[:, :-1]), 1)
        yield Fault.MASK, "one position after those that count does too", _counting(batch, whole, more)
    places = counted.long().cumsum(1)
    last, first = places == places[:, -1:], places == 1
    yield Fault.DROPPED, "the last target of every sequence is left out", _counting(batch, batch, counted & ~last)
    yield Fault.DROPPED, "the first target of every sequence is left out", _counting(batch, batch, counted & ~first)
    length, cp = batch.targets.shape[1], failed.case.layout.cp
    for part in range(1, cp if length % cp == 0 else 1):  # labels that are shifted after the sequence is cut
        end = part * length // cp
        for place, which in ((end - 1, f"last target of part {part - 1}"), (end, f"first target of part {part}")):
            there = torch.zeros_like(counted)
            there[:, place] = True
            told = f"the {which} of {cp}, at position {place} of every sequence, is left out"
            yield Fault.DROPPED, told, _counting(batch, batch, counted & ~there)


def _counting(batch: Batch, whole: Batch, counted: torch.Tensor) -> Batch:
    """Return `batch` with these targets of `whole`, all of the same weight but those that `batch` weighs."""
    weights = torch.where(batch.targets == IGNORED, whole.weights, batch.weights)
    return dataclasses.replace(
        batch, targets=torch.where(counted, whole.targets, IGNORED), weights=torch.where(counted, weights, 0.0)
    )


def replaced(failed: FailedStep, fit: Fit, other: Sequence[Tensors]) -> str | None:
    """Return for which micro-batches the part is `other`'s instead of the right one, if the gradient is such a sum.

    The text is empty for all of them, and ` on data-parallel rank 1` for one rank's.
    """
    found = _replaced(failed, fit, other)
    return found.where if found else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Replaced:
    where: str
    left: float
    """Norm of what remains unexplained, in units of `Fit`."""


def _replaced(failed: FailedStep, fit: Fit, other: Sequence[Tensors]) -> _Replaced | None:
    """Return what `replaced` does. Whole ranks are tried before their micro-batches."""
    right, ranks = failed.micro_batch_parts, failed.case.layout.dp
    each = len(right) // ranks
    for count in dict.fromkeys([each, 1]):
        now, then = ([fit.flat(part) for part in _added(parts, count)] for parts in (right, other))
        if indices := _indices_replaced(fit, now, then):
            _, left = fit.fitted(*(then[i] if i in indices else x for i, x in enumerate(now)))
            where = failed.in_micro_batches([i * count + k for i in indices for k in range(count)])
            return _Replaced(where=where, left=left)
    return None


def _added(parts: Sequence[Tensors], each: int) -> list[Tensors]:
    """Return the sums of every `each` parts."""
    groups = [parts[i : i + each] for i in range(0, len(parts), each)]
    return [{n: np.sum([part[n] for part in group], axis=0) for n in group[0]} for group in groups]


def _indices_replaced(
    fit: Fit, right: Sequence[NDArray[np.float64]], other: Sequence[NDArray[np.float64]]
) -> list[int]:
    """Return which (flat) parts of the gradient are `other`'s instead of `right`'s; empty if it is no such sum.

    Weights are fitted, so that a scaled part is still found. Tensors with few elements are skipped, because they fit by
    chance. If all parts fit as `other`'s, all are returned: where the two hardly differ, rounding hides single ones.
    """
    count = len(right)
    if fit.own.size < max(FEW, 4 * count):
        return []
    if fit.weights(*other) is not None:
        return list(range(count))
    weights = fit.weights(*right, *other)
    if weights is None:
        return []
    differs = [not np.allclose(x, y, rtol=1e-9, atol=0.0) for x, y in zip(right, other, strict=True)]
    taken = [int(differs[i] and abs(weights[count + i]) > abs(weights[i])) for i in range(count)]
    if fit.weights(*((right, other)[taken[i]][i] for i in range(count))) is None:
        return []
    return [i for i in range(count) if taken[i]]


def shifted_targets(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    """Explain by sequences whose targets are one position off."""
    batch, parts = failed.batch, failed.parts(failed.batch)
    if batch.targets.ndim < 2 or batch.targets.shape[1] < 2 or failed.twin:
        return None
    others = list(_with_shifted_targets(failed))
    if not failed.affords(len(others) * len(parts)):
        return None
    for detail, other in others:
        found = [failed.truth(failed.step, part) for part in failed.parts(other)]
        now, then = ([fit.flat(part) for part in parts] for parts in (failed.row_parts, found))
        if rows := _indices_replaced(fit, now, then):
            return Fault.MISPLACED, f"{detail}{_in_parts(failed, rows)}"
    return None


def _with_shifted_targets(failed: FailedStep) -> Iterator[tuple[str, Batch]]:
    """Yield the batch with other targets. Those past the end are the last ones again, the first, or masked."""
    batch = failed.batch
    if isinstance(batch.inputs, torch.Tensor) and batch.inputs.shape == batch.targets.shape:
        yield "inputs are their own targets", dataclasses.replace(batch, targets=batch.inputs)
    detail = "targets are those of one position later"
    targets, weights = (tensor.roll(-1, 1) for tensor in (batch.targets, batch.weights))
    yield detail, dataclasses.replace(batch, targets=targets, weights=weights)
    for last in (batch.targets[:, -1], torch.full_like(batch.targets[:, -1], IGNORED)):
        ended = torch.cat((batch.targets[:, 1:], last[:, None]), 1)
        yield detail, dataclasses.replace(batch, targets=ended)
        kept = torch.cat((batch.weights[:, 1:], (last != IGNORED).to(batch.weights.dtype)[:, None]), 1)
        yield detail, dataclasses.replace(batch, targets=ended, weights=kept)


def _in_parts(failed: FailedStep, indices: Sequence[int]) -> str:
    """Return where parts of the batch are, in words; empty for all of them."""
    layout, count = failed.case.layout, len(failed.parts(failed.batch))
    if len(indices) == count:
        return ""
    of_rank = max(count // layout.dp, 1)
    ranks = sorted({index // of_rank for index in indices})
    where = f" on data-parallel rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if layout.dp > 1 else ""
    if len(indices) == of_rank * len(ranks):
        return where
    listed = ", ".join(map(str, indices))
    return f"{where}, in {failed.parts_name} {listed} of {count}, counted from 0"


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
    """Return the data-parallel ranks that compute wrongly, judged by tensor rows that only one rank's data touches.

    An embedding has such rows. The list is empty unless these rows show for every rank whether it is right, and at
    least one rank is right.
    """
    dp, own = failed.case.layout.dp, failed.trace.gradients[failed.step]
    if dp == 1:
        return []
    right: set[int] = set()
    wrong: set[int] = set()
    for name in failed.names:
        if exact[name].ndim < 2:
            continue
        touched = np.stack([part[name].reshape(len(part[name]), -1).any(axis=1) for part in failed.rank_parts])
        alone = touched.sum(axis=0) == 1
        if not alone.any() or touched.all():
            continue
        off = np.linalg.norm((own[name] - exact[name]).reshape(len(exact[name]), -1), axis=1)
        size = np.linalg.norm(exact[name].reshape(len(exact[name]), -1), axis=1)
        errors, counts = dict[int, float](), dict[int, int]()
        for rank in range(dp):
            rows = alone & touched[rank] & (size > _TOUCHED * size.max())  # what is tiny has a large relative error
            if rows.any():
                errors[rank] = float(np.max(off[rows] / size[rows]))
                counts[rank] = int(rows.sum())
        small = {rank for rank, error in errors.items() if error <= _TOUCHED * max(errors.values())}
        right |= {rank for rank in small if counts[rank] > 1}
        wrong |= errors.keys() - small
    # A rank that uses wrong rows spoils rows of other ranks. So a rank that is right in some tensor is not at fault.
    wrong -= right
    return sorted(wrong) if right and right | wrong == set(range(dp)) else []


# --- Weights that have other values in one pass, or in both.


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Altered:
    """Values that parameters may have had in the forward pass, in the backward pass, or in both."""

    fault: Fault
    detail: str
    values: Tensors
    """Values of the altered parameters, by name."""
    back: Mapping[str, _Move] = dataclasses.field(default_factory=dict)
    """By name, the function that maps the altered weight's gradient to the order of the parameter."""


_Move = Callable[[NDArray[np.floating]], NDArray[np.floating]]


def old_block(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    """Explain by weights that are a step old, in all blocks or in one, and in all rows or in one rank's."""
    if failed.step == 0:
        return None
    now, before = failed.trace.parameters[failed.step], failed.trace.parameters[failed.step - 1]
    blocks = list(dict.fromkeys(block_of(name) for name in now))
    if len(blocks) > _MOST_BLOCKS:
        return None
    units = {"the parameters": list(now)}
    units |= {f"the weights of {block}": [n for n in now if block_of(n) == block] for block in blocks}
    return _altered(failed, fit, lambda rank: _old_values(failed, units, before, rank))


def altered_weight(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    """Explain by one weight that is a step old, rounded, or has its rows in other places.

    It may be so on all data-parallel ranks or on some.
    """
    now = failed.trace.parameters[failed.step]
    if len(now) > _MOST_WEIGHTS:
        return None
    if failed.step:
        before = failed.trace.parameters[failed.step - 1]
        units = {name: [name] for name in now}
        if found := _altered(failed, fit, lambda rank: _old_values(failed, units, before, rank)):
            return found
    return _altered(failed, fit, lambda rank: _other_values(failed) if rank is None else iter(())) or _altered(
        failed, fit, lambda rank: _rounded_values(failed) if rank is None else iter(())
    )


def _altered(
    failed: FailedStep, fit: Fit, candidates: Callable[[int | None], Iterator[_Altered]]
) -> Explanation | None:
    """Return the first candidate that explains the gradients. `candidates` is of all rows, or of one rank's.

    If the loss is right, so is the forward pass. Whole weights are tried before shards.
    """
    now, shards = failed.trace.parameters[failed.step], failed.num_shards
    passes: tuple[str, ...] = ("", "forward") if failed.loss_is_wrong else ("backward", "")
    if failed.twin and failed.case.tuning.compile:
        passes = ("",)  # what a compiled block keeps for its backward pass is not known
    for ranks in ([None], range(shards) if shards > 1 else ()):
        tried = _likeliest(failed, [candidate for rank in ranks for candidate in candidates(rank)])
        found = list[tuple[float, Explanation]]()
        for candidate, which in itertools.product(tried, passes):
            if not failed.affords(1):
                break
            other = {**now, **candidate.values}
            parts = failed.parts_of_micro_batches(
                failed.step,
                failed.batch,
                now if which == "backward" else other,
                {"forward": now, "backward": other}.get(which),
            )
            # A weight's own gradient is in the order of what was computed with, or put back in that of the parameter.
            back = [{n: candidate.back[n](g) if n in candidate.back else g for n, g in part.items()} for part in parts]
            for ordered in (parts, back) if candidate.back else (parts,):
                if fits := _replaced(failed, fit, ordered):
                    alone = f", in the {which} pass alone" if which else ""
                    told = candidate.fault, f"{candidate.detail}{alone}{fits.where}"
                    if not failed.case.precision.is_mixed:
                        return told
                    found.append((fits.left, told))
        if found:
            return _told(found)
    return None


def _told(found: list[tuple[float, Explanation]]) -> Explanation | None:
    """Return the explanation with the smallest unexplained part, and those about as good, or None if too many are.

    In 16 bits one rank's old shard in one pass may look like another's.
    """
    least = min(left for left, _ in found)
    alike = list(dict.fromkeys(each for left, each in sorted(found, key=lambda f: f[0]) if left <= _AS_CLOSE * least))
    if len(alike) > _MOST_ALIKE:
        return None
    return alike[0][0], ", or ".join(detail for _, detail in alike)


def _likeliest(failed: FailedStep, candidates: list[_Altered]) -> list[_Altered]:
    """Return the candidates to try.

    If the loss is wrong and all candidates are old or rounded weights, these are the likeliest ones: their change of
    the loss, to first order, is nearest to the run's error.
    """
    # A step's update is small, and so is rounding.
    small = all(candidate.fault in (Fault.STALE_WEIGHTS, Fault.PRECISION) for candidate in candidates)
    if failed.loss_is_wrong and small and not failed.twin:
        now, parts = failed.trace.parameters[failed.step], [*failed.rank_parts, failed.exact]
        candidates.sort(
            key=lambda each: min(
                abs(
                    failed.loss_error
                    - sum(float(np.sum(part[n] * (value - now[n]))) for n, value in each.values.items() if n in part)
                )
                for part in parts
            )
        )
        return candidates[:_MOST_LIKELY]
    return candidates[:_MOST_TRIED]


def _old_values(
    failed: FailedStep, units: Mapping[str, Sequence[str]], before: Tensors, rank: int | None
) -> Iterator[_Altered]:
    """Yield the values of the step before of each unit: of all rows, or of those that are `rank`'s shard."""
    now = failed.trace.parameters[failed.step]
    whose = "" if rank is None else f"rank {rank}'s shards of "
    for unit, names in units.items():
        values = {}
        for name in names:
            value = np.array(now[name])
            rows = ... if rank is None or not value.ndim else rows_of(rank, failed.num_shards, len(value))
            value[rows] = before[name][rows]
            if not np.array_equal(value, now[name]):
                values[name] = value
        if values:
            of = "of " * (unit in now)  # a weight, where others are several
            detail = f"the gradient with {whose}{unit} {of}before step {failed.step - 1}"
            yield _Altered(fault=Fault.STALE_WEIGHTS, detail=detail, values=values)


def _rounded_values(failed: FailedStep) -> Iterator[_Altered]:
    """Yield all weights, and single ones, rounded to 16 bits. The loss shows it, if the forward pass has them."""
    now = failed.trace.parameters[failed.step]
    if failed.case.precision.is_mixed or not failed.loss_is_wrong:
        return
    matrices = [name for name, weight in now.items() if weight.ndim > 1]
    for kind, narrow in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        rounded = {n: torch.from_numpy(np.asarray(x)).to(narrow).double().numpy() for n, x in now.items()}
        units = {"all parameters": list(now), "all matrices": matrices} | {name: [name] for name in now}
        for unit, names in units.items():
            values = {n: rounded[n].astype(now[n].dtype) for n in names if not np.array_equal(rounded[n], now[n])}
            if values:
                yield _Altered(
                    fault=Fault.PRECISION, detail=f"the gradient with {unit} rounded to {kind}", values=values
                )


def _other_values(failed: FailedStep) -> Iterator[_Altered]:
    """Yield single weights with their rows in other places, or added several times."""
    layout, now, shards = failed.case.layout, failed.trace.parameters[failed.step], failed.num_shards
    for name, weight in now.items():
        if layout.tp > 1 and name.endswith(".bias") and weight.any():
            detail = f"the gradient with {name} added {layout.tp} times, as if by every tensor-parallel rank"
            back = {name: functools.partial(np.multiply, layout.tp)}  # each of them may have its gradient
            yield _Altered(fault=Fault.FORWARD, detail=detail, values={name: layout.tp * weight}, back=back)
    tokens, split = now.get("embedding.tokens.weight"), layout.tp
    if tokens is not None and split > 1 and len(tokens) % split == 0:
        yield from _unmasked_lookups(tokens, split)
    for name, weight in now.items():
        count = len(weight) if weight.ndim else 0
        places = np.arange(count)
        if shards > 1 and count and count % shards == 0:
            detail = f"the gradient with the {shards} ranks' rows of {name} in the reversed order"
            yield from _in_places(name, weight, places.reshape(shards, -1)[::-1].ravel(), detail)
        if name.startswith("embedding.") and count > 1:  # what is looked up by number may be off by one
            for shift, where in ((1, "after"), (-1, "before")):
                detail = f"the gradient with the row of {name} {where} the right one for each place"
                for there in (np.clip(places + shift, 0, count - 1), (places + shift) % count):
                    yield from _in_places(name, weight, there, detail)


def _unmasked_lookups(tokens: NDArray[np.floating], split: int) -> Iterator[_Altered]:
    """Yield an embedding split by rows whose ranks look up tokens of others in their own rows, and do not mask them."""
    name, each = "embedding.tokens.weight", len(tokens) // split
    token, start = np.arange(len(tokens)), np.arange(split)[:, None] * each
    inside = (token >= start) & (token < start + each)
    for which, there in (
        ("the first row is added", start),
        ("the nearest row is added", np.clip(token, start, start + each - 1)),
        ("the row of the same place is added", start + token % each),
    ):
        rows = np.where(inside, token, there)

        def back(gradient: NDArray[np.floating], rows: NDArray[np.intp] = rows) -> NDArray[np.floating]:
            moved = np.zeros_like(gradient)
            for of_rank in rows:
                np.add.at(moved, of_rank, gradient)
            return moved

        detail = (
            f"the gradient with tokens of other tensor-parallel ranks looked up in a rank's part of {name}: {which}"
        )
        values = {name: np.sum([tokens[of_rank] for of_rank in rows], axis=0, dtype=tokens.dtype)}
        yield _Altered(fault=Fault.FORWARD, detail=detail, values=values, back={name: back})


def _in_places(name: str, weight: NDArray[np.floating], places: NDArray[np.intp], detail: str) -> Iterator[_Altered]:
    """Yield a weight whose row i is that of `places[i]`, unless this changes nothing."""

    def back(gradient: NDArray[np.floating]) -> NDArray[np.floating]:
        moved = np.zeros_like(gradient)
        np.add.at(moved, places, gradient)
        return moved

    if not np.array_equal(weight[places], weight):
        yield _Altered(fault=Fault.MISPLACED, detail=detail, values={name: weight[places]}, back={name: back})


# --- Some elements of tensors.


def in_region(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    """Explain gradients of which only some elements are wrong.

    Candidates are not scaled to fit there, because a fit to few elements means little.
    """
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
    factor = _factor_in(region, own, exact)
    if factor is None:
        return None
    return Fault.SCALED, f"{where} alone: {named_factor(factor, failed.known_factors())} times the truth"


def _factor_in(region: Mapping[str, NDArray[np.bool_]], own: Tensors, exact: Tensors) -> float | None:
    """Return the constant that multiplies all elements of a region and no others, or None.

    A region of fewer than _FEWEST elements has none. The other elements must not fit the constant better than the
    truth: an error there may be too small to be marked.
    """
    told, right = (np.concatenate([x[name][mask] for name, mask in region.items()]) for x in (own, exact))
    if told.size < _FEWEST or not right.any():
        return None
    factor = float(told @ right / (right @ right))
    share = LEFT_OVER if told.size >= FEW else FEW_LEFT_OVER
    if np.linalg.norm(told - factor * right) > share * np.linalg.norm(told - right):
        return None
    told, right = (np.concatenate([x[name][~mask] for name, mask in region.items()]) for x in (own, exact))
    return factor if np.linalg.norm(told - right) <= np.linalg.norm(told - factor * right) else None


def wrong_region(failed: FailedStep, own: Tensors, exact: Tensors) -> dict[str, NDArray[np.bool_]] | None:
    """Return which elements of each wrong tensor are wrong, or None if about all are."""
    region = wrong_elements(failed, own, exact)
    share = sum(int(mask.sum()) for mask in region.values()) / sum(mask.size for mask in region.values())
    # Where an error is no number, no element is marked.
    return region if share <= _MOST_WRONG and all(mask.any() for mask in region.values()) else None


def wrong_elements(failed: FailedStep, own: Tensors, exact: Tensors) -> dict[str, NDArray[np.bool_]]:
    """Return which elements of each wrong tensor are wrong."""
    region = {}
    for name in failed.names:
        error = np.abs(own[name] - exact[name])
        per_element = failed.tolerances[name] / np.sqrt(error.size)  # a wrong tensor has an element beyond it
        region[name] = error > max(per_element, _SMALL * float(error.max()))
    return region


def _explains(
    own: NDArray[np.floating],
    exact: NDArray[np.floating],
    candidate: NDArray[np.floating],
    mask: NDArray[np.bool_],
    tolerance: float,
) -> bool:
    deviation = float(np.linalg.norm((own - exact)[mask]))
    share = LEFT_OVER if mask.sum() >= FEW else FEW_LEFT_OVER
    return float(np.linalg.norm((own - candidate)[mask])) <= max(tolerance, share * deviation)


_Candidate = tuple[Fault, str, Mapping[str, NDArray[np.floating]]]


def _candidates(failed: FailedStep, exact: Tensors) -> Iterator[_Candidate]:
    """Yield what gradients could be instead, by fault, with its description."""
    names, dp = failed.names, failed.case.layout.dp
    yield Fault.MISSING, "nothing is in them", {n: np.zeros_like(exact[n]) for n in names}
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
        # With two ranks, keeping one part and dropping the other give the same sum. Ranks that differ did not reduce.
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
        yield Fault.MISSING, detail, {n: exact[n] - part[n] for n in failed.names}


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
    return start if places[-1] >= mask.size - 1 - (mask.size - start) // 10 and is_run(places) else None


def is_run(places: NDArray[np.intp]) -> bool:
    """Return whether places follow one another, but for a few whose error is too small to be seen."""
    return len(places) >= 0.9 * (int(places[-1]) - int(places[0]) + 1)


def _place(mask: NDArray[np.bool_]) -> str:
    """Return in words which elements of one tensor are marked."""
    places, size = np.flatnonzero(mask), mask.size
    first, last = int(places[0]), int(places[-1])
    if len(places) == 1:
        return f"element {_listed(mask)}"
    if is_run(places):
        if last == size - 1:
            return f"the last {size - first} of {size} elements"
        return f"the first {last + 1} of {size} elements" if first == 0 else f"elements {first} to {last} of {size}"
    if mask.ndim > 1:
        for name, lines in (("rows", mask.reshape(len(mask), -1)), ("columns", mask.reshape(-1, mask.shape[-1]).T)):
            wrong = np.flatnonzero(lines.any(axis=1))
            if len(wrong) <= len(lines) / 2 and lines[wrong].mean() >= _MOST_OF_LINES:
                more = ", ..." if len(wrong) > MOST_NAMES else ""
                return f"{len(wrong)} of {len(lines)} {name} ({', '.join(map(str, wrong[:MOST_NAMES]))}{more})"
    if len(places) <= MOST_NAMES:
        return f"elements {_listed(mask)}"
    return f"{len(places):,} of {size:,} elements"


def _listed(mask: NDArray[np.bool_]) -> str:
    """Return the indices of the marked elements and the tensor's shape, such as `[3, 5], [4, 0] of 64 x 32`."""
    indices = [[int(i) for i in index] for index in np.argwhere(mask)]
    listed = ", ".join(str(index if mask.ndim > 1 else index[0]) for index in indices)
    return f"{listed} of {' x '.join(map(str, mask.shape))}"


# --- Right values in wrong places.


def in_other_places(failed: FailedStep, own: Tensors, exact: Tensors) -> Explanation | None:
    """Explain tensors whose values are right but stand in other places, of the same tensor or of another."""
    how = {n: misplaced(own[n], exact[n], tolerance) for n, tolerance in failed.tolerances.items()}
    if all(how.values()):
        worst = failed.names[0]
        return Fault.MISPLACED, f"{worst}: {how[worst]}"
    told, right = (np.concatenate([x[n].ravel() for n in failed.names]) for x in (own, exact))
    if _has_values_of(told, right, float(np.linalg.norm([*failed.tolerances.values()])), sharply=True):
        return Fault.MISPLACED, f"{pluralize(len(failed.names), 'tensor')} have values of one another"
    return None


def part_of_other_block(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    """Explain one block's gradients by another block's, of one data-parallel rank or of all."""
    own = {block_of(name) for name in failed.names}
    blocks = sorted({block_of(name) for name in exact} - own)
    if len(own) > 1 or not blocks:
        return None
    (block,) = own
    ranks = failed.rank_parts if failed.case.layout.dp > 1 else []
    for other in blocks:
        there = {name: name.replace(block, other, 1) for name in failed.names}
        if any(n not in exact or exact[n].shape != exact[name].shape for name, n in there.items()):
            continue
        for rank, part in [(None, exact), *enumerate(ranks)]:
            found = fit.flat({name: exact[name] - part[name] + part[n] for name, n in there.items()})
            if np.linalg.norm(fit.own - found) <= fit.allowed:
                whose = "" if rank is None else f" of data-parallel rank {rank}"
                return Fault.MISPLACED, f"the part{whose} in the gradients of {block} is that of {other}"
    return None


def elements_of_neighbours(failed: FailedStep, own: Tensors, exact: Tensors) -> Explanation | None:
    """Explain tensors that hold elements of other ones, as of a flat buffer that is read at other places than it was
    filled at.

    Runs of elements are looked for in all right gradients, laid end to end.
    """
    names = [name for name in failed.names if own.get(name) is not None and np.any(own[name])][:_MOST_TENSORS]
    order = [name for name in own if name in exact]
    flat = np.concatenate([np.ravel(exact[name]) for name in order]).astype(np.float64)
    if len(names) < 2 or flat.size > _MOST_FLAT:
        return None
    begins = dict(zip(order, np.cumsum([0, *(exact[name].size for name in order)]), strict=False))
    size = 1 << int(flat.size + _RUN - 1).bit_length()
    spectrum = np.fft.rfft(flat, size)
    energy = np.convolve(np.square(flat), np.ones(_RUN), "valid")
    shifts, runs, holders = list[int](), 0, dict[str, str]()
    for name in names:
        values = np.ravel(own[name]).astype(np.float64)
        places = [i for i in range(0, values.size - _RUN + 1, _RUN) if values[i : i + _RUN].all()][:_MOST_RUNS]
        for place in places:
            run = values[place : place + _RUN]
            length, own_place = float(np.linalg.norm(run)), int(begins[name]) + place
            products = np.fft.irfft(spectrum * np.conj(np.fft.rfft(run, size)), size)[: energy.size]
            as_long = (energy > (length / 2) ** 2) & (energy < (2 * length) ** 2)
            best = int(np.where(as_long, products / np.sqrt(np.where(as_long, energy, 1.0)), -np.inf).argmax())
            runs += 1

            def off(begin: int, run: NDArray[np.float64] = run) -> float:
                return float(np.linalg.norm(flat[begin : begin + _RUN] - run))

            if off(best) < _ALIKE * length < _APART * length < off(own_place):
                shifts.append(best - own_place)
                holders.setdefault(name, next(n for n in reversed(order) if begins[n] <= best))
    if runs < _FEWEST or len(shifts) < _MOST_OF_RUNS * runs:
        return None
    name, holder = next(iter(holders.items()))
    by = f", {shifts[0]} places further" if len(set(shifts)) == 1 else ""
    return Fault.MISPLACED, (
        f"{name} holds elements of {holder}{by}, and other wrong gradients of others, as of a flat buffer that is read "
        "at other places than it is filled at"
    )


def _has_values_of(
    own: NDArray[np.floating], exact: NDArray[np.floating], tolerance: float, *, sharply: bool = False
) -> bool:
    """Return whether two tensors have the same values, in whatever places.

    Many values of one distribution are nearly the same ones when sorted. With `sharply`, the tolerance must be finer.
    """
    if own.shape != exact.shape or (sharply and tolerance > _SHARP * float(np.linalg.norm(exact))):
        return False
    return bool(np.linalg.norm(np.sort(own, axis=None) - np.sort(exact, axis=None)) <= tolerance)


def misplaced(own: NDArray[np.floating], exact: NDArray[np.floating], tolerance: float) -> str:
    """Return how `own`, which has values of `exact`, has them in other places; empty if it has other values."""
    if not _has_values_of(own, exact, tolerance):
        return _rows_of_neighbours(own, exact, tolerance)
    for count in range(2, 17):
        for axis in range(exact.ndim):
            if exact.shape[axis] % count:
                continue
            parts, right = (np.split(tensor, count, axis=axis) for tensor in (own, exact))
            order = [_same_part(part, right, tolerance) for part in parts]
            if None not in order and order != list(range(count)):
                along = ("rows", "columns")[axis] if exact.ndim == 2 else f"dimension {axis}"
                return f"its {count} parts by {along} are in the order {', '.join(map(str, order))}"
    if shifted := _shifted_rows(own, exact, tolerance):
        return shifted
    sharp = _has_values_of(own, exact, tolerance, sharply=True)
    return "its values are the right ones, in other places" if sharp else ""


def _rows_of_neighbours(own: NDArray[np.floating], exact: NDArray[np.floating], tolerance: float) -> str:
    """Return which run of rows holds rows a few places before or behind it, as a shard that begins in the wrong place;
    empty if none does."""
    if exact.ndim < 2 or own.shape != exact.shape:
        return ""
    off = np.linalg.norm((own - exact).reshape(len(exact), -1), axis=1)
    wrong = np.flatnonzero(off > tolerance / np.sqrt(len(exact)))
    if wrong.size < _LEAST_RUN:
        return ""
    first, end = int(wrong[0]), int(wrong[-1]) + 1
    for places in range(1, _MOST_PLACES + 1):
        for shift in (-places, places):
            if first + shift < 0 or end + shift > len(exact):
                continue
            if np.linalg.norm(own[first:end] - exact[first + shift : end + shift]) <= tolerance:
                return f"rows {first} to {end - 1} of {len(exact)} hold rows {first + shift} to {end + shift - 1}"
    return ""


def _shifted_rows(own: NDArray[np.floating], exact: NDArray[np.floating], tolerance: float) -> str:
    """Return by how many places a run of rows is shifted, the last ones to its start; empty if none is."""
    if not exact.ndim:
        return ""
    off = np.linalg.norm((own - exact).reshape(len(exact), -1), axis=1)
    for least in (tolerance, tolerance / np.sqrt(len(exact))):
        wrong = np.flatnonzero(off > least)
        if not wrong.size:
            continue
        rows = slice(int(wrong[0]), int(wrong[-1]) + 1)
        for places in range(1, min(rows.stop - rows.start, _MOST_PLACES + 1)):
            for shift, where in ((places, "down"), (-places, "up")):
                if np.linalg.norm(own[rows] - np.roll(exact[rows], shift, axis=0)) <= tolerance:
                    return f"rows {rows.start} to {rows.stop - 1} of {len(exact)} are shifted {where} by {places}"
    return ""


def _same_part(part: NDArray[np.floating], right: Sequence[NDArray[np.floating]], tolerance: float) -> int | None:
    """Return the index of the part of `right` that `part` equals, or None."""
    return next((i for i, other in enumerate(right) if np.linalg.norm(part - other) <= tolerance), None)
