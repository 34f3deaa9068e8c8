"""Plots of the interactive page, drawn by plotly."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from meshmark.errors import EvidenceError
from meshmark.measure.readings import Collective, MemoryReading
from meshmark.records.record import Record
from meshmark.report import palette
from meshmark.report.results import CaseResult, Tradeoff, frontier, tradeoffs
from meshmark.report.table import bytes_text, one_line
from meshmark.run.throughput import throughput
from meshmark.spec.case import Case
from meshmark.spec.layout import AXES

_MOST = 50
"""Number of cases with their own figure. The tables have all cases."""
_SYMBOLS = "circle square diamond triangle-down triangle-up cross star x hexagon pentagon".split()
_PASSED_TO_FAILED = [[0.0, "#0072B2"], [0.49, "#cfe3f2"], [0.5, "#fbe3c0"], [1.0, "#B3261E"]]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One place of the page, with the figures that it can show."""

    id: str
    title: str
    caption: str
    choice: str
    """Label of the choice between several figures."""
    figures: list[dict[str, Any]]
    """Figures, each with its label, data and layout."""
    height: int = 420


def charts(found: Sequence[CaseResult], fake: Sequence[Record] = ()) -> dict[str, list[Chart]]:
    """Return the charts by section, without empty ones. `fake`: records of fake worlds."""
    made = {
        "cases": [_tradeoff(found)],
        "speed": [_rates(found), _scaling(found), _steps(found)],
        "memory": [_memory(found), _memory_by_ranks(found, fake)],
        "traffic": [_traffic(found)],
        "equivalence": [_ratios(found)],
    }
    return {section: [chart for chart in some if chart.figures] for section, some in made.items()}


def _text(value: object) -> str:
    """Return `value` escaped, because plotly interprets tags and names must not contain any."""
    return html.escape(one_line(str(value))[:80])


def _figure(label: str, traces: Sequence[Any], **layout: Any) -> dict[str, Any]:  # noqa: ANN401
    defaults = {
        "margin": {"l": 10, "r": 10, "t": 10, "b": 40},
        "legend": {"orientation": "h", "y": 1, "yanchor": "bottom"},
    }
    made = json.loads(go.Figure(data=list(traces), layout={**defaults, **layout}).to_json())
    made["layout"].pop("template", None)
    return {"label": one_line(label)[:120], "data": made["data"], "layout": made["layout"]}


def _tall(count: int) -> int:
    return 120 + 26 * max(count, 4)


def _timed(found: Sequence[CaseResult]) -> list[tuple[CaseResult, Record]]:
    return [(r, r.timed) for r in found if r.timed and r.timed.timing.rank_step_seconds]


def _rates(found: Sequence[CaseResult]) -> Chart:
    figures, most = [], 0
    timed = _timed(found)
    for unit in sorted({record.case.workload.unit for _, record in timed}, reverse=True):
        own = [(result, throughput(record)) for result, record in timed if record.case.workload.unit == unit][:_MOST]
        most = max(most, len(own))
        traces = [
            go.Scatter(
                x=[rate.per_second for _, rate in group],
                y=[_text(result.case.id) for result, _ in group],
                mode="markers",
                name=name,
                marker={"symbol": symbol, "size": 10, "color": colour},
                error_x={
                    "array": [min(rate.highest, 2 * rate.per_second) - rate.per_second for _, rate in group],
                    "arrayminus": [rate.per_second - rate.lowest for _, rate in group],
                },
            )
            for name, symbol, colour, group in (
                ("result", "circle", "#0072B2", [one for one in own if one[0].comparable]),
                ("wrong, or narrower states: no result", "x", "#B3261E", [one for one in own if not one[0].comparable]),
            )
            if group
        ]
        layout = {"xaxis": {"title": {"text": f"{unit} per second"}, "rangemode": "tozero"}}
        figures.append(
            _figure(f"{unit} per second", traces, yaxis={"automargin": True, "autorange": "reversed"}, **layout)
        )
    caption = "Points are all steps together, bars their 95 % intervals."
    return Chart(id="rates", title="Rates", caption=caption, choice="Show", figures=figures, height=_tall(most))


