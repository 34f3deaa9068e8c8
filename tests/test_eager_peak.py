"""The peak of eager runs that is planned is the one that is measured, whichever instant it is at; and the order of
parameters that it rests on is the model's own."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmark.adapter.engine import RankContext
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.adapter.single import SingleEngine
from meshmark.measure.meters import Watch, read_memory
from meshmark.measure.readings import MemoryReading
from meshmark.models.module import parameter_shapes
from meshmark.models.transformer import Family, ModelSpec, gpt, llama
from meshmark.passes.observe import Observer
from meshmark.records.request import Request, Task
from meshmark.spec.case import Case, Tuning
from meshmark.spec.layout import Layout
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload
from meshmark.theory.grid import make_grid
from meshmark.theory.memory import CATEGORIES, Overheads, memory, model_states
from meshmark.theory.partition import (
    filled_elements,
    largest_temporaries,
    parameter_sizes,
    part_elements,
    reaching_elements,
    uniform_stages,
)
from meshmark.theory.recipe import RECIPES, UpdateForm, eager_recipe, recipe
from tests.factories import make_model

ONE = np.ones(1)


def measured(case: Case, tmp_path: Path, *, foreach: bool | None = None) -> MemoryReading:
    """Return the memory of `single` in this process. `foreach` is its optimizer's; None is PyTorch's choice on a
    CPU."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    context = RankContext(rank=0, world_size=1, device=torch.device("cpu"), backend="gloo", scratch=tmp_path)
    request = Request(
        case=case,
        adapter="",
        task=Task.OBSERVE,
        device="cpu",
        backend="gloo",
        time_limit_seconds=60,
        steps=3,
        warmup=0,
        assess=False,
    )
    with Watch(context.device) as watch:
        engine = load_adapter(builtin_adapters()["single"])().build(case, context)
        assert isinstance(engine, SingleEngine)
        for group in engine.optimizer.param_groups:
            group["foreach"] = foreach
        observer = Observer(engine, request)
        for step in range(2):
            observer.train(step, watch)
        watch.focus()
        before, after = observer.train(2, watch)
    return read_memory(watch, 2, before, after)


WIDE = gpt("wide", 2, 160, 4, vocab_size=256, seq_len=32)
"""Most is held in the update, or with two micro-batches where a weight's gradient is added to the one before."""
LONG = gpt("long", 3, 64, 4, vocab_size=256, seq_len=128, tied_embeddings=True)
"""At the loss."""
GATED = llama("gated", 2, 128, 4, 344, vocab_size=256, seq_len=32, num_kv_heads=2)
"""In SwiGLU's backward, or where the output projection's gradient is added."""
TIED = gpt("tied", 2, 64, 2, vocab_size=2048, seq_len=16, tied_embeddings=True)
"""Where the head's and the embedding's gradients, which are one parameter's, are added in a third tensor."""


@pytest.mark.parametrize(
    ("spec", "num_micro_batches", "precision", "tolerance"),
    [
        (WIDE, 1, Precision.FP32, 0.001),
        (WIDE, 2, Precision.FP32, 0.001),
        (LONG, 2, Precision.FP32, 0.001),
        (GATED, 1, Precision.FP32, 0.001),
        (GATED, 2, Precision.FP32, 0.001),
        (TIED, 1, Precision.FP32, 0.001),
        (TIED, 2, Precision.FP32, 0.001),
        (WIDE, 2, Precision.BF16, 0.001),
        (LONG, 1, Precision.BF16, 0.001),
        (GATED, 1, Precision.BF16, 0.001),
    ],
)
def test_the_peak_is_planned(
    spec: ModelSpec, num_micro_batches: int, precision: Precision, tolerance: float, tmp_path: Path
) -> None:
    """To the byte but for scalars and biases."""
    work = Workload(name=spec.name, model=spec, global_batch=4, masked=False)
    case = Case(
        adapter="single", workload=work, layout=Layout(num_micro_batches=num_micro_batches), precision=precision
    )
    reading = measured(case, tmp_path)
    assert model_states(case, 0).peak == pytest.approx(reading.peak.total - reading.peak.inputs, rel=tolerance)


