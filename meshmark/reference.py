"""The truth of a workload, and how far rounding alone carries a run from it.

Truth is the adapter `single` in float64. Noise is the same adapter in a case's precision, repeated with perturbations
as large as that precision's rounding: other micro-batches, other orders of rows, last bits of the initial values,
and in mixed precision both ways of casting. What separates a correct framework from `single` is of that kind alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from meshmark.adapter import Adapter, Engine, RankContext
from meshmark.case import Case
from meshmark.data import Batch, load_corpus, make_batch
from meshmark.initial import random_bits
from meshmark.layout import Layout, Precision
from meshmark.rank_report import RankReport, Request
from meshmark.serial import encode

NUM_NOISE_RUNS = 8
FORMAT = 1
"""Part of every key; raise it when anything that shapes a truth changes: model, data, objective or this file."""


@dataclass(frozen=True, kw_only=True)
class Truth:
    """A float64 run. Lists run over steps; tensors are float64, full, by canonical name."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    """Unclipped."""
    parameters: list[dict[str, Tensor]]
    """After the step's update."""


def truth_case(case: Case) -> Case:
    """The float64 single-process case that decides over `case`."""
    return dataclasses.replace(case, adapter="single", layout=Layout(), precision=Precision.FP64)


def reference_key(case: Case, steps: int) -> str:
    """Content hash of everything that truth and noise of `case` depend on."""
    corpus = load_corpus(case.workload.corpus, case.workload.model.seq_len + 1)
    content = [FORMAT, torch.__version__, steps, NUM_NOISE_RUNS, case.precision, encode(case.workload),
               hashlib.sha256(corpus.numpy().data).hexdigest()]  # fmt: skip
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def save_truth(truth: Truth, path: Path) -> None:
    """Write atomically: a reader sees the whole file or none."""
    partial = path.with_suffix(".partial")
    torch.save({f.name: getattr(truth, f.name) for f in dataclasses.fields(truth)}, partial)
    partial.replace(path)


def load_truth(path: Path) -> Truth:
    return Truth(**torch.load(path, mmap=True, weights_only=True))


def compute_reference(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Train the truth, write it to `request.truth`, and report the noise of `request.case.precision`."""
    assert request.truth is not None
    exact = truth_case(request.case)
    engine = adapter.build(exact, context)
    built = time.time()
    truth = _train(engine, exact, request.steps)
    save_truth(truth, request.truth)
    noise: dict[str, list[list[float]]] = {}
    for run in range(NUM_NOISE_RUNS):
        for quantity, distances in _noise_run(request, adapter, context, truth, run):
            noise.setdefault(quantity, [[] for _ in range(request.steps)])
            for step, distance in enumerate(distances):
                noise[quantity][step].append(distance)
    return RankReport(
        rank=context.rank, build_seconds=built - started, run_seconds=time.time() - built,
        losses=truth.losses, norms=list(truth.norms), noise=noise,
    )  # fmt: skip


def _train(engine: Engine, case: Case, steps: int, run: int | None = None) -> Truth:
    """Copies of everything that `engine` computes; a noise `run` permutes the rows of every batch."""
    losses, norms, gradients, parameters = [], [], [], []
    for step in range(steps):
        batch = make_batch(case.workload, step)
        losses.append(float(engine.backward(batch if run is None else _permute(batch, case, run))))
        gradients.append(_copy(engine.gradients()))
        norm = engine.update()
        norms.append(float("nan") if norm is None else float(norm))
        parameters.append(_copy(engine.parameters()))
    return Truth(losses=losses, norms=norms, gradients=gradients, parameters=parameters)


def _copy(tensors: Any) -> dict[str, Tensor]:  # noqa: ANN401
    return {name: tensor.detach().to("cpu", torch.float64, copy=True) for name, tensor in tensors.items()}


def _permute(batch: Batch, case: Case, run: int) -> Batch:
    order = random_bits(f"order/{run}", (len(batch.tokens_BT),), seed=case.workload.seed).argsort()
    return dataclasses.replace(batch, tokens_BT=batch.tokens_BT[order], targets_BT=batch.targets_BT[order])


def _noise_run(
    request: Request, adapter: Adapter, context: RankContext, truth: Truth, run: int
) -> Iterator[tuple[str, list[float]]]:
    """Distance to the truth at each step, of every quantity: loss, norm, gradients/NAME, parameters/NAME."""
    batch = request.case.workload.global_batch
    chunkings = [n for n in (1, 2, 4, 8) if batch % n == 0]
    layout = Layout(num_micro_batches=chunkings[run % len(chunkings)])
    case = dataclasses.replace(request.case, adapter="single", layout=layout)
    engine = adapter.build(case, context)
    cast(Any, engine).cast_weights = bool(run // len(chunkings) % 2)
    _perturb(engine, case, run)
    noisy = _train(engine, case, request.steps, run)
    yield "loss", [abs(a - b) for a, b in zip(noisy.losses, truth.losses, strict=True)]
    yield "norm", [abs(a - b) for a, b in zip(noisy.norms, truth.norms, strict=True)]
    for kind in ("gradients", "parameters"):
        ours, exact = getattr(noisy, kind), getattr(truth, kind)
        for name in exact[0]:
            yield f"{kind}/{name}", [float(torch.linalg.vector_norm(y[name] - x[name]))
                                     for y, x in zip(ours, exact, strict=True)]  # fmt: skip


@torch.no_grad()
def _perturb(engine: Engine, case: Case, run: int) -> None:
    """Change initial values by up to half a unit in the last place of the precision that matrix products run in."""
    ulp = 2.0 ** -(case.precision.mantissa_bits + 1)
    for name, parameter in engine.parameters().items():
        bits = random_bits(f"perturbation/{run}/{name}", parameter.shape, seed=case.workload.seed)
        parameter.mul_(1 + (bits & 0xFFFF).to(parameter.device, torch.float64).div(0xFFFF).mul(2).sub(1) * ulp)
