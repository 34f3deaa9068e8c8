"""Predicted over measured, a point a row, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from studies.validate_sweep import SweepReport


def draw(reports: Sequence[SweepReport], path: Path) -> None:
    """One panel a quantity, both models, the same file for the same numbers."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "meshmark"
    names = list(reports[0].points)
    figure, panels = pyplot.subplots(1, len(names), figsize=(10, 4.6))
    for panel, name in zip(panels, names, strict=True):
        for report in reports:
            measured, predicted = report.points[name]
            label = f"{report.model}, fitted to {report.fitted_to}"
            panel.scatter(measured, predicted, s=5, alpha=0.5, label=label, linewidths=0)
        ends = [min(r.points[name][0].min() for r in reports), max(r.points[name][0].max() for r in reports)]
        panel.plot(ends, ends, color="black", linewidth=0.8)
        panel.set(xscale="log", yscale="log", xlabel=f"measured {name}", ylabel=f"predicted {name}")
        panel.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
