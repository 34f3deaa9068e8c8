"""Where a wrong run begins to deviate: the module, the direction and the rank are named."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from meshmark.adapter.engine import RankContext
from meshmark.adapter.single import Single
from meshmark.judge.beginning import Beginning, Direction, Point, Rows, describe
from meshmark.passes.observe import begins
from meshmark.records.request import Request, Task
from meshmark.reference import own_model
from meshmark.run.runner import is_open_and_short
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload, workload
from tests.broken.engine import breaks
from tests.broken.modules import ONE_MODULE, OneModule, TokensDropped
from tests.factories import make_good, make_verdict
from tests.test_own_model import ODD

GPT = workload("gpt-mini")


def found_in(defect: type[OneModule] | None, tmp_path: Path, trained: Workload = GPT) -> Beginning | None:
    case = Case(adapter="single", workload=trained, layout=Layout(num_micro_batches=2))
    context = RankContext(rank=0, world_size=1, device=torch.device("cpu"), backend="gloo", scratch=tmp_path)
    engine = Single().build(case, context)
    request = Request(
        case=case,
        adapter="meshmark.adapter.single:Single",
        task=Task.LOCALISE,
        device="cpu",
        backend="gloo",
        steps=2,
        time_limit_seconds=60,
    )
    return begins(breaks(engine, defect) if defect else engine, request, rank=0)


@pytest.mark.parametrize("defect", ONE_MODULE, ids=lambda defect: defect.__name__)
def test_a_module_that_computes_wrongly_is_named(defect: type[OneModule], tmp_path: Path) -> None:
    found = found_in(defect, tmp_path)
    assert found is not None
    assert (found.module, found.direction) == (defect.module_name, defect.direction)
    assert found.parameter == defect.parameter
    assert found.step == 0 and found.ratio > 1


@pytest.mark.parametrize("name", ["gpt-mini", "llama-tiny", "vit-digits", "resnet-digits", "gpt-moe-mini"])
def test_a_correct_run_deviates_nowhere(name: str, tmp_path: Path) -> None:
    assert found_in(None, tmp_path, workload(name)) is None


ONE = Beginning(
    rank=2,
    step=1,
    micro_batch=0,
    place=7,
    module="layers.3.mlp.down",
    direction=Direction.BACKWARD,
    point=Point.INPUT_GRADIENT,
    ratio=12.0,
)


def test_the_sentence_names_the_first_of_all_ranks_and_who_deviates_alike() -> None:
    later = dataclasses.replace(ONE, rank=0, place=9, module="layers.2")
    told = describe([later, ONE, dataclasses.replace(ONE, rank=3)], world_size=4)
    assert told.startswith("forward right everywhere; backward first wrong at layers.3.mlp.down, on ranks 2 and 3,")
    assert "reduction" in describe([], world_size=4)


@pytest.mark.parametrize(
    "rows, told",
    [
        (Rows(number=256, off=12, zero=9), "in micro-batch 0 of step 1, in 12 of 256 rows, 9 of them zero: 12 x"),
        (Rows(number=256, off=12, zero=0), "in micro-batch 0 of step 1, in 12 of 256 rows: 12 x"),
        (Rows(number=256, off=256, zero=9), "in micro-batch 0 of step 1, in all rows, 9 of them zero: 12 x"),
        (Rows(number=256, off=256, zero=256), "in micro-batch 0 of step 1, where it is zero: 12 x"),
        (Rows(number=256, off=256, zero=0), "in micro-batch 0 of step 1: 12 x"),
    ],
)
def test_the_sentence_tells_which_rows_are_off(rows: Rows, told: str) -> None:
    assert told in describe([dataclasses.replace(ONE, rows=rows)], world_size=4)


def test_rows_that_a_module_drops_are_counted(tmp_path: Path) -> None:
    """A mixture of experts that drops the tokens beyond an expert's capacity is wrong in their rows alone."""
    found = found_in(TokensDropped, tmp_path, workload("gpt-moe-mini"))
    assert found is not None and found.rows is not None
    assert found.module == "blocks.0.feed_forward"
    assert 0 < found.rows.off < found.rows.number / 2


@pytest.mark.parametrize(
    "changes, wanted",
    [
        ({}, True),
        ({"diagnosis": "gradient of another function (from step 0 on, head.output.weight)"}, True),
        ({"diagnosis": "gradient scaled (from step 0 on, head.output.weight): 2 = dp times the truth"}, False),
        ({"seconds": 31.0}, False),
        ({"layout": Layout(tp=2)}, False),
        ({"precision": Precision.BF16}, False),
    ],
)
def test_a_short_run_whose_diagnosis_leaves_the_place_open_is_localised(changes: dict[str, Any], wanted: bool) -> None:
    told = changes.get("diagnosis", "another function computed (from step 0 on, blocks.1.attention.k.weight)")
    case = Case(
        adapter="ddp",
        workload=GPT,
        layout=changes.get("layout", Layout(dp=2)),
        precision=changes.get("precision", Precision.FP32),
    )
    record = make_good(case=case, verdicts=[make_verdict(passed=False, evidence={"diagnosis": told})])
    launch = dataclasses.replace(record.launch, seconds=changes.get("seconds", 10.0))
    assert is_open_and_short(dataclasses.replace(record, launch=launch)) is wanted


def test_a_model_that_recomputes_a_part_deviates_nowhere(tmp_path: Path) -> None:
    """Its backward pass runs a part of the forward pass again, with the values of the replay."""
    (file := tmp_path / "odd.py").write_text(ODD.replace("{cls}", "Checkpoints"))
    assert found_in(None, tmp_path, own_model.describe(f"{file}:W")) is None
