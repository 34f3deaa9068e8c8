# /// script
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "ZeRO-3 keeps a gathered parameter until the backward pass, where a view of it is used"
# framework = "deepspeed"
# symptom = "The storage of gathered experts is still there after the forward pass; that of a linear layer is not."
# cause = """
# A parameter is released by giving it other data. Autograd saves the view that the product reads, which keeps the whole
# gathered storage alive: one expert where a parameter holds all, as in Transformers, or a transpose, as in a GRU."""
# processes = 2
# ///
import sys
import time

import deepspeed
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

deepspeed.ops.__compatible_ops__ = {}  # On a CPU, DeepSpeed would compile an operator.


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4, 4))
        self.gathered: StorageWeakRef | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.gathered = StorageWeakRef(self.weight.untyped_storage())
        return nn.functional.linear(x, self.weight[0]) + nn.functional.linear(x, self.weight[1])


class Linear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.gathered = StorageWeakRef(self.weight.untyped_storage())
        return super().forward(x)


model = nn.Sequential(Linear(4, 4, bias=False), Experts(), Linear(4, 4, bias=False))
zeros = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")
config = {
    "train_batch_size": 2,
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, **{f"stage3_{name}": 0 for name in zeros}},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
loss = engine(torch.ones(1, 4)).sum()
deadline = time.monotonic() + 5
while not model[0].gathered.expired() and time.monotonic() < deadline:
    time.sleep(0.01)  # gloo's thread may keep a buffer for a moment
there = [not layer.gathered.expired() for layer in model]
assert not there[0], there  # a linear layer is released: DeepSpeed has a product of its own for it
if there[1]:
    sys.exit("expected: all gathered weights are released after the forward pass; got: that of the experts is not")
