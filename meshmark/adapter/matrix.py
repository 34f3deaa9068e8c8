"""The matrix: every adapter in a sparse product of the axes of layouts, as far as its capabilities and the workload go.

The degrees come first: all ranks along one axis, and shared out over two. On such a mesh every other axis then takes
each of its values by itself, the rest of the layout as plain as it can be. Recomputation is left to the conformance
suite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from meshmark.adapter.capabilities import Capabilities
from meshmark.adapter.contract import Adapter
from meshmark.spec.case import Case, Misfit, cell
from meshmark.spec.layout import AXES, Axis, Layout, Offload, Schedule
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload

ACCUMULATED = 2
"""Micro-batches of layouts without a pipeline: enough for accumulation to go wrong."""
PIPELINED = 4
"""Micro-batches of pipelines; more where a schedule needs as many as there are stages."""
_MODEL_AXES: tuple[Axis, ...] = ("tp", "cp", "pp")


def matrix(
    adapters: dict[str, type[Adapter]],
    worlds: Iterable[int],
    workloads: Iterable[Workload],
    precisions: Iterable[Precision],
    chosen: Sequence[Layout] | None = None,
) -> list[Case | Misfit]:
    """All cells. What is beyond an adapter's capabilities makes none, but for a precision, so that the report shows the
    gap; a layout that does not fit a workload is a misfit: nothing is dropped silently. An adapter with no parallel
    axis, such as `single`, joins at world size 1. `chosen` layouts come in the place of those that each adapter is
    tried on, and what an adapter cannot do of them is refused when it is run."""
    return [
        cell(adapter=name, workload=workload, layout=layout, precision=precision)
        for workload in workloads
        for precision in precisions
        for name, adapter in adapters.items()
        for layout in (_tried(adapter, worlds) if chosen is None else chosen)
    ]


def _tried(adapter: type[Adapter], worlds: Iterable[int]) -> Iterator[Layout]:
    for world_size in worlds if adapter.capabilities.degrees else [1]:
        yield from layouts(adapter, world_size)


def layouts(adapter: type[Adapter], world_size: int) -> Iterator[Layout]:
    """Layouts of `world_size` ranks that the matrix tries on `adapter`."""
    for mesh in meshes(adapter.capabilities, world_size):
        yield from variants(adapter.capabilities, mesh)


def meshes(can: Capabilities, world_size: int) -> Iterator[Layout]:
    """Layouts that say how many ranks stand along which axis and no more: all along one, and half of them crossed with
    two along another. Data parallelism alone is what adapters show that have nothing else."""
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
    """What runs on `mesh`: the plainest layout first, then every value of every other axis by itself."""
    orders = _orders(can) if mesh.pp > 1 else [(Schedule.GPIPE, 1)]
    plain = _laid(dataclasses.replace(mesh, zero_stage=min(can.zero_stages)), *orders[0])
    tried = [plain]
    if mesh.tp == mesh.cp == mesh.pp == 1:
        tried += [dataclasses.replace(plain, zero_stage=stage) for stage in sorted(can.zero_stages)]
    offloaded = [dataclasses.replace(layout, offload=where) for layout in dict.fromkeys(tried) for where in Offload]
    tried += [_laid(plain, *order) for order in orders]
    tried += [dataclasses.replace(plain, sequence_parallel=True)] if mesh.tp > 1 else []
    yield from (layout for layout in dict.fromkeys([*tried, *offloaded]) if not can.beyond(layout))


def _orders(can: Capabilities) -> list[tuple[Schedule, int]]:
    """Schedules of a pipeline, each with its virtual stages; interleaving less than two is another schedule."""
    found = [(schedule, 1) for schedule in Schedule if schedule in can.schedules - {Schedule.INTERLEAVED}]
    if Schedule.INTERLEAVED in can.schedules:
        found += [(Schedule.INTERLEAVED, chunks) for chunks in sorted(can.virtual_stages - {1})]
    return found or [(Schedule.GPIPE, 1)]


def _laid(layout: Layout, schedule: Schedule, virtual_stages: int) -> Layout:
    """`layout` under a schedule, with micro-batches enough for it: 1F1B takes one a stage, interleaving a multiple."""
    count = PIPELINED if layout.pp > 1 else ACCUMULATED
    if schedule is not Schedule.GPIPE:
        count = max(count, layout.pp)
    if schedule is Schedule.INTERLEAVED:
        count += -count % layout.pp
    return dataclasses.replace(layout, schedule=schedule, virtual_stages=virtual_stages, num_micro_batches=count)
