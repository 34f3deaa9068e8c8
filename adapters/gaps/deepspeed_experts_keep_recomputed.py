# /// script
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "A layer of experts keeps what its checkpoint recomputed until the next step"
# framework = "deepspeed"
# symptom = "With activation checkpointing, what a block recomputed before its experts stays in memory after backward."
# cause = """
# `MOELayer.forward` keeps `self.l_aux` (sharded_moe.py), a tensor with its graph. The backward pass frees the graph of
# the forward pass; the graph of the recomputed one, which nothing else refers to, lives on through `l_aux`."""
# processes = 1
# ///
import ctypes
import os
import sys

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from torch import nn
from torch.utils.checkpoint import checkpoint

deepspeed.ops.__compatible_ops__ = {}
deepspeed.init_distributed("gloo")
WIDTH, TOKENS = 64, 16384
expert = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
layer = MoE(WIDTH, expert, num_experts=2, k=2, drop_tokens=False, top2_2nd_expert_sampling=False)
layer.set_deepspeed_parallelism()
before = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def block(tokens: torch.Tensor) -> torch.Tensor:
    return layer(before(tokens))[0]


def resident_mib() -> float:
    ctypes.CDLL(None).malloc_trim(0)  # gives back what is free
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def kept_mib(recomputes: bool) -> float:
    """Return the memory that is freed once the layer forgets `l_aux`, after a forward and a backward pass."""
    tokens = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    output = checkpoint(block, tokens, use_reentrant=False) if recomputes else block(tokens)
    output.sum().backward()
    del output, tokens
    resident = resident_mib()
    layer.deepspeed_moe.l_aux = None
    return resident - resident_mib()


activation = TOKENS * 4 * WIDTH * 4 / 2**20
plain, recomputed = kept_mib(False), kept_mib(True)
if recomputed > plain + activation / 2:
    sys.exit(f"expected: {plain:.0f} MiB kept after a step, as without recomputation; got: {recomputed:.0f} MiB")
