"""Pipelines crossed with PyTorch's other axes: stages of tensor-parallel layers (`parallelize_module`), stages sharded
by FSDP2 over replicas of the pipeline, or both."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from meshmark.adapter.contract import Feature
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.fsdp2 import mesh_extra_memory
from meshmark.adapters.pipeline import NO_IMAGES, Pipeline, PipelineEngine, group_of
from meshmark.adapters.pipeline_stages import Part
from meshmark.adapters.tensor_parallel import parallelize
from meshmark.models.module import Model
from meshmark.models.transformer import TEXT_FAMILIES, Family
from meshmark.models.transformer.module import Transformer
from meshmark.reference.data import Batch
from meshmark.spec.case import Case
from meshmark.spec.layout import AXES, Axis, Recompute, Schedule
from meshmark.spec.precision import Precision
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.model_theory import local_parameters, stage_parameters
from meshmark.theory.partition import uniform_stages
from meshmark.theory.recipe import TrainingRecipe
from meshmark.theory.traffic import (
    Flow,
    OneTimeTraffic,
    Purpose,
    TrafficException,
    besides,
    exceptions_for,
    step_traffic,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_WHOLE = "the gradient of an embedding that is split by rows is whole on every rank"


class PipelineNDEngine(PipelineEngine):
    """Every tensor-parallel rank of the last stage computes the same loss; the first one returns it."""

    def __init__(self, case: Case, context: RankContext) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        layout = case.layout
        sizes = (layout.pp, layout.dp, layout.tp)
        self.mesh: DeviceMesh = init_device_mesh(context.device.type, sizes, mesh_dim_names=("pp", "dp", "tp"))
        super().__init__(case, context)
        axes: tuple[Axis, ...] = ("tp", "pp", "dp") if layout.zero_stage else ("tp", "pp")
        self.share_holders = group_of(layout.all_spanned(axes), context.rank)

    def make_part(self, chunk: Model) -> Part:
        from torch.distributed.fsdp import fully_shard

        layout = self.case.layout
        if layout.tp > 1:
            parallelize(cast(Transformer, chunk), self.mesh["tp"], sequence_parallel=layout.sequence_parallel)
        part = super().make_part(chunk)
        if layout.zero_stage:
            for block in chunk.blocks.values():
                fully_shard(block, mesh=self.mesh["dp"])
            fully_shard(part, mesh=self.mesh["dp"])
        return part

    def _run(self, pipeline: Callable[..., object], batch: Batch) -> Tensor:
        from torch.distributed.tensor.parallel import loss_parallel

        layout = self.case.layout
        with loss_parallel() if layout.tp > 1 else contextlib.nullcontext():
            total = super()._run(pipeline, batch)
        total = total / layout.dp if layout.zero_stage else total
        return total if self.stands.tp == 0 else torch.zeros(())

    def _loss(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the loss share, scaled by the number of replicas if FSDP2 averages gradients over them."""
        share = super()._loss(logits_BTV, targets_BT)
        share = share.to_local() if hasattr(share, "to_local") else share
        return share * self.case.layout.dp if self.case.layout.zero_stage else share

    def reduce_over_replicas(self) -> None:
        for _, gradient in self._local_gradients():
            if self.replicas is not None and not self.case.layout.zero_stage:
                dist.all_reduce(gradient, group=self.replicas)

    def _local_gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield every gradient together with this rank's part of it."""
        for parameter in self.model.parameters():
            if (gradient := parameter.grad) is not None:
                yield gradient, cast("DTensor", gradient).to_local() if hasattr(gradient, "to_local") else gradient

    def _clip(self, max_norm: float) -> Tensor:
        """Clip by the norm over all stages and shards.

        PyTorch's function computes the norm of one stage and one mesh only. Here squares are summed over all ranks.
        Parts that several ranks hold count on the first of these ranks only.
        """
        square = torch.zeros(())
        for gradient, local in self._local_gradients():
            if self.stands.tp == 0 or "tp" in _split_over(gradient):
                square += local.float().square().sum()
        dist.all_reduce(square, group=self.share_holders)
        norm = square.sqrt()
        for _, local in self._local_gradients():
            local.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm


