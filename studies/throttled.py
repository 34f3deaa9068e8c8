"""The gain of algorithms on slow links, measured (`make throttled`) and computed from the step's time on links without
a limit and its bytes over the bandwidth."""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.throttled import ADAPTERS, MODEL, TABLE, WORKERS, case_of
from meshmark.algorithms.decentralised import Decentralised
from meshmark.measure.readings import wire_factor
from meshmark.theory.traffic import step_traffic
from studies.papers import paper

IN_TURN = 2
"""How many times its bytes' time an exchange of two ranks takes. By gloo their two ways go in turn, unless both post
their receives before either sends: tests/test_in_turn.py shows when and says why. By plain TCP both go at once, and so
do the ways of gloo's rings, which go to different neighbours."""
PAYLOAD = 1448 / 1514
"""Share of an Ethernet frame that TCP's payload takes. A throttled link counts the headers too."""
BOUND = 0.2
"""By how much of the computed time a step may take another, on links that are mostly what it waits for."""
WAITS = 0.5
"""Share of a computed step that it waits for links, from which on the two are held against each other."""
SYNCHRONOUS = "synchronous"


@dataclass(frozen=True, kw_only=True)
class Measured:
    algorithm: str
    megabits: float
    """0 without a limit."""
    seconds: float
    """The median."""


@functools.cache
def measured(path: Path = TABLE) -> list[Measured]:
    with path.open(newline="") as file:
        return [
            Measured(
                algorithm=row["algorithm"],
                megabits=float(row["megabits"]),
                seconds=float(row["median"]),
            )
            for row in csv.DictReader(file)
        ]


def sent_bytes(name: str) -> float:
    """In a step, the mean over steps: by the busiest rank, the way in which it has more. A broadcast goes along a tree
    with gloo, whose root sends it as often as its depth."""
    case = case_of(name)
    factors = {"broadcast": math.ceil(math.log2(WORKERS))}
    flows = step_traffic(case, 0) or []
    each = [f.num_bytes * factors.get(f.kind, wire_factor(f.kind, len(f.ranks))) for f in flows]
    return sum(each) / case.workload.algorithm.steps_per_meeting


def _times(name: str) -> int:
    """That a step takes its bytes' time: neighbours of a graph exchange theirs, all others pass on around a ring."""
    return IN_TURN if isinstance(case_of(name).workload.algorithm, Decentralised) else 1


@dataclass(frozen=True, kw_only=True)
class Step:
    measured: float
    waits: float
    """Seconds that its bytes take, as gloo sends them."""
    free: float
    """Seconds without a limit."""

    @property
    def computed(self) -> float:
        return self.free + self.waits

    @property
    def is_off(self) -> bool:
        return abs(self.measured - self.computed) > BOUND * self.computed

    @property
    def held(self) -> bool:
        """Whether the two are held against each other."""
        return self.waits > WAITS * self.computed


def steps(found: list[Measured]) -> dict[float, dict[str, Step]]:
    """By bandwidth, then algorithm."""
    free = {row.algorithm: row.seconds for row in found if not row.megabits}
    limits = sorted({row.megabits for row in found if row.megabits}, reverse=True)
    return {
        limit: {
            row.algorithm: Step(
                measured=row.seconds,
                waits=_times(row.algorithm) * 8 * sent_bytes(row.algorithm) / (limit * 1e6 * PAYLOAD),
                free=free[row.algorithm],
            )
            for row in found
            if row.megabits == limit
        }
        for limit in limits
    }


def broken(at: Mapping[float, Mapping[str, Step]]) -> list[str]:
    """Return the rows that differ from what is computed."""
    wrong = [
        f"{name} at {limit:g} Mbit/s: {step.measured:.4f} s, computed {step.computed:.4f} s"
        for limit, by_name in at.items()
        for name, step in by_name.items()
        if step.held and step.is_off
    ]
    for limit, by_name in at.items():
        soonest = min(by_name, key=lambda name: by_name[name].measured)
        least = min(by_name, key=lambda name: by_name[name].computed)
        if by_name[soonest].computed > (1 + BOUND) * by_name[least].computed:
            wrong.append(f"at {limit:g} Mbit/s {soonest} is the soonest, where {least} is computed to be")
    return wrong


def section() -> str:
    at = steps(measured())
    limits = list(at)
    lines = [
        f"| algorithm | bytes of a step | no limit | {' | '.join(f'{limit:g} Mbit/s' for limit in limits)} |",
        f"|:--|:--|:--|{':--|' * len(limits)}",
    ]
    for name in ADAPTERS:
        cells = [_cell(at[limit], name) for limit in limits]
        lines.append(
            f"| {name} | {sent_bytes(name):,.0f} | {at[limits[0]][name].free * 1e3:.1f} | {' | '.join(cells)} |"
        )
    wrong = broken(at)
    ends = "" if not wrong else "\n\n**Not as computed:** " + "; ".join(wrong)
    return f"""## On throttled links

Milliseconds of a step of `{MODEL}` by {WORKERS} ranks of one machine, each in a network of its own, by the bandwidth of
every link each way (`make throttled`): measured, in brackets computed, and how many times sooner than synchronous
training, measured and in brackets computed. Computed is the time without a limit and the bytes over the bandwidth,
{PAYLOAD:.1%} of which is payload. Where at least half of a computed step waits for links, the two must agree within
{BOUND:.0%}, and the soonest algorithm must be the computed one, or as good as it. A mark (·) stands where a step waits
less than that. Neighbours of a graph are computed with {IN_TURN} times their bytes' time. That was found here and not
foreseen: by gloo the two ways between two ranks go in turn when one comes later, where plain TCP on the same links
sends both at once.

{chr(10).join(lines)}{ends}

{published(at)}"""


def _cell(by_name: Mapping[str, Step], name: str) -> str:
    step, whole = by_name[name], by_name[SYNCHRONOUS]
    sooner = f"{whole.measured / step.measured:.2f} ({whole.computed / step.computed:.2f})"
    mark = "" if step.held else " ·"
    times = f"{step.measured * 1e3:.0f} ({step.computed * 1e3:.0f}){mark}"
    return times if name == SYNCHRONOUS else f"{times}, {sooner} times"


def published(at: Mapping[float, Mapping[str, Step]]) -> str:
    """All-reduce over one-peer averaging."""
    limit = min(at)
    there = {name: at[limit][name].measured - at[limit][name].free for name in (SYNCHRONOUS, "dsgd-one-peer")}
    row = paper("dsgd_comm_time")[0]
    gpus, ring, partial = (float(row[key]) for key in ("gpus", "ring_allreduce_ms", "partial_average_ms"))
    measured_ratio = there[SYNCHRONOUS] / there["dsgd-one-peer"]
    return f"""Communication alone, a ring all-reduce takes 2 (n - 1) / n times as long as averaging with one
peer, where that goes both ways at once: by formula {2 * (WORKERS - 1) / WORKERS:.2f} here, measured
{measured_ratio:.2f} at {limit:g} Mbit/s, for the two ways go in turn. Published (Chen et al., ICML 2021, {row["model"]}
on {gpus:.0f} GPUs): {ring:.0f} ms over {partial:.0f} ms, {ring / partial:.2f} times, by formula
{2 * (gpus - 1) / gpus:.2f}.
"""
