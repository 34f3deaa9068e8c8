"""Faults that 16 bits would hide among the roundings of other correct arithmetic are found by their exact bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from meshmark.adapter.contract import Arithmetic, Casting
from meshmark.cli.options import chosen_workloads
from meshmark.judge.hidden_faults import _rounded_messages, _units
from meshmark.judge.twin import Twin
from meshmark.launch.launch import ForkserverLauncher
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Schedule
from meshmark.spec.precision import Precision
from meshmark.spec.workload import workload

MUTANTS = Path(__file__).parent / "broken" / "mutants.py"
EXAMPLE = Path(__file__).parents[1] / "examples" / "workloads" / "diffusion.py"
NAMES = (
    "ddp_CopyNotRefreshed_in_bf16",
    "ddp_CopyRefreshedBySecondUpdates_in_bf16",
    "ddp_NarrowFinalNorm_in_bf16",
    "pipeline_RoundsMessages_in_bf16",
    "ddp_ForgetsScale",
)


@pytest.fixture(scope="module")
def runner(launcher: ForkserverLauncher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    adapters = {name.lower(): f"{MUTANTS}:{name}" for name in NAMES}
    running = Runner(launcher, adapters, RunOptions(observed_steps=3), tmp_path_factory.mktemp("results"))
    yield running
    running.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, layout, precision, told",
    [
        (
            "ddp_CopyNotRefreshed_in_bf16",
            Layout(dp=2, num_micro_batches=4),
            Precision.BF16,
            "the gradient with the weights of head.norm as they were before the ",
        ),
        (
            "ddp_CopyRefreshedBySecondUpdates_in_bf16",
            Layout(dp=2, num_micro_batches=4),
            Precision.BF16,
            "the gradient with the weights of head.norm as they were before the ",
        ),
        (
            "ddp_NarrowFinalNorm_in_bf16",
            Layout(dp=2, num_micro_batches=4),
            Precision.BF16,
            "head.norm computed in bfloat16, bit for bit",
        ),
        (
            "pipeline_RoundsMessages_in_bf16",
            Layout(pp=2, num_micro_batches=4, schedule=Schedule.ONE_F_ONE_B),
            Precision.BF16,
            "activations and their gradients rounded to bfloat16 between stages, bit for bit",
        ),
        (
            "ddp_ForgetsScale",
            Layout(dp=2, num_micro_batches=4),
            Precision.FP16,
            "loss scale forgotten (from step 1 on): step 0 was taken with a loss scale of ",
        ),
    ],
    ids=NAMES,
)
def test_a_hidden_fault_fails_and_is_named(
    runner: Runner, name: str, layout: Layout, precision: Precision, told: str
) -> None:
    case = Case(adapter=name.lower(), workload=workload("gpt-mini"), layout=layout, precision=precision)
    verdict = runner.observe(case).verdict("equivalence")
    assert verdict is not None and not verdict.passed and not verdict.undecided
    assert told in str(verdict.evidence["diagnosis"])


def test_groups_of_weights_that_one_copy_may_hold_are_named_once() -> None:
    shapes = {
        "embedding.weight": (8, 4),
        "blocks.0.norm.weight": (4,),
        "blocks.0.up.weight": (4, 4),
        "blocks.1.norm.weight": (4,),
        "blocks.1.up.weight": (4, 4),
    }
    units = _units(shapes)
    assert units["all weights"] == list(shapes)
    assert units["all vectors"] == ["blocks.0.norm.weight", "blocks.1.norm.weight"]
    assert units["all blocks.*.up.weight"] == ["blocks.0.up.weight", "blocks.1.up.weight"]
    assert units["the weights of blocks.1"] == ["blocks.1.norm.weight", "blocks.1.up.weight"]
    assert units["blocks.0.up.weight"] == ["blocks.0.up.weight"]
    assert len({tuple(names) for names in units.values()}) == len(units)


def test_messages_of_a_model_with_other_names_are_not_tried() -> None:
    layout, precision = Layout(pp=2, num_micro_batches=4), Precision.BF16
    (own,) = chosen_workloads(f"{EXAMPLE}:Diffusion", None, None)
    for trained, count in ((workload("gpt-mini"), 3), (own, 0)):
        case = Case(adapter="pipeline", workload=trained, layout=layout, precision=precision)
        twin = Twin(case=case, arithmetic=Arithmetic(casting=Casting.AUTOCAST), device=torch.device("cpu"))
        assert len(list(_rounded_messages(twin))) == count
