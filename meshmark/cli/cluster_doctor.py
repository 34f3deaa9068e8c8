"""`meshmark doctor --cluster`: compare nodes, measure their links, and find outliers."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from meshmark.adapter.registry import builtin_adapters
from meshmark.environment import describe, machine, num_gpus, versions
from meshmark.errors import InputError
from meshmark.launch.cluster import LOOPBACK, Cluster, ClusterSpec, cluster_of, code_digest
from meshmark.launch.launch import ForkserverLauncher, LaunchResult, device_towards
from meshmark.measure.links import FEWEST_NODES, Link, odd_ones
from meshmark.passes.links import NUM_BYTES
from meshmark.records.request import Request, Task
from meshmark.serial import decode, encode
from meshmark.spec.case import Case
from meshmark.spec.hardware import GIGA
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Precision
from meshmark.spec.workload import WORKLOADS

# --- Facts of one node.

_GIB = 2**30
_NETWORK, _INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """Facts of one node, as its launcher sees it."""

    host: str
    num_gpus: int
    alike: dict[str, str]
    """Facts, by name, that all nodes of a cluster should have in common."""
    devices: list[str]
    """Network devices with their rates."""


def node_facts(spec: ClusterSpec) -> NodeFacts:
    """Return the facts of this node."""
    here = describe("cpu", "", spec.nnodes)
    towards = "lo" if spec.host in LOOPBACK else device_towards(spec.host)
    facts = {
        "GPUs": machine("cuda") if num_gpus() else "none",
        "GPU driver": _driver() if num_gpus() else "none",
        "CUDA of PyTorch": torch.version.cuda or "none",
        "processor": f"{here.machine}, {here.num_cpus} CPUs",
        "memory": f"{here.memory_bytes / _GIB:.0f} GiB",
        "link to node 0": _rate(_NETWORK / towards) if towards else "not known",
        "InfiniBand": ", ".join(infiniband(_INFINIBAND)) or "none",
        "system": here.system,
        "C library": " ".join(platform.libc_ver()),
    }
    facts |= {f"version of {name}": version for name, version in versions().items()}
    return NodeFacts(
        host=socket.gethostname(),
        num_gpus=num_gpus(),
        alike={**facts, "code of Meshmark": code_digest()},
        devices=[f"{path.name} {_rate(path)}" for path in sorted(_NETWORK.glob("*")) if path.name != "lo"],
    )


def _driver() -> str:
    """Return the driver version from nvidia-smi. A node has one driver, so the first GPU's is enough."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        told = []
    return told[0] if told else "not known"


def infiniband(folder: Path) -> list[str]:
    """Return each port of each device with its state and rate, which shows ports that are down or slow."""
    ports = sorted(folder.glob("*/ports/*"))
    return [f"{p.parent.parent.name}:{p.name} {_text(p / 'rate')} {_text(p / 'state').lower()}" for p in ports]


def _rate(device: Path) -> str:
    """Return the kernel's data about a network device. Virtual devices have no rate."""
    megabits, state = _text(device / "speed"), _text(device / "operstate")
    rate = f"{int(megabits) / 1000:g} Gbit/s" if megabits.isdecimal() else "of no known rate"
    down = ", down" if state == "down" else ""
    return f"{rate}, mtu {_text(device / 'mtu')}{down}"


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # as the kernel answers for a device that is down
        return "unknown"


# --- The comparison.

