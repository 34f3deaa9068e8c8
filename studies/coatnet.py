"""As a CoAtNet grows: where does data parallelism end, what do ZeRO's stages, offload and a pipeline then buy in memory
and cost in time, and which is the best compromise? Measured on this machine, and planned for 64 GPUs: leaves
reports/coatnet.md and its figure.

    python -m studies.coatnet
    python -m studies.coatnet --widths 32 --worlds 2 --output results/coatnet/page.md
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from meshmark.report.kept_page import keep_page
from meshmark.report.table import bytes_text
from studies import coatnet_planned
from studies.coatnet_figure import draw
from studies.coatnet_measured import (
    OPTIONS,
    TIMED,
    WIDTHS,
    WORLDS,
    Measured,
    fastest,
    fitting,
    frugal,
    measured,
    running,
)
from studies.coatnet_planned import ALIKE, GPU, NUM_GPUS, ROWS, STATES_SHARE, Plan, best, last_quarter, plans, stretch

PAGE, RESULTS = Path("reports/coatnet.md"), Path("results/coatnet")
BUDGET_MIB = 192.0
"""Budget of one rank, so that the widest net that is measured does not fit without sharding."""


def page(found: Sequence[Measured], budget: float, seconds: float) -> str:
    worlds = sorted({each.case.world_size for each in found})
    planned = [plans(width) for width in coatnet_planned.WIDTHS]
    deepest = planned[-1][0].model
    tables = "\n\n".join(_measured_table(found, world, budget) for world in worlds)
    here = found[0].observed.environment
    return f"""# As a CoAtNet grows

Where does data parallelism end, what do ZeRO's stages, offload and a pipeline buy in memory and cost in time, and which
is the best compromise? Made by `make coatnet` on {here.machine} ({here.num_cpus} cores) at commit {here.commit}, in
{seconds / 60:.1f} minutes; what a run on the same commit had measured before is not measured again.

## The answer

Measured on this machine, where a rank may hold {bytes_text(budget)}:

{_bullets([_end(found, budget), *(_compromise(found, world, budget) for world in worlds)])}

Planned, measured nowhere, for {NUM_GPUS} GPUs ({GPU.name}), of whose memory states may take {STATES_SHARE:.0%}:

{_bullets(_planned_answer(own) for own in planned)}

![memory by size, by ranks, and planned]({PAGE.with_suffix(".svg").name})

## Measured

*peak*: of the fullest rank, all tensors at the fullest instant of a step, as the allocator counts them. *device*:
without what is offloaded, which on a CPU lies in the same memory (by plan: shards of weights and moments); it is this
that has to fit. *sent*: in a step, by the busiest rank, if collectives go round rings: exact. *products*: how many
times as long as an even share they take, by the stage that has most of them and by the bubble: computed. *states*:
whether parameters, gradients and optimizer states are within 1 % of the closed form that the plans below use.

{tables}

Times are of {TIMED} ranks alone, with their 95 % interval; where two intervals meet, neither is called faster. On four
and eight ranks processes wait for a core: their times would say nothing of a machine that has as many, so none were
taken, and what is sent, and how unevenly products are dealt, stand for the cost.

## Planned for {NUM_GPUS} GPUs

The same net four times as deep, on images of 32 x 32 pixels and 1,000 classes, {ROWS:,} images a step, in bf16 autocast
with fp32 weights, gradients and moments. *held*: states, and with ZeRO-3 one gathered block; **no activations, which
are not planned of images**. *products*: at the GPU's peak, of a pipeline the slowest stage's with the bubble;
*messages*: at the bandwidth of the links, of all adapters of a node together; *host*: copies of offloaded states over
PCIe, without the host's own update. Nothing overlaps here, as it does in practice, and nothing reaches its peak there:
these are no predictions of a step, but they rank what differs by much. Plans within {ALIKE - 1:.0%} of the least are
called as good.

{_planned_table([plan for own in planned for plan in own])}

