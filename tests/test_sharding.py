"""Choices of FSDP's users beyond ZeRO's stage 3, in closed form: on values, without a launch."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import numpy as np
import pytest

from meshmark.adapter.contract import Adapter
from meshmark.adapter.registry import load_adapter
from meshmark.adapters import ROSTER
from meshmark.adapters.fsdp2 import dealt_rows
from meshmark.models.module import parameter_shapes
from meshmark.models.transformer import ModelSpec, gpt, llama
from meshmark.plan.model_names import known_models
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.workload import workload
from meshmark.theory.grid import make_grid
from meshmark.theory.memory import Overheads, memory, model_states
from meshmark.theory.partition import dealt_parameters, stages
from meshmark.theory.recipe import StateBytes, recipe
from meshmark.theory.traffic import Purpose, departed, step_traffic

GPT = workload("gpt-mini")
FOUR = Layout(dp=4, zero_stage=3, num_micro_batches=2)
P = GPT.model.num_parameters * 4
BLOCKS = GPT.model.num_layers * GPT.model.block_parameters * 4


def adapter(name: str) -> type[Adapter]:
    return load_adapter({"fsdp2": "meshmark.adapters.fsdp2:FSDP2", **ROSTER}[name])


def sent(name: str, purpose: Purpose, rank: int = 3) -> dict[tuple[str, tuple[int, ...]], int]:
    """Bytes by kind and ranks, what is padded left out: gpt-mini's rows are multiples of four."""
    case = Case(adapter=name, workload=GPT, layout=FOUR)
    flows = departed(step_traffic(case, rank) or [], adapter(name).traffic_exceptions(case, rank))
    return {(flow.kind, flow.ranks): flow.num_bytes for flow in flows if flow.purpose is purpose}


ALL, NEAR, LIKE = (0, 1, 2, 3), (2, 3), (1, 3)


@pytest.mark.parametrize(
    "name, weights, gradients",
    [
        ("fsdp2", {("all_gather", ALL): 4 * P}, {("reduce_scatter", ALL): 2 * P}),
        ("fsdp2-noreshard", {("all_gather", ALL): 2 * P}, {("reduce_scatter", ALL): 2 * P}),
        ("fsdp2-recommended", {("all_gather", ALL): 2 * (P + BLOCKS)}, {("reduce_scatter", ALL): 2 * P}),
        (
            "fsdp2-reshard2",
            {("all_gather", ALL): 2 * (2 * P - BLOCKS), ("all_gather", NEAR): 2 * BLOCKS},
            {("reduce_scatter", ALL): 2 * P},
        ),
        (
            "fsdp2-hsdp",
            {("all_gather", NEAR): 4 * P},
            {("reduce_scatter", NEAR): 2 * P, ("all_reduce", LIKE): P},
        ),
        ("fsdp1-shard-grad-op", {("all_gather", ALL): 2 * P}, {("reduce_scatter", ALL): 2 * P}),
    ],
)
def test_a_choice_decides_who_gathers_how_often(
    name: str, weights: dict[tuple[str, tuple[int, ...]], int], gradients: dict[tuple[str, tuple[int, ...]], int]
) -> None:
    assert sent(name, Purpose.WEIGHTS) == weights
    assert sent(name, Purpose.GRADIENTS) == gradients


def test_replicas_hold_twice_the_states() -> None:
    case = Case(adapter="fsdp2", workload=GPT, layout=FOUR)
    plain, hybrid = (model_states(case, 0, adapter(name).recipe(case)) for name in ("fsdp2", "fsdp2-hsdp"))
    assert plain and hybrid
    assert (hybrid.parameters, hybrid.optimizer_states) == (2 * plain.parameters, 2 * plain.optimizer_states)
    assert hybrid.parameters == P / 2


def test_weights_that_stay_are_activations() -> None:
    case = Case(adapter="fsdp2", workload=GPT, layout=FOUR)
    found = {
        name: model_states(case, 0, adapter(name).recipe(case))
        for name in ("fsdp2", "fsdp2-noreshard", "fsdp2-reshard2", "fsdp2-recommended")
    }
    held = {name: states.activations for name, states in found.items() if states and states.activations is not None}
    assert held["fsdp2-noreshard"] - held["fsdp2"] == P
    assert held["fsdp2-reshard2"] - held["fsdp2"] == BLOCKS / 2
    assert held["fsdp2-recommended"] - held["fsdp2"] == P - BLOCKS


