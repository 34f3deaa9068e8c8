"""Measurements of one rank, and why a rank ended without any."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from meshmark.judge.beginning import Beginning
from meshmark.judge.deviation import Deviations, Drift, TruthPrint
from meshmark.judge.faults import Diagnosis
from meshmark.judge.tolerance_model import Comparisons
from meshmark.measure.links import Link
from meshmark.measure.profile import Profile
from meshmark.measure.readings import DeviceMemory, MemoryReading, StepReadings, TrafficReading


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One rank's measurements. Lists run over steps. What a task does not measure is empty."""

    rank: int
    build_seconds: float
    """Seconds from the rank's first instruction until its engine is ready to train."""
    run_seconds: float
    """The remaining seconds."""
    compile_seconds: float = 0.0
    """Seconds of `torch.compile`, included in both."""
    explain_seconds: float = 0.0
    """Seconds of the search for the cause of a wrong run, included in `run_seconds`."""
    losses: list[float] = field(default_factory=list)
    """This rank's shares of the loss."""
    norms: list[float | None] = field(default_factory=list)
    """Global gradient norm before clipping, if the framework reports it."""
    left_out: int = 0
    """Steps that dynamic loss scaling skipped. They appear in no other list."""
    deviations: Deviations = field(default_factory=dict)
    """Deviations from the truth, by quantity, then step. On rank 0, for all ranks."""
    replaced: list[str] = field(default_factory=list)
    """On rank 0: functions, methods and hooks of PyTorch that were replaced in the process."""
    misled: str = ""
    """On rank 0: how the truth of this process differs from that of a clean one, which judged in its place."""
    rounded: list[str] = field(default_factory=list)
    """On rank 0: gradients that hold values of the narrow dtype alone, where the twin's need more bits."""
    moved: list[float] = field(default_factory=list)
    """On rank 0: how far each step moved the parameters, as an L2 norm."""
    drifts: list[Drift] = field(default_factory=list)
    """On rank 0, for all ranks."""
    diagnosis: Diagnosis | None = None
    """On rank 0, for a run that is not equivalent."""
    memory: MemoryReading | None = None
    traffic: TrafficReading | None = None
    steps: StepReadings | None = None
    unmeasured: dict[str, str] = field(default_factory=dict)
    """Suites that cannot be judged, each with the engine method that failed and how."""
    step_seconds: list[float] = field(default_factory=list)
    """TIME: this rank's step times, over all laps."""
    lap_starts: list[float] = field(default_factory=list)
    """TIME: start of each lap, in seconds after the first rank of the same node."""
    lap_steps: list[int] = field(default_factory=list)
    """TIME: steps of each lap."""
    cpu_seconds: list[float] = field(default_factory=list)
    """TIME, on CPUs: processor time of each lap over all threads of this rank, user and system."""
    timed_digests: dict[int, str] = field(default_factory=dict)
    """TIME, on rank 0, for all ranks: a hash of every parameter's bits, by the number of steps done before it."""
    flops_per_second: float | None = None
    """PEAK: speed of a matrix product in the case's precision."""
    state_dtypes: dict[str, str] = field(default_factory=dict)
    """Dtypes of the state on this rank: "float32", or several joined by +.

    For `parameters` and `optimizer_states`, the dtypes that the engine holds. For `gradients` and `masters`, the
    precision that their values use.
    """
    noise_runs: list[Comparisons] = field(default_factory=list)
    """NOISE: this rank's share of the runs."""
    truth_print: TruthPrint | None = None
    """NOISE: the fingerprint of the truth, in a process that imported no framework."""
    kernels: dict[str, str] = field(default_factory=dict)
    """Dtype settings and kernels that PyTorch was set to use, read back at the end."""
    timed_span: tuple[float, float] | None = None
    """TIME: monotonic clock before the first lap and after the last."""
    device_memory: DeviceMemory | None = None
    """TIME, on a GPU: memory during the timed steps."""
    beginning: Beginning | None = None
    """LOCALISE: the first deviation of this rank, or None."""
    profile: Profile | None = None
    """PROFILE: the profile of this rank."""
    samples: dict[str, list[float]] = field(default_factory=dict)
    """Values that only the passes of the conformance suite measure, by name."""
    links: list[Link] = field(default_factory=list)
    """LINKS: links from this rank's node to others."""
    all_reduce_seconds: list[float] = field(default_factory=list)
    """LINKS: times of all-reduces over all ranks."""
    digests: list[str] = field(default_factory=list)
    """On rank 0, for all ranks: a hash of every parameter's bits before the first step and after each step."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of packages, if the rank ran in a virtual environment of its adapter."""
    num_replicated: int = 0
    """On rank 0, for all ranks: number of tensors that several ranks reported, and that were compared bit for bit."""
    gathering_bytes: int = 0
    """Peak memory for gathering tensors, besides the engine's, when tensors are judged one by one."""


class StackState(StrEnum):
    """Where a rank was when the time limit expired, the most suspicious place first."""

    OWN = "in Meshmark's own code"
    SILENT = "answered no signal"
    OUTSIDE = "outside any collective"
    INSIDE = "inside a collective, or in what waits for one"


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """Why a rank ended without a report."""

    rank: int
    kind: str
    """The `Status` of the launch that follows from it, or the rank's `Pace` if the time limit expired."""
    message: str
    """Exception and text, or signal."""
    time: float
    """Seconds since the epoch. If the time limit expired, the time of the last progress."""
    traceback: str = ""
    log_tail: str = ""
    stack: str = ""
    """Stacks of all Python threads when the time limit expired."""
    stack_state: StackState = StackState.INSIDE
