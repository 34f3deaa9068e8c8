"""torchtitan's Trainer as it is, on its own Llama 3: FSDP2, tensor parallelism and pipelines.

Loading, accumulation, the count of tokens, reduction, clipping, the optimizer, the schedule and checkpoints are its
own, by its own configuration. It runs in the environment `torchtitan`, for it pins older data sets and imports triton.
`stand_ins` has what a CPU, and PyTorch 2.13, lack for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

from torch import Tensor, nn

from meshmark.adapter.contract import Adapter, Capabilities, Feature, Requirement
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapter.loop import GREENLET, LOOP_LACKS, LoopEngine
from meshmark.adapters.fsdp2 import dealt_rows, fsdp2_exceptions, mesh_extra_memory, norm_of_tensors
from meshmark.adapters.pipeline import Pipeline
from meshmark.adapters.tensor_parallel_fsdp2 import local_shapes
from meshmark.adapters.torchtitan.loop import TorchTitanLoop
from meshmark.models.transformer import Family
from meshmark.spec.case import Case
from meshmark.spec.layout import Recompute, Schedule
from meshmark.spec.optimizer import OptimizerKind
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.model_theory import local_parameters, theory_of
from meshmark.theory.partition import held_stage
from meshmark.theory.recipe import TrainingRecipe, eager_recipe
from meshmark.theory.traffic import (
    Flow,
    OneTimeTraffic,
    Purpose,
    Sharding,
    TrafficException,
    scalar_flows,
    step_traffic,
)

_ONLY_LLAMA = "torchtitan's Trainer is run on its own Llama 3"
_COUNT_BYTES = 8
"""Bytes of a number of tokens."""


class TorchTitanEngine(LoopEngine):
    """A loop over torchtitan's model, whose parameters are renamed."""

    loop: TorchTitanLoop

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        self._start()
        return self.loop.named_parameters()

    def buffers(self) -> Mapping[str, Tensor]:
        """Return none: tables of positions are no part of the reference."""
        return {}


class TorchTitan(Adapter):
    """`torchtitan.trainer.Trainer` under FSDP2: losses are summed, and divided by the number of all targets."""

    virtual_environment: ClassVar[str] = "torchtitan"
    requires: ClassVar[tuple[Requirement, ...]] = (
        Requirement(module="torchtitan", distribution="torchtitan"),
        GREENLET,
    )
    preload: ClassVar[tuple[str, ...]] = (
        "meshmark.adapters.torchtitan.stand_ins",
        "torchtitan.trainer",
    )
    capabilities: ClassVar = Capabilities(
        dtensors=True,
        degrees=frozenset({"dp"}),
        zero_stages=frozenset({3}),
        recomputes=frozenset({Recompute.NONE}),
        families=frozenset({Family.LLAMA}),
        devices=frozenset({"cpu"}),  # of a GPU not tried
        lacks={
            **dict.fromkeys(set(Family) - {Family.LLAMA}, _ONLY_LLAMA),
            **LOOP_LACKS,
            Feature.RESHARD: "its loader's state is of as many replicas as saved it",
            Feature.TIED_EMBEDDINGS: "not tried",
            Feature.RECOMPUTE: "not tried",
            Feature.UNUSED: "its model runs all of its blocks",
            Feature.FROZEN: "its optimizer takes every parameter of its model",
            Feature.DECAY_GROUPS: "not tried",
            Feature.MATRIX_WISE: "its optimizer is given parts of the parameters",
        },
    )

    loop: ClassVar[type[TorchTitanLoop]] = TorchTitanLoop

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        optimizer, layout = case.workload.optimizer, case.layout
        if optimizer.kind is not OptimizerKind.ADAMW:
            return f"{case.adapter} does not support {optimizer.kind} (adamw is what it is asked for)"
        if layout.dp > 1 and layout.zero_stage != 3:
            return f"{case.adapter} shards over data-parallel ranks (stage 3), got {layout.id}"
        return super().supports(case, device, backend)

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        """Return plain PyTorch's; activations are those of torchtitan's own operations."""
        name = "eager-fsdp2" if case.layout.zero_stage else "eager"
        return replace(eager_recipe(case, name), activations_known=False)

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        layout, model = case.layout, case.workload.transformer
        held = (local_parameters(model, layout, rank) or 0) / (layout.dp if layout.zero_stage else 1)
        blocks = held_stage(model, layout, rank).num_layers
        own = theory_of(model).table_bytes(layout, rank, case.precision)
        tables = 4 * blocks * model.seq_len * 2 * model.head_dim - own
        dealt = (
            dealt_rows(local_shapes(case), layout.dp, layout.coordinates(rank).dp, cls.recipe(case).states)
            if layout.dp > 1 and layout.pp == 1
            else ()
        )
        return (
            ExtraMemory(
                category="steady",
                num_bytes=case.precision.accumulation.itemsize * held,
                reason="gradients are there until the next step begins",
            ),
            ExtraMemory(category="steady", num_bytes=tables, reason="every block has tables of positions of its own"),
            *dealt,
            mesh_extra_memory(case),
        )

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """The norm is computed, to be logged, where there is nothing to clip too."""
        if case.layout.dp == 1:
            return ()
        norm = () if case.workload.optimizer.clip_norm is not None else (norm_of_tensors(case),)
        return (*fsdp2_exceptions(case, rank, Sharding()), *head_stays(case, rank), counts_tokens(case, rank), *norm)

    @classmethod
    def one_time_traffic(cls, case: Case, rank: int) -> tuple[OneTimeTraffic, ...]:
        if case.layout.dp == 1:
            return ()
        reason = "the first step is logged: the mean and the largest loss, and tokens seen"
        return (
            OneTimeTraffic(kind="all_reduce", steps=(0,), most_bytes=2 * 4 + _COUNT_BYTES, most_calls=3, reason=reason),
        )

    def build(self, case: Case, context: RankContext) -> Engine:
        return TorchTitanEngine(case, context, self.loop(case, context))


