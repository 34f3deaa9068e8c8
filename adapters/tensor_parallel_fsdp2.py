"""PyTorch's tensor parallelism over FSDP2's shards (2-D)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from meshmark.adapters.fsdp2 import FSDP2, ROWS, dealt_rows, mesh_extra_memory, mixed_precision_policy
from meshmark.adapters.tensor_parallel import (
    NORMS,
    TensorParallel,
    TensorParallelEngine,
    num_split,
    summed_embedding,
)
from meshmark.models.module import Model, parameter_shapes, skeleton
from meshmark.models.transformer import Family
from meshmark.spec.case import Case
from meshmark.spec.layout import Axis
from meshmark.spec.precision import Precision
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.recipe import TrainingRecipe, eager_recipe
from meshmark.theory.traffic import Flow, Purpose, TrafficException, besides, exceptions_for, step_traffic

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh  # some seconds, which only ranks should take

_BY_COLUMNS = (".q", ".k", ".v", ".up", ".gate", "embedding.tokens", "head.output")
"""Ends of the names of modules whose outputs, or vocabulary, are split: the first dimension of what they hold."""
_BY_ROWS = (".attention.out", ".feed_forward.down")


class TensorParallelFSDP2Engine(TensorParallelEngine):
    """The sharding casts weights and inputs, not autocast."""

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.module(inputs)
        return logits


class TensorParallelFSDP2(TensorParallel):
    """2-D: what tensor parallelism splits, FSDP2 shards again over data-parallel ranks, block by block."""

    arithmetic: ClassVar = FSDP2.arithmetic
    capabilities: ClassVar = replace(
        TensorParallel.capabilities,
        zero_stages=frozenset({3}),
        precisions=frozenset({Precision.FP32, Precision.BF16}),
        lacks={name: why for name, why in TensorParallel.capabilities.lacks.items() if name != Precision.BF16},
    )
    engine: ClassVar = TensorParallelFSDP2Engine

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if min(case.layout.dp, case.layout.tp) < 2:
            return f"2-D takes two axes, got {case.layout.id}"
        return super().supports(case, device, backend)

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        using = eager_recipe(case, "eager-fsdp2", casts_weights=True)
        return replace(using, backward=replace(using.backward, loss_tensors=3.0))

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        layout = case.layout
        shapes = local_shapes(case)
        dealt = dealt_rows(shapes, layout.dp, layout.coordinates(rank).dp, cls.recipe(case).states)
        return (*dealt, *summed_embedding(case), mesh_extra_memory(case))

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """Over data-parallel ranks one call for every way in which tensors are split, over tensor-parallel ones for
        those that split by rows and by columns."""
        layout, shapes, flows = case.layout, local_shapes(case), step_traffic(case, rank)
        norms = [flow for flow in flows or () if flow.purpose is Purpose.NORM]
        splits, ways = _ways(case)
        width = case.precision.wide.itemsize

        def along(axis: Axis, norm: Flow, count: int, calls: int) -> Flow:
            ranks = layout.group(axis, rank)
            return replace(norm, axes=axis, ranks=ranks, num_bytes=width * count, fewest=calls, most=calls)

        padding = sum(-rows % layout.dp * math.prod(row) for rows, *row in shapes.values())
        share = Fraction(padding, sum(map(math.prod, shapes.values())))
        by_tensor = tuple(
            TrafficException(
                instead_of=(norm,),
                sends=(along("tp", norm, *splits), along("dp", norm, len(shapes), ways)),
                reason=NORMS,
            )
            for norm in norms
        )
        padded = [besides(flows, purpose, share, ROWS) for purpose in (Purpose.GRADIENTS, Purpose.WEIGHTS)]
        return by_tensor + padded[0] + padded[1] + _narrow_stream(case, flows)

    def shard(self, model: Model, mesh: DeviceMesh, case: Case) -> None:
        from torch.distributed.fsdp import fully_shard

        policy = mixed_precision_policy(case)
        for block in model.blocks.values():
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def _narrow_stream(case: Case, flows: Iterable[Flow] | None) -> tuple[TrafficException, ...]:
    """Return exceptions for activations that tensor-parallel ranks send in 16 bits, which theory plans in 32."""
    narrow, wide = case.precision.weights.itemsize, case.precision.wide.itemsize
    if narrow == wide:
        return ()
    reason = "FSDP2 casts weights and inputs, so that the residual stream is in 16 bits"
    return exceptions_for(
        flows, Purpose.ACTIVATIONS, reason, lambda flow: replace(flow, num_bytes=flow.num_bytes * narrow // wide)
    )


def _ways(case: Case) -> tuple[tuple[int, int], int]:
    """Return how many tensors tensor parallelism splits and along how many dimensions, and in how many ways tensors lie
    on ranks: biases of what is split by columns are whole on a mesh of both axes."""
    model = case.workload.model
    if not model.brings_plan:
        return (1 + sum(num_split(case)), 2), 4 if model.family is Family.GPT else 3
    dims, names = skeleton(model).split_dims(), parameter_shapes(model).keys()
    by_columns = {name.rpartition(".")[0] for name, dim in dims.items() if dim == 1}
    biases = {f"{module}.bias" for module in by_columns} & names
    kinds = len(set(dims.values()))
    return (len(dims), kinds), kinds + bool(biases) + bool(names - dims.keys() - biases)


def local_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter on a tensor-parallel rank, as split by `parallelize` or the model's own
    plan.
    """
    if case.workload.model.brings_plan:
        dims, whole = skeleton(case.workload.model).split_dims(), parameter_shapes(case.workload.model)
        return {
            name: tuple(size // case.layout.tp if dim == dims.get(name) else size for dim, size in enumerate(shape))
            for name, shape in whole.items()
        }
    tp, found = case.layout.tp, dict[str, tuple[int, ...]]()
    for name, shape in parameter_shapes(case.workload.model).items():
        module, _, kind = name.rpartition(".")
        by_columns = module.endswith(_BY_COLUMNS)
        by_rows = module.endswith(_BY_ROWS) and kind == "weight"
        found[name] = (shape[0] // tp, *shape[1:]) if by_columns else (shape[0], shape[1] // tp) if by_rows else shape
    return found
