"""`meshmark calibrate`: measure what this machine reaches of its datasheet: matrix products and copies.

Minutes at most, on a CPU or a GPU. Collectives need several processes: where torch.distributed is already initialised
(`torchrun -m meshmark.plan.calibrate`), an all-gather is measured too.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from meshmark.errors import InputError
from meshmark.plan.rates import Rates, rates, write_rates
from meshmark.plan.system import GIGA, TERA, Gpu, gpu

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """One operation at one size."""

    name: str
    size: int
    """Rows of a square matrix, or bytes."""
    seconds: float
    """Median of the repetitions."""
    rate: float
    """FLOP/s, or bytes per second."""


def calibrate_here(output: Path | None, seconds: float) -> int:
    """Measure, print, and write rates when `output` is given; rank 0 only where there are several."""
    import torch
    import torch.distributed as dist

    if seconds <= 0:
        raise InputError(f"{seconds:g} seconds to calibrate in; expected more than 0")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found = [*measure_matmuls(device, dtype, seconds / 2), *measure_copies(device, seconds / 4)]
    found += measure_all_gathers(device, seconds / 4)
    if dist.is_initialized() and dist.get_rank() != 0:
        return 0
    for one in found:
        unit = "GFLOP/s" if one.name == "matmul" else "GB/s"
        print(f"{one.name:10} {one.size:12d} {one.seconds * 1e6:12.1f} us {one.rate / GIGA:10.1f} {unit}")
    if output:
        write_rates(output, rates_from(found, device))
        print(f"rates: {output}")
    return 0


def known_gpu(device_name: str) -> Gpu | None:
    """The GPU of ours that a driver's name ("NVIDIA A100-SXM4-40GB") speaks of; None for any other."""
    words = device_name.lower().replace("-", " ").split()
    for name in ("h200", "h100", "a100", "v100", "p100"):
        if name in words:
            return gpu("a100-40" if name == "a100" and "40gb" in words else name)
    return None


def rates_from(found: list[Measurement], device: torch.device) -> Rates:
    """Efficiencies over the datasheet of a known GPU, or over the fastest product and copy seen here.

    On an unknown machine the best of the sizes stands for the peak, so the efficiency is that of the median size.
    Links that are not measured (without torchrun) are a CPU's as assumed, or the defaults of `Rates`.
    """
    import torch

    peak_flops = max(m.rate for m in found if m.name == "matmul")
    peak_bytes = max(m.rate for m in found if m.name == "copy")
    reference = known_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if reference and peak_flops < reference.peak("bf16"):
        products, copies = peak_flops / reference.peak("bf16"), peak_bytes / reference.memory_bandwidth
    else:
        products = sorted(m.rate for m in found if m.name == "matmul")[-2] / peak_flops
        copies = sorted(m.rate for m in found if m.name == "copy")[-2] / peak_bytes
    start = rates("cpu") if device.type == "cpu" else Rates(name="")
    gathers = [m for m in found if m.name == "all-gather"]
    fields: dict[str, float] = {
        "gemm_efficiency": min(products, 1.0), "attention_efficiency": min(products, 1.0) * 0.66,
        "memory_efficiency": min(copies, 1.0),
    }  # fmt: skip
    if gathers:
        fields |= {"tp_bandwidth": max(m.rate for m in gathers), "tp_latency_seconds": min(m.seconds for m in gathers)}
    names = {"name": f"measured-{device.type}", "origin": f"meshmark calibrate on {os.uname().machine}"}
    return dataclasses.replace(start, **names, **fields)  # type: ignore[arg-type]


def measure_matmuls(device: torch.device, dtype: torch.dtype, budget: float) -> list[Measurement]:
    """Square products of rising size, as many as fit the budget."""
    import torch

    sizes = [256, 512, 1024, 2048] + ([4096, 8192] if device.type == "cuda" else [])
    out = []
    for n in sizes:
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        seconds = _median_seconds(lambda a=a, b=b: a @ b, device, budget / len(sizes))  # type: ignore[misc]
        out.append(Measurement(name="matmul", size=n, seconds=seconds, rate=2.0 * n**3 / seconds))
    return out


def measure_copies(device: torch.device, budget: float) -> list[Measurement]:
    """Copies inside the device's memory; bytes read and written both count."""
    import torch

    sizes = [2**20, 2**24, 2**27]
    out = []
    for size in sizes:
        source = torch.zeros(size // 4, device=device)
        target = torch.empty_like(source)
        seconds = _median_seconds(lambda s=source, t=target: t.copy_(s), device, budget / len(sizes))  # type: ignore[misc]
        out.append(Measurement(name="copy", size=size, seconds=seconds, rate=2.0 * size / seconds))
    return out


def measure_all_gathers(device: torch.device, budget: float) -> list[Measurement]:
    """All-gathers over the initialised process group; none without one."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    world, sizes, out = dist.get_world_size(), [2**12, 2**18, 2**22], []
    for size in sizes:
        part = torch.zeros(max(1, size // 4 // world), device=device)
        parts = [torch.empty_like(part) for _ in range(world)]
        seconds = _median_seconds(lambda p=part, w=parts: dist.all_gather(w, p), device, 0.0)  # type: ignore[misc]
        moved = 4.0 * part.numel() * (world - 1)
        out.append(Measurement(name="all-gather", size=size, seconds=seconds, rate=moved / seconds))
    return out


def _median_seconds(run: Callable[[], object], device: torch.device, budget: float) -> float:
    """Median of at least five timed runs, more while the budget lasts; the first two are warm-up."""
    import torch

    samples: list[float] = []
    start = time.perf_counter()
    while len(samples) < 7 or (time.perf_counter() - start < budget and len(samples) < 200):
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        samples.append(time.perf_counter() - begin)
    kept = sorted(samples[2:])
    return max(kept[len(kept) // 2], 1.0 / TERA)


def main() -> int:
    """Under torchrun: measure collectives too."""
    import torch
    import torch.distributed as dist

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--seconds", type=float, default=20.0)
    parsed = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        return calibrate_here(parsed.output, parsed.seconds)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
