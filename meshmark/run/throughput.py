"""Tokens (or images) per second and model FLOPs utilisation from a record's raw samples."""

from __future__ import annotations

from dataclasses import dataclass

from meshmark.run.record import Record
from meshmark.spec.precision import Precision
from meshmark.theory.flops import flops_per_unit

# Dense matrix products, operations per second, by what nvidia-smi calls the GPU. NVIDIA's datasheets: A100 (2021),
# H100 and H200 SXM (2023, without sparsity), V100 (2020). Fp32 is TF32's where PyTorch may use it, which by default
# it may not, so the plain rate stands here.
_PUBLISHED: dict[str, dict[Precision, float]] = {
    "NVIDIA H100 80GB HBM3": {Precision.BF16: 989e12, Precision.FP16: 989e12, Precision.FP32: 67e12},
    "NVIDIA H200": {Precision.BF16: 989e12, Precision.FP16: 989e12, Precision.FP32: 67e12},
    "NVIDIA A100": {Precision.BF16: 312e12, Precision.FP16: 312e12, Precision.FP32: 19.5e12},
    "Tesla V100": {Precision.FP16: 125e12, Precision.FP32: 15.7e12},
}


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
    seconds = record.step_seconds
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
        for known, rates in _PUBLISHED.items():
            if name.startswith(known) and record.case.precision in rates:
                num_gpus = min(record.case.world_size, int(count) * record.environment.nnodes)
                return rates[record.case.precision] * num_gpus, f"datasheet of {known}"
    return sum(record.matmul_flops_per_second), "best matrix product, all ranks at once"
