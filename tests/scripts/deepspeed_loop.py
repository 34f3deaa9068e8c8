"""A loop as DeepSpeed's tutorials write it: `deepspeed_loop.py STAGE [OPTION ...] [DEFECT]`.

Options are `bf16`, `round_robin`, `torch_style`, which calls `loss.backward()`, and DeepSpeed's compiled `cpu_adam`,
which `make install` built, and `fused_adam`, which DeepSpeed compiles for minutes; no test waits for it.
"""

import contextlib
import sys

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from meshmark.adapters.deepspeed.operators import load

DEFECTS = ("same_rows", "divided_twice", "counted_twice", "never_reduced", "predivided", "clipped_by_torch", "bypass")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 18)
        self.norm = nn.LayerNorm(18)
        self.up, self.down = nn.Linear(18, 37), nn.Linear(37, 18)
        self.head = nn.Linear(18, 7)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head((x + self.down(F.gelu(self.up(self.norm(x))))).mean(1))


def main(stage: int, options: list[str]) -> None:
    torch.manual_seed(0)
    model = Net()
    accumulated = 2
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulated,
        "gradient_clipping": 0.0 if "clipped_by_torch" in options else 0.5,
        "bf16": {"enabled": "bf16" in options},
        "zero_optimization": {"stage": stage, "round_robin_gradients": "round_robin" in options},
        "zero_allow_untested_optimizer": True,
    }
    if "predivided" in options:  # at stage 3, DeepSpeed does not multiply again
        config |= {"gradient_predivide_factor": 2.0, "zero_optimization": {"stage": stage, "reduce_scatter": False}}
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    if "cpu_adam" in options:
        load("cpu_adam")
    compiled = DeepSpeedCPUAdam if "cpu_adam" in options else FusedAdam if "fused_adam" in options else None
    optimizer = compiled(groups, lr=1e-2) if compiled else torch.optim.AdamW(groups, lr=1e-2)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randint(31, (64, 6), generator=generator), torch.randint(7, (64,), generator=generator))
    sampler = DistributedSampler(data, num_replicas=1, rank=0) if "same_rows" in options else DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for number, (tokens, targets) in enumerate(loader):
        loss = F.cross_entropy((engine.module if "bypass" in options else engine)(tokens).float(), targets)
        if "divided_twice" in options:
            loss = loss / accumulated
        with engine.no_sync() if "never_reduced" in options else contextlib.nullcontext():
            loss.backward() if "torch_style" in options else engine.backward(loss)
        if "clipped_by_torch" in options:
            nn.utils.clip_grad_norm_(engine.parameters(), 0.5)
        if "counted_twice" not in options or number % accumulated:
            engine.step()


main(int(sys.argv[1]), sys.argv[2:])
