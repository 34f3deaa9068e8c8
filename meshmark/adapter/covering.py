"""Layouts by which every two choices come together at least once, and how many layouts there are at all.

What goes wrong in a combination is mostly of two of its choices, and far fewer layouts than their product bring every
two together (doi:10.1109/32.605761).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from meshmark.adapter.contract import Adapter
from meshmark.errors import LayoutError
from meshmark.spec.case import Case
from meshmark.spec.layout import AXES, Layout, Offload, Recompute, Schedule
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload

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
"""Micro-batches of layouts without a pipeline: enough for accumulation to go wrong."""
PIPELINED = 4
"""Micro-batches of pipelines; more where a schedule needs as many as there are stages."""
_CHOICES = (*AXES, "zero_stage", "schedule", "folded", "sequence_parallel", "recompute", "offload")
"""Fields of a layout that are taken two by two."""
Choice = tuple[str, object]


def combinations(world_size: int) -> Iterator[Layout]:
    """Every layout of so many ranks, whoever could run it: the product of all choices that mean something together."""
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
            case = Case(adapter=name, workload=workload, layout=layout, precision=precision)
        except LayoutError:
            continue
        if takes(adapter, case):
            found.append(layout)
    return found


def takes(adapter: type[Adapter], case: Case) -> bool:
    """Return whether the adapter supports the case on one of its devices, installed or not."""
    device = next(iter(sorted(adapter.capabilities.devices)))
    try:
        return adapter.supports(case, device, "gloo") is None
    except Exception:  # whatever it is, it is told where the case is run
        return False


def covering(layouts: Sequence[Layout]) -> list[Layout]:
    """Few of `layouts`, in their order, that bring together every two choices that some of them has: always the one
    that brings most new pairs."""
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
    """`layout` under a schedule, with micro-batches enough for it: 1F1B takes one a stage, interleaving a multiple, and
    DualPipeV one for each of both ways."""
    schedule, virtual_stages, folded = order
    count = PIPELINED if layout.pp > 1 else ACCUMULATED
    if schedule is not Schedule.GPIPE:
        count = max(count, layout.pp)
    if schedule is Schedule.INTERLEAVED:
        count += -count % layout.pp
    count = max(count, 2 * layout.pp) if folded else count
    laid_out = dataclasses.replace(layout, schedule=schedule, virtual_stages=virtual_stages, num_micro_batches=count)
    return dataclasses.replace(laid_out, folded=folded)