_FACTS_SECONDS = 300.0
_LIMIT_SECONDS = (120.0, 20.0)
"""Time limit of the measurement: in total, and more for each node."""
_MOST_COLUMNS = 16
"""Number of nodes up to which every link is printed. With more, only the slowest links are printed."""
_NUM_SLOWEST = 10


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `doctor`."""
    parser.add_argument("--cluster", action="store_true", help="on every node, by srun or torchrun: compare the nodes")
    parser.add_argument("--nnodes", type=int, metavar="N", help="nodes (default: from SLURM or torchrun)")
    parser.add_argument("--node-rank", type=int, metavar="N", help="number of this node, from 0")
    parser.add_argument("--rdzv", metavar="HOST:PORT", help="address of node 0 and a free port on it")


def examine(parsed: argparse.Namespace) -> int:
    """Compare the nodes. Returns 0 on every node if they are alike, and 1 if one differs or is slow. Node 0 prints."""
    spec = cluster_of(os.environ, nnodes=parsed.nnodes, node_rank=parsed.node_rank, rdzv=parsed.rdzv)
    if spec.num_hosts == 1:
        raise InputError(
            "--cluster compares nodes, and this is one: start it on each, as srun -N2 --ntasks-per-node=1 meshmark "
            "doctor --cluster does, or give --nnodes, --node-rank and --rdzv"
        )
    with Cluster(spec, lambda text: print(f"meshmark: {text}", file=sys.stderr, flush=True)) as cluster:
        told = cluster.exchange("doctor", json.dumps(encode(node_facts(spec))), seconds=_FACTS_SECONDS)
        tasks = [decode(NodeFacts, json.loads(text)) for text in told]
        nodes = tasks[:: spec.tasks_per_node]
        with contextlib.closing(ForkserverLauncher(cluster)) as launcher:
            device, each = _ranks(spec, tasks)
            launched = launcher.launch(_request(device, spec), each * spec.nnodes)
    links = [link for report in launched.reports for link in report.links]
    failed = bool(launched.lost or launched.failures)
    if failed:
        why = launched.lost or "; ".join(f"rank {f.rank}: {f.kind}, {f.message}" for f in launched.failures)
        text = [*comparison(nodes), "links", f"  not measured: {why}"]
    else:
        text = [*comparison(nodes), *_all_reduce(launched, device), *of_links(links)]
    if spec.node_rank == 0:
        print("\n".join(text), flush=True)
    return int(failed or bool(differing(nodes) or odd_ones(links)))


def _ranks(spec: ClusterSpec, tasks: Sequence[NodeFacts]) -> tuple[str, int]:
    """Return the device that all tasks have, and the ranks per task: one per GPU if each task sees its GPUs."""
    fewest = min(task.num_gpus for task in tasks)
    if not fewest:
        return "cpu", 1
    return "cuda", 1 if spec.tasks_per_node > 1 else fewest


def _request(device: str, spec: ClusterSpec) -> Request:
    """Return the request. Its case trains nothing and only defines the ranks."""
    case = Case(adapter="single", workload=WORKLOADS["gpt-mini"], layout=Layout(), precision=Precision.FP32)
    first, more = _LIMIT_SECONDS
    return Request(
        case=case,
        adapter=builtin_adapters()["single"],
        task=Task.LINKS,
        device=device,
        backend="nccl" if device == "cuda" else "gloo",
        steps=1,
        time_limit_seconds=first + more * spec.num_hosts,
    )


def differing(nodes: Sequence[NodeFacts]) -> dict[str, dict[str, list[int]]]:
    """Return the facts that differ between nodes: by name, then value, the nodes with this value."""
    found = dict[str, dict[str, list[int]]]()
    for name in dict.fromkeys(name for node in nodes for name in node.alike):
        values = dict[str, list[int]]()
        for number, node in enumerate(nodes):
            values.setdefault(node.alike.get(name, "none"), []).append(number)
        if len(values) > 1:
            found[name] = values
    return found


def comparison(nodes: Sequence[NodeFacts]) -> list[str]:
    """Return lines with the differences (rarest values last), then the common facts, then each node."""
    differs = differing(nodes)
    lines = [f"{len(nodes)} nodes, which differ in" if differs else f"{len(nodes)} nodes, alike in all of this"]
    for name, values in differs.items():
        by_number = sorted(values.items(), key=lambda one: -len(one[1]))
        lines.append(f"  {name}: {'; '.join(f'{value} on {_nodes(which)}' for value, which in by_number)}")
    lines += ["all have"]
    lines += [f"  {name}: {value}" for name, value in nodes[0].alike.items() if name not in differs]
    lines += ["nodes"]
    return lines + [f"  {n}: {node.host}; {'; '.join(node.devices) or 'no network'}" for n, node in enumerate(nodes)]


def _nodes(numbers: Sequence[int]) -> str:
    """Format node numbers, such as `node 3` or `nodes 0-2, 5`."""
    runs = list[list[int]]()
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    told = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"node{'s' * (len(numbers) > 1)} {told}"


def _all_reduce(launched: LaunchResult, device: str) -> list[str]:
    """Return the median of the slowest rank. The rate is that of a ring's links, which compares worlds of any size."""
    world = len(launched.reports)
    seconds = max(statistics.median(report.all_reduce_seconds) for report in launched.reports)
    num_bytes = NUM_BYTES[device]
    rate = 2 * (world - 1) / world * num_bytes / seconds
    return [
        f"all-reduce of {num_bytes / 2**20:.0f} MiB over {world} ranks ({device}): {seconds * 1e3:.1f} ms, "
        f"{rate / GIGA:.3g} GB/s of bus"
    ]


def of_links(links: Sequence[Link]) -> list[str]:
    """Return every pair of nodes, or the slowest pairs if there are many, and the outliers."""
    nodes = 1 + max(link.source for link in links)
    rates = {(link.source, link.target): link.rate / GIGA for link in links}  # of the last go
    if nodes <= _MOST_COLUMNS:
        lines = ["links, GB/s from the node of a row to that of a column"]
        lines.append("      " + "".join(f"{node:>8}" for node in range(nodes)))
        for a in range(nodes):
            cells = "".join(f"{'-' if a == b else format(rates[a, b], '.3g'):>8}" for b in range(nodes))
            lines.append(f"  {a:>4}{cells}")
    else:
        lines = [f"links: {len(rates)}, {statistics.median(rates.values()):.3g} GB/s in the median; the slowest"]
        slowest = sorted(rates, key=lambda ends: rates[ends])[:_NUM_SLOWEST]
        lines += [f"  from node {a} to node {b}: {rates[a, b]:.3g} GB/s" for a, b in slowest]
    if nodes < FEWEST_NODES:
        return [*lines, "odd ones: two nodes have one link, and nothing to hold it against"]
    found = odd_ones(links)
    return [*lines, f"odd ones: {'none' if not found else ''}".rstrip(), *(f"  {one}" for one in found)]
