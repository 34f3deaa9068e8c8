"""Loops of users who asked why their training differs, each reduced to the cause that its thread found.

    meshmark check --nproc 2 tests/scripts/threads.py NAME

- `fsdp_size_of_one`: FSDP1's HYBRID_SHARD over shards of one rank. Gradients are never synchronised
  (verl-project/verl#7493, pytorch/pytorch#154888).
- `loss_grows`: losses of micro-batches are not divided by their number (huggingface/transformers#37766,
  hiyouga/LLaMA-Factory#7743).
- `schedule_by_process`: a prepared schedule steps once for every process (huggingface/accelerate#1382,
  huggingface/diffusers#3954).
- `negatives_without_gradient`: embeddings of other ranks are gathered without their graph (facebookresearch/DPR#109).
- `means_of_ranks`: every rank divides by its own number of tokens (huggingface/transformers#34242).
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NAME = sys.argv[1]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = torch.Generator().manual_seed(rank)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(50, 32), nn.Linear(32, 64), nn.Linear(64, 50)

    def forward(self, tokens):
        return self.head(F.gelu(self.inner(self.embedding(tokens))))


def tokens_of(lengths):
    tokens = torch.randint(50, (len(lengths), 17), generator=data)
    targets = tokens[:, 1:].clone()
    for row, length in enumerate(lengths):
        targets[row, length:] = -100
    return tokens[:, :-1], targets


def loss_of(model, inputs, targets):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def fsdp_size_of_one():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
    model = FullyShardedDataParallel(
        Words(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_id=torch.device("cpu")
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(5):
        loss_of(model, *tokens_of([16] * 4)).backward()
        optimizer.step()
        optimizer.zero_grad()


def loss_grows():
    model = DistributedDataParallel(Words())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(5):
        for _ in range(4):
            loss_of(model, *tokens_of([16] * 2)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        optimizer.zero_grad()


def schedule_by_process():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for _ in range(5):
        accelerator.backward(loss_of(model, *tokens_of([16] * 4)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def negatives_without_gradient():
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(5):
        pairs = torch.randn(8, 16, generator=data)
        questions, passages = model(pairs).chunk(2)
        everywhere = [torch.empty_like(passages) for _ in range(world)]
        dist.all_gather(everywhere, passages.detach())
        everywhere[rank] = passages
        scores = questions @ torch.cat(everywhere).T
        F.cross_entropy(scores, torch.arange(len(questions)) + rank * len(questions)).backward()
        optimizer.step()
        optimizer.zero_grad()


def means_of_ranks():
    model = DistributedDataParallel(Words())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(5):
        loss_of(model, *tokens_of([2, 3] if rank else [16, 15])).backward()
        optimizer.step()
        optimizer.zero_grad()


globals()[NAME]()
dist.destroy_process_group()
