"""How algorithms converge where theory is exact, and to a target: reports/convergence.md, every number measured once,
by as many processes as there are cores. Exits with 1 where something is not as it should be."""

from __future__ import annotations

import math
import os
import sys
import textwrap
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from meshmark.report.kept_page import keep_page
from studies import throttled
from studies.convergence import map as convergence_map
from studies.convergence import published_page as convergence_published
from studies.convergence.claim import CONFIDENCE, GROUPS, Result, measure
from studies.convergence.claims import BIASED, CLAIMS, UNBIASED, left_of_bias
from studies.convergence.published import RUNS
from studies.convergence.quadratics import Array
from studies.convergence.targets import TASKS, Race, race

PAGE = Path("reports/convergence.md")
FIGURE = PAGE.with_suffix(".svg")
HELD = 8
"""Replicas up to which targets are held, as by the suite; of more it is told."""
LEFT = 1e-7
"""Largest remaining distance to the optimum of algorithms that correct their bias."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    results: Sequence[Result]
    left: Sequence[float]
    """Remaining distances of BIASED, then UNBIASED."""
    races: Sequence[Race]
    finals: convergence_published.Finals


def page(found: Outcome, seconds: float) -> str:
    results, left, races = found.results, found.left, found.races
    failed = wrong(found)
    said = "\n".join(f"- **{line}**" for line in failed) or "All that is claimed below holds."
    papers = ", ".join(sorted({claim.paper for claim in CLAIMS}))
    return f"""# Convergence

Do algorithms that are not synchronous SGD converge as their papers say? What is run here are the transitions of
[meshmark/algorithms/](../meshmark/algorithms/__init__.py), to which the suite of equivalence holds the engines, step by
step. Made by `make convergence`, in {seconds / 60:.1f} minutes; of one claim alone,
`pytest studies/convergence/test_claims.py -k NAME` tells.

{said}

## Against closed forms

Each row sweeps one thing and holds what is measured to a formula: its exponent (the slope of logarithm over logarithm,
measured, and of the formula) and its constant (measured over formula, which is to be 1). A claim holds where both agree
within their intervals: Student's, {CONFIDENCE:.1%}, over {GROUPS} groups of problems. Where nothing is random the
interval is rounding's.

- quadratics, where no other problem is named: replica i minimises a_i |x - c_i|^2 / 2, and every step is known
  ([quadratics.py](../studies/convergence/quadratics.py))
- logistic regression of digit images, dealt to 8 replicas half by label: optimum and points of rest are known by
  Newton's method ([logistic.py](../studies/convergence/logistic.py))

*Bias* is how far from the optimum replicas come to rest, *noise* how much they scatter about it. To first order a bias
goes as the step size: its exponent is 1 but for higher orders, which the formulas have.

{table(results)}

Of {papers}.

![measured points on the formulas' lines]({FIGURE.name})

## What never goes away

How far the furthest of 8 replicas is from the optimum of quadratics after 400 steps of size 0.05; centres have unit
variance. Those that correct their bias must be within {LEFT:g}.

| algorithm | left | corrects its bias |
|:--|:--|:--|
{_left(left)}

{convergence_map.section(races)}
{convergence_published.section(found.finals)}
{throttled.section()}"""


def _left(left: Sequence[float]) -> str:
    return "\n".join(
        f"| {spec.id} | {rest:.1e} | {'yes' if spec in UNBIASED else 'no'} |"
        for spec, rest in zip((*BIASED, *UNBIASED), left, strict=True)
    )


def wrong(measured: Outcome) -> list[str]:
    results, left, races = measured.results, measured.left, measured.races
    found = [f"does not hold: {result}" for result in results if not result.holds]
    found += [
        f"{spec.id} should have no bias, and {rest:.1e} is left"
        for spec, rest in zip((*BIASED, *UNBIASED), left, strict=True)
        if spec in UNBIASED and not rest < LEFT
    ]
    found += [
        f"{run.spec.id} over {run.count} replicas, {run.task}: {run.verdict}, {run.ratio:.2f} times the steps"
        for run in races
        if run.verdict != "as promised" and run.count <= HELD
    ]
    return found + throttled.broken(throttled.steps(throttled.measured()))


def table(results: Sequence[Result]) -> str:
    lines = ["| what | swept | exponent | formula's | constant | holds |", "|:--|:--|:--|:--|:--|:--|"]
    for result in results:
        (slope, around), (ratio, within) = result.exponent, result.constant
        lines.append(
            f"| {result.claim.name} | {result.claim.swept} | {slope:.3f} ± {around:.3f} "
            f"| {result.expected:.3f} | {ratio:.4f} ± {within:.4f} | {'yes' if result.holds else '**no**'} |"
        )
    return "\n".join(lines)


def draw(results: Sequence[Result], path: Path) -> None:
    """A panel a claim: measured points on the formula's line."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    matplotlib.rcParams["svg.hashsalt"] = "meshmark"
    rows = math.ceil(len(results) / 3)
    figure, panels = pyplot.subplots(rows, 3, figsize=(13, 3.4 * rows))
    for panel in panels.flat[len(results) :]:
        panel.remove()
    for panel, result in zip(panels.flat, results, strict=False):
        panel.plot(result.claim.values, result.formula.mean(axis=1), color="black", linewidth=0.8, label="formula")
        panel.plot(result.claim.values, result.measured.mean(axis=1), "o", markersize=4, label="measured")
        panel.set(xscale="log", yscale="log", xlabel=result.claim.swept)
        panel.set_xticks(result.claim.values, [f"{value:.2g}" for value in result.claim.values])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_title(textwrap.fill(result.claim.name, 48), fontsize=9)
        panel.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _claim(index: int) -> tuple[Array, Array]:
    """Formulas are no values that processes can exchange."""
    result = measure(CLAIMS[index])
    return result.measured, result.formula


def _bias(index: int) -> float:
    return left_of_bias((*BIASED, *UNBIASED)[index])


def _race(index: int, count: int) -> list[Race]:
    make, specs = TASKS[index]
    return race(make(count), specs)


def measured() -> Outcome:
    """The longest first."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("fork")) as pool:
        asked = [(task, count) for task, counts in convergence_map.WORKERS.items() for count in counts]
        raced = {each: pool.submit(_race, *each) for each in reversed(asked)}
        ended = {run: pool.submit(run.final) for run in RUNS}
        claimed = [pool.submit(_claim, index) for index in range(len(CLAIMS))]
        left = [pool.submit(_bias, index) for index in range(len(BIASED) + len(UNBIASED))]
        arrays = [each.result() for each in claimed]
        return Outcome(
            results=[Result(claim=c, measured=m, formula=f) for c, (m, f) in zip(CLAIMS, arrays, strict=True)],
            left=[each.result() for each in left],
            races=[run for each in asked for run in raced[each].result()],
            finals={run: final.result() for run, final in ended.items()},
        )


def main() -> int:
    torch.set_num_threads(1)
    started = time.monotonic()
    found = measured()
    draw(found.results, FIGURE)
    keep_page(page(found, time.monotonic() - started), PAGE)
    failed = wrong(found)
    print(PAGE, *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
