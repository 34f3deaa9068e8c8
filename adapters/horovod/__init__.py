"""Horovod: a replica a rank, gradients all-reduced tensor by tensor by its own library (arXiv:1802.05799).

PyTorch's process group, which every case has, carries only what Meshmark itself asks of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from meshmark.adapter.contract import Adapter, Arithmetic, Capabilities, Casting, Feature, Requirement, Track
from meshmark.adapter.engine import DataParallelEngine, Engine, RankContext, TrafficSource, initial_model
from meshmark.adapters.horovod.launch import join
from meshmark.adapters.horovod.traffic import HorovodTraffic
from meshmark.algorithms.compressed import Compressed
from meshmark.algorithms.compressed.compressor import CompressorKind
from meshmark.models.transformer import TEXT_FAMILIES, Family
from meshmark.reference.objective import build_optimizer
from meshmark.spec.case import Case
from meshmark.spec.known_gap import KnownGap
from meshmark.spec.precision import Precision
from meshmark.theory.memory import ExtraMemory

_UNFUSED = {"HOROVOD_FUSION_THRESHOLD": "0"}
"""No buffer that tensors are joined in: every gradient is sent as it lies."""


_OWN_RING = "it reduces over connections of its own, which know no process group of PyTorch's"

_HALVED = (
    "Horovod halves sums in fp16 where the truth, like PyTorch's hook, halves what is summed: of gradients below "
    "fp16's normal range that is another last bit"
)


class HorovodEngine(DataParallelEngine):
    optimizer: Any
    """Horovod's DistributedOptimizer, a subclass of the one that it is made of."""
    leave: Callable[[], None]

    def finish_gradients(self) -> None:
        self.optimizer.synchronize()
        super().finish_gradients()

    def update(self) -> Tensor | None:
        with self.optimizer.skip_synchronize():
            return super().update()

    def forget_gradients(self) -> None:
        self.optimizer.zero_grad()  # which takes no `set_to_none`, and does so

    def traffic_source(self) -> TrafficSource | None:
        return HorovodTraffic(self.context.world_size)

    def close(self) -> None:
        self.leave()


class Horovod(Adapter):
    """Averages whole gradients after the last micro-batch, none of them fused."""

    requires: ClassVar = (Requirement(module="horovod", distribution="horovod", command="make horovod"),)
    preload: ClassVar[tuple[str, ...]] = ("horovod.torch",)
    arithmetic: ClassVar = Arithmetic(casting=Casting.AUTOCAST)
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        families=frozenset(Family),
        precisions=frozenset(Precision.PRESETS.values()) - {Precision.BF16_REDUCE_BF16},
        lacks={
            Precision.BF16_REDUCE_BF16: "Horovod 0.28.1 has no type for bf16",
            Feature.FAKE_WORLD: _OWN_RING,
        },
        devices=frozenset({"cpu"}),
    )
    known_gaps: ClassVar = (
        KnownGap(
            clause="unused",
            symptom="as if unused parameters had a gradient of zero",
            reason="what no rank has used is given a gradient of zero, so that moments and weights decay",
            reproducer="horovod_unused_parameters",
        ),
    )
    engine: ClassVar[type[HorovodEngine]] = HorovodEngine
    variables: ClassVar[dict[str, str]] = _UNFUSED
    """Variables that Horovod reads when it starts."""
    compression: ClassVar[str] = "none"
    """Name of the compression in `hvd.Compression`."""

    def build(self, case: Case, context: RankContext) -> Engine:
        leave = join(context, self.variables)
        model = initial_model(case, context.device)
        optimizer = self.distributed(case, model)
        engine = self.engine(case, context, model, optimizer)
        engine.leave = leave
        return engine

    def distributed(self, case: Case, model: nn.Module) -> Any:  # noqa: ANN401
        """The optimizer that reduces gradients."""
        import horovod.torch as hvd

        return hvd.DistributedOptimizer(
            build_optimizer(case.workload.optimizer, model.named_parameters()),
            named_parameters=model.named_parameters(),
            compression=getattr(hvd.Compression, self.compression),
            backward_passes_per_step=case.layout.num_micro_batches,
            op=hvd.Average,
            gradient_predivide_factor=1.0,
            groups=None,
            sparse_as_dense=False,
        )


class HorovodFP16Engine(HorovodEngine):
    """Reports each replica's gradients as they were before compression."""

    local: dict[str, Tensor]

    def finish_gradients(self) -> None:
        self.local = {name: gradient.clone() for name, gradient in super().gradients().items()}
        super().finish_gradients()

    def gradients(self) -> Mapping[str, Tensor]:
        return self.local

    def update(self) -> Tensor | None:
        self.local = {}
        return super().update()


class HorovodFP16(Horovod):
    """`Compression.fp16`: gradients are rounded to fp16, and summed in it."""

    engine: ClassVar = HorovodFP16Engine
    compression: ClassVar = "fp16"
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        families=TEXT_FAMILIES | {Family.OWN},
        precisions=frozenset({Precision.FP64, Precision.FP32}),
        algorithms=frozenset({Compressed.kind}),
        compressors=frozenset({CompressorKind.FP16}),
        lacks={
            Precision.BF16: _HALVED,
            Feature.TIED_EMBEDDINGS: _HALVED,
            Feature.UNUSED: "what no rank has used is given a gradient of zero, which no truth of a compressor knows",
            Feature.RESHARD: "each replica's gradients are told, of as many as there were",
            Precision.BF16_REDUCE_BF16: "what is sent has a format of its own",
            Feature.FAKE_WORLD: _OWN_RING,
            Precision.FP16: "a replica that skips an overflowing step would send what others do not",
            Feature.DROPOUT: "its masks are judged by gradients that are reduced over ranks",
        },
        devices=frozenset({"cpu"}),
    )


class HorovodRecommended(Horovod):
    """`DistributedOptimizer(optimizer, named_parameters=...)` after `broadcast_parameters`, and what is ready within a
    cycle fused in a buffer.

    `broadcast_optimizer_state` is left out: of an optimizer that has no state yet it makes one by a step with gradients
    of zero, which counts (adapters/gaps/horovod_broadcast_optimizer_state.py). The rate is the workload's, whatever the
    number of ranks.
    """

    track: ClassVar = Track.AUTHORS
    variables: ClassVar = {}

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """HOROVOD_FUSION_THRESHOLD, made whole by the first gradients that are fused."""
        reason = "the fusion buffer, 128 MiB whatever the model"
        return (ExtraMemory(category="steady", num_bytes=2.0**27, reason=reason),) if case.layout.dp > 1 else ()

    def distributed(self, case: Case, model: nn.Module) -> Any:  # noqa: ANN401
        import horovod.torch as hvd

        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return hvd.DistributedOptimizer(
            build_optimizer(case.workload.optimizer, model.named_parameters()),
            named_parameters=model.named_parameters(),
            backward_passes_per_step=case.layout.num_micro_batches,
        )
