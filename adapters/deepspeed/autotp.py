"""DeepSpeed's AutoTP in training: it replaces a model's linear layers by tensor-parallel ones, by patterns of their
names, and ZeRO shards states over the replicas of what a rank then has. Embedding and head stay whole."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshmark.adapter.contract import Feature
from meshmark.adapter.engine import Engine, Gather, Gathered, RankContext
from meshmark.adapters.deepspeed import DeepSpeed
from meshmark.adapters.deepspeed.engine import DeepSpeedEngine, whole, whole_gradient
from meshmark.adapters.deepspeed.traffic_exceptions import sharing_exceptions, state_shards
from meshmark.errors import AdapterError
from meshmark.models.module import parameter_shapes
from meshmark.models.transformer import TEXT_FAMILIES, Family
from meshmark.reference.data import Batch
from meshmark.spec.case import Case
from meshmark.spec.layout import Axis, Recompute
from meshmark.spec.precision import Precision
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.model_theory import local_parameters
from meshmark.theory.recipe import TrainingRecipe
from meshmark.theory.traffic import (
    Flow,
    OneTimeTraffic,
    Purpose,
    TrafficException,
    exceptions_for,
    step_traffic,
    stream_bytes,
)

_COLUMN = r"blocks\.\d+\.(attention\.[qkv]|feed_forward\.(up|gate))\.(weight|bias)"
_ROW = r"blocks\.\d+\.(attention\.out|feed_forward\.down)\.weight"
_WHOLE = "embedding and head are whole on every rank"


def split_dim(name: str) -> int | None:
    """Return the dim along which tensor-parallel ranks split the parameter, or None if each has all of it."""
    if re.fullmatch(_COLUMN, name):
        return 0
    return 1 if re.fullmatch(_ROW, name) else None


class AutoTPEngine(DeepSpeedEngine):
    """Every tensor-parallel rank computes the same loss of its replica's rows; the first one returns it."""

    def backward(self, batch: Batch) -> Tensor:
        return self._once_per_group(super().backward(batch))

    def evaluate(self, batch: Batch) -> Tensor:
        return self._once_per_group(super().evaluate(batch))

    def _once_per_group(self, share: Tensor) -> Tensor:
        return share if self.case.layout.coordinates(self.context.rank).tp == 0 else torch.zeros_like(share)

    def parameters(self) -> Mapping[str, Tensor]:
        return self._joined({name: functools.partial(whole, p) for name, p in self.named_parameters()})

    def gradients(self) -> Mapping[str, Tensor]:
        trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        return self._joined({name: functools.partial(whole_gradient, p, 1.0) for name, p in trained.items()})

    def _joined(self, parts: Mapping[str, Gather]) -> Gathered:
        """Return tensors that are joined with the parts of the other tensor-parallel ranks."""
        from deepspeed.utils import groups

        group = groups.get_tensor_model_parallel_group()

        def join(name: str) -> list[Tensor]:
            own, dim = parts[name]()[0].contiguous(), split_dim(name)
            if dim is None:
                return [own]
            shards = [torch.empty_like(own) for _ in range(self.case.layout.tp)]
            torch.distributed.all_gather(shards, own, group=group)
            return [torch.cat(shards, dim)]

        return Gathered(([name], functools.partial(join, name)) for name in parts)

    def prove(self) -> None:
        """Raise `AdapterError` where AutoTP has made other groups than the layout, or split other parameters."""
        from deepspeed.utils import groups

        layout, rank = self.case.layout, self.context.rank
        got = tuple(torch.distributed.get_process_group_ranks(groups.get_tensor_model_parallel_group()))
        if got != layout.group("tp", rank):
            raise AdapterError(f"rank {rank}: AutoTP splits over {got}, expected {layout.group('tp', rank)}")
        for name, parameter in self.named_parameters():
            found, wanted = getattr(parameter, "ds_numel", parameter.numel()), held_elements(self.case)[name]
            if found != wanted:
                raise AdapterError(f"rank {rank}: AutoTP gives {name} {found} elements, expected {wanted}")


_PICKLED_BYTES = 1024
"""Bytes of a pickled tensor beyond its elements: about 400 in torch 2.12."""


