"""Loops in bf16 over two micro-batches a step: `mixed.py NAME [DEFECT]`.

`fsdp2` and `fsdp1` shard by block with a policy of mixed precision, `weights` are bf16, and `compiled` is a compiled
model under DDP and autocast, as nanoGPT's. The defects: `reduced_early` reduces before the last micro-batch, `undivided`
adds losses of micro-batches up, and `other_masks` computes activations again with other dropout masks.
"""

import contextlib
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

BF16 = torch.bfloat16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)


class Model(nn.Module):
    def __init__(self, keeps_masks: bool) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(61, 32), nn.Linear(32, 61)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.keeps_masks = keeps_masks

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=self.keeps_masks)
        return self.head(x)


def main(kind: str, defect: str = "") -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = inner = Model(keeps_masks=defect != "other_masks")
    if kind == "fsdp2":
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    elif kind == "fsdp1":
        policy = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32)
        model = FullyShardedDataParallel(
            inner, auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=policy, device_id=torch.device("cpu"),
            use_orig_params=True,
        )  # fmt: skip
    elif kind == "weights":
        model = DistributedDataParallel(inner.to(BF16))
    else:
        model = DistributedDataParallel(torch.compile(inner, backend="aot_eager"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(dist.get_rank())
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(5):
        for micro in range(2):
            tokens = torch.randint(61, (4, 17), generator=data)
            last = micro == (0 if defect == "reduced_early" else 1)
            if kind == "fsdp2":
                model.set_requires_gradient_sync(last)
            with contextlib.nullcontext() if last or kind == "fsdp2" else model.no_sync():
                with torch.autocast("cpu", BF16, enabled=kind == "compiled"):
                    logits = model(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
                (loss if defect == "undivided" else loss / 2).backward()
        if kind != "fsdp1":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


main(*sys.argv[1:])
