"""Tensor parallelism by `parallelize_module`: `tensor_parallel.py [sequence] [fsdp] [loss_parallel] [DEFECT]`.

`fsdp` shards over two groups of two ranks each. `loss_parallel` leaves the logits sharded over classes.
"""

import contextlib
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

DEFECTS = ("rows_by_rank", "same_rows", "undivided", "norms_left_out")


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.norm, self.out_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 50), nn.Linear(50, width)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.q(y), self.k(y), self.v(y)))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.out_norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(33, 16)
        self.blocks = nn.ModuleList(Block(16, 4) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 33, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallelize(model: Net, mesh, sequence: bool, norms: bool, sharded_loss: bool) -> None:
    whole, part = Replicate(), Shard(1)
    plan = {"embed": RowwiseParallel(input_layouts=whole, output_layouts=part if sequence else whole)}
    plan["head"] = ColwiseParallel(
        input_layouts=part if sequence else whole,
        output_layouts=Shard(-1) if sharded_loss else whole,
        use_local_output=not sharded_loss,
    )
    plan |= {"norm": SequenceParallel()} if norms else {}
    for number in range(len(model.blocks)):
        name = f"blocks.{number}"
        for column in ("q", "k", "v", "up"):
            plan[f"{name}.{column}"] = ColwiseParallel(input_layouts=part if sequence else whole)
        for row in ("o", "down"):
            plan[f"{name}.{row}"] = RowwiseParallel(output_layouts=part if sequence else whole)
        plan |= {f"{name}.norm": SequenceParallel(), f"{name}.out_norm": SequenceParallel()} if norms else {}
    parallelize_module(model, mesh, plan)


def main(options: list[str]) -> None:
    dist.init_process_group("gloo")
    groups = 2 if "fsdp" in options else 1
    mesh = init_device_mesh("cpu", (groups, dist.get_world_size() // groups), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Net()
    sequence = "sequence" in options
    norms = sequence and "norms_left_out" not in options
    sharded_loss = "loss_parallel" in options
    parallelize(model, mesh["tp"], sequence, norms, sharded_loss)
    if "fsdp" in options:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    row = dist.get_rank() if "rows_by_rank" in options else mesh.get_local_rank("dp")
    generator = torch.Generator().manual_seed(0 if "same_rows" in options else row)
    for _ in range(6):
        for _ in range(2):
            tokens = torch.randint(33, (4, 9), generator=generator)
            with loss_parallel() if sharded_loss else contextlib.nullcontext():
                loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                (loss if "undivided" in options else loss / 2).backward()
        if norms:  # otherwise some gradients are no DTensors, which PyTorch cannot clip together
            nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


main(sys.argv[1:])
