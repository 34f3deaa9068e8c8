"""How algorithms converge where theory is exact, and to a target, beside their formulas: reports/convergence.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from meshmark.algorithms.claim import CONFIDENCE, Result, measure
from meshmark.algorithms.convergence import BIASED, CLAIMS, UNBIASED, left_of_bias
from studies.convergence_map import section

PAGE = Path("reports/convergence.md")
FIGURE = PAGE.with_suffix(".svg")
HEAD = f"""# Convergence

Made by `make convergence`. Replica i minimises a_i |x - c_i|^2 / 2, where every formula is exact, or its logistic
regression of digit images, where algorithms' points of rest are known by Newton's method: by the transitions of
[meshmark/algorithms/](../meshmark/algorithms/__init__.py), which the suite of equivalence holds engines to, step by
step. Formulas stand in [quadratics.py](../meshmark/algorithms/quadratics.py) and
[logistic.py](../meshmark/algorithms/logistic.py). To first order biases go as the step size; the exponents are those
of the whole equations. An exponent is the slope of logarithm over logarithm; intervals are Student's,
{CONFIDENCE:.1%}, over ten groups of problems.

"""


def table(results: Sequence[Result]) -> str:
    lines = [
        "| what | swept | exponent | formula's | measured / formula | holds |",
        "|:--|:--|:--|:--|:--|:--|",
    ]
    for result in results:
        (slope, around), (ratio, within) = result.exponent, result.constant
        lines.append(
            f"| {result.claim.name} | {result.claim.swept} | {slope:.4f} ± {around:.4f} "
            f"| {result.expected:.4f} | {ratio:.6f} ± {within:.6f} | {'yes' if result.holds else '**no**'} |"
        )
    return "\n".join(lines)


def draw(results: Sequence[Result], path: Path) -> None:
    """A panel a claim: measured points on the formula's line."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "meshmark"
    rows = math.ceil(len(results) / 4)
    figure, panels = pyplot.subplots(rows, 4, figsize=(15, 3.5 * rows))
    for panel in panels.flat[len(results) :]:
        panel.remove()
    for panel, result in zip(panels.flat, results, strict=False):
        panel.plot(result.claim.values, result.formula.mean(axis=1), color="black", linewidth=0.8, label="formula")
        panel.plot(result.claim.values, result.measured.mean(axis=1), "o", markersize=4, label="measured")
        panel.set(xscale="log", yscale="log", xlabel=result.claim.swept)
        panel.set_title(result.claim.name, fontsize=7)
        panel.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    results = [measure(claim) for claim in CLAIMS]
    specs = (*BIASED, *UNBIASED)
    left = [f"- {spec.id}: {np.format_float_scientific(left_of_bias(spec), precision=1)}" for spec in specs]
    ends = "How far the furthest of 8 replicas is from the optimum after 400 steps of size 0.05:\n\n"
    papers = f"Of {', '.join(sorted({claim.paper for claim in CLAIMS}))}."
    draw(results, FIGURE)
    PAGE.write_text(
        f"{HEAD}{table(results)}\n\n{papers}\n\n![convergence]({FIGURE.name})\n\n{ends}"
        + "\n".join(left)
        + f"\n\n{section()}"
    )
    print(PAGE)


if __name__ == "__main__":
    main()