class PipelineTensorParallel(Pipeline):
    """A pipeline of tensor-parallel stages, over replicas too."""

    capabilities: ClassVar = dataclasses.replace(
        Pipeline.capabilities,
        degrees=frozenset({"tp", "pp", "dp"}),
        schedules=frozenset({Schedule.ONE_F_ONE_B}),
        virtual_stages=frozenset({1}),
        recomputes=frozenset({Recompute.NONE}),
        precisions=frozenset({Precision.FP32}),
        families=TEXT_FAMILIES,
        lacks={
            **Pipeline.capabilities.lacks,
            **NO_IMAGES,
            Family.MIXTURE: "a gate and its experts are not split",
            Family.OWN: "not tried: a stage whose modules are split by a plan",
            Precision.BF16: "autocast, whose copies DTensor does not plan; not tried",
            Precision.FP64: "not tried",
            Feature.DROPOUT: "ranks draw the same masks for their own heads, which the single process does not",
            Feature.TIED_EMBEDDINGS: "its gradient is summed over stages that split it; not mapped",
            Feature.MATRIX_WISE: "its optimizer is given parts of the parameters",
            Feature.UNUSED: "not tried",
            Feature.RECOMPUTE: "not tried",
        },
    )
    axes: ClassVar[frozenset[Axis]] = frozenset({"pp", "tp"})
    """All of which a layout must have; what has fewer is another adapter's."""

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if lacking := [axis for axis in AXES if axis in cls.axes and getattr(case.layout, axis) == 1]:
            return f"a pipeline crossed with {' and '.join(sorted(cls.axes - {'pp'}))} lacks {', '.join(lacking)}"
        return super().supports(case, device, backend)

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        return dataclasses.replace(super().recipe(case), activations_known=False)

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        more = _unsplit(case, rank) * case.precision.accumulation.itemsize
        whole = [ExtraMemory(category="gradients", num_bytes=more, reason=_WHOLE)] if more else []
        return (*whole, mesh_extra_memory(case))

    @classmethod
    def one_time_traffic(cls, case: Case, rank: int) -> tuple[OneTimeTraffic, ...]:
        """Return the traffic of a micro-batch that stages compute before the first step to learn shapes."""
        count = case.layout.num_micro_batches
        tensor = [flow for flow in step_traffic(case, rank) or () if flow.axes == "tp"]
        again = (
            OneTimeTraffic(
                kind=kind,
                steps=(0,),
                most_bytes=sum(flow.num_bytes for flow in tensor if flow.kind == kind) // count,
                most_calls=sum(flow.most for flow in tensor if flow.kind == kind) // count,
                reason="a micro-batch is computed once more to know the shapes of what stages send",
            )
            for kind in sorted({flow.kind for flow in tensor})
        )
        return (*super().one_time_traffic(case, rank), *again)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        share = Fraction(_unsplit(case, rank), local_parameters(case.workload.model, case.layout, rank) or 1)
        return besides(step_traffic(case, rank), Purpose.GRADIENTS, share, _WHOLE)

    def build(self, case: Case, context: RankContext) -> Engine:
        return PipelineNDEngine(case, context)


class PipelineFSDP2(PipelineTensorParallel):
    """A pipeline whose stages FSDP2 shards over replicas, block by block. Layers may be tensor-parallel.

    PyTorch's schedules gather weights before every pass of a stage, and reduce gradients once, after the last pass.
    """

    capabilities: ClassVar = dataclasses.replace(PipelineTensorParallel.capabilities, zero_stages=frozenset({3}))
    axes: ClassVar[frozenset[Axis]] = frozenset({"pp", "dp"})

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        return (mesh_extra_memory(case),)

    @classmethod
    def one_time_traffic(cls, case: Case, rank: int) -> tuple[OneTimeTraffic, ...]:
        """Return the traffic of that micro-batch, including the gathers of weights.

        Blocks are gathered for its backward pass too, except on the first stage, which sends no gradients and so skips
        that pass.
        """
        ends, blocks, num_layers = _held(case, rank)
        times = 1 if case.layout.coordinates(rank).pp == 0 else 2
        gathered = OneTimeTraffic(
            kind="all_gather",
            steps=(0,),
            most_bytes=case.precision.weights.itemsize * (ends + times * blocks),
            most_calls=bool(ends) + times * num_layers,
            reason="weights are gathered for the micro-batch that tells the shapes of what stages send",
        )
        return (*super().one_time_traffic(case, rank), gathered)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """Return exceptions for gradients that are accumulated whole and reduced once, and for fewer gathers."""
        layout, flows = case.layout, step_traffic(case, rank)
        count, stands = layout.num_micro_batches, layout.coordinates(rank)
        ends, blocks, num_layers = _held(case, rank)
        times = _gathers(layout.pp - stands.pp, count)

        def once(flow: Flow) -> Flow:
            return dataclasses.replace(flow, num_bytes=flow.num_bytes // count, fewest=1, most=flow.most // count)

        def gathered(flow: Flow) -> Flow:
            num_bytes = case.precision.weights.itemsize * (ends + times * blocks)
            calls = bool(ends) + times * num_layers  # a stage in the middle holds nothing outside of its blocks
            return dataclasses.replace(flow, num_bytes=num_bytes, fewest=calls, most=calls)

        kept = "a block stays whole from its backward pass to its next forward, what is in no block for the step"
        return (
            *exceptions_for(flows, Purpose.GRADIENTS, "gradients are accumulated whole, and reduced once", once),
            *exceptions_for(flows, Purpose.WEIGHTS, kept, gathered),
        )


def _held(case: Case, rank: int) -> tuple[int, int, int]:
    """Return a stage's number of elements outside of blocks, that in blocks, and the number of blocks."""
    layout, model = case.layout, case.workload.transformer
    stage = uniform_stages(model, layout.pp)[layout.coordinates(rank).pp]
    ends = int(stage_parameters(model, dataclasses.replace(stage, num_layers=0), layout.tp))
    return ends, (local_parameters(model, layout, rank) or 0) - ends, stage.num_layers


def _gathers(stages_left: int, num_micro_batches: int) -> int:
    """Return how often a block is gathered in a step of 1F1B.

    It is gathered before every pass that does not find it whole. A forward pass releases it.
    """
    warm = min(stages_left, num_micro_batches)
    passes = "F" * warm + "BF" * (num_micro_batches - warm) + "B" * warm
    return sum(before != "B" for before in "F" + passes[:-1])


def _split_over(tensor: Tensor) -> set[str]:
    """Return the mesh axes along which `tensor` is sharded."""
    if not hasattr(tensor, "placements"):
        return set()
    sharded = cast("DTensor", tensor)
    names = sharded.device_mesh.mesh_dim_names or ()
    return {name for name, placement in zip(names, sharded.placements, strict=True) if placement.is_shard()}


def _unsplit(case: Case, rank: int) -> int:
    """Return the elements of the embedding's gradient beyond a rank's share; 0 on all stages but the first."""
    model, layout = case.workload.transformer, case.layout
    first = layout.coordinates(rank).pp == 0
    return model.vocab_size * model.hidden // layout.tp * (layout.tp - 1) if first else 0
