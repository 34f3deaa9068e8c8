"""Tables of where the time of profiled steps went, and plots of memory over that time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshmark.measure.profile import Bandwidth, Kernel, Profile
from meshmark.records.record import Record
from meshmark.records.request import Task
from meshmark.report.plots import curves
from meshmark.report.table import Rows, bytes_text, milliseconds, number
from meshmark.spec.hardware import gpu_of_device

_SHOWN = 3
"""Number of kernels and collectives per row."""
TOLD = (
    "A pass of its own under PyTorch's profiler, slower than the untouched one; the rank with the longest step. "
    "*compute*, *exposed* communication and *idle* time add up to the step; *communication* counts what is hidden "
    "behind computing too. *bus*: bytes that a link carries under ring algorithms, over the time from a call to its "
    "end, waiting for other ranks among it. *trace*: beside the records, for Perfetto."
)


def profiled(records: Sequence[Record]) -> list[Record]:
    """Return the last profile of every case."""
    found = {(r.case.id, r.environment.device): r for r in records if r.task is Task.PROFILE and r.profiles}
    return list(found.values())


def profile_rows(records: Sequence[Record]) -> Rows:
    rows: Rows = []
    for record in profiled(records):
        longest = max(record.profiles, key=lambda profile: profile.step_seconds)
        step = longest.step_seconds
        rows.append(
            {
                "case": record.case.id,
                "step": milliseconds(step),
                "compute": number(longest.compute_seconds / step, ".0%"),
                "communication": number(longest.communication_seconds / step, ".0%"),
                "exposed": number(longest.exposed_seconds / step, ".0%"),
                "idle": number(longest.idle_seconds / step, ".0%"),
                "longest": ", ".join(_kernel(kernel, longest) for kernel in longest.kernels[:_SHOWN]),
                "bus": ", ".join(_bandwidth(b, record) for b in longest.bandwidths[:_SHOWN]),
                "trace": record.profiles[0].trace,
            }
        )
    return rows


def _kernel(kernel: Kernel, profile: Profile) -> str:
    return f"{kernel.name[:40]} {kernel.seconds / profile.step_seconds:.0%}"


def _bandwidth(found: Bandwidth, record: Record) -> str:
    """Format a bandwidth, with its share of the link's if the GPU is known."""
    rate = found.bus_bytes_per_second
    gpu = gpu_of_device(record.environment.machine.partition(" x ")[2])
    share = f" ({rate / gpu.link_bandwidth:.0%} of the link)" if gpu else ""
    return f"{found.kind} {bytes_text(rate)}/s{share}"


def memory_curves(records: Sequence[Record], path: Path) -> bool:
    """Draw bytes over time on each case's fullest rank. Returns False when there is nothing to draw."""
    lines = {}
    for record in profiled(records):
        fullest = max(record.profiles, key=lambda profile: max((b for _, b in profile.memory), default=0))
        if fullest.memory:
            lines[record.case.id] = fullest.memory
    return curves(lines, path)
