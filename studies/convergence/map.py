"""Which algorithm trains to a target the soonest, by bandwidth and number of workers: steps as measured on logistic
regression (`targets`), a step's computation by the planner, and its bytes by the closed forms that the suites hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshmark.measure.readings import wire_factor
from meshmark.plan.prediction import predict_grid
from meshmark.plan.rates import rates
from meshmark.spec.algorithm import Algorithm
from meshmark.spec.case import Case
from meshmark.spec.hardware import gpu
from meshmark.spec.layout import Layout
from meshmark.spec.workload import Workload, workload
from meshmark.theory.grid import make_grid
from meshmark.theory.recipe import recipe
from meshmark.theory.traffic import Flow, step_traffic
from studies.convergence.claim import CONFIDENCE, GROUPS
from studies.convergence.targets import AT_LEAST, AT_MOST, SYNCHRONOUS, Race

WORKERS = {0: (4, 8, 16), 1: (4,), 2: (4,)}
"""By task: replicas that it is raced on."""
GIGABITS = (0.1, 1.0, 10.0, 100.0, 1000.0)
MODEL, MACHINE, ROWS = "gpt2-124m", "a100", 8
"""Model that each worker trains, its GPU, and the rows of a step."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of one step of one worker."""

    num_bytes: float
    """Sent, or received by the first where it serves."""
    hops: float
    """One after the other."""

    def seconds(self, gigabits: float) -> float:
        return self.hops * rates(MACHINE).network.hop_seconds + 8 * self.num_bytes / (gigabits * 1e9)


def trained(spec: Algorithm, count: int) -> Workload:
    plain = workload("gpt-mini-sgd").optimizer
    return replace(workload(MODEL), optimizer=plain, algorithm=spec, global_batch=ROWS * count)


def step_cost(spec: Algorithm, count: int) -> Cost:
    """The mean over steps, of which every `period`-th communicates."""
    case = Case(adapter="any", workload=trained(spec, count), layout=Layout(dp=count))
    flows = step_traffic(case, 0) or []
    sent = sum(flow.num_bytes * wire_factor(flow.kind, len(flow.ranks)) for flow in flows)
    return Cost(
        num_bytes=sent / spec.steps_per_meeting, hops=sum(_hops(flow) for flow in flows) / spec.steps_per_meeting
    )


def _hops(flow: Flow) -> int:
    """Return the hops of a ring. A server receives from and sends to one worker after the other; neighbours go at
    once."""
    if flow.kind in ("send", "recv"):
        return 0 if flow.kind == "recv" else 1
    return (len(flow.ranks) - 1) * (2 if flow.kind == "all_reduce" else 1)


def compute_seconds() -> float:
    model = workload(MODEL).transformer
    found = predict_grid(model, make_grid(micro_batch=[ROWS]), gpu(MACHINE), recipe("eager"), rates(MACHINE))
    return float(found.step_seconds[0])


@dataclass(frozen=True, kw_only=True)
class Winner:
    name: str
    times_sooner: float
    """Than synchronous training."""


def winner(races: Sequence[Race], gigabits: float, compute: float) -> Winner:
    """Nothing hides behind computation, and nobody takes fewer steps than synchronous training but by chance."""
    count = races[0].count
    whole = compute + step_cost(SYNCHRONOUS, count).seconds(gigabits)
    ratios = {
        r.spec.id: max(r.ratio, 1.0) * (compute + step_cost(r.spec, count).seconds(gigabits)) / whole for r in races
    }
    ratios["synchronous"] = 1.0
    best = min(ratios, key=lambda name: ratios[name])
    return Winner(name=best, times_sooner=1 / ratios[best])


def costs(races: Sequence[Race]) -> str:
    """Steps to the target and the bytes to it, beside synchronous training's."""
    lines = [
        "| algorithm | workers | steps | synchronous | ratio | bounds | bytes | says the test |",
        "|:--|:--|:--|:--|:--|:--|:--|:--|",
    ]
    for run in races:
        whole = step_cost(SYNCHRONOUS, run.count).num_bytes
        share = run.ratio * step_cost(run.spec, run.count).num_bytes / whole
        least, most = run.bounds
        lines.append(
            f"| {run.spec.id} | {run.count} | {np.mean(run.steps):.1f} | {np.mean(run.synchronous):.1f} "
            f"| {run.ratio:.3f} | {least:.3f} to {most:.3f} | {share:.1%} | {run.verdict} |"
        )
    return "\n".join(lines)


def chart(by_count: dict[int, list[Race]]) -> str:
    compute = compute_seconds()
    lines = [
        f"| Gbit/s | {' | '.join(f'{count} workers' for count in by_count)} |",
        f"|:--|{':--|' * len(by_count)}",
    ]
    for gigabits in GIGABITS:
        won = [winner(races, gigabits, compute) for races in by_count.values()]
        cells = " | ".join(f"{w.name}, {w.times_sooner:.2f} times" for w in won)
        lines.append(f"| {gigabits:g} | {cells} |")
    return "\n".join(lines)


def section(races: Sequence[Race]) -> str:
    by_task = {task: [run for run in races if run.task == task] for task in dict.fromkeys(r.task for r in races)}
    first = next(iter(by_task.values()))
    by_count = {count: [run for run in first if run.count == count] for count in dict.fromkeys(r.count for r in first)}
    tables = "\n\n".join(f"**{_ABOUT[task]}**\n\n{costs(found)}" for task, found in by_task.items())
    return f"""## To a target

Steps until the mean of the replicas is at a target loss, beside synchronous SGD of the same rate on the very same
draws, over {GROUPS} seeds: means, their ratio (geometric), and what it lies between by one-sided tests of
{CONFIDENCE:.1%}. *Too slow* is an algorithm whose ratio is above {AT_MOST} for sure, *suspiciously fast* one that is
below {AT_LEAST} for sure; both fail ([targets.py](../studies/convergence/targets.py),
[nets.py](../studies/convergence/nets.py)). *Bytes* are those to the target, beside synchronous training's, of {MODEL}
in fp32 by the closed forms that the suite of communication holds engines to.

{tables}

## Which wins where

By bandwidth of a worker's link and number of workers, the algorithm that would be at the target of logistic regression
the soonest, and how many times sooner than synchronous training. Computed: steps as above, but no fewer than
synchronous training's; {MODEL} on {ROWS} rows a worker, {compute_seconds():.3f} s of computation by the planner's
{MACHINE}; its latency a hop; bytes by the closed forms; nothing hidden behind computation. What links do is measured
below.

{chart(by_count)}
"""


_ABOUT = {
    "logistic regression": "Logistic regression of digit images, half of each replica's dealt by label, 95 % of the "
    "way to the least loss",
    "language model": "Byte-level language model (gpt-mini), each replica on its own part of the text",
    "vision transformer": "Vision transformer (vit-digits), half of each replica's images dealt by label",
}
