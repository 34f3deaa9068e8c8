"""What one node is, for a comparison with the others of its cluster."""

from __future__ import annotations

import platform
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from meshmark.environment import describe, machine, versions
from meshmark.run.cluster import ClusterSpec
from meshmark.run.gpus import num_gpus
from meshmark.run.interface import device_towards
from meshmark.run.listener import LOOPBACK
from meshmark.run.meeting import code_digest

_GIB = 2**30
_NETWORK, _INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """As its launcher sees it."""

    host: str
    num_gpus: int
    alike: dict[str, str]
    """What all nodes of one cluster should have in common, by name."""
    devices: list[str]
    """Of its network, with their rates."""


def node_facts(spec: ClusterSpec) -> NodeFacts:
    """Of this node."""
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
    """As nvidia-smi says, of the first GPU: a node has one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        told = []
    return told[0] if told else "not known"


def infiniband(folder: Path) -> list[str]:
    """Each port of each device, with its state and rate: a port that is down, or slower than its like, is told so."""
    ports = sorted(folder.glob("*/ports/*"))
    return [f"{p.parent.parent.name}:{p.name} {_text(p / 'rate')} {_text(p / 'state').lower()}" for p in ports]


def _rate(device: Path) -> str:
    """What the kernel knows of a network device; virtual ones have no rate."""
    megabits, state = _text(device / "speed"), _text(device / "operstate")
    rate = f"{int(megabits) / 1000:g} Gbit/s" if megabits.isdecimal() else "of no known rate"
    down = ", down" if state == "down" else ""
    return f"{rate}, mtu {_text(device / 'mtu')}{down}"


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # as the kernel answers for a device that is down
        return "unknown"
