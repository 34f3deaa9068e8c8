"""Run a case: train a model, compress a copy, judge it, time it, and record what was found."""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from meshmark import environment
from meshmark.compression.adamw8bit import OPTIONS, judge_optimizer, step_times
from meshmark.compression.contract import CompressionAdapter, Method, OptimizerAdapter
from meshmark.compression.judge import Batch, judge, mean_loss
from meshmark.import_target import class_at
from meshmark.measure.laps import ratio_interval
from meshmark.models.module import build_model
from meshmark.models.transformer import ModelSpec
from meshmark.records.judged_case import CaseVerdict, JudgedCase, expect_writable, read_newest
from meshmark.reference.data import make_batch
from meshmark.reference.objective import build_optimizer, loss_share
from meshmark.spec.workload import Workload, workload

STEPS = 300
"""Steps that the model is trained for before it is compressed."""
HELD_OUT = 100_000
"""The first step whose batch is for judging; training does not get that far."""
PAIRS = 40
"""Timed forward passes of each of the two models, in turn."""


@dataclass(frozen=True, kw_only=True)
class CompressionRecord(JudgedCase):
    """Results for one method.

    `speed` has milliseconds of a forward pass, the ratio original / compressed, and half its 95 % interval.
    """

    loss: dict[str, float]
    """Mean loss on held-out rows before and after."""


def read_compression(path: Path) -> list[CompressionRecord]:
    """Return the records of a file, of each case the last. Raises `ResultsError` if a line cannot be read."""
    return read_newest(path, CompressionRecord)


def load_method(target: str) -> type[Method]:
    """Return the class at "package.module:Class"."""
    method: type[Method] = class_at(target)
    return method


def make_workload(hidden: int = 128) -> Workload:
    """Return `gpt-mini` with wider layers, so that block sizes of 64 and 256 are whole parts of a weight."""
    base = workload("gpt-mini")
    assert isinstance(base.model, ModelSpec)
    model = dataclasses.replace(
        base.model, name=f"gpt-mini-{hidden}", hidden=hidden, ffn_hidden=4 * hidden, init_std=0.05
    )
    return dataclasses.replace(base, name=model.name, model=model)


def train(task: Workload, steps: int = STEPS) -> nn.Module:
    """Return the model of `task` after `steps` steps of its own optimizer, in float32."""
    model = build_model(task.model)
    model.initialize(task.seed)
    optimizer = build_optimizer(task.optimizer, model.named_parameters())
    compute = gradients_of(task)
    for step in range(steps):
        compute(model, step)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval().requires_grad_(False)


def held_out(task: Workload, batches: int = 8) -> Batch:
    """Return rows that the model was not trained on."""
    found = [make_batch(task, HELD_OUT + index) for index in range(batches)]
    return Batch(tokens=torch.cat([b.inputs for b in found]), targets=torch.cat([b.targets for b in found]))


def compress(adapter: CompressionAdapter, original: nn.Module, example: Tensor) -> nn.Module:
    """Return a compressed copy of `original`."""
    return adapter.finish(adapter.compress(copy.deepcopy(original), example))


def run_case(name: str, target: str, results: Path | None = None, steps: int = STEPS) -> CompressionRecord:
    """Run a case and append its record to `results`/records.jsonl, if given.

    Raises `ResultsError` if the record cannot be written.
    """
    if results:
        expect_writable(results)
    task, adapter = make_workload(), load_method(target)()
    original, batch = train(task, steps), held_out(task)
    judged = _optimizer if isinstance(adapter, OptimizerAdapter) else _compressed
    verdicts, loss, times = judged(adapter, original, batch, task)
    around = environment.describe("cpu", "", 1)
    versions = {"torch": str(torch.__version__)}
    if adapter.requirement:
        package = adapter.requirement.distribution
        versions[package] = importlib.metadata.version(package)
    record = CompressionRecord(
        case={"method": name, "workload": task.name, "steps": str(steps)},
        verdicts=verdicts,
        loss=loss,
        speed=times,
        versions=versions,
        commit=around.commit,
        machine=around.machine,
        date=around.date,
    )
    if results:
        record.append_to(results)
    return record


Found = tuple[list[CaseVerdict], dict[str, float], dict[str, float]]
"""Verdicts, losses and times."""


def _compressed(adapter: Method, original: nn.Module, batch: Batch, task: Workload) -> Found:
    assert isinstance(adapter, CompressionAdapter)
    compressed = compress(adapter, original, batch.tokens[:1])
    verdicts = list(judge(original, compressed, adapter, batch))

    @torch.no_grad()
    def lap() -> list[float]:
        laps = [time.perf_counter()]
        for model in (original, compressed):
            model(batch.tokens)
            laps.append(time.perf_counter())
        return [laps[1] - laps[0], laps[2] - laps[1]]

    return verdicts, {"before": _loss(original, batch), "after": _loss(compressed, batch)}, speed(lap)


def _optimizer(adapter: Method, original: nn.Module, batch: Batch, task: Workload, more: int = 100) -> Found:
    """Judge five steps; then train two copies for `more` steps, one by PyTorch's AdamW, and compare their losses."""
    assert isinstance(adapter, OptimizerAdapter)
    compute = gradients_of(task)
    verdicts = list(judge_optimizer(adapter, copy.deepcopy(original).requires_grad_(True), compute))
    models = [copy.deepcopy(original).requires_grad_(True) for _ in range(2)]
    options = {**OPTIONS, "lr": task.optimizer.learning_rate / 10}
    optimizers = [
        torch.optim.AdamW(models[0].parameters(), **options),
        adapter.build(models[1].parameters(), **options),
    ]
    for step in range(more):
        for model, optimizer in zip(models, optimizers, strict=True):
            compute(model, STEPS + step)
            optimizer.step()
    losses = {"before": _loss(models[0], batch), "after": _loss(models[1], batch)}
    return verdicts, losses, speed(lambda: step_times(optimizers))


def gradients_of(task: Workload) -> Callable[[nn.Module, int], None]:
    """Return a function that leaves a step's gradients in a model."""

    def compute(model: nn.Module, step: int) -> None:
        batch = make_batch(task, step)
        model.zero_grad()
        loss_share(model(batch.inputs), batch, task.loss).backward()  # type: ignore[no-untyped-call]

    return compute


@torch.no_grad()
def _loss(model: nn.Module, batch: Batch) -> float:
    return mean_loss(model(batch.tokens).double(), batch.targets)


def speed(lap: Callable[[], Sequence[float]], pairs: int = PAIRS) -> dict[str, float]:
    """Return times of the original and of the other, and the geometric mean of their ratios with its interval.

    `lap` returns the seconds of both, measured one after the other.
    """
    times = [lap() for _ in range(pairs + 3)][3:]
    firsts, seconds = [first for first, _ in times], [second for _, second in times]
    ratio, half_width = ratio_interval(firsts, seconds)
    return {
        "original_ms": 1000 * statistics.median(firsts),
        "compressed_ms": 1000 * statistics.median(seconds),
        "ratio": ratio,
        "half_width": half_width,
    }
