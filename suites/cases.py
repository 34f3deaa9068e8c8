"""The matrix: every adapter in every layout that it supports at a world size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshmark.adapter.contract import Adapter
from meshmark.spec.case import Case, Misfit, cell
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload

ACCUMULATED = 2
"""Micro-batches of layouts without a pipeline: enough for accumulation to go wrong."""
PIPELINED = 4
"""Micro-batches of pipelines."""


def layouts(adapter: type[Adapter], world_size: int) -> Iterator[Layout]:
    """Layouts of `world_size` ranks along each axis that the adapter supports, and with tensor and data parallelism
    crossed where it supports both."""
    degrees, stages = adapter.capabilities.degrees, sorted(adapter.capabilities.zero_stages)
    if world_size == 1:
        for stage in stages:
            yield Layout(zero_stage=stage, num_micro_batches=ACCUMULATED)
        return
    if "dp" in degrees and "tp" not in degrees:
        for stage in stages:
            yield Layout(dp=world_size, zero_stage=stage, num_micro_batches=ACCUMULATED)
    if "tp" in degrees:
        yield Layout(tp=world_size, num_micro_batches=ACCUMULATED)
    if {"tp", "dp"} <= degrees and world_size % 4 == 0:
        yield Layout(tp=world_size // 2, dp=2, num_micro_batches=ACCUMULATED)
    if "pp" in degrees:
        yield Layout(pp=world_size, num_micro_batches=PIPELINED)


def matrix(
    adapters: dict[str, type[Adapter]],
    worlds: Iterable[int],
    workloads: Iterable[Workload],
    precisions: Iterable[Precision],
) -> list[Case | Misfit]:
    """All cells. A precision that an adapter lacks still makes a case, so that the report shows the gap, and a layout
    that does not fit a workload a misfit: nothing is dropped silently. An adapter with no parallel axis, such as
    `single`, joins at world size 1."""
    return [
        cell(adapter=name, workload=workload, layout=layout, precision=precision)
        for workload in workloads
        for precision in precisions
        for name, adapter in adapters.items()
        for world_size in (worlds if adapter.capabilities.degrees else [1])
        for layout in layouts(adapter, world_size)
    ]
