"""Explain wrong evaluations: which rows, ranks or weights make the loss that was told?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from meshmark.judge.failed_step import Explanation
from meshmark.judge.faults import Fault, named_factor
from meshmark.judge.trace import Trace
from meshmark.judge.truth import exact_loss
from meshmark.judge.twin import known_parameters
from meshmark.reference.data import make_batch
from meshmark.spec.case import Case

_SAME = 1e-6
"""Relative distance of two losses that are the same but for rounding."""
_MOST_ROWS = 64
"""Rows of a batch up to which every one's loss is computed."""
_LEAST_STEPS = 2
"""Evaluations that a pair of rows must explain. One of them may be by chance what many pairs add up to."""


def explain_evaluation(case: Case, trace: Trace, multiple: float, known: Mapping[str, float]) -> Explanation:
    """Return why evaluations are wrong. `multiple` is the first wrong one in multiples of the truth, which is told with
    its name among the `known` factors where nothing explains it.
    """
    workload, rows = case.workload, case.workload.global_batch
    if not workload.couples_rows and rows <= _MOST_ROWS:
        found = list(dict.fromkeys(detail for detail, losses in _hypotheses(case, trace) if _fits(trace, losses)))
        if len(found) == 1:
            return Fault.EVALUATION, found[0]
    return Fault.EVALUATION, f"it is {named_factor(multiple, known)} times the truth"


def _fits(trace: Trace, losses: Sequence[float]) -> bool:
    return all(abs(told - loss) <= _SAME * abs(loss) for told, loss in zip(trace.evaluations, losses, strict=True))


def _hypotheses(case: Case, trace: Trace) -> Iterator[tuple[str, list[float]]]:
    """Yield what a wrong evaluation may compute, in words, and its losses."""
    workload, dp, steps = case.workload, case.layout.dp, range(len(trace.evaluations))
    batches = [make_batch(workload, step) for step in steps]
    values = [known_parameters(trace, workload, step) for step in steps]
    if len(steps) > 1:
        before = [exact_loss(workload, values[max(step - 1, 0)], batches[step], case.layout) for step in steps]
        yield "it is that of the weights before the last update", before
    shares = [
        [exact_loss(workload, values[step], batches[step].rows(i, i + 1), case.layout) for i in range(len(batches[0]))]
        for step in steps
    ]
    weights = [
        [float(batch.rows(i, i + 1).weights.sum()) / batch.total_weight for i in range(len(batch))] for batch in batches
    ]
    size = len(shares[0]) // dp
    for rank in range(dp if dp > 1 else 0):
        own = slice(rank * size, (rank + 1) * size)
        told = f"it is that of the rows of data-parallel rank {rank} alone"
        yield told, [dp * sum(each[own]) for each in shares]
        yield told, [sum(each[own]) / (sum(weight[own]) or 1.0) for each, weight in zip(shares, weights, strict=True)]
    if len(steps) < _LEAST_STEPS:
        return
    totals = [sum(each) for each in shares]
    for what, rows in _of_all_ranks(case).items():
        less = [total - sum(each[i] for i in rows) for total, each in zip(totals, shares, strict=True)]
        yield f"{what} is left out", less
        left = [1 - sum(weight[i] for i in rows) for weight in weights]
        over = [loss / (rest or 1.0) for loss, rest in zip(less, left, strict=True)]
        yield f"{what} is left out, and the mean is that of the others", over

    def name(row: int) -> str:
        return f"row {row}" + (f" (row {row % size} of data-parallel rank {row // size})" if dp > 1 else "")

    for i in range(len(shares[0])):
        less = [total - each[i] for total, each in zip(totals, shares, strict=True)]
        yield f"{name(i)} is left out", less
        over = [loss / ((1 - weight[i]) or 1.0) for loss, weight in zip(less, weights, strict=True)]
        yield f"{name(i)} is left out, and the mean is that of the others", over
        yield f"{name(i)} counts twice", [total + each[i] for total, each in zip(totals, shares, strict=True)]
        for j in range(len(shares[0])):
            if i != j:
                yield (
                    f"{name(j)} is in the place of {name(i)}",
                    [loss + each[j] for loss, each in zip(less, shares, strict=True)],
                )


def _of_all_ranks(case: Case) -> dict[str, list[int]]:
    """Return rows that every data-parallel rank may leave out, in words."""
    layout = case.layout
    size = case.workload.global_batch // layout.dp
    micro = size // layout.num_micro_batches
    found = {"first row": range(1), "last row": range(size - 1, size)}
    if layout.num_micro_batches > 1:
        found |= {"first micro-batch": range(micro), "last micro-batch": range(size - micro, size)}
    return {
        f"the {what} of every data-parallel rank": [rank * size + row for rank in range(layout.dp) for row in rows]
        for what, rows in found.items()
        if layout.dp > 1 and len(rows) < size
    }
