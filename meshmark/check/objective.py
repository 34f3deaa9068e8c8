"""Find which mean a script optimises, from each target's weight in the gradient that it steps on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from meshmark.check.recording import Call, Step, Term
from meshmark.check.tree import tensors_in
from meshmark.judge.faults import named_factor

SAME = 1e-3
"""Relative difference up to which weights count as equal.

Cross-entropy in 16 bits rounds its gradient to 4e-3. The gradient of a mean with respect to its result, however, is
one number in fp32.
"""
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


class UnseenError(Exception):
    """No weights of targets were observed. The text gives the reason."""


def objective_of(ranks: Sequence[Step], factor: float) -> Objective:
    """Return the objective of one step.

    `factor` is the factor by which the reduction multiplied each rank's gradients. If a loss has several terms, each
    is a mean of its own, whatever its weight. Raises `UnseenError` if no weights of targets were observed.
    """
    called = [[term.name for term in _differentiated(call)] for step in ranks for call in _last_calls(step)]
    if not all(called):
        raise UnseenError("the loss is made by no loss function of torch.nn.functional")
    if any(names != called[0] for names in called):
        raise UnseenError("the loss has other terms in other micro-batches")
    found = [_objective_of_term(ranks, factor, number) for number in range(len(called[0]))]
    return Objective(
        total=sum(each.total for each in found),
        candidates=[name for name in found[0].candidates if all(name in each.candidates for each in found)],
        several_terms=len(found) > 1,
        num_targets=found[0].num_targets,
        low=min(each.low for each in found),
        high=max(each.high for each in found),
        counts=found[0].counts,
    )


def _last_calls(step: Step) -> list[Call]:
    """Return the calls whose outputs entered a loss, not only another model, as an encoder's enter a decoder."""
    return [call for call in step.calls if not call.feeds or _differentiated(call)]


def _differentiated(call: Call) -> list[Term]:
    return [term for term in call.terms if term.gradient is not None]


def _objective_of_term(ranks: Sequence[Step], factor: float, number: int) -> Objective:
    """Return what the weights of one term's targets say."""
    weights: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    for step in ranks:
        for call in _last_calls(step):
            term = _differentiated(call)[number]
            if term.weighted:
                raise UnseenError("classes or targets have weights of their own")
            each, by_row = _weights_of(term, call)
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
    )


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
    num_rows = next((t.shape[0] for t in tensors_in(call.inputs) if t.dim()), 0)
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


def _equal(values: np.ndarray) -> bool:
    return bool(values.size and np.all(np.abs(values - values.mean()) <= SAME * np.abs(values.mean())))


def scaled_total(total: float, known: Mapping[str, float]) -> str | None:
    """Describe a sum of weights other than 1 as a product of the numbers of ranks and micro-batches, if it is one."""
    if abs(total - 1) <= SAME:
        return None
    if any(abs(total - value) <= SAME * value for value in known.values() if value != 1):
        return named_factor(total, {name: v for name, v in known.items() if v != 1})
    return None
