"""Correct runs in bulk, each against the noise of its own problem: how often does the yardstick alarm for nothing?"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from meshmark.adapter.engine import RankContext
from meshmark.adapter.single import Single
from meshmark.judge.yardstick import FALSE_ALARMS, Comparisons, Yardstick, compare, fit, kind_of, tail_factor
from meshmark.run.passes.noise import NUM_RUNS, train_alone
from meshmark.run.record import Record
from meshmark.run.request import Request, Task
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.model_spec import model_spec
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload
from tests.broken.mutant import GPT, TIED

RUNS = 26
"""Correct runs of a problem, beside its noise runs."""
STEPS = 3
CASE_COMPARISONS = 1000
"""Of a case of the suites, which share its false alarms: as many as gpt-tiny's."""
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
PROBLEMS: list[tuple[Workload, Precision]] = [
    (GPT, Precision.FP32),
    (dataclasses.replace(GPT, name="llama-mini", model=_LLAMA), Precision.FP32),
    (TIED, Precision.FP32),
    (dataclasses.replace(GPT, name="gpt-mini-sgd", optimizer=_SGD), Precision.FP32),
    (dataclasses.replace(GPT, name="gpt-mini-unmasked", masked=False), Precision.FP32),
    (dataclasses.replace(GPT, name="llama-mini", model=_LLAMA), Precision.FP64),
    (GPT, Precision.BF16),
    (GPT, Precision.FP64),
]


Ratios = Mapping[str, list[float]]
"""Every comparison of correct runs as a multiple of its noise, by kind of quantity."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """One problem: its noise, and what correct runs came to."""

    problem: str
    seed: int
    num_comparisons: int
    excesses: list[float]
    """Of each correct run, the largest multiple of its tolerance; above one is an alarm."""
    worst: str
    """What came closest."""
    ratios: Ratios


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
        return sum(g.num_comparisons for g in self.groups)

    @property
    def num_alarms(self) -> int:
        return sum(e > 1 for g in self.groups for e in g.excesses)

    @property
    def alarms(self) -> list[str]:
        return [f"{g.problem} seed {g.seed} ({g.worst})" for g in self.groups if max(g.excesses) > 1]

    @property
    def ratios(self) -> Ratios:
        return pool(g.ratios for g in self.groups)

    def rows(self) -> Iterator[dict[str, object]]:
        for problem in dict.fromkeys(g.problem for g in self.groups):
            own = [g for g in self.groups if g.problem == problem]
            excesses = sorted(e for g in own for e in g.excesses)
            worst = max(own, key=lambda g: max(g.excesses))
            yield {
                "problem": problem,
                "seeds": len(own),
                "runs": len(excesses),
                "alarms": sum(e > 1 for e in excesses),
                "median of the largest / tolerance": f"{excesses[len(excesses) // 2]:.2f}",
                "largest / tolerance": f"{excesses[-1]:.2f} ({worst.worst})",
            }


def measure_honest(num_groups: int, problems: Sequence[tuple[Workload, Precision]] = PROBLEMS) -> Honest:
    """`num_groups` problems, over and over with other seeds, in two processes."""
    wanted = [(*problems[i % len(problems)], i // len(problems)) for i in range(num_groups)]
    with multiprocessing.get_context("spawn").Pool(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return Honest(groups=pool.starmap(measure_group, wanted, chunksize=1))


def measure_group(workload: Workload, precision: Precision, seed: int) -> Group:
    """Noise runs and correct runs differ in nothing but which came first."""
    own = dataclasses.replace(workload, seed=seed)
    case = Case(adapter="single", workload=own, layout=Layout(), precision=precision)
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
    adapter = Single()
    yardstick = fit([train_alone(request, adapter, context, run) for run in range(NUM_RUNS)])
    runs = [train_alone(request, adapter, context, run) for run in range(NUM_RUNS, NUM_RUNS + RUNS)]
    found = [list(yardstick.excesses(run)) for run in runs]
    _, quantity, step = max(worst for run in found for worst in run)
    return Group(
        problem=f"{workload.name} {precision}",
        seed=seed,
        num_comparisons=sum(len(run) for run in found),
        excesses=[max(excess for excess, *_ in run) for run in found],
        worst=f"{quantity}, step {step}",
        ratios=pool(_ratios(yardstick, run) for run in runs),
    )


def _ratios(yardstick: Yardstick, run: Comparisons) -> Ratios:
    found = defaultdict(list)
    for ratio, quantity, _ in yardstick.ratios(run):
        found[kind_of(quantity)].append(ratio)
    return found


def ratios_of(records: Iterable[Record]) -> Ratios:
    """Of those that are equivalent."""
    passed = [r for r in records if (verdict := r.verdict("equivalence")) is not None and verdict.passed]
    return pool(_ratios(r.equivalence.yardstick, compare(r.equivalence.deviations)) for r in passed)


def pool(parts: Iterable[Ratios]) -> Ratios:
    found = defaultdict(list)
    for part in parts:
        for kind, ratios in part.items():
            found[kind] += ratios
    return dict(found)


def asked_factor(ratios: Sequence[float]) -> float:
    """What the tail of correct runs asks for: the smallest factor that fails one case in 1 / FALSE_ALARMS."""
    return tail_factor(np.array(ratios), FALSE_ALARMS / CASE_COMPARISONS)
