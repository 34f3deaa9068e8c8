"""Variables of torchrun and SLURM are understood, in both shapes, and compared with what is given by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshmark.errors import InputError
from meshmark.launch.cluster import Cluster, ClusterSpec, cluster_of
from meshmark.launch.launch import _ranks

TORCHRUN = {
    "GROUP_RANK": "1",
    "RANK": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
}
A_TASK_A_RANK = {
    **SLURM,
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


@pytest.fixture(autouse=True)
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Says what SLURM's own does of two nodes whose names nobody resolves; `make cluster-test` asks the real one."""
    script = tmp_path / "scontrol"
    names, address = "printf 'node1.invalid\\nnode2.invalid\\n'", "echo '   NodeAddr=10.9.8.7 Port=1'"
    script.write_text(f"#!/bin/sh\nif [ $2 = hostnames ]; then {names}; else {address}; fi\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return script


def test_one_task_a_node() -> None:
    assert cluster_of(TORCHRUN) == ClusterSpec(nnodes=2, node_rank=1, rdzv="a:29501", host_number=1)
    assert cluster_of(SLURM) == ClusterSpec(nnodes=2, node_rank=1, rdzv="10.9.8.7:20007")
    assert cluster_of({}) == ClusterSpec()
    assert cluster_of({**SLURM, "SLURM_STEP_ID": "1"}).port != 20007, "steps of one job would share a port"
    assert cluster_of({**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}) == ClusterSpec()


def test_one_task_a_rank_has_its_share_of_the_node_s_ranks(tmp_path: Path) -> None:
    """Each of four tasks launches one of four ranks, which know who shares their node."""
    spec = cluster_of(A_TASK_A_RANK)
    assert (spec.nnodes, spec.num_hosts, spec.text) == (4, 2, "4 tasks on 2 nodes")
    (rank,) = _ranks(spec, 4, "launch1", tmp_path)
    assert (rank.rank, rank.local_rank, rank.local_world_size) == (3, 1, 2)
    pair = _ranks(spec, 8, "launch1", tmp_path)
    assert [(r.rank, r.local_rank, r.local_world_size) for r in pair] == [(6, 2, 4), (7, 3, 4)]
    same = {**TORCHRUN, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "3", "LOCAL_RANK": "1"}
    again = cluster_of(same)
    assert (again.nnodes, again.node_rank, again.tasks_per_node, again.local_task) == (4, 3, 2, 1)
    alone = {**A_TASK_A_RANK, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "4"}
    assert cluster_of(alone).host == "127.0.0.1", "tasks of one node need no network"


def test_what_is_given_by_hand_goes_with_what_the_scheduler_says() -> None:
    assert cluster_of(SLURM, nnodes=2, rdzv="10.0.0.1:5").rdzv == "10.0.0.1:5"
    assert cluster_of(A_TASK_A_RANK, nnodes=2).nnodes == 4, "two nodes, as it is"
    assert cluster_of({}, nnodes=2, node_rank=1, rdzv="a:1") == ClusterSpec(nnodes=2, node_rank=1, rdzv="a:1")
    job = {"SLURM_JOB_NUM_NODES": "2"}
    assert cluster_of(job, nnodes=1) == ClusterSpec()


@pytest.mark.parametrize(
    ("environment", "given", "message"),
    [
        (SLURM, {"nnodes": 3}, "--nnodes 3, but this command was started as 2 nodes: leave --nnodes out"),
        (TORCHRUN, {"nnodes": 4}, "--nnodes 4, but this command was started as 2 nodes"),
        (SLURM, {"node_rank": 0}, "--node-rank 0, but this command was started as node 1"),
        (
            {**SLURM, "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1"},
            {},
            r"srun has started 3 tasks on 2 nodes, not as many on each: give every node one task, or one a GPU",
        ),
        ({"SLURM_JOB_NUM_NODES": "2"}, {}, "this job has 2 nodes, and this command runs on one of them: .* srun"),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, {}, "SLURM_STEP_NODELIST is not set"),
    ],
)
def test_contradictions_are_told(environment: dict[str, str], given: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        cluster_of(environment, nnodes=given.get("nnodes"), node_rank=given.get("node_rank"))


def test_a_node_list_that_cannot_be_resolved(scontrol: Path) -> None:
    scontrol.write_text('#!/bin/sh\n[ "$2" = hostnames ] && echo node1.invalid || echo "NodeAddr=node1.invalid"\n')
    with pytest.raises(InputError, match="is node1.invalid, at node1.invalid, which this machine cannot resolve"):
        cluster_of(SLURM)
    scontrol.write_text("#!/bin/sh\necho 'Invalid hostlist' >&2; exit 1\n")
    with pytest.raises(InputError, match=r"node list 'node\[1-2\]' is not known to scontrol .*: give --rdzv"):
        cluster_of(SLURM)


def test_a_rendezvous_address_that_is_not_node_0_s() -> None:
    """192.0.2.0/24 is nobody's; and a port that another program holds."""
    with pytest.raises(Exception, match="node 0 cannot listen at 192.0.2.1:29500: .*an address of node 0"):
        Cluster(ClusterSpec(nnodes=2, rdzv="192.0.2.1:29500")).__enter__()
