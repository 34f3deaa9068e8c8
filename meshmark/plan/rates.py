"""Rates: how much of a machine's datasheet a framework reaches.

Rates are few physical numbers, fitted or measured, never per model. Fitted rates are JSON files in a folder next to
this file, each with its origin. `python -m studies.validate --refit` writes them again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshmark.errors import InputError, UnknownNameError
from meshmark.serial import decode, encode
from meshmark.theory.memory import Overheads

RATES_DIR = Path(__file__).parent / "rates"


REACHED = 0.9
"""Share of a limiting link or network that is reached.

An all-reduce of 256 MB over two nodes of 400 GB/s reached 362 (baselines/papers/nanotron_collective_bandwidth.csv).
"""


CONTENTION = 0.189
"""Share by which computation slows down while NCCL's collectives run.

It is the average over models on A100, H100, MI210 and MI250 (arXiv:2507.03114; at most 0.40). NCCL's 16 to 24 channels
occupy 12 to 18 % of an H100.
"""


NCCL = {
    "network.contention": CONTENTION,
    "network.ring_start_seconds": 8.4e-6,
    "network.ring_inside_seconds": 3.4e-6,
    "network.ring_across_seconds": 14.0e-6,
}
"""What NCCL's collectives cost beyond their bytes: contention, and the latencies of its rings (Simple) by which it
chooses its algorithms (`baseLatencies` and `hwLatencies` of NVLink and of networks, src/graph/tuning.cc since 2.12)."""


@dataclass(frozen=True, kw_only=True)
class KernelRates:
    """Rates of matrix products and element-wise kernels."""

    gemm_efficiency: float = 0.6
    """Share of peak FLOP/s that matrix products of a very wide model reach."""
    gemm_half_width: float = 0.0
    """Hidden size at which products reach half of that. Narrow products use the machine less well."""
    attention_efficiency: float = 0.38
    """Share of peak FLOP/s that flash attention reaches on long sequences (arXiv:2307.08691 fig. 5)."""
    attention_half_length: float = 0.0
    """Tokens of a sequence of which attention reaches half of that. A causal mask leaves short ones little work."""
    memory_efficiency: float = 0.85
    """Share of the memory bandwidth that element-wise kernels reach."""


@dataclass(frozen=True, kw_only=True)
class NetworkRates:
    """Rates of collectives and sends, inside nodes and between them."""

    tp_latency_seconds: float = 3e-5
    """Latency of one collective inside a node."""
    tp_bandwidth: float = 3e11
    """Bytes per second of an all-gather or reduce-scatter inside a node."""
    hop_seconds: float = 4.5e-5
    """Time of one step of a ring that crosses nodes. An all-gather over n ranks takes n - 1 steps."""
    tp_network_bandwidth: float = 2.5e11
    """`tp_bandwidth` for a group that crosses nodes."""
    node_bandwidth: float = 2.0e11
    """Bytes per second that a node sends to others in data-parallel collectives."""
    p2p_bandwidth: float = 2e10
    """Bytes per second from one pipeline stage to the next across nodes."""
    overlap: float = 0.8
    """Share of a backward pass that data-parallel communication can hide behind."""
    contention: float = 0.0
    """Seconds that computation takes longer for each second of a collective that it hides.

    A collective's kernels occupy streaming multiprocessors, memory bandwidth and power while they run.
    """
    tensor_overlap: float = 0.0
    """Share of tensor-parallel collectives that a framework hides behind the products before or after them.

    An example is Transformer Engine's user buffers.
    """
    copy_tensor_seconds: float = 0.0
    """Time to copy one data-parallel rank's part of one tensor where ZeRO-1 gathers them: one kernel launch each."""
    ring_start_seconds: float = 0.0
    """Latency of one gather or reduction of shards over data-parallel ranks, beside its steps."""
    ring_inside_seconds: float = 0.0
    """Latency of each of its steps from one GPU of a node to another."""
    ring_across_seconds: float = 0.0
    """Latency of each of its steps from a node to the next."""
    tree_tensor_seconds: float = 0.0
    """Latency of an all-reduce per doubling of ranks, for each separately reduced bucket or weight matrix."""


@dataclass(frozen=True, kw_only=True)
class FloorRates:
    """Minimum time of a layer, however little it computes."""

    layer_floor_seconds: float = 0.0
    """Minimum time of a layer's forward and backward pass under tensor parallelism: launches and stream hand-overs."""
    pipeline_floor_seconds: float = 0.0
    """The same minimum in a pipeline."""
    pipeline_stall_seconds: float = 0.0
    """Addition to that minimum per layer and tensor-parallel rank when a pipeline crosses nodes."""


