"""Downpour SGD (Dean et al., NIPS 2012) over torch.distributed.rpc: ours, for no kept library does it. A replica a
rank; the server lives in the first one's process, and answers on threads of its own."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from meshmark.adapter.contract import Adapter, Capabilities, Feature
from meshmark.adapter.engine import Engine, RankContext, initial_model
from meshmark.algorithms.compressed.traffic import trained_shapes
from meshmark.algorithms.downpour import Downpour as DownpourAlgorithm
from meshmark.models.transformer import TEXT_FAMILIES, Family
from meshmark.reference.objective import build_optimizer
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.recipe import TrainingRecipe

COUNT_BYTES = 4
"""Bytes of PyTorch's count of an optimizer's steps, which is a tensor."""


class Downpour(Adapter):
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        families=TEXT_FAMILIES | {Family.OWN},
        precisions=frozenset({Precision.FP64, Precision.FP32}),
        algorithms=frozenset({DownpourAlgorithm.kind}),
        devices=frozenset({"cpu"}),
        lacks={
            Precision.BF16: "its gradients would be held against a twin of equal replicas",
            Precision.FP16: "a replica that skips an overflowing step would push what others do not",
            Feature.UNUSED: "what is gathered of a parameter that a step leaves out is not specified",
            Feature.DROPOUT: "its masks are judged by gradients that are reduced over ranks",
            Feature.FAKE_WORLD: "replicas wait for a parameter server's answers, by torch RPC",
            Feature.RESHARD: "the replicas of another world size are other ones",
        },
    )

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        """When the server takes in what it is pushed is chance, so no peak is planned."""
        return dataclasses.replace(super().recipe(case), activations_known=False)

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        shapes, itemsize = trained_shapes(case, rank), case.precision.master.itemsize
        vector = itemsize * sum(map(math.prod, shapes))
        found = [
            ExtraMemory(category="optimizer_states", num_bytes=vector, reason="gradients that are yet to be pushed")
        ]
        serves = case.layout.coordinates(rank).dp == 0
        passing = vector * (2 * case.layout.dp - 1 if serves else 1)
        reason = "messages of replicas that come when they come"
        found.append(ExtraMemory(category="unnamed", num_bytes=passing, reason=reason))
        if serves:
            served = 2 * vector + COUNT_BYTES * len(shapes)
            reason = "the server's parameters, and Adagrad's sums"
            found.append(ExtraMemory(category="optimizer_states", num_bytes=served, reason=reason))
        return tuple(found)

    def build(self, case: Case, context: RankContext) -> Engine:
        from meshmark.adapters.downpour.engine import DownpourEngine

        module = initial_model(case, context.device)
        optimizer = build_optimizer(case.workload.optimizer, module.named_parameters())
        return DownpourEngine(case, context, module, optimizer)
