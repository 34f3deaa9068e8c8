"""PyTorch FSDP2, `fully_shard`: parameters, gradients and optimizer states sharded tensor by tensor (ZeRO stage 3)."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor

from meshmark.adapter.capabilities import Capabilities, Feature
from meshmark.adapter.contract import Adapter
from meshmark.adapter.data_parallel import AUTOCAST, DataParallelEngine, configure
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.checkpoint import load_sharded, save_sharded
from meshmark.reference.build import build_model, parameter_shapes
from meshmark.reference.initial import Block, initial_value
from meshmark.reference.model import Model
from meshmark.reference.objective import build_optimizer
from meshmark.spec.case import Case
from meshmark.spec.model_spec import Family
from meshmark.spec.precision import Dtype, Precision
from meshmark.theory.flow import Departure, Purpose, besides, departing
from meshmark.theory.recipe import TrainingRecipe, eager_recipe
from meshmark.theory.traffic import step_traffic

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor  # a second, which only ranks should take


class FSDP2Engine(DataParallelEngine):
    """Gradients are reduce-scattered after every micro-batch, fully_shard's default: putting it off would keep them
    whole on every rank."""

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.module(inputs)  # the sharding casts, not autocast
        return logits

    def clip(self, max_norm: float) -> Tensor:
        return cast("DTensor", super().clip(max_norm)).full_tensor()

    def save(self, folder: Path) -> None:
        save_sharded(folder, self.module, self.optimizer, self.schedule)

    def load(self, folder: Path) -> None:
        load_sharded(folder, self.module, self.optimizer, self.schedule)


class FSDP2(Adapter):
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        zero_stages=frozenset({3}),
        precisions=frozenset(Precision.PRESETS.values()),
        families=frozenset(Family),
        lacks={Feature.MATRIX_WISE: "its optimizer is given parts of the parameters, by rows"},
    )

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        return eager_recipe(case, "eager-fsdp2", casts_weights=True)

    @classmethod
    def departures(cls, case: Case, rank: int) -> tuple[Departure, ...]:
        return fsdp2_departures(case, rank)

    def build(self, case: Case, context: RankContext) -> Engine:
        with torch.device("meta"):
            model = configure(build_model(case.workload.model), case)
        if case.precision.master is Dtype.FP64:
            model.double()
        shard(model, case, context)
        optimizer = build_optimizer(case.workload.optimizer, model.named_parameters())
        return FSDP2Engine(case, context, model, optimizer)


def fsdp2_departures(case: Case, rank: int, *, root_gathers: int = 2) -> tuple[Departure, ...]:
    """`root_gathers`: times a micro-batch that what is in no block is gathered."""
    flows, model, shapes = step_traffic(case, rank), case.workload.model, parameter_shapes(case.workload.model)
    padding = {name: -rows % case.layout.dp * math.prod(row) for name, (rows, *row) in shapes.items()}
    all_of_it, whole = sum(padding.values()), model.num_parameters
    of_root = sum(elements for name, elements in padding.items() if not name.startswith("blocks."))
    gathered = 2 * all_of_it - (2 - root_gathers) * of_root
    rows, norms = "a tensor's rows are padded to a multiple of the ranks", "every tensor's norm is reduced by itself"
    return (
        *departing(flows, Purpose.NORM, norms, lambda n: dataclasses.replace(n, num_bytes=n.num_bytes * len(shapes))),
        *besides(flows, Purpose.GRADIENTS, Fraction(all_of_it, whole), rows),
        *besides(flows, Purpose.WEIGHTS, Fraction(gathered, 2 * whole), rows),
    )


def shard(model: Model, case: Case, context: RankContext) -> None:
    """Shard a model on the meta device over all ranks, block by block, and fill the shards with initial values."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(context.device.type, (case.layout.dp,))
    low = AUTOCAST.get(case.precision.compute)
    reduced = getattr(torch, case.precision.reduction)
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduced) if low else MixedPrecisionPolicy()
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # Without the flag the root stays whole between forward and backward, which is not quite ZeRO-3.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    model.to_empty(device=context.device)
    fill_shards(model, case)
    model.initialize_buffers()


@torch.no_grad()
def fill_shards(model: Model, case: Case) -> None:
    """Initial values of every sharded parameter, each rank its own part alone."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for name, parameter in model.named_parameters():
        sharded = cast("DTensor", parameter)
        shape, offset = compute_local_shape_and_global_offset(parameter.shape, sharded.device_mesh, sharded.placements)
        sharded.to_local().copy_(
            initial_value(
                case.workload.model,
                name,
                parameter.shape,
                seed=case.workload.seed,
                block=Block(shape=shape, offset=offset),
                device=sharded.to_local().device,
            )
        )
