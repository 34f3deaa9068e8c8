"""Tokens (or images) per second and model FLOPs utilisation from a record's raw samples."""

from __future__ import annotations

from dataclasses import dataclass

from meshmark.run.record import Record
from meshmark.spec.hardware import gpu_of_device
from meshmark.theory.flops import flops_per_unit


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """What a timed pass amounts to."""

    per_second: float
    """All tokens or images that the model computed over all time that the slowest rank took."""
    unit: str
    """tokens or images."""
    mfu: float
    """Model FLOPs over peak FLOPs in that time (PaLM, arXiv:2204.02311, appendix B)."""
    peak_source: str
    """Where the peak is from."""


def throughput(record: Record) -> Throughput:
    """Of a record of the timed pass."""
    workload = record.case.workload
    seconds = record.timing.step_seconds
    rate = workload.units_per_step * len(seconds) / sum(seconds)
    peak, source = peak_flops_per_second(record)
    return Throughput(
        per_second=rate,
        unit=workload.unit,
        mfu=rate * flops_per_unit(workload) / peak,
        peak_source=source,
    )


def peak_flops_per_second(record: Record) -> tuple[float, str]:
    """Of all ranks together: published where the GPU is known, else the best matrix product found in the run. Ranks
    that share a GPU share its peak."""
    machine = record.environment.machine
    if record.environment.device == "cuda":
        count, _, name = machine.partition(" x ")
        gpu, compute = gpu_of_device(name), record.case.precision.compute.short
        if gpu and compute in gpu.peak_flops:
            num_gpus = min(record.case.world_size, int(count) * record.environment.nnodes)
            return gpu.peak_flops[compute] * num_gpus, f"datasheet of {name}"
    return sum(record.timing.matmul_flops_per_second), "best matrix product, all ranks at once"
