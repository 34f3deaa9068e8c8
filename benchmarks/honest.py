"""Correct runs in bulk, each against the noise of its own problem: how often does the yardstick alarm for nothing?"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from meshmark.adapter.engine import RankContext
from meshmark.adapter.single import Single
from meshmark.judge.deviation import Quantity
from meshmark.judge.spread import Spread
from meshmark.judge.yardstick import Comparisons, fit, kind_of, spreads
from meshmark.run.passes.noise import NUM_RUNS, train_alone, variance_ratio
from meshmark.run.request import Request, Task
from meshmark.serial import encode
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.model_spec import model_spec
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload, workload
from tests.broken.mutant import GPT, TIED

RUNS = 64
"""Correct runs of a problem, beside its noise runs."""
STEPS = 3
PROBABILITIES = (1e-2, 1e-3, 1e-4, 1e-5)
"""At which the tails of the fit are told."""
_LLAMA = dataclasses.replace(
    model_spec("llama-tiny"),
    name="llama-mini",
    num_layers=2,
    hidden=32,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden=88,
    seq_len=32,
    init_std=0.15,
)
_SGD = OptimizerSpec(kind=OptimizerKind.SGD, learning_rate=0.1, weight_decay=0.01, clip_norm=0.5)


def _problem(trained: Workload, precision: Precision = Precision.FP32, layout: Layout | None = None) -> Case:
    return Case(adapter="single", workload=trained, layout=layout or Layout(), precision=precision)


_MINI_LLAMA = dataclasses.replace(GPT, name="llama-mini", model=_LLAMA)
PROBLEMS: list[Case] = [
    _problem(GPT),
    _problem(_MINI_LLAMA),
    _problem(TIED),
    _problem(dataclasses.replace(GPT, name="gpt-mini-sgd", optimizer=_SGD)),
    _problem(dataclasses.replace(GPT, name="gpt-mini-unmasked", masked=False)),
    _problem(GPT, Precision.BF16),
    _problem(workload("vit-digits")),
    _problem(workload("vit-digits-bn"), layout=Layout(dp=2, num_micro_batches=2)),
    _problem(_MINI_LLAMA, Precision.FP64),
    _problem(GPT, Precision.FP64),
    _problem(workload("gpt-mini-momentum")),
    _problem(workload("gpt-mini-adafactor")),
    _problem(workload("gpt-mini-muon")),
    _problem(workload("vit-digits"), Precision.BF16),
    _problem(_MINI_LLAMA, Precision.BF16),
    _problem(GPT, Precision.BF16_REDUCE_BF16, Layout(dp=2)),
    _problem(workload("gpt-mini-local-sgd2"), layout=Layout(dp=2)),
]
"""`make power` takes them from the first on, `make power-long` all, over and over with other seeds."""


@dataclass(frozen=True, kw_only=True)
class Tail:
    """Comparisons of one kind of quantity of correct runs."""

    compared: int
    beyond: list[int]
    """By PROBABILITIES: how many were where the fit to their noise runs has so small a part of all."""
    largest: float
    """Multiple of its noise."""

    def __add__(self, other: Tail) -> Tail:
        return Tail(
            compared=self.compared + other.compared,
            beyond=[a + b for a, b in zip(self.beyond, other.beyond, strict=True)],
            largest=max(self.largest, other.largest),
        )


@dataclass(frozen=True, kw_only=True)
class Group:
    """One problem and seed: its noise, and what correct runs came to."""

    what: str
    seed: int
    excesses: list[float]
    """Of each correct run, no two of which have the same bits, the largest multiple of its tolerance; above one is an
    alarm."""
    worst: str
    """What came closest."""
    tails: dict[str, Tail]
    """By kind of quantity; empty where only the tolerance is known."""

    @property
    def alarms(self) -> int:
        return sum(e > 1 for e in self.excesses)


@dataclass(frozen=True, kw_only=True)
class Honest:
    """All groups."""

    groups: list[Group]

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    @property
    def num_runs(self) -> int:
        return sum(len(g.excesses) for g in self.groups)

    @property
    def num_comparisons(self) -> int:
        return sum(t.compared for t in self.tails.values())

    @property
    def num_alarms(self) -> int:
        return sum(g.alarms for g in self.groups)

    @property
    def alarms(self) -> list[str]:
        return [f"{g.what} seed {g.seed} ({g.worst})" for g in self.groups if g.alarms]

    @property
    def tails(self) -> dict[str, Tail]:
        found: dict[str, Tail] = {}
        for kind, tail in ((kind, tail) for g in self.groups for kind, tail in g.tails.items()):
            found[kind] = found[kind] + tail if kind in found else tail
        return found

    def rows(self) -> Iterator[dict[str, object]]:
        for what in dict.fromkeys(g.what for g in self.groups):
            own = [g for g in self.groups if g.what == what]
            excesses = sorted(e for g in own for e in g.excesses)
            worst = max(own, key=lambda g: max(g.excesses))
            yield {
                "problem": what,
                "seeds": len(own),
                "runs": len(excesses),
                "alarms": sum(e > 1 for e in excesses),
                "median of the largest / tolerance": f"{excesses[len(excesses) // 2]:.2f}",
                "largest / tolerance": f"{excesses[-1]:.2f} ({worst.worst})",
            }


def measure_honest(num_groups: int, problems: Sequence[Case] = PROBLEMS) -> Honest:
    """`num_groups` problems, over and over with other seeds, in two processes."""
    wanted = [(problems[i % len(problems)], i // len(problems)) for i in range(num_groups)]
    with multiprocessing.get_context("spawn").Pool(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return Honest(groups=pool.starmap(measure_group, wanted, chunksize=1))


def measure_group(problem: Case, seed: int) -> Group:
    """Noise runs and correct runs differ in nothing but which came first."""
    case = dataclasses.replace(problem, workload=dataclasses.replace(problem.workload, seed=seed))
    request = Request(
        case=case,
        adapter="meshmark.adapter.single:Single",
        task=Task.NOISE,
        device="cpu",
        backend="gloo",
        steps=STEPS,
        time_limit_seconds=600.0,
    )
    context = RankContext(rank=0, world_size=1, device=torch.device("cpu"), backend="gloo", scratch=Path())
    noise_runs = [train_alone(request, Single(), context, run) for run in range(NUM_RUNS)]
    yardstick, found = fit(noise_runs, variance_ratio(case)), spreads(noise_runs)
    every = (train_alone(request, Single(), context, run) for run in range(NUM_RUNS, NUM_RUNS + RUNS))
    runs = list({bits(run): run for run in every}.values())
    judged = [list(yardstick.excesses(run)) for run in runs]
    _, quantity, step = max(worst for run in judged for worst in run)
    return Group(
        what=f"single, {problem.workload.id} {problem.precision}",
        seed=seed,
        excesses=[max(excess for excess, *_ in run) for run in judged],
        worst=f"{quantity}, step {step}",
        tails=_tails(found, runs),
    )


def bits(run: Comparisons) -> str:
    """The same of runs that are the same bit by bit."""
    return hashlib.sha256(json.dumps(encode(run)).encode()).hexdigest()


def _tails(found: Mapping[Quantity, Spread], runs: Sequence[Comparisons]) -> dict[str, Tail]:
    tails: dict[str, Tail] = {}
    for quantity, spread in found.items():
        values = np.array([run[quantity] for run in runs if quantity in run])
        if not len(values) or not all(spread.level):
            continue
        multiples = values / np.array(spread.level)
        chances = spread.probability(multiples)
        tail = Tail(
            compared=multiples.size,
            beyond=[int((chances < probability).sum()) for probability in PROBABILITIES],
            largest=float(multiples.max()),
        )
        kind = kind_of(quantity)
        tails[kind] = tails[kind] + tail if kind in tails else tail
    return tails
