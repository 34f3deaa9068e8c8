"""The matrix: the cases of every adapter, in a sparse product of the axes of layouts.

Degrees come first: all ranks along one axis, or divided over two axes. On each such mesh, every other field of the
layout takes each supported value in turn, while all others stay at the plainest value. The conformance suite covers
recomputation.

`--layouts auto` covers every pair of choices at least once. Most failures of a combination are caused by two of its
choices, and far fewer layouts than all products cover every pair (doi:10.1109/32.605761).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from meshmark.adapter.contract import Adapter, Capabilities
from meshmark.errors import LayoutError
from meshmark.spec.case import Case, InvalidLayout, Tuning, cell
from meshmark.spec.layout import AXES, Axis, Layout, Offload, Recompute, Schedule
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload
from meshmark.text import pluralize

# --- Layouts that bring every two choices together.

Order = tuple[Schedule, int, bool]
"""A schedule, its virtual stages, and whether they are folded."""
_ORDERS: tuple[Order, ...] = (
    *((schedule, 1, False) for schedule in Schedule if schedule is not Schedule.INTERLEAVED),
    *((Schedule.INTERLEAVED, 2, folded) for folded in (False, True)),
)
"""Schedules of a pipeline."""
NO_ORDER: Order = (Schedule.GPIPE, 1, False)
"""Schedule of a single stage."""
ACCUMULATED = 2
"""Fewest micro-batches of layouts without a pipeline: enough for accumulation to go wrong."""
DISTINCT = 3
"""Micro-batches of layouts without a pipeline, where the batch has the rows: the third may differ from the second."""
PIPELINED = 4
"""Fewest micro-batches of pipelines; more where a schedule needs as many as there are stages."""
_CHOICES = (*AXES, "zero_stage", "schedule", "folded", "sequence_parallel", "recompute", "offload")
"""Fields of a layout that are taken two by two."""
Choice = tuple[str, object]


def combinations(world_size: int) -> Iterator[Layout]:
    """Yield every layout of `world_size` ranks, supported or not: the product of all choices that are compatible."""
    factors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    for dp, tp, pp, cp in itertools.product(factors, repeat=4):
        if dp * tp * pp * cp != world_size:
            continue
        stages = (0, 1, 2, 3) if dp > 1 else (0,)
        orders = _ORDERS if pp > 1 else (NO_ORDER,)
        splits = (False, True) if tp > 1 else (False,)
        for stage, order, split, again, where in itertools.product(stages, orders, splits, Recompute, Offload):
            plain = Layout(dp=dp, tp=tp, pp=pp, cp=cp, zero_stage=stage, sequence_parallel=split, recompute=again)
            yield laid(dataclasses.replace(plain, offload=where), order)


def supported(
    name: str, adapter: type[Adapter], worlds: Iterable[int], workload: Workload, precision: Precision
) -> list[Layout]:
    """Return the layouts of the given numbers of ranks that the adapter can use for the workload."""
    found = []
    for layout in itertools.chain.from_iterable(map(combinations, worlds)):
        if adapter.capabilities.beyond(layout):
            continue
        try:
            case = Case(adapter=name, workload=workload, layout=distinct(layout, workload), precision=precision)
        except LayoutError:
            continue
        if takes(adapter, case):
            found.append(case.layout)
    return found


def takes(adapter: type[Adapter], case: Case) -> bool:
    """Return whether the adapter supports the case on one of its devices, installed or not."""
    device = next(iter(sorted(adapter.capabilities.devices)))
    try:
        return adapter.supports(case, device, "gloo") is None
    except Exception:  # whatever it is, it is told where the case is run
        return False


def covering(layouts: Sequence[Layout]) -> list[Layout]:
    """Return a small subset of `layouts`, in their order, that covers every pair of choices in them.

    The search is greedy: each step takes the layout that adds the most new pairs.
    """
    brings = {layout: _pairs(layout) for layout in layouts}
    left, chosen = set[frozenset[Choice]]().union(*brings.values()), set[Layout]()
    while left:
        best = max(layouts, key=lambda layout: len(brings[layout] & left))
        chosen.add(best)
        left -= brings[best]
    return [layout for layout in layouts if layout in chosen]


def _pairs(layout: Layout) -> frozenset[frozenset[Choice]]:
    choices = [(name, getattr(layout, name)) for name in _CHOICES]
    return frozenset(frozenset(pair) for pair in itertools.combinations(choices, 2))


def laid(layout: Layout, order: Order) -> Layout:
    """Return `layout` under a schedule, with enough micro-batches for it.

    1F1B needs one per stage, interleaving a multiple of the stages, and DualPipeV one per stage in each direction.
    """
    schedule, virtual_stages, folded = order
    count = PIPELINED if layout.pp > 1 else ACCUMULATED
    if schedule is not Schedule.GPIPE:
        count = max(count, layout.pp)
    if schedule is Schedule.INTERLEAVED:
        count += -count % layout.pp
    count = max(count, 2 * layout.pp) if folded else count
    laid_out = dataclasses.replace(layout, schedule=schedule, virtual_stages=virtual_stages, num_micro_batches=count)
    return dataclasses.replace(laid_out, folded=folded)


def distinct(layout: Layout, workload: Workload) -> Layout:
    """Return `layout` with at least three micro-batches, and not as many as any degree, or product of degrees, has.

    With equal numbers, a gradient that is divided by one of them in the place of another is right by accident, and no
    diagnosis can tell the two apart. The count divides a replica's rows; too few rows leave less choice, or none. Rows
    that affect each other, as under a batch norm, stay in as few micro-batches as they were.
    """
    rows, left = divmod(workload.global_batch, layout.dp)
    step = layout.pp if layout.schedule is Schedule.INTERLEAVED else 1
    counts = [n for n in range(layout.num_micro_batches, rows + 1) if rows % n == 0 and n % step == 0]
    if left or not counts or workload.couples_rows:
        return layout
    degrees = [getattr(layout, axis) for axis in AXES]
    products = {math.prod(some) for size in range(2, len(AXES) + 1) for some in itertools.combinations(degrees, size)}
    best = min(counts, key=lambda n: (n in degrees, n < DISTINCT, n in products, n))
    return dataclasses.replace(layout, num_micro_batches=best)


# --- The matrix.

AUTO: Literal["auto"] = "auto"
LayoutChoice = Sequence[Layout] | Literal["auto"] | None
"""Given layouts; "auto" for a covering set of each adapter's supported layouts; or None for the matrix's own."""
_MODEL_AXES: tuple[Axis, ...] = ("tp", "cp", "pp")


def matrix(
    adapters: dict[str, type[Adapter]],
    worlds: Iterable[int],
    workloads: Iterable[Workload],
    precisions: Iterable[Precision],
    chosen: LayoutChoice = None,
    tunings: Sequence[Tuning] = (Tuning(),),
) -> list[Case | InvalidLayout]:
    """Return all cells of the matrix.

    A layout beyond an adapter's capabilities makes no cell. A precision beyond them does, so that the report shows the
    gap. A layout that does not fit a workload makes an `InvalidLayout`, so that nothing is dropped silently. An adapter
    without a parallel axis, such as `single`, runs at world size 1.

    `chosen` layouts replace those that each adapter is tried on. Those that an adapter does not support are refused
    when they are run.
    """

    def tried(name: str, adapter: type[Adapter], workload: Workload, precision: Precision) -> Iterable[Layout]:
        own = worlds_of(adapter, worlds)
        if chosen is None:
            return [layout for n in own for layout in _tried(name, adapter, n, workload, precision)]
        if chosen != AUTO:
            return chosen
        return [layout for n in own for layout in covering(supported(name, adapter, [n], workload, precision))]

    return [
        cell(adapter=name, workload=workload, layout=layout, precision=precision, tuning=tuning)
        for workload in workloads
        for precision in precisions
        for tuning in tunings
        for name, adapter in adapters.items()
        for layout in tried(name, adapter, workload, precision)
    ]


def counts(adapters: dict[str, type[Adapter]], worlds: Sequence[int], cells: Iterable[Case | InvalidLayout]) -> str:
    """Describe how many layouts exist, how many adapters support with the first workload, and how many `cells` has."""
    tried: dict[str, dict[Layout, Case | InvalidLayout]] = {}
    for each in cells:
        tried.setdefault(each.adapter, {}).setdefault(each.layout, each)
    exist = able = 0
    for name, own in tried.items():
        ranks, example = worlds_of(adapters[name], worlds), next(iter(own.values()))
        exist += sum(len(list(combinations(n))) for n in ranks)
        able += len(supported(name, adapters[name], ranks, example.workload, example.precision))
    return (
        f"layouts of {pluralize(len(tried), 'adapter')}: {exist:,} combinations exist, {able:,} are "
        f"supported, {sum(map(len, tried.values())):,} are chosen"
    )


def worlds_of(adapter: type[Adapter], worlds: Iterable[int]) -> list[int]:
    """Return the numbers of ranks the adapter runs on. An adapter with no parallel axis runs on one rank."""
    return list(worlds) if adapter.capabilities.degrees else [1]


def layouts(adapter: type[Adapter], world_size: int) -> Iterator[Layout]:
    """Layouts of `world_size` ranks that the matrix tries on `adapter`."""
    for mesh in meshes(adapter.capabilities, world_size):
        yield from variants(adapter.capabilities, mesh)


def _tried(
    name: str, adapter: type[Adapter], world_size: int, workload: Workload, precision: Precision
) -> list[Layout]:
    """Return the layouts that the matrix tries on an adapter.

    If the adapter refuses all of them, as a distributed optimizer refuses a single replica, this includes the layouts
    with data parallelism alone that it supports.
    """

    def taken(layout: Layout) -> bool:
        each = cell(adapter=name, workload=workload, layout=layout, precision=precision)
        return isinstance(each, Case) and takes(adapter, each)

    own = [distinct(layout, workload) for layout in layouts(adapter, world_size)]
    if "dp" not in adapter.capabilities.degrees or any(map(taken, own)):
        return own
    replicas = variants(adapter.capabilities, Layout(dp=world_size))
    replicas = filter(taken, (distinct(layout, workload) for layout in replicas))
    return list(dict.fromkeys([*own, *replicas]))


def meshes(can: Capabilities, world_size: int) -> Iterator[Layout]:
    """Yield layouts that set degrees only: all ranks along one axis, and half of them along one with two along another.

    An adapter without tensor, context and pipeline parallelism gets data parallelism.
    """
    if world_size == 1:
        yield Layout()
        return
    own: list[Axis] = [axis for axis in _MODEL_AXES if axis in can.degrees] or ["dp"]
    for i, axis in enumerate(own):
        yield _mesh({axis: world_size})
        for other in (*own[i + 1 :], "dp"):
            if other != axis and world_size % 4 == 0:
                yield _mesh({axis: world_size // 2, other: 2})


def _mesh(degrees: dict[Axis, int]) -> Layout:
    dp, tp, pp, cp = (degrees.get(axis, 1) for axis in AXES)
    return Layout(dp=dp, tp=tp, pp=pp, cp=cp)


def variants(can: Capabilities, mesh: Layout) -> Iterator[Layout]:
    """Yield the layouts that run on `mesh`: the plainest first, then every value of every other axis by itself."""
    orders = _orders(can) if mesh.pp > 1 else [NO_ORDER]
    plain = laid(dataclasses.replace(mesh, zero_stage=min(can.zero_stages)), orders[0])
    tried = [plain]
    if mesh.tp == mesh.pp == 1:  # context-parallel ranks share states as data-parallel ones do
        tried += [dataclasses.replace(plain, zero_stage=stage) for stage in sorted(can.zero_stages)]
    offloaded = [dataclasses.replace(layout, offload=where) for layout in dict.fromkeys(tried) for where in Offload]
    tried += [laid(plain, order) for order in orders]
    tried += [dataclasses.replace(plain, sequence_parallel=True)] if mesh.tp > 1 else []
    yield from (layout for layout in dict.fromkeys([*tried, *offloaded]) if not can.beyond(layout))


def _orders(can: Capabilities) -> list[Order]:
    """Return the schedules of a pipeline with their virtual stages. Interleaving needs at least two."""
    found = [(schedule, 1, False) for schedule in Schedule if schedule in can.schedules - {Schedule.INTERLEAVED}]
    if Schedule.INTERLEAVED in can.schedules:
        found += [(Schedule.INTERLEAVED, chunks, can.folded) for chunks in sorted(can.virtual_stages - {1})]
    return found or [NO_ORDER]