Blocks of a CoAtNet are unequal: the last quarter of these, the widest, holds {last_quarter(deepest):.0%} of their
parameters, so that of a pipeline whose stages have as many blocks each the last stages hold most of the states.

## How it was obtained

- The nets: inverted bottlenecks of width w and 2 w, transformer blocks of width 2 w and 4 w, two of each (eight of
  each where planned), [CoAtNetSpec](../meshmark/models/coatnet/__init__.py) after arXiv:2106.04803; AdamW, clipped
  gradients, a global batch of 32 digit images, fp32.
- Every layout is PyTorch's own, so that no two frameworks are compared: `ddp`, `ddp-zero1` (ZeroRedundancyOptimizer),
  `fsdp2-noreshard` (ZeRO-2), `fsdp2` (ZeRO-3), `fsdp2-offload`, `pipeline` (1F1B, as many micro-batches as
  stages and at least four).
- Memory and messages are of the third step of an instrumented pass; times of a pass without instruments, of four
  launches one after the other. That these engines train rightly is what `make roster` shows, not this page.
- Records stay in `{RESULTS}`; the planned half is [coatnet_planned.py](../studies/coatnet_planned.py), after
  [memory.py](../meshmark/theory/memory.py) and [traffic.py](../meshmark/theory/traffic.py).
