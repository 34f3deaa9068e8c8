"""Collectives of one step on one rank: those that were asked for, and those that the backend issued."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from meshmark.adapter.traffic_source import TrafficSource, Transfer
from meshmark.errors import TrafficError
from meshmark.measure.flight_recorder import IssuedOperation
from meshmark.measure.readings import AlikeSteps, Collective, TrafficReading
from meshmark.measure.watch import POINT_TO_POINT, AskedOperation, Watch

# The argument of a c10d call with the tensors that count, and whether these are one rank's part of the whole.
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


class TorchTraffic:
    """Traffic through `torch.distributed`: the traffic source that every rank has."""

    def __init__(self, watch: Watch) -> None:
        """`watch` must be in focus while this counts, and over before results are read."""
        self._watch, self._start_ns = watch, 0
        self._stretches: list[tuple[int, int]] = []

    def start(self) -> None:
        self._start_ns = time.time_ns()

    def stop(self) -> None:
        self._stretches.append((self._start_ns, time.time_ns()))

    def requested(self) -> list[Transfer]:
        """Return the transfers that were asked for.

        Raises `TrafficError` when asked and issued collectives cannot be paired in order, or a call or its group is
        unknown. Partial results are not returned.
        """
        asked, issued = self._operations()
        if gone := [i.kind for i in issued if not i.ranks]:
            raise TrafficError(f"{', '.join(gone)} went over a process group that is gone when the step is over")
        return _paired([a for a in asked if a.name not in POINT_TO_POINT], issued) + _point_to_point(asked)

    def issued(self) -> list[Transfer]:
        """Return the transfers that were issued.

        Raises `TrafficError` when the flight recorder had too little room.
        """
        since = self._watch.recorded_since_ns
        if any(start < since for start, _ in self._stretches):
            raise TrafficError("the flight recorder had no room for all collectives; TORCH_FR_BUFFER_SIZE is too small")
        messages = [m for m in self._watch.messages() if self._counts(m.time_ns)]
        sent = [Transfer(kind=m.kind, ranks=m.ranks, num_bytes=m.num_bytes) for m in messages]
        return [_issued(i) for i in self._watch.issued() if self._counts(i.time_ns)] + sent

    def _operations(self) -> tuple[list[AskedOperation], list[IssuedOperation]]:
        asked = [a for a in self._watch.requested() if self._counts(a.time_ns)]
        return asked, [i for i in self._watch.issued() if self._counts(i.time_ns)]

    def _counts(self, time_ns: int) -> bool:
        return any(start <= time_ns < stop for start, stop in self._stretches)


def read_traffic(sources: Sequence[TrafficSource]) -> TrafficReading:
    """Return the traffic of all `sources`."""
    return TrafficReading(
        asked=sum_transfers(t for source in sources for t in source.requested()),
        issued=sum_transfers(t for source in sources for t in source.issued()),
    )


def alike_steps(sources: Sequence[Sequence[TrafficSource]]) -> list[AlikeSteps]:
    """Group steps by what was issued in them. `sources` are by step, from the first. Raises `TrafficError`."""
    found: list[AlikeSteps] = []
    for step, own in enumerate(sources):
        issued = sum_transfers(t for source in own for t in source.issued())
        same = next((group for group in found if group.issued == issued), None)
        if same:
            same.steps.append(step)
        else:
            found.append(AlikeSteps(steps=[step], issued=issued))
    return found


def _paired(asked: Sequence[AskedOperation], issued: Sequence[IssuedOperation]) -> list[Transfer]:
    """Pair asked and issued collectives one by one, in order.

    If more were issued than asked for, the rest was asked for by a callback on a backend thread, which the profiler
    does not follow (as for PowerSGD's hook). For these, only the issued operation is known.
    """
    left, found, more = list(asked), list[Transfer](), len(issued) > len(asked)
    for operation in issued:
        own = transfer_of(left[0], operation.ranks) if left else None
        if own and more and (own.kind, own.num_bytes) != (operation.kind, operation.num_bytes):
            own = None
        if own:
            left.pop(0)
        found.append(own or _issued(operation))
    if left:
        raise TrafficError(
            f"{len(asked)} collectives asked for, {len(issued)} in the flight recorder: "
            f"{[a.name for a in asked]} against {[i.kind for i in issued]}"
        )
    return found


def _point_to_point(asked: Iterable[AskedOperation]) -> list[Transfer]:
    messages = [a for a in asked if a.name in POINT_TO_POINT]
    if any(not a.ranks for a in messages):
        raise TrafficError(f"{len(messages)} sends and receives, whose ends were not all seen")
    return [transfer_of(a, a.ranks) for a in messages]


def transfer_of(operation: AskedOperation, ranks: tuple[int, ...]) -> Transfer:
    """Return what `operation` sends among `ranks`. Raises `TrafficError` for an unknown call."""
    return Transfer(kind=_meaning(operation)[0], ranks=ranks, num_bytes=_full_bytes(operation, len(ranks)))


def _meaning(operation: AskedOperation) -> tuple[str, int, bool]:
    name = operation.name.removeprefix("c10d::")
    if name not in _ASKED:
        raise TrafficError(f"the call {operation.name} is none that Meshmark knows; `_ASKED` is to say what it sends")
    return _ASKED[name]


def _full_bytes(operation: AskedOperation, group_size: int) -> int:
    kind, argument, partial = _meaning(operation)
    if kind == "barrier":
        return 0
    return sum(o.num_bytes for o in operation.operands[argument]) * (group_size if partial else 1)


def _issued(operation: IssuedOperation) -> Transfer:
    num_bytes = 0 if operation.kind == "barrier" else operation.num_bytes
    return Transfer(kind=operation.kind, ranks=operation.ranks, num_bytes=num_bytes)


def sum_transfers(transfers: Iterable[Transfer]) -> list[Collective]:
    """Add up transfers by kind and ranks. A group of one moves nothing and is left out."""
    counts: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}
    for transfer in transfers:
        if len(transfer.ranks) > 1:
            key = transfer.kind, transfer.ranks
            count, total = counts.get(key, (0, 0))
            counts[key] = (count + 1, total + transfer.num_bytes)
    return [
        Collective(kind=kind, group_size=len(ranks), ranks=ranks, count=count, num_bytes=total)
        for (kind, ranks), (count, total) in sorted(counts.items())
    ]