def _tradeoff(found: Sequence[CaseResult]) -> Chart:
    """Plot speed against memory, with one figure per number of ranks."""
    points = tradeoffs(found)
    names = list(dict.fromkeys(point.result.case.adapter for point in points))
    figures = []
    for ranks in sorted({point.result.case.world_size for point in points}):
        here = [point for point in points if point.result.case.world_size == ranks][:_MOST]
        best = frontier(here)
        unit = here[0].result.case.workload.unit
        traces = [
            go.Scatter(
                x=[point.peak_bytes / 2**20 for point in best],
                y=[point.per_second for point in best],
                mode="lines",
                name="not beaten in both",
                line={"color": "#999999", "dash": "dot"},
                hoverinfo="skip",
            ),
            *(
                _dots(name, [p for p in here if p.result.case.adapter == name], number)
                for number, name in enumerate(names)
                if any(p.result.case.adapter == name for p in here)
            ),
        ]
        axes = {
            "xaxis": {"title": {"text": "MiB at the peak of the fullest rank"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": f"{unit} per second"}, "rangemode": "tozero", "automargin": True},
        }
        figures.append(_figure(f"{ranks} rank{'s' * (ranks > 1)}", traces, **axes))
    caption = "A dot a correct case; better is up and to the left. Speeds are of this machine and this model."
    return Chart(
        id="tradeoff", title="Speed against memory", caption=caption, choice="Show", figures=figures[::-1], height=520
    )


def _dots(adapter: str, points: Sequence[Tradeoff], number: int) -> go.Scatter:
    """Return the cases of one adapter, each with what is known of it on hovering. `number` decides how they look."""
    return go.Scatter(
        x=[point.peak_bytes / 2**20 for point in points],
        y=[point.per_second for point in points],
        mode="markers",
        name=_text(adapter),
        marker={
            "size": 11,
            "color": palette.ADAPTERS[number % len(palette.ADAPTERS)],
            "symbol": _SYMBOLS[number % len(_SYMBOLS)],
            "line": {"width": 1, "color": "#999999"},  # a black dot must be seen on a dark page
        },
        text=[_text(point.result.case.id) for point in points],
        customdata=[bytes_text(point.peak_bytes) for point in points],
        hovertemplate="%{text}<br>%{customdata} at the peak<br>%{y:,.0f} per second<extra></extra>",
    )


def _scaling(found: Sequence[CaseResult]) -> Chart:
    """Plot speed by number of ranks. Lines connect only layouts of one kind."""
    rates: dict[str, dict[int, float]] = {}
    for result, record in _timed(found):
        if result.comparable:
            of_kind = rates.setdefault(_kind_of_layout(result.case), {})
            ranks, rate = result.case.world_size, throughput(record).per_second
            of_kind[ranks] = max(of_kind.get(ranks, 0.0), rate)
    lines = {name: dict(sorted(by_ranks.items())) for name, by_ranks in rates.items() if len(by_ranks) > 1}
    traces = [
        go.Scatter(x=list(by_ranks), y=list(by_ranks.values()), name=_text(name), mode="lines+markers")
        for name, by_ranks in lines.items()
    ]
    worlds = sorted({ranks for by_ranks in lines.values() for ranks in by_ranks})
    axes = {
        "xaxis": {"title": {"text": "ranks"}, "tickvals": worlds},
        "yaxis": {"title": {"text": "per second"}, "rangemode": "tozero", "automargin": True},
    }
    figures = [_figure("Scaling", traces, **axes)] if traces else []
    caption = "Layouts of one kind on several numbers of ranks: the same axes, ZeRO stage and schedule."
    return Chart(
        id="scaling", title="Scaling over world sizes", caption=caption, choice="", figures=figures, height=520
    )


def _kind_of_layout(case: Case) -> str:
    """Return adapter, axes, ZeRO stage, schedule and workload: what stays the same as the number of ranks grows."""
    layout = case.layout
    axes = "x".join(axis for axis in AXES if getattr(layout, axis) > 1)
    parts = [case.adapter, axes]
    if layout.zero_stage:
        parts.append(f"ZeRO-{layout.zero_stage}")
    if layout.pp > 1:
        parts.append(f"{layout.schedule}{f' of {layout.virtual_stages} chunks' if layout.virtual_stages > 1 else ''}")
    return f"{' '.join(parts)}, {case.workload.id}"


def _steps(found: Sequence[CaseResult]) -> Chart:
    timed = _timed(found)[:_MOST]
    boxes = [
        go.Box(
            x=[1000 * s for s in record.timing.step_seconds], name=_text(result.case.id), marker={"color": "#0072B2"}
        )
        for result, record in timed
    ]
    layout: dict[str, Any] = {"xaxis": {"title": {"text": "milliseconds a step"}}, "showlegend": False}
    figures = (
        [_figure("all cases", boxes, yaxis={"automargin": True, "autorange": "reversed"}, **layout)] if boxes else []
    )
    for result, record in timed:
        ranks = [
            go.Scatter(y=[1000 * s for s in seconds], name=f"rank {rank}", mode="lines")
            for rank, seconds in enumerate(record.timing.rank_step_seconds)
        ]
        axes = {
            "xaxis": {"title": {"text": "step"}},
            "yaxis": {"title": {"text": "milliseconds"}, "rangemode": "tozero"},
        }
        figures.append(_figure(result.case.id, ranks, **axes))
    caption = "Of every step, raw, by rank where a case is chosen."
    return Chart(
        id="steps", title="Step times", caption=caption, choice="Show", figures=figures, height=_tall(len(boxes))
    )


def _memory(found: Sequence[CaseResult]) -> Chart:
    measured = [(r, r.observed.memory.readings) for r in found if r.observed and r.observed.memory.readings][:_MOST]
    fullest = [(r.case.id, max(readings, key=lambda m: m.peak.total)) for r, readings in measured]
    figures = [_stacked("fullest rank of every case", fullest)] if fullest else []
    for result, readings in measured:
        figures.append(_stacked(result.case.id, [(f"rank {rank}", reading) for rank, reading in enumerate(readings)]))
    caption = "Exact bytes alive at the peak, by category; by rank where a case is chosen."
    height = _tall(len(measured))
    return Chart(
        id="memory-plot", title="Memory at the peak", caption=caption, choice="Show", figures=figures, height=height
    )


def _memory_by_ranks(found: Sequence[CaseResult], fake: Sequence[Record]) -> Chart:
    """Plot memory by category as the number of ranks grows, for every kind of layout that was run on several numbers.

    Fake worlds are marked, because a rank of theirs was measured alone.
    """
    kinds: dict[str, dict[int, tuple[str, MemoryReading]]] = {}
    observed = [(r.observed, "") for r in found if r.observed and r.comparable]
    for record, mark in [*observed, *((record, ", fake world") for record in fake)]:
        if record.memory.readings:
            ranks, fullest = record.case.world_size, max(record.memory.readings, key=lambda m: m.peak.total)
            of_kind = kinds.setdefault(_kind_of_layout(record.case), {})
            of_kind.setdefault(ranks, (f"{ranks} rank{'s' * (ranks > 1)}{mark}", fullest))
    bars = {kind: [by[n] for n in sorted(by)] for kind, by in kinds.items() if len(by) > 1}
    several = [(f"{kind.partition(',')[0]}: {name}", one) for kind, some in bars.items() for name, one in some]
    figures = [_stacked("all kinds of layouts", several[:_MOST])] if several else []
    figures += [_stacked(kind, some) for kind, some in bars.items()]
    caption = "Exact bytes alive at the peak of the fullest rank: what more ranks take away, and what they leave."
    title, height = "Memory as ranks are added", _tall(min(len(several), _MOST))
    return Chart(id="memory-ranks", title=title, caption=caption, choice="Show", figures=figures, height=height)


def _stacked(label: str, bars: Sequence[tuple[str, MemoryReading]]) -> dict[str, Any]:
    names = [_text(name) for name, _ in bars]
    traces = [
        go.Bar(
            y=names,
            x=[getattr(reading.peak, category) / 2**20 for _, reading in bars],
            name=category.replace("_", " "),
            orientation="h",
            marker={"color": colour},
        )
        for category, colour in palette.CATEGORIES.items()
    ]
    axes = {"yaxis": {"automargin": True, "autorange": "reversed"}, "xaxis": {"title": {"text": "MiB"}}}
    return _figure(label, traces, barmode="stack", **axes)


def _traffic(found: Sequence[CaseResult]) -> Chart:
    sent = [(r, r.observed.traffic.readings) for r in found if r.observed and r.observed.traffic.readings]
    sent = [(r, readings) for r, readings in sent if any(reading.asked for reading in readings)][:_MOST]
    most = [
        (r.case.id, max((m.asked for m in readings), key=lambda m: sum(c.wire_bytes for c in m)))
        for r, readings in sent
    ]
    figures = [_by_kind("busiest rank of every case", most)] if most else []
    figures += [
        _by_kind(r.case.id, [(f"rank {rank}", reading.asked) for rank, reading in enumerate(readings)])
        for r, readings in sent
    ]
    caption = "What one step sends, by collective, as ring algorithms do; by rank where a case is chosen."
    return Chart(
        id="traffic-plot", title="Traffic", caption=caption, choice="Show", figures=figures, height=_tall(len(most))
    )


def _by_kind(label: str, bars: Sequence[tuple[str, Sequence[Collective]]]) -> dict[str, Any]:
    kinds = dict.fromkeys(c.kind for _, collectives in bars for c in collectives)
    traces = [
        go.Bar(
            y=[_text(name) for name, _ in bars],
            x=[sum(c.wire_bytes for c in collectives if c.kind == kind) / 2**20 for _, collectives in bars],
            name=_text(kind),
            orientation="h",
        )
        for kind in kinds
    ]
    axes = {"yaxis": {"automargin": True, "autorange": "reversed"}, "xaxis": {"title": {"text": "MiB"}}}
    return _figure(label, traces, barmode="stack", **axes)


def _ratios(found: Sequence[CaseResult]) -> Chart:
    """Plot every deviation as a share of what is allowed. From 1 on, a case fails."""
    ordered = sorted(found, key=lambda r: r.correct is not False)
    figures = []
    for result in ordered[:_MOST]:
        if result.observed and (made := _heat(result.case.id, result.observed)):
            figures.append(made)
    caption = (
        "Distance from the truth as a part of what its noise allows, by tensor and step; from 1 on the case fails."
    )
    title = "Equivalence by tensor and step"
    return Chart(id="ratios", title=title, caption=caption, choice="Show", figures=figures, height=640)


def _heat(label: str, record: Record) -> dict[str, Any] | None:
    evidence = record.equivalence
    parts: dict[str, dict[int, float]] = {}
    try:
        for part, quantity, step in evidence.tolerance_model.judge(evidence.deviations):
            parts.setdefault(str(quantity), {})[step] = min(part, 1e6)  # an infinite one has no colour
    except EvidenceError:  # a baseline's: the verdict stands in the record
        return None
    if not parts:
        return None
    steps = 1 + max(step for values in parts.values() for step in values)
    heat = go.Heatmap(
        z=[[values.get(step) for step in range(steps)] for values in parts.values()],
        x=list(range(steps)),
        y=[_text(quantity) for quantity in parts],
        zmin=0,
        zmax=2,
        colorscale=_PASSED_TO_FAILED,
        colorbar={"title": {"text": "of allowed"}},
        hovertemplate="%{y}, step %{x}: %{z:.3g} of what is allowed<extra></extra>",
    )
    axes = {"yaxis": {"automargin": True, "autorange": "reversed"}, "xaxis": {"title": {"text": "step"}, "dtick": 1}}
    return _figure(label, [heat], **axes)
