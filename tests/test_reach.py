"""How far what ranks send goes: by hand, and the same measured as planned."""

from __future__ import annotations

import dataclasses
import math

import pytest

from meshmark.errors import InputError
from meshmark.launch.scheduler import cluster_of
from meshmark.measure.readings import Collective, TrafficReading
from meshmark.records.reach import Place, Reach, Sent, measured_traffic, planned_traffic, reach
from meshmark.report.communication import communication
from meshmark.report.results import results
from meshmark.spec.layout import Layout
from meshmark.spec.layout_id import parse_layout
from meshmark.theory.flow import Flow
from meshmark.theory.traffic import step_traffic
from tests.factories import make_case, make_good

PAIRS = [Place(node=0), Place(node=0), Place(node=1), Place(node=1)]


def ring(kind: str, ranks: tuple[int, ...], num_bytes: int) -> list[Sent]:
    return [(rank, kind, ranks, num_bytes) for rank in ranks]


def test_a_ring_leaves_each_node_once() -> None:
    """However its ranks are numbered: a scheduler may deal them out in turn."""
    everyone = ring("all_gather", (0, 1, 2, 3), 400)  # 300 bytes a rank
    assert reach(everyone, PAIRS) == Reach(within_nodes=600, between_nodes=600, between_switches=0)
    dealt = [Place(node=rank % 2) for rank in range(4)]
    assert reach(everyone, dealt) == reach(everyone, PAIRS)
    assert reach(ring("all_reduce", (0, 1), 100), PAIRS) == Reach(within_nodes=200, between_nodes=0, between_switches=0)
    assert reach(ring("all_reduce", (0, 1), 100), dealt) == Reach(within_nodes=0, between_nodes=200, between_switches=0)


def test_messages_go_to_their_peer_and_what_is_exchanged_to_all_alike() -> None:
    sends: list[Sent] = [(1, "send", (1, 2), 50), (2, "recv", (1, 2), 50), (3, "send", (2, 3), 7)]
    assert reach(sends, PAIRS) == Reach(within_nodes=7, between_nodes=50, between_switches=0)
    found = reach(ring("all_to_all", (0, 1, 2, 3), 40), PAIRS)  # 30 bytes a rank, 10 to each peer
    assert found == Reach(within_nodes=40, between_nodes=80, between_switches=0)


def test_switches_are_told_apart_where_they_are_known() -> None:
    places = [Place(node=node, switch="top.a" if node < 2 else "top.b") for node in (0, 1, 2)]
    assert reach(ring("all_gather", (0, 1, 2), 300), places) == Reach(
        within_nodes=0, between_nodes=200, between_switches=400
    )


def test_what_is_not_known_is_not_told() -> None:
    assert reach([(0, "a new collective", (0, 1), 8)], PAIRS) is None
    assert reach(ring("all_reduce", (0, 1), 8), []) is None, "records of old"
    assert planned_traffic([None], [[]]) is None and planned_traffic([[]], []) is None


@pytest.mark.parametrize("layout", ["dp2.tp2.mb2", "dp2.pp2.1f1b.mb2", "dp4.zero3", "tp4", "cp2.dp2"])
def test_planned_goes_as_far_as_measured(layout: str) -> None:
    """Of meters that see theory's flows; not of those that miss one."""
    case = make_case("any", layout=parse_layout(layout))
    flows = [step_traffic(case, rank) or [] for rank in range(4)]
    readings = [TrafficReading(asked=[_seen(flow) for flow in theirs], issued=[]) for theirs in flows]
    found, plan = (reach(sent, PAIRS) for sent in (measured_traffic(readings), planned_traffic(flows, [[]] * 4)))
    assert found and found == plan
    assert found.within_nodes > 0 and found.between_nodes > 0
    less = [dataclasses.replace(readings[0], asked=readings[0].asked[1:]), *readings[1:]]
    assert reach(measured_traffic(less), PAIRS) != plan


def _seen(flow: Flow) -> Collective:
    return Collective(
        kind=flow.kind, group_size=len(flow.ranks), ranks=flow.ranks, count=flow.most, num_bytes=flow.num_bytes
    )


def test_a_report_of_several_nodes_splits_what_was_sent() -> None:
    good = make_good(case=make_case("ddp", layout=Layout(dp=2)))
    told = communication(results([good]))
    assert all("within / between nodes" not in row for row in told)
    split = Reach(within_nodes=0.0, between_nodes=2048.0, between_switches=0.0)
    traffic = dataclasses.replace(
        good.traffic,
        readings=[TrafficReading(asked=[], issued=[])] * 2,
        reach=split,
        planned_reach=dataclasses.replace(split, between_switches=1024.0),
    )
    two = dataclasses.replace(good.environment, nnodes=2)
    (row,) = communication(results([dataclasses.replace(good, traffic=traffic, environment=two)]))
    assert row["within / between nodes"] == "0 B / 2 KiB"
    assert row["as planned, all ranks"] == "0 B / 2 KiB / 1 KiB" and not math.isnan(split.between_nodes)


def test_schedulers_say_where_a_task_runs() -> None:
    """Tasks that are dealt out in turn: the third of four is the second of the first node."""
    told = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    told |= {"SLURM_JOB_ID": "7", "SLURM_PROCID": "2", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}
    tree = {"SLURM_TOPOLOGY_ADDR": "spine.leaf1.node1", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}
    flat = {"SLURM_TOPOLOGY_ADDR": "node1", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}
    listed = {"SLURM_STEP_NODELIST": "ignored"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshmark.launch.scheduler._first_host", lambda nodes: "10.0.0.1")
        for topology, switch in ((tree, "spine.leaf1"), (flat, ""), ({}, "")):
            spec = cluster_of({**told, **listed, **topology})
            assert (spec.node_rank, spec.node, spec.local_task, spec.switch) == (2, 0, 1, switch)
        with pytest.raises(InputError, match="SLURM_NODEID='x'"):
            cluster_of({**told, **listed, "SLURM_NODEID": "x"})
    torchrun = {"GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}
    assert cluster_of({**torchrun, "MASTER_ADDR": "a", "MASTER_PORT": "1"}).node == 1