class TorchTitanTensorParallel(TorchTitan):
    """`tensor_parallel_degree`, by torchtitan's own plan for its Llama, with FSDP2 over replicas or without."""

    capabilities: ClassVar = replace(
        TorchTitan.capabilities, degrees=frozenset({"tp", "dp"}), zero_stages=frozenset({0, 3}), sequence_parallel=True
    )

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if case.layout.tp == 1:
            return f"{case.adapter} takes several tensor-parallel ranks, got {case.layout.id}"
        return super().supports(case, device, backend)

    @classmethod
    def plans_traffic(cls, case: Case) -> bool:
        """Return False: torchtitan redistributes by a plan of its own, which no closed form follows."""
        return False


class TorchTitanPipeline(TorchTitan):
    """`pipeline_parallel_degree` under 1F1B: torchtitan's own stages of its Llama."""

    capabilities: ClassVar = replace(
        TorchTitan.capabilities,
        degrees=frozenset({"pp"}),
        zero_stages=frozenset({0}),
        schedules=frozenset({Schedule.ONE_F_ONE_B}),
    )

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        layout = case.layout
        if layout.pp == 1:
            return f"{case.adapter} takes several stages, got {layout.id}"
        if layout.num_micro_batches < layout.pp:
            return f"1F1B over {layout.pp} stages takes at least as many micro-batches, got {layout.num_micro_batches}"
        return super().supports(case, device, backend)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """The norm over stages is computed where there is nothing to clip too."""
        if case.workload.optimizer.clip_norm is not None:
            return ()
        flows = scalar_flows(case, rank, Purpose.NORM, case.precision.wide.itemsize)
        return (TrafficException(sends=tuple(flows), reason="the norm is computed, to be logged"),)

    @classmethod
    def one_time_traffic(cls, case: Case, rank: int) -> tuple[OneTimeTraffic, ...]:
        """Return what PyTorch's stages tell each other of shapes."""
        return Pipeline.one_time_traffic(case, rank)


def head_stays(case: Case, rank: int) -> tuple[TrafficException, ...]:
    """Return the gathering of the head's weights, which stay from the forward pass to the backward, taken off."""
    shards, model = case.layout.dp, case.workload.transformer
    rows = (-(-model.vocab_size // shards) * model.hidden + -(-model.hidden // shards)) * shards
    once = -case.layout.num_micro_batches * rows * case.precision.weights.itemsize
    return tuple(
        TrafficException(
            sends=(replace(flow, num_bytes=once, fewest=0, most=0),),
            reason="the last norm and the head are gathered once in a micro-batch, and stay until their backward pass",
        )
        for flow in step_traffic(case, rank) or ()
        if flow.purpose is Purpose.WEIGHTS
    )


def counts_tokens(case: Case, rank: int) -> TrafficException:
    """Return the sum of the ranks' numbers of targets, once a step."""
    count = Flow(
        kind="all_reduce",
        axes="dp",
        ranks=case.layout.group("dp", rank),
        purpose=Purpose.LOSS,
        num_bytes=_COUNT_BYTES,
        fewest=1,
        most=1,
    )
    return TrafficException(sends=(count,), reason="targets are counted over all ranks, once a step")
