"""`--layouts auto`: every two choices that an adapter supports come together, in few layouts; counts are told."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from meshmark.adapter.matrix import AUTO, combinations, covering, distinct, matrix, supported
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.cli.commands import main
from meshmark.spec.layout import Layout, Schedule
from meshmark.spec.precision import Precision
from meshmark.spec.workload import WORKLOADS

GPT = WORKLOADS["gpt-tiny"]
CHOICES = "dp tp pp cp zero_stage schedule sequence_parallel recompute offload".split()


def able(name: str, *worlds: int) -> list[Layout]:
    return supported(name, load_adapter(builtin_adapters()[name]), worlds, GPT, Precision.FP32)


def pairs(layouts: list[Layout]) -> set[tuple[object, ...]]:
    return {(a, getattr(x, a), b, getattr(x, b)) for x in layouts for a, b in itertools.combinations(CHOICES, 2)}


@pytest.mark.parametrize("name", ["deepspeed", "megatron-gpt", "pipeline", "tp"])
def test_a_covering_set_has_every_pair_of_choices(name: str) -> None:
    all_ = able(name, 8)
    few = covering(all_)
    assert pairs(few) == pairs(all_) and few == [layout for layout in all_ if layout in few]


def test_a_covering_set_is_much_smaller_than_the_product() -> None:
    all_ = list(combinations(4))
    few = covering(all_)
    assert pairs(few) == pairs(all_) and len(few) < len(all_) / 10


def test_combinations_are_layouts_of_that_size_each_once() -> None:
    found = list(combinations(4))
    assert len(found) == len(set(found)) and {layout.world_size for layout in found} == {4}
    assert Layout(dp=2, pp=2, zero_stage=1, num_micro_batches=4, schedule=Schedule.ONE_F_ONE_B) in found
    assert len(list(combinations(1))) == 9, "recomputation and offload alone"


def test_auto_takes_the_place_of_the_matrix_and_tells_how_many_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    adapters = {name: load_adapter(builtin_adapters()[name]) for name in ("ddp", "single")}
    cells = matrix(adapters, [2, 4], [GPT], [Precision.FP32], AUTO)
    assert {cell.layout.id for cell in cells if cell.adapter == "ddp"} == {
        f"dp{n}.mb3{again}" for n in (2, 4) for again in ("", ".recompute_full")
    }
    assert main(["cases", "--adapters", "ddp", "--world", "2,4", "--layouts", "auto"]) == 0
    exist = sum(len(list(combinations(n))) for n in (2, 4))
    told = f"layouts of 1 adapter: {exist:,} combinations exist, 4 are supported, 4 are chosen"
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    "degrees, rows, count",
    [
        ({"dp": 2}, 24, 3),
        ({"dp": 4}, 24, 3),
        ({"dp": 8}, 24, 3),
        ({"tp": 2, "dp": 2, "pp": 2}, 24, 6),
        ({"tp": 3, "dp": 2}, 24, 4),
        ({"dp": 2}, 8, 4),
        ({"tp": 4}, 8, 8),
        ({"dp": 4}, 8, 2),
        ({"dp": 2}, 4, 2),
        ({"dp": 5}, 24, 2),
        ({"dp": 8}, 8, 2),
    ],
)
def test_no_degree_is_as_large_as_the_number_of_micro_batches(degrees: dict[str, int], rows: int, count: int) -> None:
    """As far as the rows allow it."""
    plain = Layout(**degrees, num_micro_batches=4 if "pp" in degrees else 2)
    found = distinct(plain, dataclasses.replace(GPT, global_batch=rows))
    assert found == dataclasses.replace(plain, num_micro_batches=count)


def test_interleaving_keeps_a_multiple_of_its_stages() -> None:
    plain = Layout(pp=4, num_micro_batches=4, schedule=Schedule.INTERLEAVED, virtual_stages=2)
    assert distinct(plain, GPT).num_micro_batches == 8


def test_rows_that_affect_each_other_are_divided_no_further() -> None:
    coupled = next(workload for workload in WORKLOADS.values() if workload.couples_rows)
    assert distinct(Layout(dp=2, num_micro_batches=2), coupled).num_micro_batches == 2
