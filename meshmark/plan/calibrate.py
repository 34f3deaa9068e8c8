"""`meshmark calibrate`: measure the local machine and the share of its peaks that is reached, in about a minute.

Every rank is a separate process, as in training: one per GPU, or one per core (`OMP_NUM_THREADS` cores). To measure
between nodes, run `torchrun --nnodes 2 ... -m meshmark.plan.calibrate -o FILE` on each; rank 0 writes.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from meshmark.errors import InputError
from meshmark.plan.calibration_file import Calibrated, write_calibrated
from meshmark.plan.provenance import provenance
from meshmark.plan.rates import HostRates, Rates, SpreadRates
from meshmark.plan.stacks import rates_for
from meshmark.spec.hardware import GIGA, Gpu, gpu, gpu_of_device
from meshmark.theory.memory import Overheads

if TYPE_CHECKING:
    import torch

    from meshmark.plan.microbenchmarks import Bench, Measurement

_KIB, _MIB = 2**10, 2**20
_COLLECTIVE_SIZES = [4 * _KIB, 64 * _KIB, 512 * _KIB, 2 * _MIB, 8 * _MIB]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Microbenchmarks:
    """All measurements of one machine."""

    main_dtype: str
    """The arithmetic that the efficiencies are for."""
    on_device: Sequence[Measurement]
    inside: Sequence[Measurement] = ()
    """Collectives between the ranks of a node."""
    across: Sequence[Measurement] = ()
    """Collectives between nodes."""
    overlap: float = 0.0

    def of(self, kind: str, dtype: str | None = None) -> list[Measurement]:
        return [m for m in self.on_device if m.kind == kind and dtype in (None, m.dtype)]


def calibrate_here(output: Path | None, seconds: float, ranks: int | None = None) -> int:
    """Start the ranks, measure, print the result, and write it if `output` is given."""
    import torch
    from torch.multiprocessing.spawn import ProcessRaisedException, spawn

    from meshmark.environment import threads_of_ranks

    if not 0 < seconds <= 3600:
        raise InputError(f"{seconds:g} seconds to calibrate in; expected more than 0 and at most an hour's 3600")
    cuda = torch.cuda.is_available()
    threads = threads_of_ranks(os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    most = torch.cuda.device_count() if cuda else max(1, len(os.sched_getaffinity(0)) // threads)
    count = most if ranks is None else ranks
    if not 1 <= count <= most:
        raise InputError(f"{count} ranks to calibrate with, expected 1 to {most}: one a {'GPU' if cuda else 'core'}")
    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{folder}/rendezvous"
        try:
            spawn(_rank, (count, where, output, seconds), nprocs=count)  # type: ignore[no-untyped-call]
        except ProcessRaisedException as error:
            last = str(error).strip().splitlines()[-1]
            if not last.startswith((mistake := f"{InputError.__module__}.{InputError.__name__}") + ": "):
                raise
            raise InputError(last.removeprefix(f"{mistake}: ")) from None  # a rank's mistake of the user's
    return 0


def _rank(rank: int, world: int, where: str, output: Path | None, seconds: float) -> None:
    """One process of `calibrate_here`."""
    import torch
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    if world > 1:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=where, rank=rank, world_size=world)
    try:
        calibrate_rank(output, seconds)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def calibrate_rank(output: Path | None, seconds: float) -> None:
    """Measure with all ranks of an initialised process group, or alone. The first rank prints and writes."""
    import torch
    import torch.distributed as dist

    from meshmark.plan.microbenchmarks import Bench

    if not torch.cuda.is_available():
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    world = dist.get_world_size() if dist.is_initialized() else 1
    bench = Bench(device=device, world=world, collectives=int(max(5, min(40, 2 * seconds))))
    found = measure(bench, seconds, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    for one in (*found.on_device, *found.inside, *found.across):
        unit = "GFLOP/s" if one.kind in ("product", "attention") else "GB/s"
        print(f"{one.kind:14} {one.dtype} {one.size:12d} {one.seconds * 1e6:12.1f} us {one.rate / GIGA:10.2f} {unit}")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    there = machine_from(found, gpu_from(found, device, local), world)
    peaks = ", ".join(f"{dtype} {flops / GIGA:.4g}" for dtype, flops in there.gpu.peak_flops.items())
    print(f"{there.gpu.name}: {peaks} GFLOP/s a rank. {provenance(there.gpu, there.rates)}")
    if output:
        write_calibrated(output, there)
        print(f"machine and rates: {output}; use: meshmark plan --gpu {output} ...")


def measure(bench: Bench, seconds: float, local_world: int) -> Microbenchmarks:
    """Run all measurements in about `seconds`. `local_world` ranks are on this node."""
    import torch
    import torch.distributed as dist

    from meshmark.plan import microbenchmarks as m

    cuda = bench.device.type == "cuda"
    main, tokens = (torch.bfloat16, 4096) if cuda else (torch.float32, 512)
    widths = [512, 1024, 2048, 4096, 8192] if cuda else [128, 256, 512, 1024]
    others, width = ([torch.float16, torch.float32], 4096) if cuda else ([torch.bfloat16], 256)
    length, copied = (2048, 2**28) if cuda else (256, 2**26)
    each = seconds / 12.0
    found = [m.measure_product(bench, main, w, tokens, each) for w in widths]
    found += [m.measure_product(bench, dtype, width, tokens // 4, each) for dtype in others]
    found.append(m.measure_attention(bench, main, length, each))
    found.append(m.measure_elementwise(bench, main, widths[-2], tokens, each))
    found += [m.measure_copy(bench, size, each) for size in (copied // 16, copied)]
    findings = Microbenchmarks(main_dtype=m.name_of(main), on_device=found)
    if bench.world == 1:
        return findings
    groups = [dist.new_group(list(range(first, first + local_world))) for first in range(0, bench.world, local_world)]
    own = groups[dist.get_rank() // local_world]
    sizes = [16 * size for size in _COLLECTIVE_SIZES] + [1024 * _MIB] if cuda else _COLLECTIVE_SIZES
    inside = m.measure_collectives(bench, sizes, own) if local_world > 1 else []
    across = m.measure_collectives(bench, sizes) if bench.world > local_world else []
    overlap = m.measure_overlap(bench, main, widths[-2], tokens, sizes[3])
    return dataclasses.replace(findings, inside=inside, across=across, overlap=overlap)


def gpu_from(found: Microbenchmarks, device: torch.device, local_world: int) -> Gpu:
    """Return the machine.

    A known GPU uses its datasheet, so that its MFU means the same as elsewhere. For any other, peaks are measured: the
    fastest product of each arithmetic, the largest copy, and the memory per rank.
    """
    import torch

    from meshmark.environment import describe, versions

    if device.type == "cuda" and (known := gpu_of_device(torch.cuda.get_device_name(device))):
        return known
    here = describe(device.type, "", 1)
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    link = latency_and_bandwidth(found.inside)[1] if found.inside else found.of("copy")[-1].rate
    network = latency_and_bandwidth(found.across)[1] if found.across else link
    peaks = {
        dtype: max(m.rate for m in found.of("product", dtype))
        for dtype in dict.fromkeys(m.dtype for m in found.of("product"))
    }
    return Gpu(
        name=re.sub(r"[^a-z0-9]+", "-", here.machine.lower()).strip("-") or device.type,
        peak_flops=peaks,
        memory_bytes=float(total or here.memory_bytes / local_world),
        memory_bandwidth=found.of("copy")[-1].rate,
        link_bandwidth=link,
        network_bandwidth=network,
        gpus_per_node=local_world,
        source=f"meshmark calibrate, {local_world} a node of {here.num_cpus} CPUs, torch {versions()['torch']}, "
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
    )


def machine_from(found: Microbenchmarks, there: Gpu, world: int) -> Calibrated:
    """Return the measured rates as shares of the machine.

    Rates that were not measured (such as links between nodes) come from the planner's rates for a known GPU, or else
    from inside the node.
    """
    try:
        # By its datasheet's links: what was measured is written over them below. No run says how far it is from a plan.
        start = dataclasses.replace(rates_for(gpu(there.name)), spread=SpreadRates())
    except InputError:
        start = Rates(name="", host=HostRates(step_seconds=0.0), memory=Overheads())
    peak = there.peak_flops[found.main_dtype]
    efficiency, half_width = width_curve(found.of("product", found.main_dtype), peak)
    numbers: dict[str, float] = {
        "kernels.gemm_efficiency": efficiency,
        "kernels.gemm_half_width": half_width,
        "kernels.attention_efficiency": min(1.0, found.of("attention")[0].rate / peak),
        "kernels.memory_efficiency": min(1.0, found.of("elementwise")[0].rate / there.memory_bandwidth),
    }
    if found.inside:
        latency, bandwidth = latency_and_bandwidth(found.inside)
        numbers |= {
            "network.tp_latency_seconds": latency,
            "network.tp_bandwidth": bandwidth,
            "network.overlap": found.overlap,
        }
        if not start.name:
            numbers |= {
                "network.hop_seconds": latency,
                "network.tp_network_bandwidth": bandwidth,
                "network.node_bandwidth": bandwidth,
                "network.p2p_bandwidth": bandwidth,
            }
    if found.across:
        latency, bandwidth = latency_and_bandwidth(found.across)
        numbers |= {
            "network.hop_seconds": latency / max(1, world - 1),
            "network.tp_network_bandwidth": bandwidth,
            "network.node_bandwidth": bandwidth * there.gpus_per_node,
            "network.p2p_bandwidth": bandwidth,
        }
    origin = f"measured: {there.source}" if not start.name else f"measured by meshmark calibrate over {start.origin}"
    named = dataclasses.replace(start, name=there.name, origin=origin)
    return Calibrated(gpu=there, rates=named.moved(numbers))


def width_curve(products: Sequence[Measurement], peak: float) -> tuple[float, float]:
    """Return the efficiency of very wide products, and the width at which half of it is reached.

    They are fitted as a line through 1/rate over 1/width, by least squares of relative errors.
    """
    inverse = np.array([peak / m.rate for m in products])
    terms = np.array([[1.0, 1.0 / m.size] for m in products]) / inverse[:, None]
    level, slope = np.linalg.lstsq(terms, np.ones(len(products)), rcond=None)[0]
    if level < 1.0:  # faster than the peak when extrapolated: they reach all of it
        level, slope = 1.0, terms[:, 1] @ (1.0 - terms[:, 0]) / (terms[:, 1] @ terms[:, 1])
    if slope < 0.0:  # slower the wider: no such curve
        return min(1.0, float(np.median(1.0 / inverse))), 0.0
    return float(1.0 / level), float(slope / level)


def latency_and_bandwidth(collectives: Sequence[Measurement]) -> tuple[float, float]:
    """Return the seconds of an empty collective, and the bytes per second of a rank.

    They are fitted as a line through time over bytes sent, by least squares of relative errors. An all-reduce counts
    as two collectives.
    """
    times = np.array([m.seconds / (2.0 if m.kind == "all_reduce" else 1.0) for m in collectives])
    sent = np.array([m.work / (2.0 if m.kind == "all_reduce" else 1.0) for m in collectives])
    terms = np.stack([np.ones(len(times)), sent], axis=1) / times[:, None]
    latency, per_byte = np.linalg.lstsq(terms, np.ones(len(times)), rcond=None)[0]
    # Noise can tilt the line below zero at an end; a tenth of the least that was seen stands there.
    latency = latency if latency > 0 else times.min() / 10.0
    per_byte = per_byte if per_byte > 0 else (times / sent).min() / 10.0
    return float(latency), float(1.0 / per_byte)


def main() -> int:
    """Entry point under torchrun, which can also measure between nodes."""
    import torch
    import torch.distributed as dist

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--seconds", type=float, default=20.0)
    parsed = parser.parse_args()
    if "RANK" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        calibrate_rank(parsed.output, parsed.seconds)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