@pytest.mark.parametrize("name", ["fsdp2-hsdp", "fsdp2-reshard2", "fsdp1-hybrid"])
def test_two_ranks_are_too_few_for_two_groups(name: str) -> None:
    case = Case(adapter=name, workload=GPT, layout=dataclasses.replace(FOUR, dp=2))
    assert "take a larger multiple of 2 data-parallel ranks, got 2" in (
        adapter(name).refusal(case, "cpu", "gloo") or ""
    )
    assert adapter(name).refusal(dataclasses.replace(case, layout=FOUR), "cpu", "gloo") is None


def test_rows_that_are_no_multiple_of_the_shards_are_dealt_out_whole() -> None:
    """As a dry run of 1,024 ranks showed: even shares are right only where rows divide."""
    case = Case(
        adapter="fsdp2",
        workload=dataclasses.replace(GPT, global_batch=6),
        layout=Layout(dp=6, zero_stage=3),
    )
    shapes = parameter_shapes(GPT.model)

    def rows(rank: int) -> dict[str, float]:
        found = {r.category: r.num_bytes for r in adapter("fsdp2").extra_memory(case, rank)}
        return {name: found[name] + share * P / 6 for name, share in (("parameters", 1), ("optimizer_states", 2))}

    padded = sum(-(-first // 6) * math.prod(row) for first, *row in shapes.values())
    assert all(rows(rank)["parameters"] == pytest.approx(4 * padded) for rank in range(6)), "on every rank the same"
    assert sum(rows(rank)["optimizer_states"] for rank in range(6)) == pytest.approx(2 * P), "moments are not padded"
    assert rows(0)["optimizer_states"] > rows(5)["optimizer_states"], "the first ranks have theirs, the last the rest"


@pytest.mark.parametrize("shards", [512, 3])
def test_what_replicas_of_shards_sum_is_a_whole_padded_shard(shards: int) -> None:
    layout = Layout(dp=2 * shards, zero_stage=3)
    case = Case(adapter="fsdp2-hsdp", workload=dataclasses.replace(GPT, global_batch=2 * shards), layout=layout)
    flows = departed(step_traffic(case, 0) or [], adapter("fsdp2-hsdp").traffic_exceptions(case, 0))
    summed = sum(f.num_bytes for f in flows if f.purpose is Purpose.GRADIENTS and f.kind == "all_reduce")
    shapes = parameter_shapes(GPT.model).values()
    assert summed == 4 * sum(-(-rows // shards) * math.prod(row) for rows, *row in shapes)


@pytest.mark.parametrize(
    "model", [gpt("g", 3, 48, 4, vocab_size=102, seq_len=20), llama("l", 2, 64, 4, 168, vocab_size=96)]
)
@pytest.mark.parametrize("shards", [1, 2, 7, 1000])
def test_the_planner_deals_rows_out_as_the_suites_do(model: ModelSpec, shards: int) -> None:
    """The first rank's shard is what the adapter's extra memory make of an even one; all of it where rows divide."""
    (stage,), many = stages(model, 1, balanced=False), np.array([float(shards)])
    (found,) = dealt_parameters(model, stage, np.ones(1), many)
    one = StateBytes(weight_bytes=1.0, gradient_bytes=1.0, master_bytes=0.0, moment_bytes=1.0)
    more = {r.category: r.num_bytes for r in dealt_rows(parameter_shapes(model), shards, 0, one)}
    for state in ("parameters", "gradients", "optimizer_states"):
        assert found == pytest.approx(model.num_parameters / shards + more.get(state, 0.0), rel=1e-12)
    assert (found * shards > model.num_parameters) == (shards > 2)


def test_a_plan_of_thousands_of_shards_holds_their_padding() -> None:
    """FSDP2 at stage 3 only: Llama 405B over 16,384 ranks has 3.25 rows of 16,384 for each, and deals out 4."""
    model = known_models()["llama-405b"]
    grid = make_grid(dp=16384, zero_stage=np.array([0, 3]), micro_batch=1)
    even, dealt = (
        memory(model, grid, replace(recipe("fsdp2"), deals_rows=deals), Overheads()) for deals in (False, True)
    )
    assert recipe("fsdp2").deals_rows and not recipe("fsdp-fused-loss").deals_rows
    assert dealt.parameters[0] == even.parameters[0]
    for name in ("parameters", "gradients", "optimizer"):
        ratio = getattr(dealt, name)[1] / getattr(even, name)[1]
        assert 1.25 < ratio < 1.3, (name, ratio)
