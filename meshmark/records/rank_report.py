"""What one rank measured, and what it was asked to measure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from meshmark.judge.beginning import Beginning
from meshmark.judge.deviation import Deviations, Drift
from meshmark.judge.faults import Diagnosis
from meshmark.judge.tolerance_model import Comparisons
from meshmark.measure.device_memory import DeviceMemory
from meshmark.measure.links import Link
from meshmark.measure.profile import Profile
from meshmark.measure.readings import MemoryReading, StepReadings, TrafficReading


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One rank's measurements. Lists run over steps; what a task does not measure is empty."""

    rank: int
    build_seconds: float
    """From the rank's first instruction to an engine ready to train."""
    run_seconds: float
    """The rest."""
    compile_seconds: float = 0.0
    """Within both: of `torch.compile`."""
    losses: list[float] = field(default_factory=list)
    """This rank's shares."""
    norms: list[float | None] = field(default_factory=list)
    """Global gradient norm before clipping, where the framework tells it."""
    left_out: int = 0
    """Attempts at a step that dynamic loss scaling left out, and that are in no other list."""
    deviations: Deviations = field(default_factory=dict)
    """From the truth, by quantity, then step; on rank 0, for all ranks."""
    drifts: list[Drift] = field(default_factory=list)
    """On rank 0, for all ranks."""
    diagnosis: Diagnosis | None = None
    """On rank 0, of a run that is not equivalent."""
    memory: MemoryReading | None = None
    traffic: TrafficReading | None = None
    steps: StepReadings | None = None
    unmeasured: dict[str, str] = field(default_factory=dict)
    """By suite that cannot be judged: the engine's method that failed, and how."""
    step_seconds: list[float] = field(default_factory=list)
    """TIME: this rank's own, of all laps."""
    lap_starts: list[float] = field(default_factory=list)
    """TIME, by lap: seconds after the first rank of the same node."""
    lap_steps: list[int] = field(default_factory=list)
    """TIME: steps of each lap."""
    cpu_seconds: list[float] = field(default_factory=list)
    """TIME, on CPUs, by lap: processor time of all threads of this rank, user and system."""
    timed_digests: dict[int, str] = field(default_factory=dict)
    """TIME, on rank 0, for all ranks: a hash of every parameter's bits, by steps done before it."""
    flops_per_second: float | None = None
    """PEAK: of a matrix product in the case's precision."""
    state_dtypes: dict[str, str] = field(default_factory=dict)
    """Precisions of the `parameters` and `optimizer_states` that the engine holds on this rank, and those that the
    values of `gradients` and `masters` make use of: "float32", or several joined by +."""
    noise_runs: list[Comparisons] = field(default_factory=list)
    """NOISE: this rank's share of the runs."""
    kernels: dict[str, str] = field(default_factory=dict)
    """Formats and kernels that PyTorch was set to compute with, as read back at the end."""
    timed_span: tuple[float, float] | None = None
    """TIME: of the monotonic clock, from before the first lap to after the last."""
    device_memory: DeviceMemory | None = None
    """TIME, on a GPU: of the timed steps."""
    beginning: Beginning | None = None
    """LOCALISE: the first deviation of this rank; None where it has none."""
    profile: Profile | None = None
    """PROFILE."""
    samples: dict[str, list[float]] = field(default_factory=dict)
    """What only the passes of the conformance suite measure, by name."""
    links: list[Link] = field(default_factory=list)
    """LINKS: from this rank's node to others."""
    all_reduce_seconds: list[float] = field(default_factory=list)
    """LINKS: over all ranks."""
    digests: list[str] = field(default_factory=list)
    """On rank 0, for all ranks: a hash of every parameter's bits before the first step and after each."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of packages, where the rank ran in a virtual environment of its adapter's."""
    num_replicated: int = 0
    """On rank 0, for all ranks: tensors that more than one rank told, and that were compared bit for bit."""
    gathering_bytes: int = 0
    """Where tensors are judged one by one: the most memory that bringing them together took beside the engine's."""


class StackState(StrEnum):
    """Where a rank stood when its time was up; the most suspicious first."""

    OWN = "in Meshmark's own code"
    SILENT = "answered no signal"
    OUTSIDE = "outside any collective"
    INSIDE = "inside a collective, or in what waits for one"


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """Why a rank ended without a report."""

    rank: int
    kind: str
    """The `Status` that it makes of its launch; or its `Pace` when its time was up."""
    message: str
    """Exception and text, or signal."""
    time: float
    """Seconds since the epoch; of one whose time was up, that of its last progress."""
    traceback: str = ""
    log_tail: str = ""
    stack: str = ""
    """When its time was up: what every Python thread was doing."""
    standing: StackState = StackState.INSIDE
