"""Adapters that train correctly and answer the other questions of the contract in their own way, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import DataParallelEngine, Engine, Holdings, RankContext
from meshmark.adapters.ddp import DDP, DDPEngine
from meshmark.adapters.fsdp2 import FSDP2, FSDP2Engine
from meshmark.spec.case import Case
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.recipe import TrainingRecipe
from meshmark.theory.traffic import Flow, Purpose, TrafficException


class _ShardsEngine(FSDP2Engine):
    """Returns every tensor as FSDP2 keeps it."""

    parameters = DataParallelEngine.parameters
    gradients = DataParallelEngine.gradients
    holdings = DataParallelEngine.holdings


class _SilentEngine(DDPEngine):
    def holdings(self) -> Holdings:
        if self.context.rank == 1:
            raise RuntimeError("nobody knows")
        return super().holdings()


class _MetaEngine(DDPEngine):
    def parameters(self) -> Mapping[str, Tensor]:
        return {name: tensor.to("meta") for name, tensor in super().parameters().items()}


class _Swapped(Adapter):
    engine: ClassVar[type[Engine]]

    def build(self, case: Case, context: RankContext) -> Engine:
        engine = super().build(case, context)  # type: ignore[safe-super]
        engine.__class__ = self.engine
        return engine


class TellsShards(_Swapped, FSDP2):
    engine = _ShardsEngine


class HoldingsRaise(_Swapped, DDP):
    engine = _SilentEngine


class TellsMeta(_Swapped, DDP):
    engine = _MetaEngine


class RecipeRaises(DDP):
    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        raise LookupError("no such recipe")


class RemaindersOdd(DDP):
    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        return (("gradients", 8.0),)  # type: ignore[return-value]


class DeparturesRaise(DDP):
    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        raise torch.OutOfMemoryError("by analysis")


class DepartsFromNothing(DDP):
    """From what theory does not say."""

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        flow = Flow(kind="reduce", axes="dp", ranks=(0, 1), purpose=Purpose.GRADIENTS, num_bytes=4, fewest=1, most=1)
        return (TrafficException(instead_of=(flow,), reason="made up"),)