@dataclass(frozen=True, kw_only=True)
class PollingRates:
    """Rates of frameworks that poll for pipeline messages."""

    pipeline_wait_seconds: float = 0.0
    """Time that a stage waits per neighbour and micro-batch for pipeline messages.

    Applies to jobs of `pipeline_wait_nodes` or more. Zero unless a framework polls for messages.
    """
    pipeline_wait_nodes: float = 1e9
    """Number of nodes from which jobs wait."""
    pipeline_wait_dp: float = 1.0
    """With fewer data-parallel ranks than this, or without ZeRO, jobs wait only from twice as many nodes."""
    pipeline_wait_tp: float = 1e9
    """Number of tensor-parallel ranks from which jobs wait."""


@dataclass(frozen=True, kw_only=True)
class HostRates:
    """Host work, and the bandwidth of offloaded states."""

    step_seconds: float = 0.01
    """Host work per step that nothing hides."""
    tp_step_seconds: float = 0.0
    """Additional host work per tensor-parallel rank beyond the first, for groups that cross nodes."""
    offload_bandwidth: float = 2.5e10
    """Bytes per second between host and device for offloaded states."""


@dataclass(frozen=True, kw_only=True)
class SpreadRates:
    """Range of measured over predicted step time for nine of ten runs. Unknown if both ends are 1."""

    faster: float = 1.0
    """One run in twenty takes less than this share of its prediction."""
    slower: float = 1.0
    """One run in twenty takes more than this multiple of its prediction."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates that a machine and a framework reach together. Raises `InputError` for an impossible number."""

    name: str
    origin: str = "assumed"
    """The rows or measurements that the rates come from."""
    kernels: KernelRates = KernelRates()
    network: NetworkRates = NetworkRates()
    floors: FloorRates = FloorRates()
    polling: PollingRates = PollingRates()
    host: HostRates = HostRates()
    memory: Overheads = Overheads(fragmentation=0.03)
    """The rates that memory depends on."""
    spread: SpreadRates = SpreadRates()
    """Deviation of runs from their predictions, for runs that the other rates are not fitted to."""

    def __post_init__(self) -> None:
        for name, value in self.numbers().items():
            field = name.partition(".")[2]
            if field in _SHARES and not 0.0 < value <= 1.0:
                raise InputError(f"rates {self.name!r}: {field} is {value:g}, expected a share between 0 and 1")
            if not 0.0 <= value < float("inf"):
                raise InputError(f"rates {self.name!r}: {field} is {value:g}, expected 0 or more")

    def numbers(self) -> dict[str, float]:
        """Return all numbers by dotted name, such as `network.hop_seconds`."""
        made = dataclasses.asdict(self)
        return {f"{part}.{field}": value for part in _PARTS for field, value in made[part].items()}

    def moved(self, numbers: Mapping[str, float]) -> Rates:
        """Return the rates with other numbers, given by dotted name."""
        changes: dict[str, dict[str, float]] = {}
        for name, value in numbers.items():
            part, _, field = name.partition(".")
            changes.setdefault(part, {})[field] = value
        parts = {part: dataclasses.replace(getattr(self, part), **fields) for part, fields in changes.items()}
        return dataclasses.replace(self, **parts)


_PARTS = tuple(f.name for f in dataclasses.fields(Rates) if f.name not in ("name", "origin"))
_SHARES = ("gemm_efficiency", "attention_efficiency", "memory_efficiency")


def rates(name: str) -> Rates:
    """Return the fitted or measured rates called `name`. Raises `UnknownNameError` when there are none."""
    known = {path.stem: path for path in sorted(RATES_DIR.glob("*.json"))}
    if name not in known:
        raise UnknownNameError("rates", name, known)
    return read_rates(known[name])


def read_rates(path: Path) -> Rates:
    """Read rates from a JSON file. Raises `InputError` when the file has none."""
    try:
        return rates_from(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} holds no rates ({error}); write it with `meshmark calibrate -o {path}`") from error


def rates_from(fields: object) -> Rates:
    """Return rates from their JSON value, grouped by part or, in older files, flat. Missing numbers have defaults.

    Raises `ValueError` or `TypeError` when they are not rates, and `InputError` for an impossible number.
    """
    if not isinstance(fields, dict):
        raise TypeError(f"expected their fields, got {type(fields).__name__}")
    made = encode(Rates(name=""))
    parts = {field: part for part in _PARTS for field in made[part]}
    for name, value in fields.items():
        if name in parts:
            made[parts[name]][name] = value
        elif name in _PARTS:
            made[name] = made[name] | value if isinstance(value, dict) else value
        elif name in ("name", "origin"):
            made[name] = value
        else:
            raise ValueError(f"rates have no field {name}; they have name, origin, {', '.join(_PARTS)}")
    if "name" not in fields:
        raise ValueError("they have no name")
    found: Rates = decode(Rates, made)
    return found


def write_rates(path: Path, value: Rates) -> None:
    """Write rates as JSON, with numbers rounded to four digits."""
    rounded = value.moved({name: float(f"{number:.4g}") for name, number in value.numbers().items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(encode(rounded), indent=1) + "\n")
