"""How far rounding alone carries a run from the truth: the yardstick of every equivalence verdict.

The adapter `single` trains in a case's precision, repeatedly, under perturbations as large as that precision's
rounding: other micro-batches, other orders of rows, last bits of the initial values, and in mixed precision both ways
of casting (autocast, and casting the weights). What separates a correct framework from `single` is of that kind alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any, cast

import torch

from meshmark.adapter import Adapter, Engine, RankContext
from meshmark.case import Case
from meshmark.data import Batch, load_corpus, make_batch
from meshmark.initial import random_bits
from meshmark.layout import Layout
from meshmark.rank_report import RankReport, Request
from meshmark.serial import encode
from meshmark.trace import Trace, note
from meshmark.truth import assess

NUM_RUNS = 8
NUM_RANKS = 2
"""Processes that share the runs."""
TIME_LIMIT_SECONDS = 600.0
FORMAT = 3
"""Part of every key; raise it when anything that shapes the noise changes: model, data, objective, truth, this file."""

Noise = dict[str, list[float]]
"""Largest distance to the truth over all noise runs, by quantity, then step."""


def noise_key(case: Case, steps: int) -> str:
    """Content hash of everything that the noise of `case` depends on."""
    corpus = load_corpus(case.workload.corpus, case.workload.model.seq_len + 1)
    content = [FORMAT, torch.__version__, steps, NUM_RUNS, case.precision, encode(case.workload),
               hashlib.sha256(corpus.numpy().data).hexdigest()]  # fmt: skip
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def measure_noise(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Noise of `request.case`'s workload and precision over this rank's share of the runs; `adapter` is `single`."""
    alone = dataclasses.replace(context, rank=0, world_size=1)
    runs = range(context.rank, NUM_RUNS, context.world_size)
    noise = merge_noise([_noise_run(request, adapter, alone, run) for run in runs])
    return RankReport(rank=context.rank, build_seconds=0.0, run_seconds=time.time() - started, noise=noise)


def merge_noise(parts: Sequence[Noise]) -> Noise:
    """The largest distance of all parts, which hold the same quantities and steps."""
    return {
        quantity: [max(step) for step in zip(*(part[quantity] for part in parts), strict=True)] for quantity in parts[0]
    }


def _noise_run(request: Request, adapter: Adapter, context: RankContext, run: int) -> Noise:
    workload = request.case.workload
    chunkings = [n for n in (1, 2, 4, 8) if workload.global_batch % n == 0]
    layout = Layout(num_micro_batches=chunkings[run % len(chunkings)])
    case = dataclasses.replace(request.case, adapter="single", layout=layout)
    engine = adapter.build(case, context)
    cast(Any, engine).cast_weights = bool(run // len(chunkings) % 2)
    _perturb(engine, case, run)
    trace = Trace(parameters=[note(engine.parameters())])
    for step in range(request.steps):
        trace.losses.append(float(engine.backward(_permute(make_batch(workload, step), case, run))))
        trace.gradients.append(note(engine.gradients()))
        norm = engine.update()
        trace.norms.append(None if norm is None else float(norm))
        trace.parameters.append(note(engine.parameters()))
    found = assess(trace, workload, start=trace.parameters[0])
    return {quantity: [d.distance for d in steps] for quantity, steps in found.items()}


def _permute(batch: Batch, case: Case, run: int) -> Batch:
    order = random_bits(f"order/{run}", (len(batch.tokens_BT),), seed=case.workload.seed).argsort()
    return dataclasses.replace(batch, tokens_BT=batch.tokens_BT[order], targets_BT=batch.targets_BT[order])


@torch.no_grad()
def _perturb(engine: Engine, case: Case, run: int) -> None:
    """Change initial values by up to half a unit in the last place of the precision that matrix products run in."""
    ulp = 2.0 ** -(case.precision.mantissa_bits + 1)
    for name, parameter in engine.parameters().items():
        bits = random_bits(f"perturbation/{run}/{name}", parameter.shape, seed=case.workload.seed)
        parameter.mul_(1 + (bits & 0xFFFF).to(parameter.device, torch.float64).div(0xFFFF).mul(2).sub(1) * ulp)
