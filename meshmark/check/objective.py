"""Find which mean a script optimises, from each target's weight in the gradient that it steps on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from meshmark.check.recording import Call, Step, Term
from meshmark.check.tree import tensors_in
from meshmark.judge.faults import named_factor

SAME = 1e-3
"""Relative difference up to which weights count as equal.

Cross-entropy in 16 bits rounds its gradient to 4e-3. The gradient of a mean with respect to its result, however, is
one number in fp32.
"""
_TELLING = 8
"""Smallest number of rows that count as the same if their targets are the same, in the same order."""
_NEVER_ZERO = ("cross_entropy", "nll_loss")
"""Losses whose gradient is zero in all classes of no row."""
MEANS = {
    "tokens": "a mean over all targets of the global batch",
    "rows": "a mean over rows of each row's mean",
    "ranks": "a mean of the means of ranks and micro-batches",
}


@dataclass(kw_only=True)
class Objective:
    """The objective whose gradient the script steps on, as found at one step."""

    total: float
    """Sum of all weights, which is 1 for a mean."""
    candidates: list[str]
    """Names in `MEANS` that fit; several if they are the same for this batch."""
    several_terms: bool
    """Whether loss functions were called more than once in a micro-batch."""
    num_targets: int
    low: float
    high: float
    """Weights of single targets, as multiples of their mean."""
    counts: list[int] = field(default_factory=list)
    """Number of targets of every micro-batch."""
    totals: list[float] = field(default_factory=list)
    """Sum of the weights of each term."""
    num_rows: int = 0
    """Number of rows of the global batch, 0 if they are not known."""
    num_positions: int = 0
    """Number of targets with those that do not count, as behind a sequence; 0 if the loss function takes the mean."""
    multiplied: float = 1.0
    """Number by which the script multiplies every loss, 1 if they differ."""
    unreduced: bool = False
    """Whether the script reduces single losses by itself."""
    reweighed: bool = False
    """Whether it then weighs targets of one row, or single rows of one micro-batch, by numbers of their own."""
    num_unused: int = 0
    """Number of calls of models by whose outputs nothing was differentiated."""
    num_detached: int = 0
    """Number of targets that count in a loss whose gradient does not reach their row of the model's output."""

    @property
    def has_factor(self) -> bool:
        """Whether the sum of all weights is not 1 because the script multiplies its losses by a number."""
        return self.multiplied not in (0.0, 1.0) and abs(self.total / self.multiplied - 1) <= SAME

    @property
    def sums_in_rows(self) -> bool:
        """Whether the script adds up the losses of each row and takes the mean over rows."""
        return self.unreduced and abs(self.total * self.num_rows - self.num_targets) <= SAME * self.num_targets

    @property
    def averages_positions(self) -> bool:
        """Whether the script divides the sum of single losses by the number of positions, not all of which count."""
        targets = self.total * self.num_positions
        return self.num_positions > self.num_targets and abs(targets - self.num_targets) <= SAME * self.num_targets


class UnseenError(Exception):
    """No weights of targets were observed. The text gives the reason."""


def objective_of(ranks: Sequence[Step], factor: float) -> Objective:
    """Return the objective of one step.

    `factor` is the factor by which the reduction multiplied each rank's gradients. If a loss has several terms, each
    has a separate mean, whatever its weight. So have calls whose losses are over other classes, or over the same rows
    again. Raises `UnseenError` if no weights of targets were observed.
    """
    kinds = [_kinds(step) for step in ranks]
    if len(set(kinds[0])) > 1 and all(own == kinds[0] for own in kinds):
        found = [objective_of([_only(step, kind) for step in ranks], factor) for kind in dict.fromkeys(kinds[0])]
        return _together(found)
    called = [[term.name for term in _differentiated(call)] for step in ranks for call in _last_calls(step)]
    if not all(called):
        raise UnseenError(
            "the loss is made by none of the loss functions whose targets are counted, such as cross_entropy"
        )
    if any(names != called[0] for names in called):
        raise UnseenError("the loss has other terms in other micro-batches")
    numbers = range(len(called[0]))
    found = [_objective_of_terms(ranks, factor, [number]) for number in numbers]
    if len(set(called[0])) == 1 < len(found) and not _together(found).candidates:
        # As in mixup, where the two targets of a row share its weight, by shares that micro-batches draw.
        joined = _objective_of_terms(ranks, factor, numbers)
        return joined if joined.candidates else _together(found)
    return _together(found)


