"""Collectives of one step on one rank: what was asked for, and what the backend issued."""

from __future__ import annotations

from collections.abc import Iterable

from meshmark.measure.readings import Collective, TrafficReading
from meshmark.measure.watch import AskedOperation, IssuedOperation, Watch

# Which argument of a c10d call holds the tensors that count, and whether these are one rank's part of the whole.
_ASKED: dict[str, tuple[str, int, bool]] = {
    "allreduce_": ("all_reduce", 0, False),
    "allreduce_coalesced_": ("all_reduce", 0, False),
    "allgather_": ("all_gather", 1, True),
    "_allgather_base_": ("all_gather", 0, False),
    "allgather_coalesced_": ("all_gather", 1, True),
    "allgather_into_tensor_coalesced_": ("all_gather", 0, False),
    "reduce_scatter_": ("reduce_scatter", 0, True),
    "_reduce_scatter_base_": ("reduce_scatter", 1, False),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, False),
    "broadcast_": ("broadcast", 0, False),
    "reduce_": ("reduce", 0, False),
    "alltoall_": ("all_to_all", 1, False),
    "alltoall_base_": ("all_to_all", 1, False),
    "gather_": ("gather", 1, True),
    "scatter_": ("scatter", 0, True),
    "send": ("send", 0, False),
    "recv_": ("recv", 0, False),
    "recv_any_source_": ("recv", 0, False),
    "barrier": ("barrier", 0, False),
}
POINT_TO_POINT = frozenset({"send", "recv"})


def read_traffic(watch: Watch, step: int) -> TrafficReading:
    """Traffic of `step`. Raises `AssertionError` when asked and issued collectives cannot be paired, by order."""
    windows = [w for w in watch.windows if w.step == step]
    asked = [a for a in watch.asked() if any(w.holds(a.time_ns) for w in windows)]
    issued = [i for i in watch.issued() if any(w.holds(i.time_ns) for w in windows)]
    collectives = [a for a in asked if _kind(a) not in POINT_TO_POINT]
    assert len(collectives) == len(issued), (
        f"{len(collectives)} collectives asked for, {len(issued)} in the flight recorder: "
        f"{[a.name for a in collectives]} against {[i.kind for i in issued]}"
    )
    point_to_point = [(_kind(a), 2, _full_bytes(a, 2)) for a in asked if _kind(a) in POINT_TO_POINT]
    paired = [(_kind(a), i.group_size, _full_bytes(a, i.group_size)) for a, i in zip(collectives, issued, strict=True)]
    return TrafficReading(
        asked=_sum(paired + point_to_point),
        issued=_sum([(i.kind, i.group_size, _issued_bytes(i)) for i in issued] + point_to_point),
    )


def _kind(operation: AskedOperation) -> str:
    return _ASKED[operation.name.removeprefix("c10d::")][0]


def _full_bytes(operation: AskedOperation, group_size: int) -> int:
    kind, argument, partial = _ASKED[operation.name.removeprefix("c10d::")]
    if kind == "barrier":
        return 0
    return sum(o.num_bytes for o in operation.operands[argument]) * (group_size if partial else 1)


def _issued_bytes(operation: IssuedOperation) -> int:
    return 0 if operation.kind == "barrier" else operation.num_bytes


def _sum(calls: Iterable[tuple[str, int, int]]) -> list[Collective]:
    """Calls (kind, group size, bytes) added up by kind and group size. Groups of one move nothing and are left out."""
    counts: dict[tuple[str, int], tuple[int, int]] = {}
    for kind, group_size, num_bytes in calls:
        if group_size > 1:
            count, total = counts.get((kind, group_size), (0, 0))
            counts[kind, group_size] = (count + 1, total + num_bytes)
    return [
        Collective(kind=kind, group_size=size, count=count, num_bytes=total)
        for (kind, size), (count, total) in sorted(counts.items())
    ]
