"""An encoder and a decoder, each with a wrapper of its own, and one optimizer: `chain.py [undivided]`."""

import itertools
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
encoder = DistributedDataParallel(nn.Sequential(nn.Linear(12, 32), nn.ReLU()))
decoder = DistributedDataParallel(nn.Linear(32, 5))
optimizer = torch.optim.Adam(itertools.chain(encoder.parameters(), decoder.parameters()), 1e-3)
generator = torch.Generator().manual_seed(dist.get_rank())
for _ in range(5):
    for _ in range(2):
        x, y = torch.randn(16, 12, generator=generator), torch.randint(5, (16,), generator=generator)
        loss = F.cross_entropy(decoder(encoder(x)), y)
        (loss if "undivided" in sys.argv else loss / 2).backward()
    nn.utils.clip_grad_norm_(itertools.chain(encoder.parameters(), decoder.parameters()), 0.2)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
