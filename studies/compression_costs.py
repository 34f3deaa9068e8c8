"""The cost of smaller models in loss, and their speed, side by side: a section of reports/compression.md.

One process trains the original, makes every smaller model from it, and times them round after round, each model once
a round. Loads of the machine fall on all of them alike, and ratios to the original are of the same round.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from meshmark.adapter.registry import compression_methods
from meshmark.compression.contract import CompressionAdapter
from meshmark.compression.judge import mean_loss
from meshmark.compression.run import (
    HELD_OUT,
    STEPS,
    compress,
    gradients_of,
    held_out,
    load_method,
    make_workload,
    train,
)
from meshmark.compression.specification import linears
from meshmark.environment import describe
from meshmark.import_target import import_module_of
from meshmark.measure.laps import in_rounds, ratio_interval
from meshmark.models.module import build_model
from meshmark.reference.data import make_batch
from meshmark.reference.objective import build_optimizer
from meshmark.report.table import table as markdown
from meshmark.spec.workload import Workload

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "reports" / "records" / "compression-costs.jsonl"
ROUNDS, WARM_UP, BATCHES = 60, 3, 32
STUDENT_HIDDEN, RANK, ALPHA, MORE = 64, 4, 8.0, 100
"""Width of the student, half the original's; rank and scale of QLoRA's adapters; steps of fine-tuning."""


class Adapted(nn.Module):
    """A frozen layer and a low-rank adapter beside it, which adds nothing at first (arXiv:2305.14314)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(base.in_features, RANK, bias=False), nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + ALPHA / RANK * self.b(self.a(x))
        return y


def distil(task: Workload, teacher: nn.Module) -> nn.Module:
    """Return a student of half the width, trained as long as its teacher was, by its probabilities and the text."""
    model, loss = untrained(task), import_module_of(str(ROOT / "examples/workloads/distillation.py")).distillation_loss
    optimizer = build_optimizer(task.optimizer, model.named_parameters())
    for step in range(STEPS):
        batch = make_batch(task, step)
        with torch.no_grad():
            taught = teacher(batch.inputs)
        model.zero_grad()
        total = loss(model(batch.inputs).flatten(0, 1), taught.flatten(0, 1), batch.targets.flatten())
        (total / batch.targets.numel()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval().requires_grad_(False)


def untrained(task: Workload) -> nn.Module:
    model: nn.Module = build_model(task.model)
    model.initialize(task.seed)  # type: ignore[operator]
    return model


def adapt(quantized: nn.Module) -> nn.Module:
    """Return a quantized model with adapters that are trained."""
    torch.manual_seed(0)
    quantized.requires_grad_(False)
    for name, layer in linears(quantized).items():
        quantized.set_submodule(name, Adapted(layer))
    return quantized


def fine_tune(task: Workload, model: nn.Module) -> Callable[[], None]:
    """Return a function that trains a model's parameters for one more step, on batches that it has not seen."""
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    options = dataclasses.replace(task.optimizer, learning_rate=task.optimizer.learning_rate / 10)
    optimizer, steps, compute = build_optimizer(options, trained), iter(range(STEPS, HELD_OUT)), gradients_of(task)

    def step() -> None:
        compute(model, next(steps))
        optimizer.step()

    return step


def measure(rounds: int = ROUNDS) -> list[dict[str, object]]:
    """Return a row for each smaller model: loss and time over those of what it is compared with, with intervals."""
    task = make_workload()
    original, example = train(task), make_batch(task, HELD_OUT).inputs[:1]
    methods = {name: load_method(target) for name, target in compression_methods().items()}
    usable = {name: method() for name, method in methods.items() if not method.refusal()}
    models = {"original": original}
    models |= {n: compress(m, original, example) for n, m in usable.items() if isinstance(m, CompressionAdapter)}
    small = make_workload(STUDENT_HIDDEN)
    models |= {"distillation": distil(small, original), "the same student, without a teacher": train(small)}
    tuned = {"original, trained on": copy.deepcopy(original).requires_grad_(True)}
    nf4 = usable.get("bitsandbytes-nf4")
    if isinstance(nf4, CompressionAdapter):
        tuned["QLoRA"] = adapt(compress(nf4, original, example))
    more = {name: fine_tune(task, model) for name, model in tuned.items()}
    for step in more.values():
        for _ in range(MORE):
            step()
    losses = {name: _losses(task, model) for name, model in (models | tuned).items()}
    tokens = held_out(task).tokens

    def forward(model: nn.Module) -> Callable[[], float]:
        return _timed(torch.no_grad()(functools.partial(model, tokens)))

    seconds = in_rounds({name: forward(model) for name, model in (models | tuned).items()}, rounds, WARM_UP)
    training = in_rounds({name: _timed(step) for name, step in more.items()}, rounds, WARM_UP)
    base, started = "original", "original, trained on"
    rows = list[dict[str, object]]()
    for name in models | tuned:
        against = started if name in tuned else base
        if name in (base, started):
            continue
        loss, loss_half = ratio_interval(losses[name], losses[against])
        speed, speed_half = ratio_interval(seconds[against], seconds[name])
        row = {"method": name, "against": against, "loss": statistics.fmean(losses[name])}
        row |= {"of": statistics.fmean(losses[against]), "loss_ratio": loss, "loss_half_width": loss_half}
        row |= {"speed_ratio": speed, "speed_half_width": speed_half}
        if name in tuned:
            step, half = ratio_interval(training[started], training[name])
            row |= {"step_ratio": step, "step_half_width": half}
        rows.append(row)
    return rows


def _timed(call: Callable[[], object]) -> Callable[[], float]:
    def seconds() -> float:
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun

    return seconds


@torch.no_grad()
def _losses(task: Workload, model: nn.Module) -> list[float]:
    batches = [make_batch(task, HELD_OUT + index) for index in range(BATCHES)]
    return [mean_loss(model(each.inputs).double(), each.targets) for each in batches]


def run() -> None:
    """Measure, and keep the rows."""
    around = describe("cpu", "", 1)
    rows = [row | {"commit": around.commit, "machine": around.machine, "date": around.date} for row in measure()]
    KEPT.write_text("".join(json.dumps(row) + "\n" for row in rows))


def section() -> str:
    """Return the section of the page."""
    rows = [json.loads(line) for line in KEPT.read_text().splitlines()]
    return f"""## Loss and speed, side by side

All models in one process at commit {rows[0]["commit"]}, timed in {ROUNDS} rounds, each once a round.
*loss ratio*: mean on {BATCHES} held-out batches, over that of the model it is held *against*. *forward speed* and
*training speed*: the other's time of a pass or a step, over this one's. All have 95 % intervals. *distillation* is a
student of half the width, taught by the original for {STEPS} steps. *QLoRA* is the original in NF4 with adapters of
rank {RANK}, trained for {MORE} more steps; the original was trained on for as many, with all of its weights.

{markdown([_row(row) for row in rows])}
"""


def _row(row: Mapping[str, float]) -> dict[str, object]:
    def ratio(name: str, digits: int) -> str:
        if f"{name}_ratio" not in row:
            return ""
        return f"{row[f'{name}_ratio']:.{digits}f} ± {row[f'{name}_half_width']:.{digits}f}"

    return {
        "method": row["method"],
        "against": row["against"],
        "loss": f"{row['loss']:.4f} / {row['of']:.4f}",
        "loss ratio": ratio("loss", 4),
        "forward speed": ratio("speed", 2),
        "training speed": ratio("step", 2),
    }
