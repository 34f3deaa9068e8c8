"""PyTorch DistributedDataParallel: one replica per rank, gradients all-reduced in buckets (arXiv:2006.15704)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from meshmark.adapter.contract import PYTORCH_2_13, Adapter, Arithmetic, Capabilities, Casting, Feature, Track
from meshmark.adapter.engine import DataParallelEngine, Engine, RankContext, initial_model
from meshmark.models.module import buffer_shapes, parameter_shapes
from meshmark.models.transformer import Family
from meshmark.reference.objective import build_optimizer
from meshmark.spec.case import Case, Knob
from meshmark.spec.known_gap import KnownGap
from meshmark.spec.precision import Dtype, Precision
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.model_theory import theory_of
from meshmark.theory.recipe import TrainingRecipe, eager_recipe
from meshmark.theory.traffic import (
    METERED_STEP,
    Flow,
    OneTimeTraffic,
    Purpose,
    TrafficException,
    exceptions_for,
    reduced_each,
    step_traffic,
)

# The hook is wrapped in a lambda because DDP rejects PyTorch's own hook, by its name, on backends other than NCCL.
# gloo sums bf16 as well.
_HOOKS: dict[Dtype, Callable[[dist.ProcessGroup, Any], Future[Tensor]]] = {
    Dtype.BF16: lambda group, bucket: bf16_compress_hook(group, bucket),
}
"""Hooks by the format in which gradients are reduced, where it differs from the format they are held in."""
_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 2**20, 25 * 2**20
"""DDP's defaults."""


_SMALL_BUCKET_BYTES = 10 * 2**10


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
    arithmetic: ClassVar = Arithmetic(casting=Casting.AUTOCAST)
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        families=frozenset(Family),
        precisions=frozenset(Precision.PRESETS.values()),
        tunings=frozenset(Knob),
        unfreezes=True,
    )
    known_gaps: ClassVar[tuple[KnownGap, ...]] = (
        KnownGap(
            clause="unfrozen",
            symptom="missing reduction (from step 2 on",
            reason="parameters that are unfrozen after wrapping are not reduced, and replicas drift apart; wrap the "
            "model again",
            reproducer="ddp_unfrozen_parameters",
        ),
    )
    engine: ClassVar[type[DDPEngine]] = DDPEngine
    gradients_are_views: ClassVar[bool] = True
    """Whether gradients are views of the buckets in which they are reduced."""
    broadcasts_buffers: ClassVar[bool] = False
    """Whether DDP broadcasts buffers. If not, each replica keeps its own statistics, as the workload defines them."""
    static_graph: ClassVar[bool] = False

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        return eager_recipe(case, "eager-ddp")

    def build(self, case: Case, context: RankContext) -> Engine:
        module = self.wrap(case, context)
        optimizer = build_optimizer(case.workload.optimizer, module.module.named_parameters(), case.tuning)
        return self.engine(case, context, module, optimizer)

    def wrap(self, case: Case, context: RankContext) -> DistributedDataParallel:
        arguments: dict[str, Any] = {
            "device_ids": [context.device] if context.device.type == "cuda" else None,
            "find_unused_parameters": case.workload.leaves_unused,
            "gradient_as_bucket_view": self.gradients_are_views,
            "broadcast_buffers": self.broadcasts_buffers,
            "static_graph": self.static_graph,
        }
        model = initial_model(case, context.device)
        module: DistributedDataParallel = DistributedDataParallel(model, **{**arguments, **self.choices(context)})
        if case.precision.narrows_reduction:
            module.register_comm_hook(dist.group.WORLD, _HOOKS[case.precision.reduction])
        return module

    def choices(self, context: RankContext) -> dict[str, Any]:
        """Return the further arguments of DDP that a variant has."""
        return {}