"""


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _size(count: int) -> str:
    return f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.3g} M"


def _parameters(each: Measured) -> int:
    return each.case.workload.model.num_parameters


def _end(found: Sequence[Measured], budget: float) -> str:
    """Where data parallelism ends, on two ranks."""
    plain = [each for each in found if each.name == "data parallel" and each.case.world_size == TIMED]
    plain = sorted((each for each in plain if not each.failure), key=_parameters)
    fits = [each for each in plain if each.device_bytes <= budget]
    over = [each for each in plain if each.device_bytes > budget]
    said = []
    if fits:
        said.append(
            f"with {_size(_parameters(fits[-1]))} parameters it takes {bytes_text(fits[-1].device_bytes)} a rank"
        )
    if over:
        said.append(f"with {_size(_parameters(over[0]))} it takes {bytes_text(over[0].device_bytes)}, and does not fit")
    else:
        said.append("it fits at every size that was measured")
    return f"**Data parallelism** keeps 16 bytes a parameter on every rank, however many there are: {', '.join(said)}."


def _compromise(found: Sequence[Measured], world: int, budget: float) -> str:
    """Describe the layouts of the widest net that was measured on `world` ranks."""
    own = [each for each in found if each.case.world_size == world]
    widest = max(each.width for each in own)
    own = [each for each in own if each.width == widest]
    start = f"**{world} ranks**, {_size(_parameters(own[0]))} parameters"
    fits = fitting(own, budget)
    if not fits:
        return f"{start}: nothing that was measured fits."
    names = ", ".join(f"{each.name} ({bytes_text(each.device_bytes)})" for each in fits)
    if world == TIMED and (first := fastest(fits)):
        tied = f", the simplest of those that cannot be told apart by time, with {_names(first[1:])}"
        return (
            f"{start}: of what fits, {names}, **{first[0].name}** is the best compromise{tied if first[1:] else ''}: "
            f"{_rate(first[0])} images/s."
        )
    least = frugal(fits)
    assert least
    told = f"{start}: of what fits, {names}, **{least.name}** sends least, {bytes_text(least.sent_bytes)} a step"
    if (longer := stretch(least.case)) > 1 and (even := frugal([each for each in fits if stretch(each.case) == 1])):
        told += f", with products that take {longer:.2f} times an even share; of those that deal them evenly, "
        told += f"**{even.name}** with {bytes_text(even.sent_bytes)}"
    return f"{told}. Which is fastest, this machine cannot say."


def _names(found: Sequence[Measured]) -> str:
    return " and ".join(each.name for each in found)


def _planned_answer(own: Sequence[Plan]) -> str:
    plain, chosen = own[0], best(own)
    start = f"**{_size(plain.case.workload.model.num_parameters)} parameters**: data parallelism "
    start += f"{'fits' if plain.fits else 'has ended'} ({bytes_text(plain.state_bytes)})"
    if not chosen:
        return f"{start}; nothing that was planned fits."
    others = f"; as good by time: {', '.join(plan.name for plan in chosen[1:])}" if chosen[1:] else ""
    return f"{start}; **{chosen[0].name}** with {bytes_text(chosen[0].state_bytes)} a GPU{others}."


def _measured_table(found: Sequence[Measured], world: int, budget: float) -> str:
    timed = world == TIMED
    head = [
        "parameters",
        "layout",
        "peak",
        "device",
        "fits",
        "sent",
        "products",
        "states",
        *(["images/s"] if timed else []),
    ]
    lines = [f"### {world} ranks", "", f"| {' | '.join(head)} |", "|:--" * len(head) + "|"]
    for each in found:
        if each.case.world_size != world:
            continue
        cells = [_size(_parameters(each)), f"{each.name} (`{each.case.adapter}`, {each.case.layout.id})"]
        if each.failure:
            cells += [f"not measured: {each.failure.splitlines()[0]}", *[""] * (len(head) - 3)]
        else:
            states = {True: "as planned", False: "**not as planned**", None: "not planned"}[each.as_planned]
            cells += [bytes_text(max(each.peaks)), bytes_text(each.device_bytes)]
            cells += ["yes" if each.device_bytes <= budget else "no", bytes_text(each.sent_bytes)]
            cells += [f"{stretch(each.case):.2f}", states]
            cells += [_rate(each)] if timed else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _rate(each: Measured) -> str:
    if (rate := each.rate) is None:
        return ""
    return f"{rate.per_second:,.0f} ({rate.lowest:,.0f} to {rate.highest:,.0f})"


def _planned_table(found: Sequence[Plan]) -> str:
    head = ["parameters", "layout", "held", "fits", "products", "messages", "host", "in all"]
    lines = [f"| {' | '.join(head)} |", "|:--" * len(head) + "|"]
    for plan in found:
        seconds = (plan.compute_seconds, plan.wire_seconds, plan.host_seconds, plan.seconds)
        cells = [_size(plan.case.workload.model.num_parameters), f"{plan.name} ({plan.case.layout.id})"]
        cells += [bytes_text(plan.state_bytes), "yes" if plan.fits else "no"]
        cells += [f"{1000 * each:,.0f} ms" if each else "" for each in seconds]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def wrong(found: Sequence[Measured]) -> list[str]:
    """Return what is missing for a complete page."""
    said = [f"{each.case.id}: {each.failure}" for each in found if each.failure]
    return said + [
        f"{each.case.id}: states are not as planned: {verdict.summary}"
        for each in found
        if (verdict := each.observed.verdict("memory")) and not verdict.passed
    ]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=_numbers, default=WIDTHS, help="of the nets (default: %(default)s)")
    parser.add_argument("--worlds", type=_numbers, default=WORLDS, help="ranks (default: %(default)s)")
    parser.add_argument("--budget-mib", type=float, default=BUDGET_MIB, help="of a rank (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=OPTIONS.timing_budget_seconds, help="of timed steps a case")
    parser.add_argument("--time-limit", type=float, default=OPTIONS.time_limit_seconds, help="of a launch, in seconds")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("-o", "--output", type=Path, default=PAGE)
    asked = parser.parse_args(arguments)
    started = time.monotonic()
    options = replace(OPTIONS, timing_budget_seconds=asked.seconds, time_limit_seconds=asked.time_limit)
    with running(asked.results, options) as runner:
        found = measured(runner, asked.widths, asked.worlds)
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    budget = asked.budget_mib * 2**20
    draw(found, budget, asked.output.with_suffix(".svg"))
    keep_page(page(found, budget, time.monotonic() - started), asked.output)
    failed = wrong(found)
    print(asked.output, *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
