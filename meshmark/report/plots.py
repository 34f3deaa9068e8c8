"""SVG plots of a report: memory by category and over time, throughput with its spread, and clauses as a heat map."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.rcdefaults()  # a matplotlibrc in the working directory may be a stranger's, and ask for LaTeX
matplotlib.use("svg")
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import Patch, Rectangle  # noqa: E402

from meshmark.records.record import Record  # noqa: E402
from meshmark.report import palette  # noqa: E402
from meshmark.report.memory_by_ranks import WORLDS, Source, memory_by_ranks  # noqa: E402
from meshmark.report.results import CaseResult, frontier, tradeoffs  # noqa: E402
from meshmark.report.table import one_line  # noqa: E402
from meshmark.run.throughput import throughput  # noqa: E402

_STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "meshmark",
    "svg.fonttype": "none",
    "figure.facecolor": "white",
}


def _label(result: CaseResult) -> str:
    case = result.case
    parts = (case.adapter, case.layout.id, " ".join([case.workload.name, *case.computed]))
    return "  ".join(one_line(part)[:32] for part in parts)  # longer ones would leave the axes no room


def memory_plot(found: Sequence[CaseResult], path: Path) -> bool:
    """Draw stacked bytes at the peak of each case's fullest rank, the leanest case of each number of ranks first.

    Returns False when there is nothing to draw.
    """
    rows = [
        (r, max(r.observed.memory.readings, key=lambda m: m.peak.total))
        for r in found
        if r.observed and r.observed.memory.readings
    ]
    rows.sort(key=lambda row: (row[0].case.world_size, row[1].peak.total))
    if not rows:
        return False
    largest = max(reading.peak.total for _, reading in rows)
    unit, name = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9, 0.8 + 0.26 * len(rows)))
        axes = figure.subplots()
        left = [0.0] * len(rows)
        for category, colour in palette.CATEGORIES.items():
            widths = [getattr(reading.peak, category) / unit for _, reading in rows]
            axes.barh(range(len(rows)), widths, left=left, color=colour, label=category.replace("_", " "))
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(rows)), [_label(result) for result, _ in rows], parse_math=False)
        axes.invert_yaxis()
        axes.margins(y=0.01)
        axes.set_xlabel(f"{name} on the fullest rank at its peak")
        figure.legend(loc="outside upper left", ncols=6, frameon=False, fontsize=8)
        figure.tight_layout(rect=(0, 0, 1, 1 - 0.35 / figure.get_figheight()))
        figure.savefig(path, metadata={"Date": None})
    return True


def ranks_plot(found: Sequence[CaseResult], fake: Sequence[Record], path: Path) -> bool:
    """Draw model states a parameter by category as ranks are added: a panel a kind of layout, computed bars paler.

    Adapters whose bars are the same share a panel. Returns False when there is nothing to draw.
    """
    observed = [r.observed for r in found if r.observed]
    panels: dict[tuple[object, ...], list[str]] = {}
    states = memory_by_ranks([*observed, *fake])
    for kind, by in states.items():
        drawn = tuple((world, round(by[world].total, 1)) for world in WORLDS if world in by)
        panels.setdefault((kind.precision, *drawn), []).append(kind.title)
    firsts = {names[0]: names for names in panels.values()}
    kinds = [kind for kind in states if kind.title in firsts][:_PANELS]
    if not kinds:
        return False
    columns = min(3, len(kinds))
    lines = -(-len(kinds) // columns)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9, 0.7 + 2.3 * lines))
        grid = figure.subplots(lines, columns, sharey=True, squeeze=False)
        for axes in grid.flat[len(kinds) :]:
            axes.set_axis_off()
        for kind, axes in zip(kinds, grid.flat, strict=False):
            held = {world: states[kind][world] for world in WORLDS if world in states[kind]}
            bottom = [0.0] * len(held)
            for category in ("parameters", "gradients", "optimizer_states"):
                heights = [getattr(each, category) for each in held.values()]
                bars = axes.bar(range(len(held)), heights, bottom=bottom, color=palette.CATEGORIES[category])
                for bar, each in zip(bars, held.values(), strict=True):
                    bar.set_alpha(0.45 if each.source is Source.COMPUTED else 1.0)
                bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
            for place, total in enumerate(bottom):
                axes.text(place, total, f"{total:.2g}".lstrip("0"), ha="center", va="bottom", fontsize=6)
            axes.set_xticks(range(len(held)), [str(world) for world in held], fontsize=8)
            names = [one_line(name)[:30] for name in firsts[kind.title]]
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            axes.set_title(",\n".join(names[:2]) + more, fontsize=8, loc="left", parse_math=False)
        for axes in grid[:, 0]:
            axes.set_ylabel("bytes a parameter", fontsize=8)
        patches = [
            Patch(color=palette.CATEGORIES[name], label=name.replace("_", " "))
            for name in ("parameters", "gradients", "optimizer_states")
        ]
        pale = Patch(color="#999999", alpha=0.45, label="pale: computed")
        figure.legend(handles=[*patches, pale], loc="outside upper left", ncols=4, frameon=False, fontsize=8)
        figure.supxlabel("ranks", fontsize=8)
        figure.tight_layout(rect=(0, 0, 1, 1 - 0.35 / figure.get_figheight()))
        figure.savefig(path, metadata={"Date": None})
    return True


_PANELS = 9
"""Kinds of layouts that a picture has room for."""
_MARKERS = "osD^vP*XhpdH<>8"


def tradeoff_plot(found: Sequence[CaseResult], path: Path) -> bool:
    """Draw speed against memory, with a dot per correct case and a plot per number of ranks.

    Returns False when there is nothing to draw.
    """
    points = tradeoffs(found)
    counts = Counter(point.result.case.world_size for point in points)
    worlds = sorted(ranks for ranks, count in counts.items() if count > 1)[-3:] or sorted(counts)[-1:]
    if not worlds:
        return False
    names = list(dict.fromkeys(point.result.case.adapter for point in points))
    largest = max(point.peak_bytes for point in points)
    unit, name = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9, 3.6 + 0.2 * (len(names) // 5 + 1)))
        every = figure.subplots(1, len(worlds), squeeze=False)[0]
        for axes, ranks in zip(every, worlds, strict=True):
            here = [point for point in points if point.result.case.world_size == ranks]
            best = frontier(here)
            axes.plot([p.peak_bytes / unit for p in best], [p.per_second for p in best], ":", color="#999999", zorder=0)
            for number, adapter in enumerate(names):
                own = [point for point in here if point.result.case.adapter == adapter]
                axes.scatter(
                    [point.peak_bytes / unit for point in own],
                    [point.per_second for point in own],
                    s=42,
                    color=palette.ADAPTERS[number % len(palette.ADAPTERS)],
                    marker=_MARKERS[number % len(_MARKERS)],
                    label=one_line(adapter)[:32] if ranks == worlds[0] else None,
                )
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
            axes.set_title(f"{ranks} rank{'s' * (ranks > 1)}", fontsize=9)
            axes.set_xlabel(f"{name} on the fullest rank at its peak")
        every[0].set_ylabel(f"{points[0].result.case.workload.unit} per second, on this machine")
        figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8)
        figure.tight_layout(rect=(0, 0.06 * (len(names) // 5 + 1), 1, 1))
        figure.savefig(path, metadata={"Date": None})
    return True


def throughput_plot(found: Sequence[CaseResult], path: Path) -> bool:
    """Draw tokens or images per second of every step, and over all steps with an interval.

    Hollow points are not valid results. Returns False when there is nothing to draw.
    """
    rows = [(r, r.timed) for r in found if r.timed and r.timed.timing.rank_step_seconds]
    if not rows:
        return False
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9, 0.8 + 0.26 * len(rows)))
        axes = figure.subplots()
        for y, (result, timed) in enumerate(rows):
            rates = [timed.case.workload.units_per_step / s for s in timed.timing.step_seconds]
            found_rate = throughput(timed)
            highest = min(found_rate.highest, max(rates))  # of few steps it may have no bound
            face = "none" if not result.comparable else "#0072B2"
            axes.scatter(
                rates, [y] * len(rates), s=14, alpha=0.5, facecolors=face, edgecolors="#0072B2", linewidths=0.8
            )
            axes.plot([found_rate.lowest, highest], [y, y], color="black", linewidth=2.5)
            axes.plot([found_rate.per_second] * 2, [y - 0.35, y + 0.35], color="black", linewidth=1.5)
        axes.set_yticks(range(len(rows)), [_label(result) for result, _ in rows], parse_math=False)
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        units = " or ".join(sorted({timed.case.workload.unit for _, timed in rows}, reverse=True))
        axes.set_xlabel(
            f"{units} per second: steps (dots), all of them (tick), its 95 % interval (bar);\n"
            "hollow: wrong, or narrower states"
        )
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})
    return True


CLAUSE_COLOURS = {"yes": "#9BD4BF", "gap": "#E69F00", "no": "#D55E00", "no answer": "#E5E5E5", "reported": "#C9DDF0"}
"""Colours of cells of the heat map, by what they say. Cells also carry a mark, for readers who see no colours."""


def clause_plot(
    names: Sequence[str], rows: Mapping[str, Sequence[tuple[str, str] | None]], path: Path, *, inch: float = 0.26
) -> None:
    """Draw adapters by clause, a coloured cell each. `inch` is the side of a cell.

    A cell is a key of `CLAUSE_COLOURS` and the mark that it carries, or None where the clause was not run.
    """
    with matplotlib.rc_context(_STYLE):
        left, top, bottom = 0.077 * max(map(len, rows)) + 0.15, 0.073 * max(map(len, names)) + 0.2, 0.45
        size = (left + inch * len(names) + 0.15, top + inch * len(rows) + bottom)
        figure = Figure(figsize=size)
        axes = figure.add_axes(
            (left / size[0], bottom / size[1], inch * len(names) / size[0], inch * len(rows) / size[1])
        )
        for y, cells in enumerate(rows.values()):
            for x, cell in enumerate(cells):
                if cell is None:
                    continue
                said, mark = cell
                axes.add_patch(Rectangle((x, y), 1, 1, facecolor=CLAUSE_COLOURS[said], edgecolor="white", linewidth=1))
                axes.text(x + 0.5, y + 0.5, one_line(mark), ha="center", va="center", fontsize=7, parse_math=False)
        axes.set_xlim(0, len(names))
        axes.set_ylim(len(rows), 0)
        axes.xaxis.tick_top()
        axes.set_xticks([x + 0.5 for x in range(len(names))], [*map(one_line, names)], rotation=90, parse_math=False)
        axes.set_yticks([y + 0.5 for y in range(len(rows))], [one_line(title)[:48] for title in rows], parse_math=False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        used = {cell[0] for cells in rows.values() for cell in cells if cell}
        shown = [Patch(color=colour, label=name) for name, colour in CLAUSE_COLOURS.items() if name in used]
        figure.legend(handles=shown, loc="lower left", ncols=len(shown), frameon=False, fontsize=8)
        figure.savefig(path, metadata={"Date": None})


def curves(lines: Mapping[str, Sequence[tuple[float, int]]], path: Path) -> bool:
    """Draw bytes over seconds with one line each. Returns False when there is nothing to draw."""
    if not lines:
        return False
    largest = max(num_bytes for points in lines.values() for _, num_bytes in points)
    unit, name = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9, 3 + 0.2 * len(lines)))
        axes = figure.subplots()
        for label, points in lines.items():
            times, counted = zip(*points, strict=True)
            axes.step(times, [num_bytes / unit for num_bytes in counted], where="post", label=one_line(label)[:80])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("seconds of profiled steps")
        axes.set_ylabel(f"{name} on the fullest rank")
        figure.legend(loc="outside lower left", frameon=False, fontsize=8)
        figure.tight_layout(rect=(0, 0.2 * (len(lines) + 1) / figure.get_figheight(), 1, 1))
        figure.savefig(path, metadata={"Date": None})
    return True