def _together(found: list[Objective]) -> Objective:
    """Return the objective whose terms are `found`."""
    return Objective(
        total=sum(each.total for each in found),
        candidates=[name for name in found[0].candidates if all(name in each.candidates for each in found)],
        several_terms=len(found) > 1,
        num_targets=found[0].num_targets,
        low=min(each.low for each in found),
        high=max(each.high for each in found),
        counts=found[0].counts,
        totals=[total for each in found for total in each.totals or [each.total]],
        num_rows=found[0].num_rows,
        num_positions=found[0].num_positions,
        multiplied=found[0].multiplied,
        unreduced=any(each.unreduced for each in found),
        reweighed=any(each.reweighed for each in found),
        num_unused=found[0].num_unused,
        num_detached=max(each.num_detached for each in found),
    )


def _kinds(step: Step) -> list[str]:
    """Return what tells calls apart that are no micro-batches of one loss: the number of classes, repeated rows, or a
    target that all rows have.
    """
    found, seen = [], list[Tensor]()
    for call in _last_calls(step):
        constants = [t.constant for t in call.terms if t.constant is not None and t.scored.numel() >= _TELLING]
        if constants and len(constants) == len(call.terms):
            found.append(f"targets {constants}")
            continue
        scores = [g for _, g in call.used_gradients if g.dim() == 2 and g.shape[1] > 1]
        if len(scores) != 1:
            found.append("")
            continue
        [gradient] = scores
        targets = gradient.argmin(1)  # of a cross-entropy, whose gradient is negative for the target alone
        is_entropy = bool(((gradient < 0).sum(1) <= 1).all()) and len(targets) >= _TELLING
        again = is_entropy and bool((targets != targets[0]).any()) and any(torch.equal(targets, own) for own in seen)
        found.append(f"{gradient.shape[1]} classes{f', {len(seen)}' if again else ''}")
        seen += [targets] if is_entropy else []
    return found


def _only(step: Step, kind: str) -> Step:
    """Return a step with calls of one kind alone."""
    calls = zip(_last_calls(step), _kinds(step), strict=True)
    return replace(step, calls=[call for call, own in calls if own == kind])


def _last_calls(step: Step) -> list[Call]:
    """Return the calls whose outputs entered a loss, not only another model, as an encoder's enter a decoder.

    Nor do outputs that nothing was differentiated by, as of a pass for a metric, where those of other calls of the same
    model were.
    """
    used = {call.root for call in step.calls if call.used_gradients}
    calls = [call for call in step.calls if call.used_gradients or call.root not in used or _differentiated(call)]
    return [call for call in calls if not call.feeds or _differentiated(call)]


def _differentiated(call: Call) -> list[Term]:
    return [term for term in call.terms if term.gradient is not None]


def _objective_of_terms(ranks: Sequence[Step], factor: float, numbers: Sequence[int]) -> Objective:
    """Return what the weights of targets say: of one term's, or of those in the same places of several terms."""
    reweighed, detached = False, 0
    weights: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    terms: list[Term] = []
    for step in ranks:
        for call in _last_calls(step):
            together = [_differentiated(call)[number] for number in numbers]
            term = together[0]
            terms.append(term)
            if any(one.weighted for one in together):
                raise UnseenError("classes or targets have weights of their own")
            parts = [_weights_of(one, call) for one in together]
            detached += max(_num_detached(one, call) for one in together)
            if len({(own.size, of_rows.size) for own, of_rows in parts}) > 1:
                raise UnseenError("the loss has terms of different numbers of targets")
            each, by_row = (np.sum(part, axis=0) for part in zip(*parts, strict=True))
            single = each.size == by_row.size or not by_row.size  # one target a row
            varies = term.reduction == "none" and not _equal(each)
            reweighed |= varies and (single or each.size % by_row.size == 0 and not _equal_in_rows(each, by_row.size))
            weight = factor / call.scale * (1.0 if term.inside else call.entering)
            weights.append(each * weight)
            rows.append(by_row * weight)
    pooled = np.concatenate(weights)
    total = float(pooled.sum())
    if not pooled.size or not total:
        raise UnseenError("no target counts")
    relative = pooled / pooled.mean()
    sums = [float(w.sum()) for w in weights if w.size]
    candidates = []
    if _equal(pooled):
        candidates.append("tokens")
    by_row = np.concatenate(rows)
    if by_row.size and _equal(by_row[by_row != 0]):
        candidates.append("rows")
    by_rank = [sum(float(w.sum()) for w in part) for part in _by_rank(weights, ranks)]
    if all(_equal(w) for w in weights if w.size) and (_equal(np.array(sums)) or _equal(np.array(by_rank))):
        candidates.append("ranks")
    return Objective(
        total=total,
        candidates=candidates,
        several_terms=False,
        num_targets=int(pooled.size),
        low=float(relative.min()),
        high=float(relative.max()),
        counts=[int(w.size) for w in weights],
        num_rows=int(by_row.size),
        num_positions=sum(term.scored.numel() for term in terms) if terms[0].reduction != "mean" else 0,
        multiplied=terms[0].multiplied if len({term.multiplied for term in terms}) == 1 else 1.0,
        unreduced=terms[0].reduction == "none",
        reweighed=reweighed,
        num_unused=sum(not call.used_gradients for step in ranks for call in step.calls),
        num_detached=detached,
    )


