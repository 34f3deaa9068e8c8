"""DeepSpeed-Ulysses, sequence parallelism (arXiv:2309.14509): every rank has some tokens of each sequence; around the
attention core all-to-all makes that all tokens of some heads. ZeRO shards states over all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshmark.adapter.contract import Feature
from meshmark.adapter.engine import Engine, RankContext, configure
from meshmark.adapters.deepspeed import DeepSpeed
from meshmark.adapters.deepspeed.engine import DeepSpeedEngine
from meshmark.adapters.deepspeed.traffic_exceptions import zero_exceptions
from meshmark.errors import AdapterError
from meshmark.models.module import Model
from meshmark.models.transformer import TEXT_FAMILIES, Family
from meshmark.models.transformer.module import Attention, Transformer
from meshmark.reference.data import Batch
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.model_theory import bucket_elements
from meshmark.theory.traffic import Flow, Purpose, TrafficException, context_parallel_traffic, stream_bytes


class UlyssesAttention(Attention):
    """Attention over this rank's tokens."""

    exchanged: Callable[[Tensor, Tensor, Tensor], Tensor]
    """`of_heads` behind DeepSpeed's all-to-all, from this rank's tokens to its heads and back."""

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, _ = x_BTC.shape
        q_BTHD, k_BTKD, v_BTKD = (layer(x_BTC).view(B, T, -1, self.head_dim) for layer in (self.q, self.k, self.v))
        y_BTHD = self.exchanged(q_BTHD, k_BTKD, v_BTKD)
        out: Tensor = self.out(y_BTHD.reshape(B, T, -1))
        return out

    def of_heads(self, *qkv_BTHD: Tensor) -> Tensor:
        return self.attend(*(tensor.transpose(1, 2) for tensor in qkv_BTHD)).transpose(1, 2).contiguous()


