"""DDP, FSDP1 or a reduction by hand, and what a script may do between its backward pass and the optimizer's step."""

import copy
import math
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

WAY = sys.argv[1]
LR = 1e-8 if "tiny steps" in WAY else 1e-2
dist.init_process_group("gloo")
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 32), nn.Linear(32, 10)
        if WAY in ("another's gradient", "a small tensor lost"):
            self.spare = nn.Linear(16, 10)

    def forward(self, x):
        small = 1e-4 * self.spare(x) if WAY == "a small tensor lost" else 0.0
        return self.head(torch.tanh(self.first(x))) + small


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(100, 16, sparse=True, mode="sum"), nn.Linear(16, 10)

    def forward(self, words):
        return self.head(self.words(words))


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter, self.head = nn.Parameter(torch.ones(9, dtype=torch.cfloat)), nn.Linear(16, 10)

    def forward(self, x):
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=16))


net = Bag() if "sparse" in WAY else Fourier() if WAY == "complex" else Net()
if WAY == "infinite norm of a shard":
    model = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
else:
    model = (
        net
        if "by hand" in WAY or "in bfloat16" in WAY or WAY == "sparse, not reduced"
        else DistributedDataParallel(net, find_unused_parameters=WAY == "another's gradient")
    )
if "sparse" in WAY:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
elif WAY == "group taken out":
    optimizer = torch.optim.AdamW([{"params": net.first.parameters()}, {"params": net.head.parameters()}], lr=LR)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)


def hook(optimizer, args, kwargs):
    """Runs when the step begins, as a library's clipping or warm-up does."""
    if WAY == "clips in a hook":
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    for group in optimizer.param_groups:
        group["lr"] *= 1.1 if WAY == "warms up in a hook" else 1.0


def rounding_hook(optimizer, args, kwargs):
    """Runs when the step ends."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


optimizer.register_step_pre_hook(hook)
if "communication hook" in WAY:

    def sent_in_bf16(_, bucket):
        sent = bucket.buffer().bfloat16().roll(1 if "shifts" in WAY else 0).float()
        sums = dist.all_reduce(sent, async_op=True).get_future()
        return sums.then(lambda future: (future.value()[0] / world).bfloat16().float())

    model.register_comm_hook(None, sent_in_bf16)
adam = sys.modules["torch.optim.adam"].adam
if WAY == "tiny steps, never made":
    sys.modules["torch.optim.adam"].adam = lambda *args, **kwargs: None
if WAY == "tiny steps upwards":
    sys.modules["torch.optim.adam"].adam = lambda *args, **kwargs: adam(*args, **{**kwargs, "maximize": True})
if WAY == "rounds in a hook after the step":
    optimizer.register_step_post_hook(rounding_hook)
step_once = torch.compile(lambda: optimizer.step(), backend="eager") if WAY == "compiled" else optimizer.step
initial = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
rows = torch.Generator().manual_seed(100 + rank)
for step in range(6):
    if WAY == "begins again" and step == 2:  # after a warm-up of compiled code
        model.load_state_dict(initial[0])
        optimizer.load_state_dict(initial[1])
    if WAY == "state emptied":
        optimizer.state.clear()
    x = torch.randint(100, (8, 5), generator=rows) if "sparse" in WAY else torch.randn(8, 16, generator=rows)
    y = torch.randint(10, (8,), generator=rows)
    if WAY == "shares rows":
        x[:4] = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
    if WAY == "hands rows on":
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step - rank))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    (1e-5 * loss if "tiny gradients" in WAY else loss).backward()
    if "by hand" in WAY:
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world**2 if "twice" in WAY else world
    if "in bfloat16" in WAY:
        for parameter in net.parameters():
            sent = parameter.grad.bfloat16()
            dist.all_reduce(sent)
            parameter.grad = (sent / world).float().roll(1 if "shifted" in WAY else 0)
    if WAY == "sparse, not reduced":
        for parameter in net.head.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
    if "infinite norm" in WAY or "norm of order 1" in WAY:
        bound = 1e-3 if "shard" in WAY else 1e6
        nn.utils.clip_grad_norm_(model.parameters(), bound, norm_type=math.inf if "infinite" in WAY else 1.0)
    if WAY in ("infinite norm, then halved", "norm of order 1, then halved"):
        for parameter in model.parameters():
            parameter.grad *= 0.5
    if WAY == "infinite norm, then random":
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
    if WAY == "a part clipped, another dropped":
        nn.utils.clip_grad_norm_(net.first.parameters(), 1e6)
        for parameter in net.head.parameters():
            parameter.grad = None
    if WAY == "a part clipped, another zeroed":
        nn.utils.clip_grad_norm_(net.first.parameters(), 1e6)
        net.head.weight.grad = torch.zeros_like(net.head.weight)
    if WAY == "asks for the norm first":
        nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    if WAY == "a small tensor lost":
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        net.spare.weight.grad = torch.zeros_like(net.spare.weight)
    if "clips twice" in WAY:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
    if WAY == "clips twice, then halves":
        for parameter in model.parameters():
            parameter.grad *= 0.5
    if "skips" in WAY:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if step == 1:
            continue
    if WAY == "another's gradient":
        net.spare.weight.grad = net.head.weight.grad[:, :16].clone()
        dist.all_reduce(net.spare.weight.grad)  # as gradients that are reduced by hand
    if WAY == "weights shrink":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
    step_once()
    if WAY == "group taken out" and step == 1:
        optimizer.param_groups.pop(0)
dist.destroy_process_group()
