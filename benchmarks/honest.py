"""Correct runs in bulk, each against the noise of its own problem: how often is there an alarm for nothing?"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.batched import train_batched
from benchmarks.problems import PROBLEMS, varied
from meshmark.adapter.engine import RankContext
from meshmark.adapter.single import Single
from meshmark.judge.deviation import Quantity
from meshmark.judge.tolerance_model import Comparisons, Spread, fit, kind_of, spreads
from meshmark.passes.noise import NUM_RUNS, train_alone, variance_ratio
from meshmark.records.request import Request, Task
from meshmark.serial import encode
from meshmark.spec.case import Case

NUM_SAMPLES = 2
"""Noise samples of a problem: each of NUM_RUNS correct runs, every one judged by the noise of the next."""
STEPS = 3
PROBABILITIES = (1e-2, 1e-3, 1e-4, 1e-5)
"""At which the tails of the fit are told."""


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
    """One problem and seed: what correct runs came to, beside the noise of others."""

    what: str
    seed: int
    tolerance_models: int
    """Each from noise runs of its own."""
    excesses: list[float]
    """Largest multiple of its tolerance that each correct run reached, without runs of equal bits; above one is an
    alarm."""
    worst: str
    """Quantity that came closest to its tolerance."""
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


def honest_cases(num_groups: int, problems: Sequence[Case] = PROBLEMS) -> list[Case]:
    """`num_groups` problems, over and over with other seeds."""
    return [varied(problems[i % len(problems)], i) for i in range(num_groups)]


def measure_single(case: Case) -> Group:
    """Runs of `single`, as the noise pass makes them."""
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
    return _group(
        "single", case, [train_alone(request, Single(), context, run) for run in range(NUM_SAMPLES * NUM_RUNS)]
    )


def measure_batched(case: Case) -> Group:
    """Runs that are computed together: many more of them in a minute, of smaller models."""
    return _group("batched", case, train_batched(case, STEPS, NUM_SAMPLES * NUM_RUNS))


def _group(how: str, case: Case, runs: Sequence[Comparisons]) -> Group:
    """Noise runs and correct runs differ in nothing: those of the next part are the noise of this one.

    A 16-bit noise run also notes how far other correct engines are from the twin, of which it draws some. Those are not
    results of the run itself, so they are left out of what is judged. They are not counted as correct runs either.
    """
    parts = [runs[i : i + NUM_RUNS] for i in range(0, len(runs), NUM_RUNS)]  # each with every way of casting
    excesses, tails = list[tuple[float, Quantity, int]](), dict[str, Tail]()
    for correct, noise_runs in zip(parts, [*parts[1:], parts[0]], strict=True):
        tolerance_model, found = fit(noise_runs, variance_ratio(case)), spreads(noise_runs)
        judged = [{q: steps for q, steps in run.items() if kind_of(q) != "way"} for run in correct]
        distinct = list({bits(run): run for run in judged}.values())
        excesses += [max(tolerance_model.excesses(run)) for run in distinct]
        varying = {q: found[q] for q in found if np.ptp([run[q] for run in noise_runs if q in run], axis=0).any()}
        for kind, tail in _tails(varying, distinct).items():
            tails[kind] = tails[kind] + tail if kind in tails else tail
    _, quantity, step = max(excesses)
    return Group(
        what=f"{how}, {case.workload.id} {case.precision}",
        seed=case.workload.seed,
        tolerance_models=len(parts),
        excesses=[excess for excess, *_ in excesses],
        worst=f"{quantity}, step {step}",
        tails=tails,
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
