"""Step time through an adapter over a hand-written script of the same framework: DDP and FSDP2.

Both live in the same two ranks and take turns, step by step, on the same batches; the ratio is the median over pairs.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.goal import verdict
from meshmark.adapter.engine import RankContext
from meshmark.adapter.registry import load_adapter
from meshmark.models.transformer.module import Transformer
from meshmark.reference.data import Batch, make_batch
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.workload import workload

WORKLOAD = workload("gpt-tiny")
LAYOUTS = {
    "ddp": ("meshmark.adapters.ddp:DDP", Layout(dp=2, num_micro_batches=2)),
    "fsdp2": ("meshmark.adapters.fsdp2:FSDP2", Layout(dp=2, zero_stage=3, num_micro_batches=2)),
}
PAIRS = 100
WARMUP = 5
GOAL = 1.02


def hand_written(name: str, rank: int) -> Callable[[Batch], None]:
    """A training step as one would write it for this framework and nothing else."""
    torch.manual_seed(0)
    model: torch.nn.Module = Transformer(WORKLOAD.model)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    if name == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        mesh = init_device_mesh("cpu", (2,))
        for block in model.blocks.values():  # type: ignore[union-attr, operator]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
    spec = WORKLOAD.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=spec.learning_rate, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay
    )

    def step(batch: Batch) -> None:
        rows = len(batch.inputs) // 4
        for i in range(2):
            part = slice((2 * rank + i) * rows, (2 * rank + i + 1) * rows)
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = i == 1
            logits = model(batch.inputs[part])
            loss = F.cross_entropy(logits.flatten(0, 1), batch.targets[part].flatten(), reduction="sum")
            (loss * 2 / batch.total_weight).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), spec.clip_norm or 1.0)
        if name == "fsdp2":
            norm.full_tensor()  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()

    return step


def race(rank: int, port: int, name: str, file: str) -> None:
    """Ranks 0 and 1: write the ratio of the slowest rank's medians to `file`."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    target, layout = LAYOUTS[name]
    context = RankContext(
        rank=rank, world_size=2, device=torch.device("cpu"), backend="gloo", scratch=Path(file).parent
    )
    engine = load_adapter(target)().build(Case(adapter=name, workload=WORKLOAD, layout=layout), context)
    runners: list[Callable[[Batch], object]] = [engine.step, hand_written(name, rank)]
    ratios = []
    for pair in range(WARMUP + PAIRS):
        batch = make_batch(WORKLOAD, pair)
        seconds = [0.0, 0.0]
        for i in (0, 1) if pair % 2 else (1, 0):
            dist.barrier()
            start = time.perf_counter()
            runners[i](batch)
            seconds[i] = time.perf_counter() - start
        slowest = torch.tensor(seconds)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if pair >= WARMUP:
            ratios.append(float(slowest[0] / slowest[1]))
    if rank == 0:
        Path(file).write_text(str(statistics.median(ratios)))
    dist.barrier()


def main() -> int:
    met = []
    for name in LAYOUTS:
        with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            probe.close()
            file = str(Path(folder) / "ratio")
            torch.multiprocessing.spawn(race, (port, name, file), nprocs=2)
            met.append(verdict(f"overhead_{name}", float(Path(file).read_text()), GOAL, at_least=False))
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
