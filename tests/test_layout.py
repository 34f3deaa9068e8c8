"""How a layout is named, and which layouts cannot be."""

from __future__ import annotations

import ast
import itertools
import time
from pathlib import Path

import pytest

from meshmark.errors import LayoutError
from meshmark.spec.layout import AXES, Axis, Coordinates, Layout
from meshmark.spec.precision import Dtype
from tests.factories import make_model


@pytest.mark.parametrize(
    "layout, id_",
    [
        (Layout(), "one"),
        (Layout(num_micro_batches=2), "one.mb2"),
        (Layout(dp=2), "dp2"),
        (Layout(dp=2, zero_stage=3, num_micro_batches=2), "dp2.zero3.mb2"),
        (Layout(dp=2, tp=4, pp=8, zero_stage=1, num_micro_batches=16), "dp2.tp4.pp8.zero1.mb16"),
        (Layout(zero_stage=1), "one.zero1"),
    ],
)
def test_ids_are_stable(layout: Layout, id_: str) -> None:
    """Literal on purpose: users write them after -k, and baselines are looked up by them."""
    assert layout.id == id_


def test_different_layouts_have_different_ids() -> None:
    grid = itertools.product((1, 2, 4), (1, 2, 4), (1, 2), (0, 1, 2, 3), (1, 2))
    layouts = [Layout(dp=d, tp=t, pp=p, zero_stage=z, num_micro_batches=m) for d, t, p, z, m in grid]
    assert len({layout.id for layout in layouts}) == len(layouts)


def test_the_world_is_the_product_of_the_degrees() -> None:
    assert Layout(dp=2, tp=3, pp=5, num_micro_batches=7).world_size == 30


ROOT = Path(__file__).parent.parent
MESH = Layout(dp=3, tp=2, pp=5, cp=4)
"""Degrees that differ, so that one is not taken for another."""


def test_ranks_are_numbered_tensor_context_data_pipeline_from_the_innermost() -> None:
    """Literal on purpose: Megatron numbers them so, and torch's device mesh of dims (pp, dp, cp, tp)."""
    assert MESH.coordinates(1) == Coordinates(tp=1)
    assert MESH.coordinates(2) == Coordinates(cp=1)
    assert MESH.coordinates(8) == Coordinates(dp=1)
    assert MESH.coordinates(24) == Coordinates(pp=1)
    assert MESH.coordinates(119) == Coordinates(dp=2, tp=1, pp=4, cp=3)
    assert Layout(dp=2, pp=2).coordinates(2) == Coordinates(pp=1), "the third of four ranks is on the second stage"


def test_every_rank_stands_somewhere_else_and_is_found_there() -> None:
    stands = [MESH.coordinates(rank) for rank in range(MESH.world_size)]
    assert len(set(stands)) == MESH.world_size == 120
    assert [MESH.rank_of(there) for there in stands] == list(range(120))


@pytest.mark.parametrize("axis, ranks", [("tp", (50, 51)), ("cp", (49, 51, 53, 55)), ("dp", (51, 59, 67))])
def test_groups_are_the_ranks_that_differ_along_one_axis(axis: Axis, ranks: tuple[int, ...]) -> None:
    assert MESH.group(axis, 51) == ranks


def test_the_groups_of_an_axis_part_the_world() -> None:
    for axis in AXES:
        groups = {MESH.group(axis, rank) for rank in range(120)}
        assert sorted(rank for group in groups for rank in group) == list(range(120))
        for group in groups:
            assert [getattr(MESH.coordinates(rank), axis) for rank in group] == list(range(len(group)))


def test_groups_along_several_axes_part_the_world_and_cost_no_more_than_they_hold() -> None:
    groups = MESH.all_spanned(("tp", "dp"))
    assert sorted(rank for group in groups for rank in group) == list(range(120)) and len(groups) == 20
    assert MESH.spanned(("tp", "dp"), 51) == (50, 51, 58, 59, 66, 67) and (50, 51, 58, 59, 66, 67) in groups
    started = time.process_time()
    large = Layout(dp=2**14, tp=2**6)
    assert large.spanned(("tp",), 2**20 - 1) == tuple(range(2**20 - 2**6, 2**20))
    assert time.process_time() - started < 0.5, "a walk through a million ranks takes seconds"


