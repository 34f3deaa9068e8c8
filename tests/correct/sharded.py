"""ZeRO's stage 2 by hand: parameters are one flat tensor, and every rank updates its share of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshmark.adapter.contract import Capabilities, Feature
from meshmark.adapter.engine import Holdings, RankContext
from meshmark.adapters.ddp import DDP
from meshmark.reference.objective import build_optimizer
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.theory.memory import ExtraMemory
from tests.correct.reduction import ByHand, ByHandEngine, beside_gradients, gradient_bytes


class FlatShards(ByHandEngine):
    def __init__(self, case: Case, context: RankContext, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(case, context, module, optimizer)
        parameters = list(module.parameters())
        self.flat = torch.cat([p.detach().flatten() for p in parameters])
        self.sizes = [p.numel() for p in parameters]
        for parameter, view in zip(parameters, self.flat.split(self.sizes), strict=True):
            parameter.data = view.view_as(parameter)
        self.shard = nn.Parameter(self.flat.chunk(context.world_size)[context.rank])
        self.optimizer = build_optimizer(case.workload.optimizer, [("flat", self.shard)])

    def reduce(self) -> None:
        flat = torch.cat([gradient.flatten() for gradient in self.gradients_held()])
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(self.shard.grad, flat)
        self.shard.grad /= self.context.world_size
        for parameter in self.module.parameters():
            parameter.grad = None
        if self.scaler.is_enabled():  # every rank leaves out the step that overflows on one
            overflow = (~self.shard.grad.isfinite()).any().float()
            dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
            if overflow:
                self.shard.grad.fill_(torch.inf)

    def clip(self, max_norm: float) -> Tensor:
        assert self.shard.grad is not None
        square = self.shard.grad.square().sum()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_([self.shard], max_norm, square.sqrt())
        return square.sqrt()

    def update(self) -> Tensor | None:
        norm = super().update()
        self.optimizer.zero_grad()
        dist.all_gather_into_tensor(self.flat, self.shard.detach().clone())
        return norm

    def gradients(self) -> Mapping[str, Tensor]:
        assert self.shard.grad is not None
        whole = torch.empty_like(self.flat)
        dist.all_gather_into_tensor(whole, self.shard.grad)
        named = self.named_parameters()
        return {name: part.view_as(p) for (name, p), part in zip(named, whole.split(self.sizes), strict=True)}

    def holdings(self) -> Holdings:
        gradients = [] if self.shard.grad is None else [self.shard.grad]
        return replace(super().holdings(), parameters=[self.flat], gradients=gradients)


class FlatShardsHand(ByHand):
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        zero_stages=frozenset({2}),
        precisions=DDP.capabilities.precisions,
        lacks={Feature.SAVE: "this engine saves nothing", Feature.MATRIX_WISE: "a share is no matrix"},
    )
    engine = FlatShards
    layout: ClassVar = Layout(dp=2, zero_stage=2, num_micro_batches=2)

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        reason = "whole gradients, a flat copy of them and gloo's copy, beside the share"
        return (beside_gradients(cls, case, rank, 3 * gradient_bytes(case), reason),)
