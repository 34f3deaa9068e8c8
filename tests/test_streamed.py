"""DeepSpeed's ZeRO stage 2 gradient by gradient: what it holds at the peak is planned, and an unnamed copy there is
caught."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.launch.launch import ForkserverLauncher
from meshmark.models.transformer import Family, ModelSpec
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.workload import workload
from meshmark.theory.grid import layout_grid
from meshmark.theory.memory import Overheads, eager_pass, memory, model_states
from meshmark.theory.partition import parameter_shapes, uniform_stages
from meshmark.theory.recipe import recipe
from meshmark.theory.streamed import Bucket, Parameter, Parts, moments
from tests.broken.mutants import BY_NAME, target
from tests.factories import make_model

SPECS = [
    make_model(),
    make_model(tied_embeddings=True),
    make_model(family=Family.LLAMA, num_kv_heads=2),
    make_model(family=Family.LLAMA, tied_embeddings=True),
]
ONE = np.ones(1)


@pytest.mark.parametrize("spec", SPECS)
def test_a_backward_pass_frees_all_that_it_finds_and_makes(spec: ModelSpec) -> None:
    stage = uniform_stages(spec, 1)[0]
    one = eager_pass(spec, layout_grid(Layout(), 4), recipe("eager-deepspeed-2"), stage)
    found = list(moments(one, 2.0))
    assert found[0].during == one.held + 2 * one.logits
    assert found[-1].after == pytest.approx(0, abs=1e-6)
    assert min(moment.after for moment in found) >= 0
    sizes = [(float(p.start[0]), float(p.size[0])) for moment in found for p in moment.parameters]
    ends = np.cumsum([math.prod(shape) for shape in parameter_shapes(spec, stage).values()])
    assert sorted(start + size for start, size in sizes) == list(ends), "every gradient arrives, once"


@st.composite
def reductions(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    """Sizes of parameters in their order, of the bucket, the number of ranks, and one of them."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    num_ranks = draw(st.integers(1, 5))
    return sizes, draw(st.integers(20, 90)), num_ranks, draw(st.integers(0, num_ranks - 1))


def replayed(sizes: list[int], capacity: int, num_ranks: int, rank: int) -> list[int]:
    """Return the results of `Bucket.take` for gradients that arrive last first, element by element."""
    part = 2 * math.ceil(sum(sizes) / (2 * num_ranks))
    owner = [element // part for element in range(sum(sizes))]
    owners = [set(owner[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(len(sizes))]
    kept = sum(size for size, by in zip(sizes, owners, strict=True) if rank in by)
    waiting, made, found = list[int](), 0, list[int]()
    for i in reversed(range(len(sizes))):
        held = capacity + made + sum(sizes[j] for j in waiting if sizes[j] > capacity)
        filled = sum(sizes[j] for j in waiting)
        if filled + sizes[i] <= capacity:
            found.append(held)
        else:
            several = len(set().union(*(owners[j] for j in waiting))) > 1
            new = kept if any(rank in owners[j] for j in waiting) else 0
            found.append(max(held + filled * several, held - made + max(made, new)))
            made, waiting = max(made, new), []
        waiting.append(i)
    return found


@given(reductions())
@settings(deadline=None)
def test_a_bucket_is_reduced_when_the_next_gradient_would_not_fit(given: tuple[list[int], int, int, int]) -> None:
    sizes, capacity, num_ranks, rank = given
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    every = [Parameter(start=start * ONE, size=size * ONE) for start, size in zip(starts, sizes, strict=True)]
    size = 2 * math.ceil(sum(sizes) / (2 * num_ranks))
    parts = Parts(rank=np.array([[rank]]), size=size * ONE)
    bucket = Bucket(capacity, parts, parts.whole(every))
    assert [float(bucket.take(p)[0, 0]) for p in reversed(every)] == replayed(sizes, capacity, num_ranks, rank)


def test_where_no_rank_is_asked_for_the_peak_is_the_fullest_s() -> None:
    model, using = workload("gpt-mini").model, recipe("eager-deepspeed-2")
    grids = [layout_grid(Layout(dp=4, zero_stage=2, num_micro_batches=4), 16, rank) for rank in range(-1, 4)]
    fullest, *ranks = (memory(model, grid, using, Overheads()).total_bytes[0] for grid in grids)
    assert fullest == max(ranks) > min(ranks)


def test_with_overlap_two_buckets_of_deepspeed_s_own_size_are_there() -> None:
    case = Case(adapter="deepspeed-recommended", workload=workload("gpt-mini"), layout=Layout(dp=2, zero_stage=2))
    plan = model_states(case, 0, load_adapter(builtin_adapters()[case.adapter]).recipe(case))
    assert plan and plan.peak and 0 < plan.peak - 2 * 4 * 500_000_000 < 2e6


MUTANT = BY_NAME["deepspeed2_CopiesWhileItAccumulates"]


@pytest.fixture(scope="module")
def runner(launcher: ForkserverLauncher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    pytest.importorskip("deepspeed")
    known = {"deepspeed": "meshmark.adapters.deepspeed:DeepSpeed", MUTANT.name: target(MUTANT.name)}
    running = Runner(launcher, known, RunOptions(observed_steps=3), tmp_path_factory.mktemp("results"))
    yield running
    running.close()


def test_the_peak_is_planned_of_every_rank(runner: Runner) -> None:
    """This rank's gradients fill the bucket several times, in the reduction on one rank."""
    memory = runner.observe(Case(adapter="deepspeed", workload=MUTANT.workload, layout=MUTANT.layout)).memory
    for reading, plan in zip(memory.readings, memory.planned, strict=True):
        assert plan and plan.peak
        measured, late = reading.peak.total - reading.peak.inputs, reading.late_bytes  # which gloo's thread still had
        assert max(measured - late - plan.peak, plan.peak - measured) <= 0.001 * plan.peak, (measured, late, plan.peak)
    assert len({plan and plan.peak for plan in memory.planned}) == 2, "ranks hold parts of different tensors"


def test_a_copy_that_is_gone_after_the_step_is_caught_at_the_peak(runner: Runner) -> None:
    verdict = runner.observe(MUTANT.case).verdict("memory")
    assert verdict is not None and not verdict.passed
    assert verdict.evidence["category"] == "peak"
