"""How much of a machine's datasheet a framework reaches: few, physical numbers, fitted or measured, never per model.

Fitted rates lie beside this file as JSON, each with where it came from; `python -m studies.validate --refit`
writes them again.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from meshmark.errors import InputError, UnknownNameError
from meshmark.theory.overheads import Overheads

RATES_DIR = Path(__file__).parent / "rates"


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a machine and a framework reach together. Raises `InputError` for a number that cannot be."""

    name: str
    origin: str = "assumed"
    """Which rows or measurements these come from."""
    gemm_efficiency: float = 0.6
    """Share of peak FLOP/s that matrix products of a very wide model reach."""
    gemm_half_width: float = 0.0
    """Hidden size at which they reach half of it: narrow products fill the machine worse."""
    attention_efficiency: float = 0.38
    """The same for flash attention (arXiv:2307.08691 fig. 5)."""
    memory_efficiency: float = 0.85
    """Share of the memory bandwidth that element-wise kernels reach."""
    tp_latency_seconds: float = 3e-5
    """One collective inside a node."""
    tp_bandwidth: float = 3e11
    """Bytes per second of an all-gather or reduce-scatter inside a node."""
    hop_seconds: float = 4.5e-5
    """One step of a ring that crosses nodes: an all-gather over n ranks takes n - 1."""
    tp_network_bandwidth: float = 2.5e11
    """The same as `tp_bandwidth` for a group that crosses nodes."""
    layer_floor_seconds: float = 0.0
    """Forward and backward pass of a layer take no less under tensor parallelism: launches and stream hand-overs."""
    pipeline_floor_seconds: float = 0.0
    """The same in a pipeline."""
    pipeline_stall_seconds: float = 0.0
    """Added to that floor per layer and tensor-parallel rank when a pipeline crosses nodes."""
    node_bandwidth: float = 2.0e11
    """Bytes per second that a node sends to others in data-parallel collectives."""
    overlap: float = 0.8
    """Share of a backward pass that data-parallel communication can hide behind."""
    copy_tensor_seconds: float = 0.0
    """Copying one data-parallel rank's part of one tensor where ZeRO-1 gathers them: a kernel's launch each."""
    tree_tensor_seconds: float = 0.0
    """An all-reduce's latency per doubling of ranks and weight matrix."""
    step_seconds: float = 0.01
    """Host work of a step that nothing hides."""
    tp_step_seconds: float = 0.0
    """The same per tensor-parallel rank beyond the first, of groups that cross nodes."""
    p2p_bandwidth: float = 2e10
    """Bytes per second from one pipeline stage to the next across nodes."""
    pipeline_wait_seconds: float = 0.0
    """What a stage waits per neighbour and micro-batch for pipeline messages, in jobs of `pipeline_wait_nodes` or more;
    zero unless a framework polls for them."""
    pipeline_wait_nodes: float = 1e9
    """Nodes from which jobs wait."""
    pipeline_wait_dp: float = 1.0
    """With fewer data-parallel ranks, or without ZeRO, they wait from twice as many nodes only."""
    pipeline_wait_tp: float = 1e9
    """Tensor-parallel ranks from which jobs wait."""
    offload_bandwidth: float = 2.5e10
    """Bytes per second between host and device for offloaded states."""
    fragmentation: float = 0.03
    """Reserved but unused memory, over activations and working set."""
    queued_collectives: float = 0.0
    """Whole-sequence tensors that queued collectives pin when the host is far ahead, all in forward passes."""
    overhead_bytes: float = 0.0
    """What the framework takes before a model is there."""

    @property
    def overheads(self) -> Overheads:
        """The part that memory depends on."""
        return Overheads(
            fragmentation=self.fragmentation,
            queued_collectives=self.queued_collectives,
            overhead_bytes=self.overhead_bytes,
        )

    def __post_init__(self) -> None:
        for field in ("gemm_efficiency", "attention_efficiency", "memory_efficiency"):
            if not 0.0 < (got := getattr(self, field)) <= 1.0:
                raise InputError(f"rates {self.name!r}: {field} is {got:g}, expected a share between 0 and 1")
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, float) and not 0.0 <= value < float("inf"):
                raise InputError(f"rates {self.name!r}: {name} is {value:g}, expected 0 or more")


def rates(name: str) -> Rates:
    """The fitted or measured rates called `name`. Raises `UnknownNameError` when there are none."""
    known = {path.stem: path for path in sorted(RATES_DIR.glob("*.json"))}
    if name not in known:
        raise UnknownNameError("rates", name, known)
    return read_rates(known[name])


def read_rates(path: Path) -> Rates:
    """Rates from a JSON file. Raises `InputError` when the file is not one."""
    try:
        return Rates(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} holds no rates ({error}); write it with `meshmark calibrate -o {path}`") from error


def write_rates(path: Path, value: Rates) -> None:
    """Write rates as JSON, numbers rounded to four digits."""
    items = dataclasses.asdict(value).items()
    fields = {key: float(f"{item:.4g}") if isinstance(item, float) else item for key, item in items}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields, indent=1) + "\n")
