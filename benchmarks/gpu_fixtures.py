"""Records what NCCL's flight recorder, the driver and PyTorch's allocator say on this machine: `python -m
benchmarks.gpu_fixtures FOLDER`. One process, one GPU: groups of several ranks take several GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from meshmark.measure.flight_recorder import dump


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    torch.cuda.set_device(0)
    _communicate(torch.ones(1000, device="cuda"))
    torch.cuda.synchronize()
    _write(folder / "flight-recorder.json", dump())
    _write(folder / "memory-stats.json", torch.cuda.memory_stats())
    _write(folder / "memory-free-total.json", torch.cuda.mem_get_info())
    for name, command in (("list", ["-L"]), ("all", ["-q", "-x"]), ("topology", ["topo", "-m"])):
        told = subprocess.run(["nvidia-smi", *command], capture_output=True, text=True)
        (folder / f"nvidia-smi-{name}.txt").write_text(told.stdout + told.stderr)
    dist.destroy_process_group()


def _communicate(x: torch.Tensor) -> None:
    out = torch.empty_like(x)
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    dist.all_gather_into_tensor(out, x)
    dist.reduce_scatter_tensor(out, x)
    dist.all_gather([out], x)
    dist.all_to_all_single(out, x)
    dist.barrier()
    with dist._coalescing_manager(device=x.device):  # type: ignore[attr-defined]
        dist.all_gather_into_tensor(out, x)
        dist.all_gather_into_tensor(x, out)


def _write(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=1, default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
