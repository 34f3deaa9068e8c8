"""Memory in closed form: properties that hold for every layout, and counts that papers print."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmark.models.transformer import model_spec
from meshmark.plan.frameworks import recipe_of
from meshmark.plan.model_names import known_models, model_of_size, plan_model
from meshmark.plan.rates import Rates, rates
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Offload, Recompute, Schedule
from meshmark.spec.precision import Precision
from meshmark.spec.workload import workload
from meshmark.theory.activations import layer_activation_bytes, num_in_flight
from meshmark.theory.grid import RECOMPUTES, SCHEDULES, Grid, make_grid
from meshmark.theory.memory import CATEGORIES, Overheads, Room, memory, model_states, stage_memory, state_bytes
from meshmark.theory.model_theory import stage_parameters
from meshmark.theory.partition import balanced_stages, stages, uniform_stages
from meshmark.theory.recipe import RECIPES, eager_recipe, recipe

STAGES = st.sampled_from([1, 2, 3, 5, 8, 16])
POWERS = st.sampled_from([1, 2, 4, 8])


def state_total(grid: Grid, name: str) -> float:
    found = state_bytes(np.array([1e9]), grid, recipe(name))
    return float(sum(found[c][0] for c in ("parameters", "gradients", "optimizer", "buffers")))


@given(dp=st.integers(1, 4096), stage=st.integers(0, 2), name=st.sampled_from(sorted(RECIPES)))
def test_a_higher_zero_stage_never_needs_more_model_states(dp: int, stage: int, name: str) -> None:
    low, high = (make_grid(dp=[dp], zero_stage=[z]) for z in (stage, stage + 1))
    assert state_total(high, name) <= state_total(low, name)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_the_host_holds_twelve_bytes_of_states_a_parameter_and_its_gradients(zero_stage: int) -> None:
    """arXiv:2101.06840 sec. 3.2: fp32 masters, momentum and variance, over the ranks; gradients here in fp32 too. What
    is offloaded is on the host alone; on disk, nowhere."""
    case = Case(
        adapter="deepspeed-offload",
        workload=workload("gpt-mini"),
        layout=Layout(dp=4, zero_stage=zero_stage, offload=Offload.CPU),
        precision=Precision.BF16,
    )
    share = case.workload.model.num_parameters / 4
    using = eager_recipe(case, f"eager-deepspeed-{zero_stage}", casts_weights=True)
    plan = model_states(case, 0, using)
    there = model_states(replace(case, layout=replace(case.layout, offload=Offload.NONE)), 0, using)
    on_disk = model_states(replace(case, layout=replace(case.layout, offload=Offload.NVME)), 0, using)
    assert plan and there and on_disk
    hosted = plan.host_parameters, plan.host_gradients, plan.host_optimizer_states
    assert hosted == (4 * share, 4 * share, 8 * share)
    together = plan.with_host()
    assert (plan.optimizer_states, together.parameters) == (0, there.parameters)
    assert together.optimizer_states == there.optimizer_states
    assert on_disk == on_disk.with_host() and on_disk.parameters == plan.parameters


@given(dp=st.integers(2, 2048), stage=st.integers(0, 3), name=st.sampled_from(sorted(RECIPES)))
def test_more_shards_never_need_more_model_states(dp: int, stage: int, name: str) -> None:
    few, many = (make_grid(dp=[n], zero_stage=[stage]) for n in (dp, dp + 1))
    assert state_total(many, name) <= state_total(few, name) * (1 + 1e-12)


@given(tp=POWERS, pp=POWERS, micro_batch=POWERS, name=st.sampled_from(sorted(RECIPES)))
@settings(deadline=None)
def test_categories_less_what_is_absent_add_up_and_none_is_negative(
    tp: int, pp: int, micro_batch: int, name: str
) -> None:
    grid = make_grid(tp=[tp], pp=[pp], micro_batch=[micro_batch], num_micro_batches=[8], sequence_parallel=[tp > 1])
    held = memory(plan_model("llama-8b"), grid, recipe(name), rates("h100-nanotron").memory)
    parts = [getattr(held, c)[0] for c in CATEGORIES]
    assert min(parts) >= 0
    assert held.total_bytes[0] == pytest.approx(sum(parts) - held.absent[0])
    assert (held.absent[0] == 0) or recipe(name).eager, "the papers' peaks have everything at once"


def test_the_update_of_pytorch_s_default_on_a_gpu_takes_the_roots_of_all_second_moments() -> None:
    """Foreach, as DDP and FSDP2 have it unless they are told otherwise; sharded as the moments are. Torchtitan's is
    fused, and its peak is in the backward pass."""
    model, full = plan_model("llama-8b"), RECOMPUTES.index(Recompute.FULL)
    for shards, stage in ((1, 0), (8, 3)):
        grid = make_grid(dp=[shards], zero_stage=[stage], recompute=[full], micro_batch=[1])
        fused, foreach = (memory(model, grid, recipe_of(name), Overheads()) for name in ("torchtitan", "fsdp2"))
        states = fused.parameters + fused.gradients + fused.optimizer
        roots = 4 * model.num_parameters / shards
        assert foreach.total_bytes[0] >= float(states[0]) + roots * 0.999
        assert (foreach.total_bytes[0] > fused.total_bytes[0]) == (stage == 0), (
            "of a shard they are less than activations"
        )


@given(
    pp=STAGES,
    m=st.integers(1, 40),
    schedule=st.sampled_from(Schedule),
    name=st.sampled_from(["nanotron", "zero"]),
    micro_batch=POWERS,
    tp=POWERS,
    capacity=st.sampled_from([np.inf, 7e10, 4e10, 3e10, 2e10]),
)
@settings(deadline=None, max_examples=300)
def test_the_fullest_of_all_stages_is_found_among_the_first_of_each_kind(
    pp: int, m: int, schedule: Schedule, name: str, micro_batch: int, tp: int, capacity: float
) -> None:
    model, using, given = plan_model("llama-8b"), recipe(name), rates("h100-nanotron")
    grid = make_grid(
        pp=[pp],
        tp=[tp],
        num_micro_batches=[m],
        micro_batch=[micro_batch],
        schedule=[SCHEDULES.index(schedule)],
        offload=[1],
    )
    every = [stage_memory(model, grid, using, given.memory, i, Room(capacity_bytes=capacity)) for i in range(pp)]
    totals = [part.total_bytes[0] for part in every]
    held = memory(model, grid, using, given.memory, capacity_bytes=capacity)
    assert held.total_bytes[0] == pytest.approx(max(totals))
    assert totals[int(held.fullest_stage[0])] == pytest.approx(max(totals))
    assert held.host_bytes[0] == max(part.host_bytes[0] for part in every)


@given(tp=POWERS, pp=POWERS)
@settings(deadline=None)
def test_one_rank_of_a_layout_never_needs_more_than_the_single_gpu(tp: int, pp: int) -> None:
    plain = Rates(name="plain")
    one = memory(plan_model("llama-8b"), make_grid(num_micro_batches=[8]), recipe("megatron"), plain.memory)
    cut = make_grid(tp=[tp], pp=[pp], num_micro_batches=[8], sequence_parallel=True)
    many = memory(plan_model("llama-8b"), cut, recipe("megatron"), plain.memory)
    assert many.parameters[0] <= one.parameters[0] * (1 + 1e-9)
    assert many.optimizer[0] <= one.optimizer[0] * (1 + 1e-9)


@pytest.mark.parametrize(("name", "num_bytes"), [("zero", 16), ("megatron", 18), ("mixed20", 20), ("fp32", 16)])
def test_recipes_hold_the_bytes_a_parameter_that_papers_quote(name: str, num_bytes: int) -> None:
    assert recipe(name).states.total == num_bytes


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_states_equal_the_exact_counts_that_the_suites_judge_against(stage: int, dp: int) -> None:
    case = Case(adapter="any", workload=workload("gpt-tiny"), layout=Layout(dp=dp, zero_stage=stage if dp > 1 else 0))
    exact = model_states(case, 0)
    count = float(case.workload.model.num_parameters)
    found = state_bytes(np.array([count]), make_grid(dp=[dp], zero_stage=[case.layout.zero_stage]), recipe("fp32"))
    assert found["parameters"][0] == pytest.approx(exact.parameters)
    assert found["gradients"][0] == pytest.approx(exact.gradients)
    assert found["optimizer"][0] == pytest.approx(exact.optimizer_states)


def test_activations_are_korthikantis_formulas() -> None:
    spec, t = plan_model("megatron-175b"), 8
    s, b, h, a = spec.seq_len, 1, spec.hidden, spec.num_heads
    using = recipe("megatron")

    def layer(**columns: object) -> float:
        return float(layer_activation_bytes(spec, make_grid(**{k: [v] for k, v in columns.items()}), using)[0])

    full = RECOMPUTES.index(Recompute.FULL)
    assert layer() == pytest.approx(s * b * h * (34 + 5 * a * s / h))
    assert layer(tp=t) == pytest.approx(s * b * h * (10 + 24 / t + 5 * a * s / (h * t)))
    assert layer(tp=t, sequence_parallel=True) == pytest.approx(s * b * h * (34 / t + 5 * a * s / (h * t)))
    assert layer(recompute=full) == pytest.approx(2 * s * b * h)


def test_the_first_stage_of_1f1b_holds_p_micro_batches_and_gpipe_all() -> None:
    grid = make_grid(pp=[4], num_micro_batches=[16])
    assert [num_in_flight(grid, i)[0] for i in range(4)] == [4, 3, 2, 1]
    gpipe = make_grid(pp=[4], num_micro_batches=[16], schedule=[list(Schedule).index(Schedule.GPIPE)])
    assert num_in_flight(gpipe, 3)[0] == 16
    # arXiv:2205.05198: interleaving holds 1 + (p-1)/(pv) times the layers' activations on the first stage.
    inter = make_grid(
        pp=[4], num_micro_batches=[16], virtual_stages=[2], schedule=[list(Schedule).index("interleaved")]
    )
    assert num_in_flight(inter, 0)[0] / 2 == pytest.approx(4 * (1 + 3 / 8))


@pytest.mark.parametrize("pp", [1, 2, 4, 8, 16])
def test_every_cut_holds_all_layers_and_parameters(pp: int) -> None:
    spec = plan_model("sweep-8b")
    for cut in (uniform_stages(spec, pp), balanced_stages(spec, pp)):
        assert sum(s.num_layers for s in cut) == spec.num_layers
        assert sum(s.has_embedding for s in cut) == sum(s.has_head for s in cut) == sum(s.has_loss for s in cut) == 1
        assert sum(stage_parameters(spec, s) for s in cut) == spec.num_parameters


def test_the_balanced_cut_is_nanotrons() -> None:
    layers = [s.num_layers for s in stages(plan_model("sweep-8b"), 4, balanced=True)]
    assert layers == [9, 9, 8, 6]
    share = recipe("nanotron").cut.head_share
    last = stages(plan_model("sweep-1b"), 4, balanced=True, head_share=share)[-1]
    assert (last.num_layers, last.has_head) == (1, True)
    # A stage whose share is met exactly stays open in its source: 1B's head is four layers, 20 over 4 stages.
    assert [s.num_layers for s in stages(plan_model("sweep-1b"), 4, balanced=True)] == [6, 5, 5, 0]


@given(st.floats(1e8, 2e12))
def test_a_model_made_to_a_size_has_it(size: float) -> None:
    spec = model_of_size(size)
    assert abs(spec.num_parameters - size) <= 0.51 * spec.block_parameters + spec.embedding_parameters


def test_presets_have_their_published_sizes() -> None:
    sizes = {
        "llama-8b": 8.03,
        "llama-70b": 70.6,
        "llama-405b": 405.9,
        "megatron-1t": 1008.0,
        "bloom-176b": 176.0,
        "llama2-13b": 13.0,
        "llama2-70b": 69.0,
        "gpipe-transformer-3": 0.2822,
        "gpipe-transformer-1663": 83.9,
        "zero-40b": 40.5,
        "zero-60b": 60.8,
        "zero-170b": 171.0,
    }
    for name, billions in sizes.items():
        assert known_models()[name].num_parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert plan_model("sweep-1b").num_parameters == pytest.approx(1342177280, rel=1e-4)
    assert model_spec("gpt-tiny") in known_models().values()


def test_what_queued_collectives_pin_is_given_back_where_it_does_not_fit() -> None:
    """The allocator waits for them rather than fail, and the plan says how much it took back."""
    model, fitted = plan_model("sweep-8b"), rates("h100-sweep")
    grid = make_grid(dp=[2], tp=[8], micro_batch=[8], num_micro_batches=[16], sequence_parallel=True)
    free = memory(model, grid, recipe("nanotron"), fitted.memory)
    live = free.total_bytes[0] - 1.0
    tight = memory(model, grid, recipe("nanotron"), fitted.memory, capacity_bytes=live)
    assert free.released[0] == 0.0 < tight.released[0]
    assert tight.total_bytes[0] + tight.released[0] == pytest.approx(free.total_bytes[0])


def test_what_is_pinned_follows_the_launch_queue_and_the_filling_of_a_pipeline() -> None:
    """Nothing in two stages whose host is the slower, two forward passes' tensors in four, in eight a full queue."""
    model, fitted = plan_model("sweep-1b"), rates("h100-nanotron")
    none = fitted.moved({"memory.queued_collectives": 0.0})
    grid = make_grid(tp=[8], pp=[2, 4, 8], num_micro_batches=[32], sequence_parallel=True)
    lag = np.full(3, 1e-9)
    held, bare = (memory(model, grid, recipe("nanotron"), r.memory, lag=lag) for r in (fitted, none))
    whole = model.seq_len * model.hidden * 2 * (1 + 1 / 8)
    pinned = (held.first_stage_bytes - bare.first_stage_bytes) / whole
    assert pinned == pytest.approx([0.0, 2 * 5 * 2, fitted.memory.queued_collectives * 3 / (3 + 1.7)], abs=1e-3)
    assert (
        memory(model, grid, recipe("nanotron"), fitted.memory, lag=np.zeros(3)).fragmentation[1] < held.fragmentation[1]
    )


def test_rank_0_holds_the_first_stage() -> None:
    grid = make_grid(tp=[2], pp=[1, 2], micro_batch=[16], num_micro_batches=[1], sequence_parallel=True)
    found = memory(plan_model("sweep-1b"), grid, recipe("nanotron"), rates("h100-nanotron").memory)
    assert found.first_stage_bytes[0] == found.total_bytes[0]
    assert found.fullest_stage[1] == 1 and found.first_stage_bytes[1] < found.total_bytes[1]
