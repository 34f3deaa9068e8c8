"""How far rounding alone carries a run from the truth: the yardstick of every equivalence verdict.

The adapter `single` trains in a case's precision, repeatedly, under perturbations as large as that precision's
rounding: other micro-batches, other orders of rows, last bits of the initial values, and in mixed precision both ways
of casting (autocast, and casting the weights). What separates a correct framework from `single` is of that kind alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from meshmark import rank_progress
from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import Engine, RankContext
from meshmark.judge.replicas import num_replicas
from meshmark.judge.trace import Trace, host_copies
from meshmark.judge.truth import assess_replicas
from meshmark.judge.yardstick import Comparisons, noise_run
from meshmark.reference.data import Batch, load_corpus, make_batch
from meshmark.reference.initial import random_bits
from meshmark.run.rank_report import RankReport
from meshmark.run.request import Request
from meshmark.serial import decode, encode
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout

NUM_RUNS = 8
NUM_RANKS = 2
"""Processes that share the runs."""
TIME_LIMIT_SECONDS = 600.0
FORMAT = 5
"""Part of every key; raise it when anything that shapes the noise changes: model, data, objective, truth, this file."""


def noise_key(case: Case, steps: int) -> str:
    """Content hash of everything that the noise of `case` depends on."""
    corpus = load_corpus(case.workload.corpus, case.workload.model.seq_len + 1)
    content = [
        FORMAT,
        torch.__version__,
        steps,
        NUM_RUNS,
        case.precision,
        encode(case.workload),
        hashlib.sha256(corpus.numpy().data).hexdigest(),
        *([num_replicas(case)] if num_replicas(case) > 1 else []),
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def measure_noise(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Noise of `request.case`'s workload and precision over this rank's share of the runs; `adapter` is `single`."""
    alone = dataclasses.replace(context, rank=0, world_size=1)
    runs = range(context.rank, NUM_RUNS, context.world_size)
    noise_runs = [train_alone(request, adapter, alone, run) for run in runs]
    return RankReport(rank=context.rank, build_seconds=0.0, run_seconds=time.time() - started, noise_runs=noise_runs)


def read_noise(path: Path) -> list[Comparisons] | None:
    """The noise runs that `write_noise` left; None when the file is not what was written.

    Raises `FileNotFoundError` when there is none.
    """
    try:
        digest, _, text = path.read_text().partition("\n")
        whole = hashlib.sha256(text.encode()).hexdigest() == digest
        runs: list[Comparisons] = decode(list[Comparisons], json.loads(text)) if whole else []
    except FileNotFoundError:
        raise
    except (OSError, ValueError):
        return None
    return runs or None


def write_noise(path: Path, runs: Sequence[Comparisons]) -> None:
    """Atomically, so that another process reads a whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(encode(runs))
    partial = path.with_suffix(f".{os.getpid()}.{time.time_ns()}")
    partial.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
    partial.replace(path)


def train_alone(request: Request, adapter: Adapter, context: RankContext, run: int) -> Comparisons:
    """One noise run; `run` seeds its perturbations and picks its chunking and way of casting. Of replicas that may
    differ, each is trained by an engine of its own, here in turn, on its own rows."""
    workload, replicas = request.case.workload, num_replicas(request.case)
    chunkings = [n for n in (1, 2, 4, 8) if workload.global_batch // replicas % n == 0]
    layout = Layout(num_micro_batches=chunkings[run % len(chunkings)])
    case = dataclasses.replace(request.case, adapter="single", layout=layout)
    engines = [adapter.build(case, context) for _ in range(replicas)]
    for engine in engines:
        cast(Any, engine).cast_weights = bool(run // len(chunkings) % 2)
        _perturb(engine, case, run)
    traces = [Trace(parameters=[host_copies(engine.parameters())]) for engine in engines]
    rank_progress.begin(rank_progress.Phase.TRAIN, request.steps)
    for step in range(request.steps):
        batch = make_batch(workload, step)
        parts = [_permute(batch.shard(replica, replicas), case, run) for replica in range(replicas)]
        for trace, engine, part in zip(traces, engines, parts, strict=True):
            trace.evaluations.append(float(engine.evaluate(part)))
            trace.losses.append(float(engine.backward(part)))
        _meet([engine.gradients() for engine in engines], workload.algorithm.reduces_gradients(step), replicas)
        for trace, engine in zip(traces, engines, strict=True):
            trace.gradients.append(host_copies(engine.gradients()))
            norm = engine.update()
            trace.norms.append(None if norm is None else float(norm))
        _meet([engine.parameters() for engine in engines], workload.algorithm.averages_after(step))
        for trace, engine in zip(traces, engines, strict=True):
            trace.parameters.append(host_copies(engine.parameters()))
        rank_progress.advance()
    return noise_run(assess_replicas(traces, workload, start=traces[0].parameters[0]), case.precision)


@torch.no_grad()
def _meet(replicas: Sequence[Mapping[str, Tensor]], average: bool, times: int = 1) -> None:
    """Multiply all replicas' tensors by `times`, and then put their mean in their place if they are to `average`: in
    the precision that they are kept in."""
    for name, first in replicas[0].items():
        tensors = [held[name] for held in replicas]
        if times > 1:
            torch._foreach_mul_(tensors, times)
        if average and len(tensors) > 1:
            mean = sum((tensor / len(tensors) for tensor in tensors), torch.zeros_like(first))
            torch._foreach_copy_(tensors, [mean] * len(tensors))


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
