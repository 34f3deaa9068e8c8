"""The same step again and again, without ever moving: what dropout does to the loss, by rank."""

from __future__ import annotations

import dataclasses
import time

import torch

from meshmark.adapter import Adapter, RankContext
from meshmark.data import IGNORED, Batch, make_batch
from meshmark.model import Transformer
from meshmark.objective import loss_share
from meshmark.rank_report import RankReport, Request
from meshmark.trace import Trace, gather_trace, note
from meshmark.truth import exact_gradients, initial_values
from meshmark.workload import Workload

NUM_REFERENCES = 96
"""Draws of the single process that the ranks' losses are held against."""


def repeat_with_dropout(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """`losses`: this rank's mean loss over the same rows, which all data-parallel ranks train on, again and again; on
    rank 0 also `reference`, a single process's, and `evaluation` beside `exact`. The optimizer must not move."""
    case = request.case
    engine = adapter.build(case, context)
    built, batch = time.time(), _same_rows(case.workload, case.layout.dp)
    losses, trace = [], Trace(parameters=[note(engine.parameters())])
    for step in range(request.steps):
        if step == request.steps // 2:  # amid training, which must not notice
            evaluation = torch.tensor(float(engine.evaluate(batch)))
        losses.append(float(engine.backward(batch)) * case.layout.dp)
        trace.gradients.append(note(engine.gradients()))
        engine.update()
    torch.distributed.all_reduce(evaluation)
    trace.parameters.append(note(engine.parameters()))
    engine.close()
    trace.losses, trace.norms = losses, [None] * len(losses)
    _, drifts, num_replicated = gather_trace(trace)
    samples = {"losses": losses}
    if context.rank == 0:
        exact = exact_gradients(case.workload, initial_values(case.workload), batch).loss
        reference = _references(case.workload, batch.shard(0, case.layout.dp), case.layout.dp)
        samples |= {"reference": reference, "evaluation": [float(evaluation)], "exact": [exact]}
    return RankReport(
        rank=context.rank, build_seconds=built - started, run_seconds=time.time() - built, losses=losses,
        samples=samples, drifts=drifts, num_replicated=num_replicated,
    )  # fmt: skip


def _same_rows(workload: Workload, dp: int) -> Batch:
    """A global batch that holds the rows of the first data-parallel rank `dp` times."""
    batch = make_batch(workload, 0).shard(0, dp)
    tokens, targets = (t.repeat(dp, 1) for t in (batch.tokens_BT, batch.targets_BT))
    return dataclasses.replace(batch, tokens_BT=tokens, targets_BT=targets, num_tokens=int((targets != IGNORED).sum()))


@torch.no_grad()
def _references(workload: Workload, rows: Batch, dp: int) -> list[float]:
    """Losses of plain PyTorch with dropout on the same rows."""
    model = Transformer(workload.model)
    model.initialize(workload.seed)
    torch.manual_seed(workload.seed + 1)
    return [float(loss_share(model(rows.tokens_BT), rows)) * dp for _ in range(NUM_REFERENCES)]