@pytest.mark.parametrize("form", UpdateForm)
def test_the_update_is_planned_by_the_form_of_its_step(form: UpdateForm, tmp_path: Path) -> None:
    """As a GPU's default, all of a group at once, takes the roots of all second moments; fused, nothing."""
    work = Workload(name=WIDE.name, model=WIDE, global_batch=1, masked=False)
    tuning = Tuning(fused_optimizer=form is UpdateForm.FUSED)
    case = Case(adapter="single", workload=work, layout=Layout(), tuning=tuning)
    using = eager_recipe(case)
    assert using.update is (UpdateForm.FUSED if tuning else UpdateForm.LOOP)
    found = model_states(case, 0, dataclasses.replace(using, update=form)).peak
    reading = measured(case, tmp_path, foreach=True if form is UpdateForm.FOREACH else None)
    assert found == pytest.approx(reading.peak.total - reading.peak.inputs, rel=0.001)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_without_moments_the_update_holds_no_temporaries_of_theirs(precision: Precision, tmp_path: Path) -> None:
    """Most is held within a block, whose last weight gradient under autocast is there in both widths."""
    work = Workload(
        name="sgd",
        model=WIDE,
        global_batch=4,
        masked=False,
        optimizer=OptimizerSpec(kind=OptimizerKind.SGD, weight_decay=0.0),
    )
    case = Case(adapter="single", workload=work, layout=Layout(), precision=precision)
    reading = measured(case, tmp_path)
    assert model_states(case, 0).peak == pytest.approx(reading.peak.total - reading.peak.inputs, rel=0.003)


SPECS = [
    make_model(),
    make_model(tied_embeddings=True),
    make_model(family=Family.LLAMA, num_kv_heads=2),
    make_model(family=Family.LLAMA, tied_embeddings=True),
]


@pytest.mark.parametrize("spec", SPECS)
def test_parameters_come_in_the_model_s_order(spec: ModelSpec) -> None:
    embedding, block, head = parameter_sizes(spec, uniform_stages(spec, 1)[0], ONE)
    sizes = [float(size[0]) for size in [*embedding, *(block * spec.num_layers), *head]]
    assert sizes == [math.prod(shape) for shape in parameter_shapes(spec).values()]


@given(st.sampled_from(SPECS), st.integers(1, 9), st.data())
def test_the_tensors_that_reach_into_a_part(spec: ModelSpec, num_parts: int, data: st.DataObject) -> None:
    part = data.draw(st.integers(0, num_parts - 1))
    size = math.ceil(spec.num_parameters / (2 * num_parts)) * 2
    start, expected = 0, 0
    for shape in parameter_shapes(spec).values():
        stop = start + math.prod(shape)
        if start < (part + 1) * size and stop > part * size:
            expected += stop - start
        start = stop
    found = part_elements(spec, uniform_stages(spec, 1)[0], ONE, num_parts * ONE, part)
    assert found[0] == expected


def test_a_part_beyond_the_last_tensor_is_padding() -> None:
    """Ten elements in parts of two: DeepSpeed on rank 511 of gpt-tiny was measured to hold its part of zeros."""
    assert [reaching_elements([3, 4, 3], 8, part) for part in range(8)] == [3, 7, 4, 7, 3, 2, 2, 2]
    assert reaching_elements([3, 4, 4], 4, 2) == 4 + 1, "a part that ends in padding"


def test_a_bucket_and_the_largest_temporaries() -> None:
    spec = gpt("some", 3, 8, 2, vocab_size=16, seq_len=4)
    sizes = [math.prod(shape) for shape in parameter_shapes(spec).values()]
    bucket, filled = spec.block_parameters, 0
    while filled + sizes[0] <= bucket:
        filled += sizes.pop(0)
    stage = uniform_stages(spec, 1)[0]
    assert filled_elements(spec, stage, ONE, bucket)[0] == filled
    assert largest_temporaries(spec, stage, ONE)[0] == 2 * 8 * 32 + 32  # down's, after up's bias


@settings(deadline=None)
@given(
    name=st.sampled_from(sorted(name for name in RECIPES if RECIPES[name].eager)),
    dp=st.sampled_from([2, 4]),
    num_micro_batches=st.sampled_from([1, 4]),
    hidden=st.sampled_from([32, 64]),
    tokens=st.sampled_from([16, 64]),
)
def test_the_peak_holds_the_activations_and_grows(
    name: str, dp: int, num_micro_batches: int, hidden: int, tokens: int
) -> None:
    stage = (
        3
        if name in ("eager-fsdp1", "eager-fsdp2", "eager-deepspeed-3")
        else int(name[-1])
        if "deepspeed" in name
        else 0
    )

    def held(hidden: int, tokens: int) -> float:
        spec = gpt("some", 3, hidden, 4, vocab_size=64, seq_len=tokens)
        grid = make_grid(dp=[dp], zero_stage=[stage], num_micro_batches=[num_micro_batches])
        found = memory(spec, grid, recipe(name), Overheads())
        assert min(float(getattr(found, part)[0]) for part in (*CATEGORIES, "absent")) >= 0
        total = float(found.total_bytes[0])
        assert total >= found.parameters[0] + found.optimizer[0] + found.activations[0]
        assert total == pytest.approx(sum(float(getattr(found, c)[0]) for c in CATEGORIES) - float(found.absent[0]))
        return total

    assert held(2 * hidden, tokens) > held(hidden, tokens) < held(hidden, 2 * tokens)
