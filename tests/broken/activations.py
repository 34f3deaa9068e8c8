"""Engines that train correctly and hold other activations than they should."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from meshmark.adapter.engine import Engine, RankContext, initial_model
from meshmark.adapters.ddp import DDP, DDPEngine
from meshmark.reference.objective import build_optimizer
from meshmark.spec.case import Case


class _KeepsLogits(DDPEngine):
    kept: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        self.kept = super().forward(inputs)
        return self.kept


class _Recomputes(DDPEngine):
    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = checkpoint(super().forward, inputs, use_reentrant=False)
        return logits


class _Copies(DDPEngine):
    """Hands the model a copy of its input, as needless as it is harmless: 8 bytes a token."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.copy = inputs.clone()
        return super().forward(self.copy)


class KeepsLogits(DDP):
    engine: type[DDPEngine] = _KeepsLogits

    def build(self, case: Case, context: RankContext) -> Engine:
        model = initial_model(case, torch.device("cpu"))
        module: DistributedDataParallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return self.engine(case, context, module, build_optimizer(case.workload.optimizer, model.named_parameters()))


class Recomputes(KeepsLogits):
    engine = _Recomputes


class Copies(KeepsLogits):
    engine = _Copies