def test_nobody_else_divides_ranks() -> None:
    """Stages, shards of the batch and groups follow from coordinates, in the core, adapters and studies."""
    found = []
    for folder in ("meshmark", "adapters", "suites", "benchmarks", "studies"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())) if path != ROOT / "meshmark/spec/layout.py" else ():
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Mod):
                    divided = node.left
                elif isinstance(node, ast.Call) and ast.unparse(node.func) == "divmod":
                    divided = node.args[0]
                else:
                    continue
                if ast.unparse(divided).rpartition(".")[2] == "rank":
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not found


@pytest.mark.parametrize("rank", [-1, 120])
def test_a_rank_beyond_the_world_is_refused(rank: int) -> None:
    with pytest.raises(LayoutError, match=f"layout dp3.tp2.pp5.cp4: there is no rank {rank}, expected 0 to 119"):
        MESH.coordinates(rank)


@pytest.mark.parametrize("axis", AXES)
def test_coordinates_beyond_a_degree_are_refused(axis: Axis) -> None:
    degree = getattr(MESH, axis)
    with pytest.raises(LayoutError, match=f"no {axis} index {degree}, expected 0 to {degree - 1}"):
        MESH.rank_of(Coordinates(**{axis: degree}))


@pytest.mark.parametrize("degree", ["dp", "tp", "pp", "num_micro_batches"])
@pytest.mark.parametrize("value", [0, -2])
def test_degrees_below_one_are_refused(degree: str, value: int) -> None:
    with pytest.raises(LayoutError, match=f"{degree} is {value}, expected at least 1"):
        Layout(**{degree: value})


def test_an_unknown_zero_stage_is_refused() -> None:
    with pytest.raises(LayoutError, match="zero_stage is 4, expected 0, 1, 2 or 3"):
        Layout(zero_stage=4)


@pytest.mark.parametrize(
    "layout, changes, words",
    [
        (Layout(tp=3), {"vocab_size": 255}, ["tp 3", "4 heads and 4 kv heads"]),
        (Layout(tp=4), {"num_kv_heads": 2}, ["tp 4", "4 heads and 2 kv heads"]),
        (Layout(tp=2), {"vocab_size": 257}, ["tp 2", "vocabulary of 257"]),
        (Layout(tp=2), {"ffn_hidden": 25}, ["tp 2", "ffn_hidden 25"]),
        (Layout(pp=3), {}, ["pp 3 stages", "more than 2 layers"]),
        (Layout(dp=3), {}, ["8 sequences", "dp 3 x 1 micro-batches"]),
        (Layout(dp=2, num_micro_batches=8), {}, ["8 sequences", "dp 2 x 8 micro-batches"]),
    ],
)
def test_a_layout_that_does_not_fit_says_why(layout: Layout, changes: dict[str, int], words: list[str]) -> None:
    with pytest.raises(LayoutError) as caught:
        layout.check(make_model(**changes), global_batch=8)
    for word in [layout.id, "'mini'", *words]:
        assert word in str(caught.value)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(LayoutError, match="heads.*stages.*sequences"):
        Layout(tp=3, pp=3, dp=5).check(make_model(), global_batch=8)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=4), Layout(pp=2, num_micro_batches=4), Layout(dp=8)])
def test_layouts_at_the_edge_fit(layout: Layout) -> None:
    assert layout.check(make_model(), global_batch=8) is None


def test_mantissa_bits_are_those_of_the_formats() -> None:
    import torch

    for dtype in Dtype:
        found = torch.finfo(getattr(torch, dtype))
        assert (2.0**-dtype.mantissa_bits, 8 * dtype.itemsize) == (found.eps, found.bits)
