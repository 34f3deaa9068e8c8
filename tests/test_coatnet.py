"""The study of a growing CoAtNet: what it plans, and how it chooses of what it has measured; nothing is launched."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from meshmark.measure.readings import Collective, TrafficReading
from meshmark.records.record import Outcome, Status
from meshmark.records.request import Task
from studies.coatnet import page, wrong
from studies.coatnet_figure import draw
from studies.coatnet_measured import Measured, cases, fastest, fitting, frugal
from studies.coatnet_planned import GPU, WIDTHS, bandwidth, best, plans, stretch
from tests.factories import make_memory, make_memory_evidence, make_record, make_timing, make_traffic_evidence

MIB = 2**20


def measured(name: str, *, mib: int, sent: int = 1000, seconds: float = 0.5, world: int = 2) -> Measured:
    """Steps that scatter by 1 %."""
    case = cases(32, world)[name]
    readings = [make_memory(parameters=4, activations=mib * MIB)] * world
    observed = make_record(
        case=case,
        memory=make_memory_evidence(readings=readings, planned=[None] * world, extra_memory=[[]] * world),
        traffic=make_traffic_evidence(readings=[TrafficReading(asked=[_sends(sent)], issued=[])] * world),
        verdicts=[],
    )
    steps = [seconds * (1 + 0.01 * (-1) ** i) for i in range(16)]
    timing = make_timing(num_launches=3, rank_step_seconds=[steps] * world)
    timed = make_record(case=case, task=Task.TIME, timing=timing) if world == 2 else None
    return Measured(name=name, observed=observed, timed=timed)


def _sends(num_bytes: int) -> Collective:
    return Collective(kind="send", group_size=2, ranks=(0, 1), count=1, num_bytes=num_bytes)


def test_states_of_data_parallelism_are_16_bytes_a_parameter_and_of_zero_their_shares() -> None:
    by_name = {plan.name: plan for plan in plans(WIDTHS[0])}
    count = by_name["data parallel"].model.num_parameters
    for name, each in {"data parallel": 16, "ZeRO-1": 8 + 8 / 64, "ZeRO-2": 4 + 12 / 64}.items():
        assert by_name[name].state_bytes == pytest.approx(each * count, rel=1e-6), name
    assert by_name["ZeRO-3, offloaded"].state_bytes < by_name["ZeRO-3"].state_bytes < by_name["ZeRO-2"].state_bytes


def test_the_fullest_stage_of_unequal_ones_holds_more_than_its_share() -> None:
    """And its products are dealt unevenly too; the bubble of 4 stages and 8 micro-batches alone is 11/8."""
    by_name = {plan.name: plan for plan in plans(WIDTHS[0])}
    whole, four = by_name["data parallel"], by_name["pipeline of 4"]
    assert whole.state_bytes / 4 < four.state_bytes < whole.state_bytes
    assert stretch(whole.case) == 1
    assert stretch(four.case) > 11 / 8


def test_rings_between_nodes_use_the_adapters_of_all_their_gpus_and_a_pair_its_own() -> None:
    assert bandwidth(range(8)) == GPU.link_bandwidth
    assert bandwidth(range(64)) == 8 * GPU.network_bandwidth < GPU.link_bandwidth
    assert bandwidth((0, 8)) == GPU.network_bandwidth


def test_data_parallelism_is_chosen_where_it_is_as_good_and_never_where_it_does_not_fit() -> None:
    assert best(plans(WIDTHS[0]))[0].name == "data parallel"
    largest = plans(WIDTHS[-1])
    assert not largest[0].fits
    chosen = best(largest)
    assert chosen and all(plan.fits for plan in chosen)
    assert best([plan for plan in largest if not plan.fits]) == []


def test_layouts_within_the_budget_are_those_that_ran() -> None:
    found = [measured("data parallel", mib=20), measured("ZeRO-3", mib=9)]
    assert [each.name for each in fitting(found, 10 * MIB)] == ["ZeRO-3"]
    failed = dataclasses.replace(
        found[1], observed=dataclasses.replace(found[1].observed, outcome=Outcome(status=Status.RAISED, message="no"))
    )
    assert fitting([found[0], failed], 10 * MIB) == []
    assert "raised: no" in wrong([failed])[0]


def test_nothing_is_called_faster_where_intervals_meet() -> None:
    seconds = {"ZeRO-1": 2, "ZeRO-2": 1.001, "ZeRO-3": 1}
    slow, like, quick = (measured(name, mib=1, seconds=each) for name, each in seconds.items())
    assert fastest([slow, like, quick]) == [like, quick]
    assert fastest([slow, quick]) == [quick]
    assert fastest([dataclasses.replace(slow, timed=None)]) == []


def test_the_page_says_what_is_best_and_what_is_planned(tmp_path: Path) -> None:
    """On more ranks than are timed by what is sent alone, beside the best that deals products evenly."""
    found = [
        measured("data parallel", mib=20, seconds=1),
        measured("ZeRO-3", mib=9, seconds=2),
        measured("ZeRO-3", mib=5, sent=5000, world=4),
        measured("pipeline of 4", mib=5, sent=10, world=4),
    ]
    text = page(found, 10 * MIB, 60)
    assert (
        "**2 ranks**, 0.569 M parameters: of what fits, ZeRO-3 (9.00 MiB), **ZeRO-3** is the best compromise: 16 ("
        in text
    )
    assert "**pipeline of 4** sends least, 10 B a step" in text
    assert "deals them evenly" not in text and "of those that deal them evenly, **ZeRO-3** with 4.88 KiB" in text
    assert "Planned, measured nowhere, for 64 GPUs" in text
    draw(found, 10 * MIB, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").stat().st_size > 10_000
    least = frugal(fitting(found, 100 * MIB))
    assert least is not None and least.name == "pipeline of 4"
