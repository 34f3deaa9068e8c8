"""Case ids, and the matrix that the suites are parametrized by."""

from __future__ import annotations

import re

import pytest

from meshmark.adapter.contract import Adapter, Capabilities
from meshmark.adapter.matrix import layouts, matrix, takes
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.adapters import ROSTER
from meshmark.errors import LayoutError
from meshmark.spec.case import Case, InvalidLayout, expect_fit
from meshmark.spec.layout import Layout, Offload, Schedule
from meshmark.spec.precision import Precision
from meshmark.spec.workload import WORKLOADS
from tests.factories import make_case


@pytest.fixture(scope="module")
def adapters() -> dict[str, type[Adapter]]:
    return {name: load_adapter(target) for name, target in builtin_adapters().items()}


@pytest.fixture(scope="module")
def cases(adapters: dict[str, type[Adapter]]) -> list[Case]:
    tiny = [WORKLOADS["gpt-tiny"], WORKLOADS["llama-tiny"]]
    return matrix(adapters, [1, 2, 4], tiny, list(Precision.PRESETS.values()))


@pytest.mark.parametrize(
    "adapter, layout, precision, id_",
    [
        ("single", Layout(num_micro_batches=2), Precision.FP64, "single-one.mb2-gpt-tiny-fp64"),
        ("ddp", Layout(dp=2, num_micro_batches=2), Precision.FP32, "ddp-dp2.mb2-gpt-tiny-fp32"),
        ("fsdp2", Layout(dp=4, zero_stage=3, num_micro_batches=2), Precision.BF16, "fsdp2-dp4.zero3.mb2-gpt-tiny-bf16"),
        ("gpipe", Layout(pp=2, num_micro_batches=4), Precision.FP32, "gpipe-pp2.mb4-gpt-tiny-fp32"),
    ],
)
def test_ids_are_stable(adapter: str, layout: Layout, precision: Precision, id_: str) -> None:
    case = Case(adapter=adapter, workload=WORKLOADS["gpt-tiny"], layout=layout, precision=precision)
    assert case.id == id_


def test_ids_of_the_matrix_are_unique_and_can_be_selected_with_k(cases: list[Case]) -> None:
    ids = [case.id for case in cases]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"[\w.-]+", id_) for id_ in ids)


def test_every_adapter_has_cases_of_every_precision_and_workload(
    cases: list[Case], adapters: dict[str, type[Adapter]]
) -> None:
    for name in adapters:
        seen = {(case.precision, case.workload.name) for case in cases if case.adapter == name}
        assert seen == {(p, w) for p in Precision.PRESETS.values() for w in ("gpt-tiny", "llama-tiny")}


def test_cases_stay_within_the_worlds_asked_for(adapters: dict[str, type[Adapter]]) -> None:
    """But an adapter without a parallel axis runs in its one process whatever the world."""
    for cell in matrix(adapters, [4], [WORKLOADS["gpt-tiny"]], [Precision.FP32]):
        assert cell.layout.world_size == (4 if adapters[cell.adapter].capabilities.degrees else 1)


def test_layouts_of_the_matrix_are_those_that_the_adapter_supports(
    cases: list[Case], adapters: dict[str, type[Adapter]]
) -> None:
    for case in cases:
        refusal = adapters[case.adapter].capabilities.refusal(case, "cpu", "gloo") or ""
        assert not re.search(r"\b(dp|tp|pp)=|ZeRO stage", refusal), f"{case.id}: {refusal}"


def test_an_adapter_that_refuses_all_but_replicas_is_asked_for_replicas() -> None:
    """A distributed optimizer takes several replicas; on two ranks every layout of the matrix had one."""
    for name in ("megatron-gpt-zero1", "megatron-gpt-overlap"):
        adapter = load_adapter(ROSTER[name])
        cells = matrix({name: adapter}, [2], [WORKLOADS["gpt-tiny"]], [Precision.FP32])
        taken = [cell.layout.dp for cell in cells if isinstance(cell, Case) and takes(adapter, cell)]
        assert taken == [2]


def test_every_zero_stage_that_an_adapter_supports_is_in_the_matrix(adapters: dict[str, type[Adapter]]) -> None:
    """In data parallelism alone; crossed with another axis its stages are for `--layouts` to ask for."""
    for adapter in adapters.values():
        found = list(layouts(adapter, 2))
        if any(layout.dp == 2 for layout in found):
            assert {layout.zero_stage for layout in found} == adapter.capabilities.zero_stages