class DeepSpeedAutoTP(DeepSpeed):
    engine: ClassVar = AutoTPEngine
    capabilities: ClassVar = dataclasses.replace(
        DeepSpeed.capabilities,
        degrees=frozenset({"tp", "dp"}),
        families=TEXT_FAMILIES,
        recomputes=frozenset({Recompute.NONE}),
        precisions=frozenset({Precision.FP32}),
        lacks={
            **DeepSpeed.capabilities.lacks,
            Family.OWN: "its patterns of names are not mapped to a plan; tp takes one",
            Family.IMAGES: "their names are not in the patterns given here, and convolutions are not split",
            Family.MIXTURE: "its names are not in the patterns given here",
            Precision.BF16: "not tried",
            Precision.FP16: "not tried",
            Feature.FAKE_WORLD: "it compares the batches of tensor-parallel ranks, and a fake world has one alone",
            Feature.DROPOUT: "ranks draw the same masks for their own heads, which the single process does not",
            Feature.RECOMPUTE: "not asked of it",
            Feature.RESHARD: "not tried",
        },
    )

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if case.layout.tp == 1 or case.layout.dp == 1:
            return f"AutoTP x ZeRO takes two axes, got {case.layout.id}"
        return super().supports(case, device, backend)

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        """Embedding, logits and loss are whole on every rank, whose activations are not planned beside split blocks."""
        return dataclasses.replace(super().recipe(case), activations_known=False)

    @classmethod
    def held_sizes(cls, case: Case) -> list[int]:
        return [*held_elements(case).values()]

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """Return the extra memory of embedding and head, whose states are whole, or a share of the whole."""
        layout, states = case.layout, cls.recipe(case).states
        shards, _ = state_shards(layout, rank)
        more = sum(cls.held_sizes(case)) - (local_parameters(case.workload.model, layout, rank) or 0)
        weights = 1 / shards if layout.zero_stage == 3 else 1
        found = {
            "parameters": states.weight_bytes * weights + states.master_bytes / shards,
            "optimizer_states": states.moment_bytes / shards,
        }
        if layout.zero_stage == 3:  # there for life; of the others `DeepSpeed` counts every tensor
            found |= {"gradients": states.gradient_bytes / shards, "steady": states.gradient_bytes / shards}
        whole = (ExtraMemory(category=name, num_bytes=more * each, reason=_WHOLE) for name, each in found.items())
        return (*whole, *super().extra_memory(case, rank))

    @classmethod
    def one_time_traffic(cls, case: Case, rank: int) -> tuple[OneTimeTraffic, ...]:
        """Before its first forward pass, DeepSpeed sees whether tensor-parallel ranks have the same inputs.

        The first of them broadcasts its own, pickled, with their size; then all add up whether theirs are equal. A
        micro-batch is a view of the global batch, and pickle takes the storage whole.
        """
        reason = "ranks see whether all have the inputs of the first, once"
        pickled = 8 * case.workload.global_batch * case.workload.model.seq_len + _PICKLED_BYTES
        told = OneTimeTraffic(kind="broadcast", steps=(0,), most_bytes=pickled, most_calls=2, reason=reason)
        equal = OneTimeTraffic(kind="all_reduce", steps=(0,), most_bytes=4, most_calls=1, reason=reason)
        return (*super().one_time_traffic(case, rank), told, equal)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        flows = step_traffic(case, rank) or []
        num_bytes, calls = _reduced_activations(case)

        def reduced(flow: Flow) -> Flow:
            return dataclasses.replace(flow, num_bytes=num_bytes, fewest=calls, most=calls)

        reason = "each product by columns reduces its input's gradient by itself; embedding and head are whole"
        norms = _norms(case, rank)
        return (
            *_shared(case, rank, flows, cls.held_sizes(case)),
            *exceptions_for(flows, Purpose.ACTIVATIONS, reason, reduced),
            *exceptions_for(flows, Purpose.LOSS, "logits are whole on every rank"),
            TrafficException(
                sends=norms,
                instead_of=tuple(flow for flow in flows if flow.purpose is Purpose.NORM),
                reason="the norm is computed, clipping or not, and summed along one axis after the other",
            ),
        )

    def config(self, case: Case, context: RankContext) -> dict[str, Any]:
        """Return the configuration without the size of the whole batch.

        DeepSpeed derives the whole from the other two sizes and all ranks, including tensor-parallel ones.
        """
        config = super().config(case, context)
        del config["train_batch_size"]
        specs = [
            {"patterns": [f".*{_COLUMN}$"], "partition_type": "column"},
            {"patterns": [f".*{_ROW}$"], "partition_type": "row"},
        ]
        partition = {"use_default_specs": False, "layer_specs": specs}
        return {**config, "tensor_parallel": {"autotp_size": case.layout.tp, "partition_config": partition}}

    def build(self, case: Case, context: RankContext) -> Engine:
        engine = super().build(case, context)
        assert isinstance(engine, AutoTPEngine)
        engine.prove()
        return engine


def held_elements(case: Case) -> dict[str, int]:
    """Return the elements of every parameter on one tensor-parallel rank, by canonical name."""
    shapes = parameter_shapes(case.workload.model)
    return {
        name: math.prod(shape) // (1 if split_dim(name) is None else case.layout.tp) for name, shape in shapes.items()
    }


def _reduced_activations(case: Case) -> tuple[int, int]:
    """Bytes and calls of a step: two outputs by rows a block, and the gradient of each input of products by columns."""
    layout, model = case.layout, case.workload.transformer
    by_columns = 4 if model.family is Family.GPT else 5
    times = (2 + by_columns) * model.num_layers
    return times * stream_bytes(case), times * layout.num_micro_batches


def _norms(case: Case, rank: int) -> tuple[Flow, ...]:
    width = 8 if case.layout.zero_stage == 3 else 4

    def along(axis: Axis) -> Flow:
        ranks = case.layout.group(axis, rank)
        return Flow(kind="all_reduce", axes=axis, ranks=ranks, purpose=Purpose.NORM, num_bytes=width, fewest=1, most=1)

    return along("dp"), along("tp")


def _shared(case: Case, rank: int, flows: list[Flow], sizes: list[int]) -> tuple[TrafficException, ...]:
    """Return ZeRO's exceptions for a rank's tensors. Theory plans split embeddings and heads, which are whole here."""
    share = sum(sizes) / (local_parameters(case.workload.model, case.layout, rank) or 1)
    real = {
        dataclasses.replace(flow, num_bytes=round(flow.num_bytes * share)): flow
        for flow in flows
        if flow.purpose in (Purpose.GRADIENTS, Purpose.WEIGHTS)
    }
    found = sharing_exceptions(case, rank, [*real], sizes)
    left = {flow for exception in found for flow in exception.instead_of}
    return (
        *(
            dataclasses.replace(exception, instead_of=tuple(real[flow] for flow in exception.instead_of))
            for exception in found
        ),
        *(
            TrafficException(sends=(flow,), instead_of=(planned,), reason=_WHOLE)
            for flow, planned in real.items()
            if flow not in left
        ),
    )