class DDPBuckets(DDP):
    """Buckets of 10 KiB, so that a small model too has several, and no comparison of ranks at the start."""

    bucket_cap_mb: ClassVar = _SMALL_BUCKET_BYTES / 2**20

    def choices(self, context: RankContext) -> dict[str, Any]:
        return {"bucket_cap_mb": self.bucket_cap_mb, "init_sync": False}

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """Return exceptions for buckets, which exceed their size by at most the tensor that fills them."""
        sizes = [math.prod(shape) for shape in parameter_shapes(case.workload.model).values()]

        def several(flow: Flow) -> Flow:
            largest = max(sizes) * flow.num_bytes // sum(sizes)
            return replace(flow, fewest=max(1, flow.num_bytes // (_SMALL_BUCKET_BYTES + largest)))

        return exceptions_for(step_traffic(case, rank), Purpose.GRADIENTS, "buckets are small", several)


class StaticEngine(DDPEngine):
    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Reduce after every micro-batch: `no_sync` breaks the reducer (adapters/gaps/ddp_static_graph_no_sync.py)."""
        yield


class DDPStatic(DDP):
    """`static_graph=True`: DDP is told that every step uses the same parameters in the same order."""

    engine: ClassVar = StaticEngine
    static_graph: ClassVar = True

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        using = super().recipe(case)
        return replace(using, backward=replace(using.backward, accumulates_outside_buckets=False))

    capabilities: ClassVar = replace(
        DDP.capabilities, lacks={Feature.UNUSED: "what a step leaves out would be another graph"}
    )

    @classmethod
    def one_time_traffic(cls, case: Case, rank: int) -> tuple[OneTimeTraffic, ...]:
        used = OneTimeTraffic(
            kind="all_reduce",
            steps=(0,),
            most_bytes=4 * len(parameter_shapes(case.workload.model)),
            most_calls=1,
            reason="ranks count which parameters the graph uses, once",
        )
        laid_out = tuple(
            OneTimeTraffic(
                kind="broadcast",
                steps=(METERED_STEP,),
                least_bytes=flow.num_bytes,
                most_bytes=flow.num_bytes,
                least_calls=flow.fewest,
                most_calls=flow.most,
                reason=exception.reason,
            )
            for exception in _layout_of_buckets(case, rank)
            for flow in exception.sends
        )
        return (*(laid_out or super().one_time_traffic(case, rank)), used)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        reason = "after every micro-batch, for `no_sync` breaks the reducer of a static graph"
        return (*reduced_each(case, rank, reason), *_layout_of_buckets(case, rank))


def _layout_of_buckets(case: Case, rank: int) -> tuple[TrafficException, ...]:
    """Return what the metered step sends once, in the third forward pass of a static graph; nothing if that pass is in
    another step.

    It is one number a tensor, one for all of them, and one a bucket (`sync_bucket_indices` in PyTorch's reducer.cpp).
    """
    if not case.layout.num_micro_batches == 1 < case.layout.dp:
        return ()
    itemsize = case.precision.accumulation.itemsize
    shapes = {n: shape for n, shape in parameter_shapes(case.workload.model).items() if case.workload.trains(n)}
    sizes = [itemsize * math.prod(shape) for shape in reversed(shapes.values())]
    buckets, filled = 1, 0
    for size in sizes[:-1]:
        filled += size
        if filled >= (_FIRST_BUCKET_BYTES if buckets == 1 else _BUCKET_BYTES):
            buckets, filled = buckets + 1, 0
    told = Flow(
        kind="broadcast",
        axes="dp",
        ranks=case.layout.group("dp", rank),
        purpose=Purpose.GRADIENTS,
        num_bytes=4 * (len(shapes) + 1 + buckets),
        fewest=2,
        most=2,
    )
    return (
        TrafficException(sends=(told,), reason="buckets are laid out by the order of the second backward pass, once"),
    )


class DDPRecommended(DDP):
    """`DistributedDataParallel(model)`: the first rank's buffers are everybody's, and gradients are copied into buckets
    and back."""

    track: ClassVar = Track.AUTHORS
    gradients_are_views: ClassVar = False
    broadcasts_buffers: ClassVar = True
    capabilities: ClassVar = replace(
        DDP.capabilities, lacks={Feature.BUFFERS: "by default the first rank's are broadcast before every forward pass"}
    )

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        return eager_recipe(case)

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        trained = sum(
            math.prod(shape)
            for name, shape in parameter_shapes(case.workload.model).items()
            if case.workload.trains(name)
        )
        num_bytes = case.precision.accumulation.itemsize * trained
        return (ExtraMemory(category="steady", num_bytes=num_bytes, reason="buckets, beside the gradients themselves"),)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """The first rank's buffers, such as tables of positions, before the first forward pass of a step."""
        found, layout = super().traffic_exceptions(case, rank), case.layout
        count = len(buffer_shapes(case.workload.model))
        if not cls.broadcasts_buffers or not count or step_traffic(case, rank) is None:
            return found
        flow = Flow(
            kind="broadcast",
            axes="dp",
            ranks=layout.spanned(("dp",), rank),
            purpose=Purpose.WEIGHTS,
            num_bytes=int(theory_of(case.workload.model).table_bytes(layout, rank, case.precision)),
            fewest=1,
            most=count,
        )
        return (*found, TrafficException(sends=(flow,), reason="`broadcast_buffers`: buffers are the first rank's"))


class DDPBucketList(DDPBuckets):
    """`bucket_cap_mb_list`: a size for each bucket. Gradients are copied into a whole bucket at once
    (`batched_grad_copy`), ranks come from a `device_mesh`, and no buffers are sent (`forward_sync_buffers=False`).
    """

    requires: ClassVar = (PYTORCH_2_13,)
    gradients_are_views: ClassVar[bool] = False

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        return DDPRecommended.recipe(case)

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        return DDPRecommended.extra_memory(case, rank)

    def choices(self, context: RankContext) -> dict[str, Any]:
        from torch.distributed.device_mesh import init_device_mesh

        return {
            "bucket_cap_mb_list": [size / 2**20 for size in (_SMALL_BUCKET_BYTES // 2, _SMALL_BUCKET_BYTES)],
            "batched_grad_copy": True,
            "device_mesh": init_device_mesh(context.device.type, (context.world_size,)),
            "broadcast_buffers": None,  # its older name
            "forward_sync_buffers": False,
        }


class DDPSkipsUnused(DDP):
    """`skip_all_reduce_unused_params`: a bucket whose parameters have no gradients on any rank is not sent."""

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        trained = sum(map(case.workload.trains, parameter_shapes(case.workload.model)))
        told = tuple(
            replace(flow, num_bytes=4 * trained, fewest=1, most=1)
            for flow in step_traffic(case, rank) or ()
            if flow.purpose is Purpose.GRADIENTS
        )
        reason = "`find_unused_parameters`: ranks tell each other which parameters they have used"
        return (TrafficException(sends=told, reason=reason),) if told else ()

    def choices(self, context: RankContext) -> dict[str, Any]:
        return {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
