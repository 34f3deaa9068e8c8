"""SimpleFSDP (arXiv:2411.00284), torchtitan's: every weight is a sharded DTensor, whose reading gathers it, so that a
compiler sees the collectives. Here without a compiler: weights are gathered one by one where they are read, and what
the backward pass needs of them stays until then."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from meshmark.adapter.contract import Arithmetic, Casting, Feature, Requirement, Summing
from meshmark.adapter.engine import AUTOCAST, Engine, RankContext, configure
from meshmark.adapters.fsdp2 import FSDP2, FSDP2Engine, fill_shards
from meshmark.models.module import build_model, parameter_shapes
from meshmark.models.transformer import TEXT_FAMILIES, Family
from meshmark.reference.objective import build_optimizer
from meshmark.spec.case import Case
from meshmark.spec.layout import Recompute
from meshmark.spec.precision import Dtype
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.traffic import Sharding


class SimpleFSDPEngine(FSDP2Engine):
    def differentiate(self, loss: Tensor) -> None:
        """Gradients are added up over ranks, not averaged: torchtitan divides its loss by all tokens."""
        super().differentiate(loss / self.case.layout.dp)


class SimpleFSDP(FSDP2):
    """torchtitan's SimpleFSDP: `data_parallel(model, mesh, mode="fully_shard")`."""

    virtual_environment: ClassVar[str] = "torchtitan"
    requires: ClassVar = (Requirement(module="torchtitan", distribution="torchtitan"),)
    arithmetic: ClassVar = Arithmetic(casting=Casting.WEIGHTS, averages=False, reduces_each=True, sums=Summing.BLOCKS)
    preload: ClassVar[tuple[str, ...]] = ("torchtitan.experiments.graph_trainer.simple_fsdp",)
    capabilities: ClassVar = dataclasses.replace(
        FSDP2.capabilities,
        recomputes=frozenset({Recompute.NONE}),
        families=TEXT_FAMILIES,
        tunings=frozenset(),
        lacks={
            **FSDP2.capabilities.lacks,
            Feature.TIED_EMBEDDINGS: "what two modules share is sharded for each, and is two parameters",
            Feature.RECOMPUTE: "not tried: its weights are gathered once more",
            **dict.fromkeys(set(Family) - TEXT_FAMILIES, "not tried"),
            Family.OWN: "which gathered weights autograd keeps depends on each operation of a model",
        },
    )
    sharding: ClassVar = Sharding(reshards_blocks=False, reshards_root=False)

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """Operations save the gathered weights that their backward pass reads; lookups and sums read none."""
        shapes, itemsize = parameter_shapes(case.workload.model), case.precision.weights.itemsize
        gathered = {name: float(itemsize * math.prod(shape)) for name, shape in shapes.items()}
        saved = sum(num_bytes for name, num_bytes in gathered.items() if _is_saved(name))
        reason = "kept weights are where the collective has put them, and count as communication"
        there = {"activations": -sum(gathered.values()), "peak": saved}
        return (
            *super().extra_memory(case, rank),
            *(ExtraMemory(category=name, num_bytes=more, reason=reason) for name, more in there.items()),
        )

    def build(self, case: Case, context: RankContext) -> Engine:
        from torch.distributed.device_mesh import init_device_mesh
        from torchtitan.experiments.graph_trainer.simple_fsdp import MixedPrecisionPolicy, data_parallel

        with torch.device("meta"):
            model = build_model(case.workload.model)
        if case.precision.master is Dtype.FP64:
            model.double()
        low = AUTOCAST.get(case.precision.compute)
        reduced = getattr(torch, case.precision.reduction)
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduced) if low else None
        mesh = init_device_mesh(context.device.type, (case.layout.dp,), mesh_dim_names=("fsdp",))
        data_parallel(model, mesh, mode="fully_shard", mp_policy=policy)
        configure(model, case)  # not before: what is frozen does not stay so (adapters/gaps/simple_fsdp_frozen.py)
        model.to_empty(device=context.device)
        fill_shards(model, case)
        model.initialize_buffers()
        optimizer = build_optimizer(case.workload.optimizer, model.named_parameters(), case.tuning)
        return SimpleFSDPEngine(case, context, model, optimizer)


def _is_saved(name: str) -> bool:
    return "norm" in name or (name.endswith("weight") and not name.startswith("embedding."))
