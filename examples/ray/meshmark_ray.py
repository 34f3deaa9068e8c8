"""The suites on the nodes of a Ray cluster; what follows `--` goes to pytest:

    python examples/ray/meshmark_ray.py --nodes 2 --ranks-per-node 8 --gpus -- --world 16 --workload gpt-1.3b

One actor a rank, in a placement group that spreads nodes apart and packs the ranks of one. Each actor gives its command
the variables that torchrun would give, which Meshmark understands. Ray distributes, starts and ends; nothing else of
Meshmark knows of it. Records are node 0's. RAY_ADDRESS, or the cluster of this machine. Ray runs its workers at a
lower priority than others; where times count, start its daemons with RAY_worker_niceness=0.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

PLACE_SECONDS = 300.0


class Rank:
    """One rank's command on its node; an actor."""

    def place(self) -> tuple[str, int, list[int]]:
        """Address, a free port with one above it, and GPUs that Ray has given it."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return ray.util.get_node_ip_address(), port - 1, [int(gpu) for gpu in ray.get_gpu_ids()]

    def run(self, folder: str, command: list[str], environment: dict[str, str]) -> int:
        """Its exit code. What it prints goes to the driver."""
        return subprocess.run(command, cwd=folder, env={**os.environ, **environment}, check=False).returncode


def environments(places: Sequence[tuple[str, int, list[int]]], each: int) -> list[dict[str, str]]:
    """This process's variables, as srun takes them along, and torchrun's, by rank. Ranks of one node see all its GPUs,
    and take that of their number."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    address, port, _ = places[0]
    secret, found = secrets.token_hex(32), []
    for rank in range(len(places)):
        node, local = divmod(rank, each)
        gpus = sorted(gpu for _, _, some in places[node * each : (node + 1) * each] for gpu in some)
        told = {
            "RANK": rank,
            "LOCAL_RANK": local,
            "GROUP_RANK": node,
            "WORLD_SIZE": len(places),
            "LOCAL_WORLD_SIZE": each,
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            "MESHMARK_RDZV_SECRET": secret,
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
        }
        found.append({**own, **{name: str(value) for name, value in told.items()}})
    return found


def actors(nodes: int, each: int, gpus: bool) -> list[Any]:
    """One a rank, with a core and, if asked for, a GPU; a bundle a node, with room for its ranks."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle = {"CPU": float(each), **({"GPU": float(each)} if gpus else {})}
    group = placement_group([bundle] * nodes, strategy="STRICT_SPREAD")
    if not group.wait(PLACE_SECONDS):
        raise SystemExit(f"no {nodes} nodes with {bundle} each within {PLACE_SECONDS:.0f} s: {ray.cluster_resources()}")
    bundles = [
        PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=rank // each)
        for rank in range(nodes * each)
    ]
    remote = ray.remote(num_cpus=1, num_gpus=int(gpus))(Rank)
    return [remote.options(scheduling_strategy=one).remote() for one in bundles]


def main() -> int:
    import ray

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--gpus", action="store_true", help="one a rank")
    parser.add_argument("pytest", nargs=argparse.REMAINDER, metavar="-- OPTIONS")
    asked = parser.parse_args()
    options = asked.pytest[1:] if asked.pytest[:1] == ["--"] else asked.pytest
    ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=True)
    ranks = actors(asked.nodes, asked.ranks_per_node, asked.gpus)
    given = environments(ray.get([rank.place.remote() for rank in ranks]), asked.ranks_per_node)
    command = [sys.executable, "-m", "pytest", "--pyargs", "meshmark.suites", *options]
    codes = ray.get([rank.run.remote(os.getcwd(), command, one) for rank, one in zip(ranks, given, strict=True)])
    print(f"exit codes by rank: {codes}")
    return max(codes, key=abs)


if __name__ == "__main__":
    sys.exit(main())
