"""Tables of what ranks sent, and of the exceptions from theory that adapters declare."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from meshmark.measure.readings import Collective, wire_factor
from meshmark.records.record import Reach, Record
from meshmark.report.results import CaseResult
from meshmark.report.table import EMPTY, KIB, Cell, Rows, bytes_cell, bytes_text, yes_or_no
from meshmark.report.tables import names
from meshmark.spec.layout import AXES, Layout
from meshmark.theory.traffic import Flow, TrafficException


def sent_bytes(record: Record) -> float:
    """Return the bytes that the busiest rank hands to its links in a step."""
    return max((sum(c.wire_bytes for c in reading.asked) for reading in record.traffic.readings), default=0.0)


def communication(found: Sequence[CaseResult]) -> Rows:
    """Return rows for the rank that sends most, in bytes of one step."""
    rows: Rows = []
    apart = any(result.observed and result.observed.environment.nnodes > 1 for result in found)
    for result in found:
        if not result.observed or not result.observed.traffic.readings or result.case.world_size == 1:
            continue
        traffic, verdict = result.observed.traffic.readings, result.observed.verdict("communication")
        rank = max(range(len(traffic)), key=lambda r: _wire(traffic[r].asked))
        sent, plan = result.observed.traffic.reach, result.observed.traffic.planned_reach
        rows.append(
            {
                **names(result),
                "as planned": yes_or_no(verdict.passed) if verdict else EMPTY,
                "differences": verdict.evidence.get("differences", "") if verdict else "",
                "asked for": _kinds(traffic[rank].asked, result.case.layout),
                "sent / rank": bytes_cell(_wire(traffic[rank].asked)),
                "backend issued": _kinds(traffic[rank].issued, result.case.layout),
                "really sent / rank": bytes_cell(_wire(traffic[rank].issued)),
                **({"within / between nodes": _reach(sent), "as planned, all ranks": _reach(plan)} if apart else {}),
            }
        )
    return rows


def _reach(reach: Reach | None) -> str:
    """Return bytes of all ranks within nodes, between nodes and, if switches are known, between switches."""
    if reach is None:
        return "not known"
    beyond = [reach.between_switches] if reach.between_switches else []
    return " / ".join(bytes_text(part) for part in (reach.within_nodes, reach.between_nodes, *beyond))


def traffic_exceptions(found: Sequence[CaseResult]) -> Rows:
    """Return the exceptions that adapters declare from theory, for the first rank. Empty without any.

    The difference is what ring algorithms send.
    """
    return [
        {
            **names(result),
            "sent": _flows(exception.sends),
            "in place of": _flows(exception.instead_of),
            "difference": Cell(text=f"{_difference(exception):+,.0f} B", order=_difference(exception)),
            "why": exception.reason,
        }
        for result in found
        if result.observed and result.observed.traffic.traffic_exceptions
        for exception in result.observed.traffic.traffic_exceptions[0]
    ]


def _flows(flows: Iterable[Flow]) -> str:
    """Format flows, such as `gradients: all_reduce 168 KiB`."""
    return ", ".join(f"{flow.purpose}: {flow.kind} {bytes_text(flow.num_bytes)}" for flow in flows) or "nothing"


def _difference(exception: TrafficException) -> float:
    return wire_bytes(exception.sends) - wire_bytes(exception.instead_of)


def wire_bytes(flows: Iterable[Flow]) -> float:
    """Return the bytes that a rank hands to its links, under ring algorithms."""
    return sum(flow.num_bytes * wire_factor(flow.kind, len(flow.ranks)) for flow in flows)


def _wire(collectives: list[Collective]) -> float:
    return sum(c.wire_bytes for c in collectives)


def _kinds(collectives: list[Collective], layout: Layout) -> str:
    """Format collectives by kind and group, without scalars, such as `2 all_reduce 925 KiB`."""
    return (
        ", ".join(
            f"{c.count} {c.kind} {bytes_text(c.num_bytes)}{_over(c.ranks, layout)}"
            for c in collectives
            if c.num_bytes > KIB
        )
        or "nothing"
    )


@functools.lru_cache(maxsize=4096)  # layouts are few where records are many
def _over(ranks: tuple[int, ...], layout: Layout) -> str:
    """Return the mesh axes of a group, such as ` over tp`, if the mesh has more than one axis.

    Empty for old records, which do not contain the group.
    """
    if sum(len(layout.group(axis, 0)) > 1 for axis in AXES) < 2 or not ranks:
        return ""
    stands = [layout.coordinates(rank) for rank in ranks]
    return " over " + "+".join(axis for axis in AXES if len({getattr(place, axis) for place in stands}) > 1)
