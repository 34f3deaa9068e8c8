"""megatron-core's further choices of how gradients are scaled and kept, of pipelines, and of fp16."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshmark.adapter.engine import Engine, Gathered, RankContext
from meshmark.adapters.megatron.gpt_engine import GPTModelEngine
from meshmark.adapters.megatron.gpt_model import ELEMENT_WISE_MASTERS, MegatronGPT, MegatronGPTDistributedOptimizer
from meshmark.adapters.megatron.on_cpu import cuda_is
from meshmark.adapters.megatron.overlap import MegatronGPTOverlap
from meshmark.reference.data import Batch
from meshmark.spec.case import Case
from meshmark.spec.layout import Recompute, Schedule
from meshmark.spec.precision import Precision
from meshmark.theory.memory import micro_batch_tokens
from meshmark.theory.traffic import Flow, Purpose, TrafficException, exceptions_for, step_traffic


def _copy(tensors: Mapping[str, Tensor], name: str, scale: float = 1.0) -> list[Tensor]:
    return [tensors[name] / scale]


class PerTokenEngine(GPTModelEngine):
    """The loss is a sum over tokens. Megatron counts them over all ranks and micro-batches, and divides gradients."""

    def evaluate(self, batch: Batch) -> Tensor:
        """Free the buffers of gradients meanwhile."""
        with cuda_is(self.context.device):
            for chunk in self.chunks:
                chunk.offload_grad_buffers()
            share = super().evaluate(batch)
            for chunk in self.chunks:
                chunk.restore_grad_buffers()
        return share

    def _loss(self, micro: Batch, loss_BT: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:  # type: ignore[override]
        total = (loss_BT * micro.weights).sum()
        return total, micro.weights.sum().int(), {"share": total.detach() / micro.total_weight}

    def gradients(self) -> Mapping[str, Tensor]:
        """Return copies: memory of which NumPy has a view, as who reads gradients may make, cannot be freed."""
        found = super().gradients()
        return Gathered(([name], functools.partial(_copy, found, name)) for name in found)


class MegatronGPTPerToken(MegatronGPT):
    """`calculate_per_token_loss`, by which Megatron scales gradients once they are reduced. Buffers of gradients have
    no memory while a model is evaluated (`offload_grad_buffers`), and replicas begin with the first one's weights
    (`broadcast_params`)."""

    engine: ClassVar = PerTokenEngine
    capabilities: ClassVar = dataclasses.replace(
        MegatronGPT.capabilities,
        precisions=frozenset({Precision.FP32}),
        lacks={**MegatronGPT.capabilities.lacks, Precision.BF16: "not tried"},
    )

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        layout, found = case.layout, super().traffic_exceptions(case, rank)

        def counted(kind: str, axis: Any) -> list[Flow]:  # noqa: ANN401
            ranks = layout.group(axis, rank)
            flow = Flow(kind=kind, axes=axis, ranks=ranks, purpose=Purpose.LOSS, num_bytes=4, fewest=1, most=1)
            return [flow] if len(ranks) > 1 else []

        sends = (*counted("broadcast", "pp"), *counted("all_reduce", "dp"))
        reason = "tokens are counted over replicas, and the last stage tells the others"
        told = (TrafficException(sends=sends, reason=reason),) if sends else ()
        return (*found, *told, *cls._gathered_inputs(case, rank))

    @classmethod
    def shares_inputs(cls, case: Case) -> bool:
        """Return whether tensor-parallel ranks share what they all keep, to compute a layer again."""
        layout = case.layout
        return layout.recompute is Recompute.FULL and layout.tp > 1 and not layout.sequence_parallel

    @classmethod
    def _gathered_inputs(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        layout, model = case.layout, case.workload.transformer
        if not cls.shares_inputs(case):
            return ()
        calls = model.num_layers // layout.pp * layout.num_micro_batches
        gathered = Flow(
            kind="all_gather",
            axes="tp",
            ranks=layout.group("tp", rank),
            purpose=Purpose.ACTIVATIONS,
            num_bytes=calls * 4 * micro_batch_tokens(case) * model.hidden,
            fewest=calls,
            most=calls,
        )
        return (
            TrafficException(sends=(gathered,), reason="inputs of layers are shared out, and gathered to run again"),
        )

    def model_options(self, case: Case) -> dict[str, Any]:
        return {
            "calculate_per_token_loss": True,
            "deterministic_mode": True,
            "distribute_saved_activations": self.shares_inputs(case),
        }

    def optimizer_options(self, case: Case) -> dict[str, Any]:
        """Rates of the embedding and the head are told by themselves, and are those of all others."""
        rate, decays = case.workload.optimizer.learning_rate, case.workload.optimizer.weight_decay > 0
        rates = {"min_lr": 0.0, "decoupled_lr": rate, "decoupled_min_lr": 0.0}
        return {**rates, "decoupled_weight_decay": decays}

    def build(self, case: Case, context: RankContext) -> Engine:
        engine = super().build(case, context)
        assert isinstance(engine, PerTokenEngine)
        for chunk in engine.chunks:
            chunk.broadcast_params()
        return engine


class MegatronGPTExchangedSums(MegatronGPTDistributedOptimizer):
    """`reduce_scatter_with_fp32_accumulation`: ranks exchange parts of gradients, and each sums its own in float32."""

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        def exchanged(flow: Flow) -> Flow:
            is_sum = flow.purpose is Purpose.GRADIENTS and flow.kind == "reduce_scatter"
            return dataclasses.replace(flow, kind="all_to_all") if is_sum else flow

        padded = super().traffic_exceptions(case, rank)
        reason = "parts of gradients are exchanged, and summed where they belong"
        return (
            *(dataclasses.replace(each, sends=tuple(map(exchanged, each.sends))) for each in padded),
            *exceptions_for(step_traffic(case, rank), Purpose.GRADIENTS, reason, exchanged),
        )

    def reduction_options(self, case: Case) -> dict[str, Any]:
        return {"reduce_scatter_with_fp32_accumulation": True}


class MegatronGPTPipelineOptions(MegatronGPT):
    """Stages that tell shapes with every message (`variable_seq_lengths`), count the embedding and the loss as layers,
    and give up what they have sent (`deallocate_pipeline_outputs`)."""

    capabilities: ClassVar = dataclasses.replace(
        MegatronGPT.capabilities,
        degrees=frozenset({"pp", "dp", "tp"}),
        schedules=frozenset({Schedule.ONE_F_ONE_B}),
        virtual_stages=frozenset({1}),
        precisions=frozenset({Precision.FP32}),
        lacks={**MegatronGPT.capabilities.lacks, Precision.BF16: "not tried"},
    )

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        layout, layers = case.layout, case.workload.model.num_layers
        if layout.pp == 1 or (layers + 2) % layout.pp or layers % layout.pp:
            return f"{case.adapter} takes several stages of as many layers, an embedding and a loss, got {layout.id}"
        return super().supports(case, device, backend)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """A shape is three numbers of 8 bytes."""
        found = super().traffic_exceptions(case, rank)
        messages = [flow for flow in step_traffic(case, rank) or [] if flow.kind in ("send", "recv")]
        shapes = tuple(dataclasses.replace(flow, num_bytes=3 * 8 * flow.most) for flow in messages)
        reason = "the shape of every message is told before it"
        return (*found, TrafficException(sends=shapes, reason=reason)) if shapes else found

    def model_options(self, case: Case) -> dict[str, Any]:
        return {
            "variable_seq_lengths": True,
            "moe_token_dispatcher_type": "alltoall",  # wanted of dense models too
            "deallocate_pipeline_outputs": True,
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
            "grad_scale_func": lambda loss: loss,
        }


class MegatronGPTAligned(MegatronGPTOverlap):
    """Stages begin to reduce and to gather together: the schedule tells each chunk when (`grad_sync_func`,
    `param_sync_func`, `align_param_gather`), as Megatron-LM's scripts set them for pipelines."""

    overlaps_gather: ClassVar = True
    capabilities: ClassVar = dataclasses.replace(
        MegatronGPTOverlap.capabilities,
        schedules=frozenset({Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED}),
        virtual_stages=frozenset({1, 2}),
        zero_stages=frozenset({1}),
        precisions=frozenset({Precision.FP32}),
        lacks={**MegatronGPTOverlap.capabilities.lacks, Precision.BF16: ELEMENT_WISE_MASTERS},
    )
    known_gaps: ClassVar = MegatronGPTDistributedOptimizer.known_gaps

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if case.layout.pp == 1:
            return f"{case.adapter} takes several stages to align, got {case.layout.id}"
        return super().supports(case, device, backend)

    def reduction_options(self, case: Case) -> dict[str, Any]:
        return {"align_param_gather": True}

    def model_options(self, case: Case) -> dict[str, Any]:
        return {"overlap_p2p_comm_warmup_flush": case.layout.virtual_stages > 1}

    def build(self, case: Case, context: RankContext) -> Engine:
        engine = super().build(case, context)
        assert isinstance(engine, GPTModelEngine)
        config, chunks = engine.chunks[0].config, engine.chunks
        reduce, gather = [c.start_grad_sync for c in chunks], [c.start_param_sync for c in chunks]
        config.grad_sync_func = reduce if len(chunks) > 1 else reduce[0]
        config.param_sync_func = gather if len(chunks) > 1 else gather[0]
        return engine


