"""Event simulator of pipeline schedules, with stages of unequal length.

A task is the forward pass (F), backward pass (B) or, under zero bubble, the weight-gradient pass (W) of one chunk of
layers for one micro-batch. A rank runs its tasks in the schedule's order, each as soon as its inputs are available.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from meshmark.errors import LayoutError
from meshmark.spec.layout import Layout, Schedule

_MOST_TASKS, _FEWEST_ROUNDS = 20_000, 2


@dataclass(frozen=True, kw_only=True, order=True)
class Action:
    """One pass of one chunk for one micro-batch. A chunk's global position is chunk x pp + rank."""

    kind: str
    chunk: int
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A task with its time on a rank."""

    rank: int
    task: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """A simulated step."""

    slots: tuple[Slot, ...]
    num_ranks: int

    @property
    def seconds(self) -> float:
        return max(slot.end for slot in self.slots)

    def idle_seconds(self, rank: int) -> float:
        """Return the time of the step during which a rank computes nothing."""
        return self.seconds - sum(slot.end - slot.start for slot in self.slots if slot.rank == rank)

    @property
    def bubble_of_step(self) -> float:
        """Mean share of idle time over ranks: (p - 1)/(m + p - 1) for equal stages (arXiv:1811.06965)."""
        idle = sum(self.idle_seconds(rank) for rank in range(self.num_ranks))
        return idle / (self.num_ranks * self.seconds)


def simulate(layout: Layout, stage_seconds: Sequence[float], *, send_seconds: float = 0.0) -> Run:
    """Simulate one step.

    `stage_seconds` is each rank's forward and backward pass of one micro-batch; a third of it is the forward pass.
    Raises `LayoutError` when the times do not match the layout, or a schedule cannot run with its micro-batches.
    """
    if len(stage_seconds) != layout.pp or min(stage_seconds) < 0:
        raise LayoutError(f"layout {layout.id}: {len(stage_seconds)} stage times, expected {layout.pp}, none negative")
    orders = [task_order(layout, rank) for rank in range(layout.pp)]
    times = _times(layout, orders, stage_seconds, send_seconds)
    slots = tuple(
        Slot(rank=rank, task=task, start=start, end=end)
        for rank, order in enumerate(orders)
        for task, (start, end) in zip(order, times[rank], strict=True)
    )
    return Run(slots=slots, num_ranks=layout.pp)


def simulated_bubble_seconds(layout: Layout, stage_seconds: Sequence[float]) -> float:
    """Return the time of a simulated step beyond the work of its slowest stage.

    `pipeline.bubble_seconds` approximates it. For a long step, only as many micro-batches are simulated as fill and
    drain the pipeline, because those in between add no bubble.
    """
    tasks_each = 2 * layout.pp * layout.virtual_stages
    rounds = max(_FEWEST_ROUNDS, _MOST_TASKS // (tasks_each * layout.pp))
    m = min(layout.num_micro_batches, rounds * layout.pp)
    short = dataclasses.replace(layout, num_micro_batches=m)
    orders = [task_order(short, rank) for rank in range(layout.pp)]
    seconds = max(times[-1][1] for times in _times(short, orders, stage_seconds, 0.0))
    return seconds - m * max(stage_seconds)


def _times(
    layout: Layout, orders: Sequence[Sequence[Action]], stage_seconds: Sequence[float], send: float
) -> list[list[tuple[float, float]]]:
    """Return start and end of every task of every rank.

    A task starts when the previous one and its inputs have ended.
    """
    p, last = layout.pp, layout.pp * layout.virtual_stages - 1
    third = [seconds / 3.0 / layout.virtual_stages for seconds in stage_seconds]
    backward = 1.0 if layout.schedule is Schedule.ZERO_BUBBLE else 2.0
    unknown = [-1.0] * layout.num_micro_batches
    forwards, backwards, weights = ([list(unknown) for _ in range(last + 1)] for _ in range(3))
    times: list[list[tuple[float, float]]] = [[] for _ in range(p)]
    waiting = set(range(p))
    while waiting:
        before = sum(map(len, times))
        for rank in [*range(p), *reversed(range(p))]:
            done, order, free = times[rank], orders[rank], times[rank][-1][1] if times[rank] else 0.0
            while len(done) < len(order):
                task = order[len(done)]
                place, i, ready, seconds = task.chunk * p + rank, task.micro_batch, 0.0, third[rank]
                if task.kind == "F":
                    ended = forwards[place]
                    ready = forwards[place - 1][i] if place else -send
                elif task.kind == "B":
                    ended, seconds = backwards[place], seconds * backward
                    ready = backwards[place + 1][i] if place < last else -send
                else:
                    ended, ready = weights[place], backwards[place][i] - send
                if ready == -1.0:
                    break
                start = max(free, ready + send)
                free = ended[i] = start + seconds
                done.append((start, free))
            if len(done) == len(order):
                waiting.discard(rank)
        assert sum(map(len, times)) > before or not waiting, f"schedule {layout.schedule} deadlocks with {layout.id}"
    return times


def task_order(layout: Layout, rank: int) -> list[Action]:
    """Return the order in which a rank runs its tasks."""
    m = layout.num_micro_batches
    if layout.schedule is Schedule.INTERLEAVED and layout.virtual_stages > 1:
        return _interleaved(layout, rank)
    forwards = [Action(kind="F", chunk=0, micro_batch=i) for i in range(m)]
    backwards = [Action(kind="B", chunk=0, micro_batch=i) for i in range(m)]
    if layout.schedule is Schedule.GPIPE:
        return forwards + backwards
    warm = min(layout.pp - rank - 1, m)
    order = forwards[:warm]
    for i in range(m - warm):
        order += [forwards[warm + i], backwards[i]]
    order += backwards[m - warm :]
    return _with_weight_passes(order, rank) if layout.schedule is Schedule.ZERO_BUBBLE else order


def _with_weight_passes(order: list[Action], rank: int) -> list[Action]:
    """Insert the weight passes of ZB-H1 (arXiv:2401.10241 sec. 2.1).

    A rank falls `rank` weight passes behind, then keeps pace. It does the remaining ones at the end, where 1F1B would
    be idle.
    """
    out: list[Action] = []
    owed: list[Action] = []
    forwards_left = sum(task.kind == "F" for task in order)
    for task in order:
        out.append(task)
        forwards_left -= task.kind == "F"
        if task.kind == "B":
            owed.append(Action(kind="W", chunk=task.chunk, micro_batch=task.micro_batch))
            if len(owed) > rank and (forwards_left or rank == 0 or len(owed) > rank):
                out.append(owed.pop(0))
    return out + owed


def _interleaved(layout: Layout, rank: int) -> list[Action]:
    """Return the interleaved order of tasks (arXiv:2104.04473 sec. 2.2.2).

    Micro-batches in groups of p pass through chunk after chunk. After 2(p - rank - 1) + (v - 1)p warm-up forwards,
    forward and backward passes alternate.
    """
    p, v, m = layout.pp, layout.virtual_stages, layout.num_micro_batches
    if m % p:
        raise LayoutError(f"layout {layout.id}: interleaving needs micro-batches in multiples of pp {p}, got {m}")
    forwards = [(c, g * p + i) for g in range(m // p) for c in range(v) for i in range(p)]
    backwards = [(v - 1 - c, i) for c, i in forwards]
    warm = min(2 * (p - rank - 1) + (v - 1) * p, m * v)
    f = [Action(kind="F", chunk=c, micro_batch=i) for c, i in forwards]
    b = [Action(kind="B", chunk=c, micro_batch=i) for c, i in backwards]
    order = f[:warm]
    for i in range(m * v - warm):
        order += [f[warm + i], b[i]]
    return order + b[m * v - warm :]
