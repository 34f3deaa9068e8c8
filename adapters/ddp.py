"""PyTorch DistributedDataParallel: a replica a rank, gradients all-reduced in buckets (arXiv:2006.15704)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from meshmark.adapter.capabilities import Capabilities
from meshmark.adapter.contract import Adapter
from meshmark.adapter.data_parallel import DataParallelEngine, initial_model
from meshmark.adapter.engine import Engine, RankContext
from meshmark.reference.objective import build_optimizer
from meshmark.spec.case import Case
from meshmark.spec.model_spec import Family
from meshmark.spec.precision import Dtype, Precision
from meshmark.theory.recipe import TrainingRecipe, eager_recipe

# Functions of its own, for DDP lets PyTorch's run on NCCL alone (it knows them by name), though gloo sums bf16 too.
_HOOKS: dict[Dtype, Callable[[dist.ProcessGroup, Any], Future[Tensor]]] = {
    Dtype.BF16: lambda group, bucket: bf16_compress_hook(group, bucket),
}
"""By the format that gradients are reduced in, where it is not the one that they are held in."""


class DDPEngine(DataParallelEngine):
    module: DistributedDataParallel

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        with contextlib.nullcontext() if last else self.module.no_sync():
            yield

    def inner(self) -> nn.Module:
        inner: nn.Module = self.module.module
        return inner


class DDP(Adapter):
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        families=frozenset(Family),
        precisions=frozenset(Precision.PRESETS.values()),
    )

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        return eager_recipe(case, "eager-ddp")

    def build(self, case: Case, context: RankContext) -> Engine:
        model = initial_model(case, context.device)
        device_ids = [context.device] if context.device.type == "cuda" else None
        module: DistributedDataParallel = DistributedDataParallel(
            model,
            device_ids=device_ids,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # each replica keeps its own statistics, as the workload defines them
            find_unused_parameters=case.workload.skipped_block is not None,
        )
        if case.precision.narrows_reduction:
            module.register_comm_hook(dist.group.WORLD, _HOOKS[case.precision.reduction])
        optimizer = build_optimizer(case.workload.optimizer, model.named_parameters())
        return DDPEngine(case, context, module, optimizer)