class FP16Engine(GPTModelEngine):
    """Gradients are those of a scaled loss until the update."""

    def loss_scale(self) -> float:
        return float(self.optimizer.get_loss_scale())

    def gradients(self) -> Mapping[str, Tensor]:
        scale, found = self.loss_scale(), super().gradients()
        return Gathered(([name], functools.partial(_copy, found, name, scale)) for name in found)

    def update(self) -> Tensor | None:
        with cuda_is(self.context.device):
            stepped, norm, _ = self.optimizer.step()
            self.optimizer.zero_grad()
        if stepped:
            for schedule in self.learning_rates:
                schedule.step()
        return None if norm is None or self.case.workload.optimizer.clip_norm is None else torch.as_tensor(norm)


class MegatronGPTFP16(MegatronGPT):
    """fp16 with Megatron's own dynamic scaling of the loss, from PyTorch's first scale on."""

    engine: ClassVar = FP16Engine
    capabilities: ClassVar = dataclasses.replace(
        MegatronGPT.capabilities,
        precisions=frozenset({Precision.FP16}),
        lacks={
            **{k: v for k, v in MegatronGPT.capabilities.lacks.items() if k is not Precision.FP16},
            Precision.FP32: "its scaling is of fp16",
            Precision.BF16: "its scaling is of fp16",
        },
    )

    def optimizer_options(self, case: Case) -> dict[str, Any]:
        return {"initial_loss_scale": 2.0**16, "min_loss_scale": 2.0**-4, "loss_scale_window": 2000, "hysteresis": 1}

    def build(self, case: Case, context: RankContext) -> Engine:
        engine = super().build(case, context)
        assert isinstance(engine, FP16Engine)
        for chunk in engine.chunks:
            chunk.config.grad_scale_func = engine.optimizer.scale_loss
        return engine


class MegatronGPTFP16Constant(MegatronGPTFP16):
    """`loss_scale`: fp16 whose loss is scaled by the same number in every step."""

    def optimizer_options(self, case: Case) -> dict[str, Any]:
        return {"loss_scale": 2.0**12}