def _num_detached(term: Term, call: Call) -> int:
    """Return the number of targets that count although no gradient reaches their row of the model's output.

    Only losses are counted whose gradient has no zero of its own: that of `binary_cross_entropy_with_logits`, and any
    in fp16, is rounded to zero where a row is learnt.
    """
    num_rows, counted = _num_rows(call), term.scored.reshape(-1)
    if term.name not in _NEVER_ZERO or term.inside or not num_rows or counted.numel() % num_rows:
        return 0
    assert term.gradient is not None
    if term.gradient.numel() == counted.numel():
        counted = counted & (term.gradient.reshape(-1) != 0)  # those that the script leaves out itself
    gradients = [g for _, g in call.used_gradients]
    if not gradients or any(not g.dim() or g.shape[0] != num_rows or g.dtype is torch.float16 for g in gradients):
        return 0
    reached = torch.stack([g.reshape(num_rows, -1).ne(0).any(1) for g in gradients]).any(0)
    return int(counted.reshape(num_rows, -1)[~reached].sum())


def _by_rank(weights: list[np.ndarray], ranks: Sequence[Step]) -> list[list[np.ndarray]]:
    found, left = [], iter(weights)
    for step in ranks:
        found.append([next(left) for _ in _last_calls(step)])
    return found


def _weights_of(term: Term, call: Call) -> tuple[np.ndarray, np.ndarray]:
    """Return the weight of every target that counts, and their sums by row of the batch.

    The sums are empty if the rows are not known.
    """
    assert term.gradient is not None
    num_rows = _num_rows(call)
    counted = term.scored.numpy().ravel()
    gradient = term.gradient.double().numpy().ravel()
    if term.reduction == "mean":
        full = np.where(counted, gradient[0] / max(1, counted.sum()), 0.0)
    elif term.reduction == "sum":
        full = np.where(counted, gradient[0], 0.0)
    else:
        full = np.where(counted, gradient, 0.0) if gradient.size == counted.size else np.zeros(counted.size)
    by_row = full.reshape(num_rows, -1).sum(1) if num_rows and full.size % num_rows == 0 else np.zeros(0)
    return full[counted], by_row


def _num_rows(call: Call) -> int:
    """Return the number of rows of a batch: the length of an input that outputs have too, or else of the first one."""
    lengths = [t.shape[0] for t in tensors_in(call.inputs) if t.dim()]
    outputs = {g.shape[0] for _, g in call.used_gradients if g.dim()}
    return next((length for length in lengths if length in outputs), next(iter(lengths), 0))


def _equal_in_rows(values: np.ndarray, num_rows: int) -> bool:
    return all(_equal(row) for row in values.reshape(num_rows, -1))


def _equal(values: np.ndarray) -> bool:
    return bool(values.size and np.all(np.abs(values - values.mean()) <= SAME * np.abs(values.mean())))


def scaled_total(total: float, known: Mapping[str, float]) -> str | None:
    """Describe a sum of weights other than 1 as a product of the numbers of ranks and micro-batches, if it is one."""
    if abs(total - 1) <= SAME:
        return None
    if any(abs(total - value) <= SAME * value for value in known.values() if value != 1):
        return named_factor(total, {name: v for name, v in known.items() if v != 1})
    return None