def test_every_axis_that_is_declared_is_varied_by_itself() -> None:
    """All ranks along one axis or half of them crossed with two along another; the rest plain but for one value."""

    class Able(Adapter):
        capabilities = Capabilities(
            degrees=frozenset({"dp", "tp", "pp", "cp"}),
            combinations=frozenset({frozenset({"dp", "tp"}), frozenset({"dp", "pp"}), frozenset({"tp", "pp"})}),
            zero_stages=frozenset({0, 1}),
            schedules=frozenset({Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED}),
            virtual_stages=frozenset({1, 2}),
            sequence_parallel=True,
            offloads=frozenset({Offload.NONE, Offload.CPU}),
        )

    tensor = ["tp4", "tp4.sp", "tp4.offload", "tp2.pp2.1f1b", "tp2.pp2.interleaved.v2", "tp2.pp2.1f1b.sp"]
    tensor += ["tp2.pp2.1f1b.offload", "dp2.tp2", "dp2.tp2.sp", "dp2.tp2.offload"]
    pipeline = ["pp4.1f1b", "pp4.interleaved.v2", "pp4.1f1b.offload"]
    pipeline += ["dp2.pp2.1f1b", "dp2.pp2.interleaved.v2", "dp2.pp2.1f1b.offload"]
    found = [re.sub(r"\.mb\d|_cpu", "", layout.id) for layout in layouts(Able, 4)]
    context = ["cp4", "cp4.zero1", "cp4.offload", "cp4.zero1.offload"]  # ranks of one sequence may share states too
    assert found == [*tensor, *context, *pipeline]


def test_states_are_offloaded_at_every_stage_that_shards_them() -> None:
    class Offloading(Adapter):
        capabilities = Capabilities(
            degrees=frozenset({"dp"}), zero_stages=frozenset({1, 3}), offloads=frozenset({Offload.CPU, Offload.NVME})
        )

    ids = [layout.id.removeprefix("dp2.").replace("mb2.", "") for layout in layouts(Offloading, 2)]
    assert sorted(ids) == [f"zero{stage}.offload_{where}" for stage in (1, 3) for where in ("cpu", "nvme")]


@pytest.mark.parametrize("world, counts", [(2, {4}), (3, {4, 6}), (8, {8})])
def test_schedules_get_the_micro_batches_that_they_need(world: int, counts: set[int]) -> None:
    class Piped(Adapter):
        capabilities = Capabilities(
            degrees=frozenset({"pp"}),
            schedules=frozenset({Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED}),
            virtual_stages=frozenset({1, 2}),
        )

    assert {layout.num_micro_batches for layout in layouts(Piped, world)} == counts


def test_of_a_mesh_what_fits_is_a_case_and_what_does_not_a_misfit() -> None:
    class Piped(Adapter):
        capabilities = Capabilities(
            degrees=frozenset({"pp"}),
            schedules=frozenset({Schedule.GPIPE, Schedule.INTERLEAVED}),
            virtual_stages=frozenset({1, 2}),
        )

    case, misfit = matrix({"piped": Piped}, [4], [WORKLOADS["gpt-tiny"]], [Precision.FP32])
    assert isinstance(case, Case) and case.layout.id == "pp4.mb6"
    assert isinstance(misfit, InvalidLayout) and misfit.layout.id == "pp4.interleaved.v2.mb8"
    assert "pp 8 stages are more than 4 layers" in misfit.reason


def test_accumulation_is_part_of_every_case(cases: list[Case]) -> None:
    assert all(case.layout.num_micro_batches > 1 for case in cases)


def test_a_world_that_does_not_fit_names_every_misfit(adapters: dict[str, type[Adapter]]) -> None:
    chosen = {name: adapters[name] for name in ("ddp", "fsdp2")}
    cells = matrix(chosen, [5], [WORKLOADS["gpt-tiny"]], [Precision.FP32])
    with pytest.raises(LayoutError, match="(?s)ddp: layout dp5.*dp 5 x 2 micro-batches; fsdp2: layout dp5"):
        expect_fit(cells)


def test_what_fits_is_run_and_what_does_not_keeps_its_reason(adapters: dict[str, type[Adapter]]) -> None:
    cells = matrix({"ddp": adapters["ddp"]}, [2, 5], [WORKLOADS["gpt-tiny"]], [Precision.FP32])
    expect_fit(cells)
    fits, misfit = cells
    assert isinstance(fits, Case) and fits.world_size == 2
    assert isinstance(misfit, InvalidLayout) and misfit.id == "ddp-dp5.mb2-gpt-tiny-fp32"
    assert "not divisible by dp 5 x 2 micro-batches" in misfit.reason


def test_a_case_that_cannot_be_is_refused_when_it_is_made() -> None:
    with pytest.raises(LayoutError, match="pp 3 stages are more than 2 layers"):
        make_case(layout=Layout(pp=3))
