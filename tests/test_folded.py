"""Pipelines folded into a V: which rank holds which stage, and what that makes of states and messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.errors import LayoutError
from meshmark.models.transformer import MODELS
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Schedule
from meshmark.spec.workload import WORKLOADS, Workload
from meshmark.theory.memory import model_states
from meshmark.theory.model_theory import local_parameters
from meshmark.theory.partition import held_stage, uniform_stages
from meshmark.theory.traffic import Purpose, pipeline_traffic, stream_bytes

LOOP = Layout(pp=4, schedule=Schedule.INTERLEAVED, virtual_stages=2, num_micro_batches=8)
V = replace(LOOP, folded=True)
DEEP = replace(MODELS["gpt-tiny"], num_layers=10)


def of(num_layers: int, **changes: bool) -> Workload:
    model = replace(MODELS["gpt-tiny"], num_layers=num_layers, **changes)
    return replace(WORKLOADS["gpt-tiny"], model=model, global_batch=8)


def zbv(layout: Layout, workload: Workload) -> Case:
    return Case(adapter="pipeline-zbv", workload=workload, layout=layout)


def test_the_first_rank_of_a_v_holds_both_ends() -> None:
    assert [V.stages_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert [LOOP.stages_of(rank) for rank in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    first, last = held_stage(DEEP, V, 0), held_stage(DEEP, V, 3)
    assert (first.has_embedding, first.has_head, first.has_loss) == (True, True, True)
    assert not last.has_head and not last.has_embedding
    assert [held_stage(DEEP, V, rank).num_layers for rank in range(4)] == [3, 3, 2, 2]
    assert [held_stage(DEEP, replace(LOOP, virtual_stages=1), rank) for rank in range(4)] == [*uniform_stages(DEEP, 4)]
    with pytest.raises(LayoutError, match="folded chunks are two"):
        replace(V, virtual_stages=3)


def test_ranks_of_a_v_hold_the_model_and_hand_over_at_its_point_without_a_message() -> None:
    case = zbv(V, of(8))
    model = case.workload.transformer
    assert sum(local_parameters(model, V, rank) or 0 for rank in range(4)) == model.num_parameters
    sent = [sum(f.num_bytes for f in pipeline_traffic(case, rank) if f.kind == "send") for rank in range(4)]
    assert sent == [stream_bytes(case) * times for times in (2, 4, 4, 2)]
    assert {f.ranks for f in pipeline_traffic(case, 3)} == {(2, 3)}
    tied = pipeline_traffic(zbv(V, of(8, tied_embeddings=True)), 0)
    assert not [f for f in tied if f.purpose is Purpose.TIED_WEIGHT], "both are on the first rank"
    states = [model_states(case, rank) for rank in range(4)]
    assert all(s and s.activations is None and s.peak is None for s in states), "of a V states alone are planned"
    message = stream_bytes(case) / V.num_micro_batches
    assert [s.buffers / message / 8 for s in states if s] == [2, 4, 4, 2], "what is handed over is not received"


def test_a_v_takes_its_micro_batches() -> None:
    supports = load_adapter(builtin_adapters()["pipeline-zbv"]).supports
    few = zbv(replace(V, pp=2, num_micro_batches=2), of(4))
    assert "twice as many micro-batches" in (supports(few, "cpu", "gloo") or "")
    assert "unfolded stages" in (supports(zbv(LOOP, of(8)), "cpu", "gloo") or "")
