"""Tensors that engines return are checked by name on arrival. One that an adapter cannot return costs one verdict
only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshmark.adapter.engine import Holdings
from meshmark.adapter.single import SingleEngine
from meshmark.errors import AdapterError
from meshmark.judge.trace import host_gradients, host_parameters, local_holdings
from meshmark.launch.launch import ForkserverLauncher
from meshmark.models.module import parameter_shapes
from meshmark.records.record import Record, Status
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from tests.factories import make_workload

WORKLOAD = make_workload()
SHAPES = parameter_shapes(WORKLOAD.model)
NAME = "blocks.1.attention_norm.weight"


class Returns(SingleEngine):
    """Whatever it is given."""

    def __init__(self, told: Any, held: Any = None) -> None:  # noqa: ANN401
        self.told, self.held = told, held

    def parameters(self) -> Mapping[str, Tensor]:
        return self.told  # type: ignore[no-any-return]

    def gradients(self) -> Mapping[str, Tensor]:
        return self.told  # type: ignore[no-any-return]

    def holdings(self) -> Holdings:
        return self.held  # type: ignore[no-any-return]


class Odd(Tensor):
    """A subclass."""


SHAPE = tuple(SHAPES[NAME])


@pytest.mark.parametrize(
    "value, told",
    [
        (None, f"{NAME} is NoneType; expected a plain float tensor of shape {SHAPE}"),
        ([1.0], f"{NAME} is list; expected"),
        (torch.zeros(SHAPE).numpy(), f"{NAME} is numpy.ndarray; expected"),
        (torch.zeros(SHAPE).as_subclass(Odd), f"{NAME} is tests.test_engine_tensors.Odd; expected"),
        (torch.zeros(SHAPE, device="meta"), f"{NAME} is on the meta device, without values; expected"),
        (torch.zeros(SHAPE).to_sparse(), f"{NAME} is of layout torch.sparse_coo; expected"),
        (torch.zeros(SHAPE, dtype=torch.int64), f"{NAME} is of torch.int64; expected"),
        (torch.zeros(3), rf"{NAME} has shape \(3,\); its full shape is "),
    ],
)
def test_a_tensor_that_cannot_be_compared_is_named(value: object, told: str) -> None:
    told = told.replace(str(SHAPE), rf"\({SHAPE[0]},\)")
    with pytest.raises(AdapterError, match=rf"^parameters\(\): {told}"):
        host_parameters(Returns({NAME: value}), WORKLOAD)
    with pytest.raises(AdapterError, match=rf"^gradients\(\): {told}"):
        host_gradients(Returns({NAME: value}), WORKLOAD)


def test_names_and_forms_are_checked_too() -> None:
    with pytest.raises(AdapterError, match="parameters.. returned 'module.x'; the canonical names are "):
        host_parameters(Returns({"module.x": torch.zeros(3)}), WORKLOAD)
    with pytest.raises(AdapterError, match="gradients.. returned NoneType; expected a mapping"):
        host_gradients(Returns(None), WORKLOAD)


def test_plain_tensors_and_parameters_pass() -> None:
    good = nn.Parameter(torch.ones(SHAPE, dtype=torch.bfloat16))
    assert host_parameters(Returns({NAME: good}), WORKLOAD)[NAME].tolist() == [1.0] * SHAPE[0]
    held = local_holdings(Returns({}, Holdings(parameters=[good])))
    assert held.parameters[0] is good


@pytest.mark.parametrize(
    "held, told",
    [
        (None, r"holdings\(\) returned NoneType; expected a Holdings"),
        (
            Holdings(optimizer_states=[torch.ones(2), None]),
            r"holdings\(\): optimizer_states\[1\] is NoneType; expected",
        ),  # type: ignore[list-item]
        (Holdings(gradients=[torch.ones(2, device="meta")]), r"holdings\(\): gradients\[0\] is on the meta device"),
        (Holdings(communication=[torch.ones(2).as_subclass(Odd)]), r"holdings\(\): communication\[0\] is .*Odd"),
    ],
)
def test_what_holds_no_bytes_is_named_by_category_and_place(held: Holdings, told: str) -> None:
    with pytest.raises(AdapterError, match=told):
        local_holdings(Returns({}, held))


NAMES = ("TellsShards", "HoldingsRaise", "TellsMeta", "RecipeRaises", "RemaindersOdd", "DeparturesRaise")
ODD = {name.lower(): f"tests.broken.contract:{name}" for name in (*NAMES, "DepartsFromNothing")}


@pytest.fixture(scope="module")
def runner(launcher: ForkserverLauncher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    running = Runner(launcher, ODD, RunOptions(observed_steps=3), tmp_path_factory.mktemp("results"))
    yield running
    running.close()


def observe(runner: Runner, adapter: str, **layout: Any) -> Record:  # noqa: ANN401
    return runner.observe(Case(adapter=adapter, workload=WORKLOAD, layout=Layout(dp=2, **layout)))


def verdicts(record: Record) -> dict[str, bool]:
    return {v.suite: v.passed for v in record.verdicts}


def test_sharded_tensors_are_brought_together_and_counted_where_they_are(runner: Runner) -> None:
    record = observe(runner, "tellsshards", zero_stage=3)
    assert record.outcome.status is Status.OK, record.outcome.message
    assert verdicts(record) == {"equivalence": True, "memory": True, "communication": True}
    assert record.memory.state_dtypes["optimizer_states"] == "float32"


def test_a_tensor_without_values_ends_a_pass_with_its_name(runner: Runner) -> None:
    outcome = observe(runner, "tellsmeta").outcome
    assert outcome.status is Status.RAISED
    assert "AdapterError: parameters(): " in outcome.message and "on the meta device" in outcome.message


@pytest.mark.parametrize(
    "adapter, suite, told",
    [
        ("holdingsraise", "memory", "Engine.holdings raised RuntimeError: nobody knows on rank 1"),
        ("reciperaises", "memory", "Adapter.recipe raised LookupError: no such recipe"),
        ("remaindersodd", "memory", "Adapter.extra_memory raised TypeError: got ('gradients', 8.0)"),
        ("departuresraise", "communication", "Adapter.traffic_exceptions raised OutOfMemoryError: by analysis"),
        (
            "departsfromnothing",
            "communication",
            "Adapter.traffic_exceptions raised ValueError: replaces reduce of gradients over ranks 0, 1, which theory "
            "lacks",
        ),
    ],
)
def test_what_an_adapter_cannot_tell_costs_the_verdict_that_rests_on_it_alone(
    runner: Runner, adapter: str, suite: str, told: str
) -> None:
    record = observe(runner, adapter)
    assert record.outcome.status is Status.OK, record.outcome.message
    assert verdicts(record) == {name: name != suite for name in ("equivalence", "memory", "communication")}
    verdict = record.verdict(suite)
    assert verdict and verdict.summary.startswith(told)
