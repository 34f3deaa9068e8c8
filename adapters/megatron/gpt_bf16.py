"""GPTModel within Float16Module, under Megatron's optimizer with float32 masters and float32 gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from fractions import Fraction

import torch

from meshmark.adapters.megatron.gpt_engine import GPTModelEngine
from meshmark.adapters.megatron.gpt_weights import initial_values, shard
from meshmark.models.transformer import Family
from meshmark.spec.case import Case
from meshmark.spec.layout import Recompute
from meshmark.theory.traffic import Flow, Purpose, TrafficException, exceptions_for


def narrow_activations(case: Case, flows: Sequence[Flow] | None) -> tuple[TrafficException, ...]:
    """All weights are cast, where theory has autocast's wide residual stream."""
    if not case.precision.is_mixed:
        return ()
    part = Fraction(case.precision.weights.itemsize, case.precision.wide.itemsize)

    def cast(flow: Flow) -> Flow:
        return dataclasses.replace(flow, num_bytes=int(flow.num_bytes * part))

    return exceptions_for(flows, Purpose.ACTIVATIONS, "all weights are cast, and so is the residual stream", cast)


@torch.no_grad()
def restore_masters(case: Case, engine: GPTModelEngine) -> None:
    """Give the float32 masters the workload's initial values: megatron-core makes them from weights that it has already
    rounded."""
    values, stands = initial_values(case.workload.transformer, case.workload.seed), engine.stands
    for fused, parameter in engine.fused_parameters():
        own = shard(case.workload.transformer, fused, values, stands.tp, case.layout.tp)
        parameter.main_param.copy_(own)  # type: ignore[attr-defined]


def untried_in_bf16(case: Case) -> Iterator[str]:
    """Yield the features of a layout and a model that are untested in bf16."""
    layout = case.layout
    if case.workload.model.family is not Family.GPT:
        yield "rotary positions"
    elif not case.workload.transformer.causal:
        yield "an encoder"
    if case.workload.frozen:
        yield "frozen parameters"
    if layout.tp > 2:
        yield "more than two tensor-parallel ranks"
    if layout.sequence_parallel:
        yield "sequence parallelism"
    if layout.virtual_stages > 1:
        yield "interleaved stages"
    if layout.recompute is not Recompute.NONE:
        yield "recomputation"