class UlyssesEngine(DeepSpeedEngine):
    """Trains on this rank's tokens of its replica's rows."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self._tokens(inputs))

    def loss_share(self, outputs: Tensor, batch: Batch) -> Tensor:
        own = dataclasses.replace(batch, targets=self._tokens(batch.targets), weights=self._tokens(batch.weights))
        return super().loss_share(outputs, own)

    def differentiate(self, loss: Tensor) -> None:
        """Up to stage 2 DeepSpeed sums gradients over a sequence's ranks, and at stage 3 it averages them
        (adapters/gaps/deepspeed_zero3_sequence_parallel_averages.py): made a sum here."""
        layout = self.case.layout
        super().differentiate(loss * layout.cp if layout.zero_stage == 3 else loss)

    def _tokens(self, rows_BT: Tensor) -> Tensor:
        layout = self.case.layout
        return rows_BT.chunk(layout.cp, dim=1)[layout.coordinates(self.context.rank).cp].contiguous()

    def exchange(self) -> None:
        """Put DeepSpeed's all-to-all around every attention core. Raises `AdapterError` where DeepSpeed has made
        another group of ranks than the layout."""
        from deepspeed.sequence.layer import DistributedAttention
        from deepspeed.utils import groups

        group = groups._get_sequence_parallel_group()
        expected = self.case.layout.group("cp", self.context.rank)
        if (got := tuple(torch.distributed.get_process_group_ranks(group))) != expected:
            raise AdapterError(f"rank {self.context.rank}: DeepSpeed shares a sequence over {got}, expected {expected}")
        for part in self.inner().modules():
            if isinstance(part, UlyssesAttention):
                across = DistributedAttention(part.of_heads, group, scatter_idx=2, gather_idx=1)
                part.exchanged = _batch_first(across)


def _batch_first(across: Callable[..., Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: across(q, k, v, 0)


class DeepSpeedUlysses(DeepSpeed):
    engine: ClassVar = UlyssesEngine
    capabilities: ClassVar = dataclasses.replace(
        DeepSpeed.capabilities,
        degrees=frozenset({"cp", "dp"}),
        families=TEXT_FAMILIES,
        precisions=frozenset({Precision.FP32}),
        lacks={
            **DeepSpeed.capabilities.lacks,
            Family.OWN: "its rows have no sequence to deal out",
            Family.IMAGES: "images have no sequence of tokens to deal out",
            Family.MIXTURE: "its experts were not tried on parts of sequences",
            Precision.BF16: "not tried",
            Precision.FP16: "not tried",
            Feature.DROPOUT: "ranks draw the masks of their own tokens, which the single process does not",
            Feature.RESHARD: "not tried",
        },
    )

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        cp = case.layout.cp
        if cp == 1:
            return f"sequence parallelism takes several ranks a sequence, got {case.layout.id}"
        if reason := super().supports(case, device, backend):
            return reason
        if case.workload.transformer.num_kv_heads % cp:
            return f"cp {cp} does not divide {case.workload.transformer.num_kv_heads} key-value heads"
        return None

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """q, k, v and the output, and their gradients: eight exchanges a layer and micro-batch, each of what a rank
        has (section 3.2)."""
        layout, model = case.layout, case.workload.transformer
        calls = 8 * model.num_layers * layout.num_micro_batches
        stream = stream_bytes(case) // case.precision.wide.itemsize * case.precision.compute.itemsize
        per_layer = 4 * stream + 4 * stream // model.hidden * model.kv_hidden
        exchanged = Flow(
            kind="all_to_all",
            axes="cp",
            ranks=layout.group("cp", rank),
            purpose=Purpose.ACTIVATIONS,
            num_bytes=per_layer * model.num_layers,
            fewest=calls,
            most=calls,
        )
        reason = "heads are dealt out by all-to-all, where theory has a ring of keys and values"
        ring = tuple(context_parallel_traffic(case, rank))
        return (*zero_exceptions(case, rank), TrafficException(sends=(exchanged,), instead_of=ring, reason=reason))

    def model(self, case: Case, context: RankContext) -> Model:
        """Positions are counted from this rank's first token; rotary ones are of the whole sequence, among heads."""
        spec = case.workload.transformer
        with context.device:
            model = Transformer(spec)
            for block in model.blocks.values():
                block.attention = UlyssesAttention(spec)
        model.initialize(case.workload.seed)
        assert model.embedding is not None
        if model.embedding.positions is not None:
            first = case.layout.coordinates(context.rank).cp * (spec.seq_len // case.layout.cp)
            model.embedding.positions.register_forward_pre_hook(lambda _, given: (given[0] + first,))
        return configure(model, case)

    def groups(self, case: Case, context: RankContext) -> ModuleType:
        """The way that Accelerate and Transformers take. With `sequence_parallel_size` in the configuration, DeepSpeed
        reduces no gradients over a sequence's ranks (adapters/gaps/deepspeed_sequence_parallel_by_configuration.py)."""
        import deepspeed
        from deepspeed.runtime.sequence_parallel import parallel_state_sp

        deepspeed.init_distributed(dist_backend=context.backend, auto_mpi_discovery=False)
        parallel_state_sp.initialize_sequence_parallel(case.layout.cp)
        told: ModuleType = parallel_state_sp
        return told

    def build(self, case: Case, context: RankContext) -> Engine:
        engine = super().build(case, context)
        assert isinstance(engine, UlyssesEngine)
        engine.exchange()
        return engine


class DeepSpeedUlyssesNarrow(DeepSpeedUlysses):
    """`seq_parallel_communication_data_type: bf16`: gradients are sent and summed in bf16, over replicas and over the
    ranks that share a sequence."""

    capabilities: ClassVar = dataclasses.replace(
        DeepSpeedUlysses.capabilities,
        zero_stages=frozenset({2, 3}),
        precisions=frozenset({Precision.BF16_REDUCE_BF16}),
        lacks={
            **{k: v for k, v in DeepSpeedUlysses.capabilities.lacks.items() if k is not Precision.BF16_REDUCE_BF16},
            Precision.FP32: "its choice is of what is reduced in bf16",
        },
    )

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """Up to stage 2 the format that was asked for is not heeded
        (adapters/gaps/deepspeed_sequence_parallel_data_type.py)."""
        found = super().traffic_exceptions(case, rank)
        if case.layout.zero_stage == 3:
            return found
        wide = case.precision.wide.itemsize // case.precision.reduction.itemsize
        return tuple(_widened(each, wide) for each in found)

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """Stage 3 keeps a bucket for life, of what it sends."""
        found = super().extra_memory(case, rank)
        if case.layout.zero_stage < 3:
            return found
        num_bytes = -2.0 * bucket_elements(case.workload.model)
        return (*found, ExtraMemory(category="steady", num_bytes=num_bytes, reason="a bucket is in bf16"))

    def config(self, case: Case, context: RankContext) -> dict[str, Any]:
        return {**super().config(case, context), "seq_parallel_communication_data_type": "bf16"}


def _widened(found: TrafficException, times: int) -> TrafficException:
    """Return an exception whose gradients take so many times the bytes."""
    sends = tuple(
        dataclasses.replace(flow, num_bytes=flow.num_bytes * times) if flow.purpose is Purpose.GRADIENTS else flow
        for flow in found.sends
    )
    if sends == found.sends:
        return found
    reason = f"{found.reason}; in float32 whatever was asked for, because ranks share a sequence"
    return dataclasses.replace(found, sends=sends, reason=reason)
