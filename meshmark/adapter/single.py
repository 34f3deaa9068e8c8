"""Plain PyTorch in one process: in float64 the truth, in a case's precision the yardstick of noise."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from meshmark.adapter.capabilities import Capabilities, Feature
from meshmark.adapter.contract import Adapter
from meshmark.adapter.data_parallel import AUTOCAST, DataParallelEngine, initial_model
from meshmark.adapter.engine import Engine, RankContext
from meshmark.reference.objective import build_optimizer
from meshmark.spec.case import Case
from meshmark.spec.model_spec import Family
from meshmark.spec.precision import Precision


class SingleEngine(DataParallelEngine):
    cast_weights = False
    """In mixed precision, cast the weights (and so the whole residual stream) as FSDP2 and DeepSpeed do, in place of
    autocast, which keeps norms and residuals in float32."""

    def forward(self, inputs: Tensor) -> Tensor:
        dtype = AUTOCAST.get(self.case.precision)
        if not self.cast_weights or dtype is None:
            return super().forward(inputs)
        weights = {name: parameter.to(dtype) for name, parameter in self.module.named_parameters()}
        logits: Tensor = torch.func.functional_call(self.module, weights, (inputs,))
        return logits


class Single(Adapter):
    capabilities: ClassVar = Capabilities(
        precisions=frozenset(Precision),
        families=frozenset(Family),
        lacks={Feature.RESHARD: "it runs on one rank alone"},
    )

    def build(self, case: Case, context: RankContext) -> Engine:
        model = initial_model(case, context.device)
        optimizer = build_optimizer(case.workload.optimizer, model.named_parameters())
        return SingleEngine(case, context, model, optimizer)
