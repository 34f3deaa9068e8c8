"""The gathered, versioned, serialised outcome of one pass over one case."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from meshmark.environment import Environment
from meshmark.judge.deviation import Deviations, Drift, Quantity, QuantityKind
from meshmark.judge.faults import Diagnosis
from meshmark.judge.observed_path import ObservedPath
from meshmark.judge.sample import Sample
from meshmark.judge.tolerance_model import Comparisons, ToleranceModel, Way
from meshmark.measure.device_memory import DeviceMemory
from meshmark.measure.gpu_power import GpuPower
from meshmark.measure.interval import Interval, mean_interval
from meshmark.measure.laps import Lap, laps_of
from meshmark.measure.profile import Profile
from meshmark.measure.readings import AlikeSteps, MemoryReading, TrafficReading
from meshmark.records.reach import Place, Reach
from meshmark.records.request import Task
from meshmark.records.sources import Source
from meshmark.spec.case import Case
from meshmark.spec.known_gap import KnownGap
from meshmark.theory.flow import Flow, OneTimeTraffic, TrafficException
from meshmark.theory.states import ExtraMemory, ModelStates

SCHEMA = 4
"""Version of the format; raise it with every change that an older reader would misread."""


class Status(StrEnum):
    """How a pass ended."""

    OK = "ok"
    SKIPPED = "skipped"
    """Not run: unsupported, or not installed."""
    RAISED = "raised"
    KILLED = "killed"
    HUNG = "hung"
    """No end within the time limit, and some rank stood still amid its work: a defect."""
    SLOW = "slow"
    """No end within the time limit, while its ranks came on: nothing is known of its correctness, and a higher limit is
    all that an answer costs."""
    OOM = "oom"
    NAN = "nan"
    """It ran to its end, with a loss that is not a number."""
    EXITED = "exited"
    """A rank's process ended by itself, whatever its exit code, and left neither a report nor an error."""
    UNFINISHED = "unfinished"
    """What failed stands outside the case's ranks."""
    NO_SPACE = "no space"
    """A disk was full, of the launch's own files or of what a rank wrote."""
    NODES_DISAGREE = "nodes disagree"
    """Nodes were given other commands, or hold other data or versions; ends the run."""
    NODE_LOST = "node lost"
    """Another node, or the link to it, was gone; ends the run, unless the others go on."""
    UNKILLABLE = "could not be killed"
    """A rank outlived SIGKILL, as one does inside a driver that hangs; what it held is held still."""

    @property
    def outside(self) -> bool:
        """Whether what failed stands outside the case: no verdict on the adapter."""
        infrastructure = (Status.NO_SPACE, Status.NODES_DISAGREE, Status.NODE_LOST, Status.UNKILLABLE)
        return self is Status.UNFINISHED or self in infrastructure


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerEnd:
    """How another rank ended after one has failed."""

    rank: int
    kind: str
    """As a `RankFailure` has it; "done" when it came to its end, "ended" when the launcher had to end it."""
    seconds: float | None = None
    """After the first failure; None where nobody noted when."""

    @property
    def by_itself(self) -> bool:
        """Whether nobody had to end it: torchrun's agent kills peers, the default launcher waits for them first."""
        return self.kind not in ("killed", "ended")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a pass ended, with the evidence when it did not end well."""

    status: Status
    rank: int | None = None
    """The rank that failed first."""
    message: str = ""
    traceback: str = ""
    log_tail: str = ""
    stacks: dict[int, str] = field(default_factory=dict)
    """Every rank's Python stacks, when it hung or was too slow."""
    peers: list[PeerEnd] = field(default_factory=list)
    """What became of the other ranks when one failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One suite's judgement."""

    suite: str
    """equivalence, memory or communication."""
    passed: bool
    undecided: bool = False
    """Not passed, and no fault of what was judged: nothing can be told."""
    summary: str
    """One line: what decided."""
    evidence: dict[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSeconds:
    """What a launch took."""

    seconds: float = 0.0
    """From the launch to the last process's end."""
    build_seconds: float = 0.0
    """Of the slowest rank: from its first instruction to an engine ready to train."""
    compile_seconds: float = 0.0
    """Of the slowest rank: of `torch.compile`, which is in no timed step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCurves:
    """What training itself tells."""

    losses: list[float] = field(default_factory=list)
    """Global mean, by step."""
    norms: list[float | None] = field(default_factory=list)
    """Global gradient norm before clipping, by step, where the framework tells it."""
    left_out: int = 0
    """Attempts that dynamic loss scaling left out, as it should where a gradient overflows; each was tried again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EquivalenceEvidence:
    """What the truth and its noise say of a run."""

    deviations: Deviations = field(default_factory=dict)
    """From the truth, by quantity, then step."""
    noise: Comparisons = field(default_factory=dict)
    """The root mean square of such distances in runs of `single` under perturbation, and of the scales of gradients."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """How many times its noise a quantity may stand from the truth: by kind, and by quantity where that is more."""
    ways: Mapping[str, Way] = field(default_factory=dict)
    """As a `ToleranceModel` has them: how a run that has not the twin's bits may compute."""
    drifts: list[Drift] = field(default_factory=list)
    diagnosis: Diagnosis | None = None
    """Of a run that is not equivalent: the likely defect."""
    num_replicated: int = 0
    """Tensors, of all steps, that several ranks told and that were compared bit for bit."""
    sample: Sample | None = None
    """What of a large model was judged; None where all was, or nothing."""
    gathering_bytes: list[int] = field(default_factory=list)
    """By rank, of a sample: the most memory that bringing tensors together took beside what the engine holds."""

    @property
    def tolerance_model(self) -> ToleranceModel:
        return ToleranceModel(noise=self.noise, factors=self.factors, ways=self.ways)

    @property
    def wrong_start(self) -> list[Quantity]:
        """Initial values that differ from the truth's by so much as a bit."""
        return [q for q, steps in self.deviations.items() if q.kind is QuantityKind.INITIAL and steps[0].distance]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEvidence:
    """What ranks held, and what they were to hold; lists are by rank."""

    readings: list[MemoryReading] = field(default_factory=list)
    planned: list[ModelStates | None] = field(default_factory=list)
    """Before extra memory; None where nothing is planned."""
    extra_memory: list[list[ExtraMemory]] = field(default_factory=list)
    """What the adapter declares beyond the plan."""
    live_bytes: list[dict[int, int]] = field(default_factory=list)
    """After each step, the allocator's own count of everything; empty in records of old."""
    state_dtypes: dict[str, str] = field(default_factory=dict)
    """Of all ranks together; see `RankReport`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficEvidence:
    """What ranks sent, and what they were to send; lists are by rank."""

    readings: list[TrafficReading] = field(default_factory=list)
    planned: list[list[Flow] | None] = field(default_factory=list)
    """By theory; None where it does not plan. Empty in records of old, whose plan was their adapter's word."""
    traffic_exceptions: list[list[TrafficException]] = field(default_factory=list)
    """From theory, as the adapter declares them."""
    one_time_traffic: list[list[OneTimeTraffic]] = field(default_factory=list)
    """What some steps send besides, as the adapter declares it."""
    alike_steps: list[list[AlikeSteps]] = field(default_factory=list)
    """What the backend did in every step; empty in records of old, and of a rank that could not tell."""
    places: list[Place] = field(default_factory=list)
    """Where each rank ran; empty in records of old."""
    reach: Reach | None = None
    """How far went what ranks sent."""
    planned_reach: Reach | None = None
    """And how far what they were to send was to go."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Relaunch:
    """Another launch of the untouched pass, of as many steps, in one lap."""

    rank_step_seconds: list[list[float]]
    """By rank, then step: raw."""
    rank_starts: list[list[float]] = field(default_factory=list)
    """By rank: seconds after the first rank of the same node, alone in a list; empty: together."""
    rank_cpu_seconds: list[list[float]] = field(default_factory=list)
    """By rank, alone in a list: as those of the first launch."""
    losses: list[float] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    """As those of the first launch."""


@dataclass(frozen=True, kw_only=True)
class TimingEvidence:
    """What the untouched pass took."""

    rank_step_seconds: list[list[float]] = field(default_factory=list)
    """By rank, then step: raw, of all laps."""
    rank_starts: list[list[float]] = field(default_factory=list)
    """By rank, then lap: seconds after the first rank of the same node; empty: together."""
    lap_steps: list[int] = field(default_factory=list)
    """Steps of each lap; empty: one lap."""
    rank_cpu_seconds: list[list[float]] = field(default_factory=list)
    """By rank, then lap: processor time of all its threads, user and system; empty on GPUs and before schema 4."""
    device_memory: list[DeviceMemory] = field(default_factory=list)
    """By rank, on GPUs."""
    power: list[GpuPower] = field(default_factory=list)
    """Of the GPUs of the node that writes, where NVML tells."""
    spoilt: list[str] = field(default_factory=list)
    """Why the rate is none of this machine: a GPU that was throttled, or shared."""
    peak_flops_per_second: float | None = None
    """Measured, of all cores or GPUs that the ranks can use; None where nobody measured."""
    digests: dict[int, str] = field(default_factory=dict)
    """A hash of every parameter's bits, by steps done: amid warm-up, and after the last step."""
    observed: ObservedPath | None = None
    """What these, and the losses, were held against."""
    relaunches: list[Relaunch] = field(default_factory=list)
    """The same steps in fresh processes, one launch after the other."""

    @functools.cached_property
    def interval(self) -> Interval:
        """Of the mean of `step_seconds`: every table of a report asks for it."""
        return mean_interval(self.step_seconds, repeat=len(self.rank_step_seconds[0]) if self.relaunches else 0)

    @property
    def cpu_seconds_per_step(self) -> float | None:
        """Processor time of all ranks together, in the mean of all launches; None where it was not measured."""
        launches = [self.rank_cpu_seconds, *(one.rank_cpu_seconds for one in self.relaunches)]
        if not all(launches) or not self.rank_step_seconds:
            return None
        steps = len(self.rank_step_seconds[0]) * self.num_launches
        return sum(sum(laps) for ranks in launches for laps in ranks) / steps or None

    @property
    def num_launches(self) -> int:
        return 1 + len(self.relaunches)

    @property
    def laps(self) -> list[Lap]:
        """Of all launches."""
        if not self.rank_step_seconds:
            return []
        again = [lap for one in self.relaunches for lap in laps_of(one.rank_step_seconds, one.rank_starts)]
        return laps_of(self.rank_step_seconds, self.rank_starts, self.lap_steps) + again

    @property
    def step_seconds(self) -> list[float]:
        """From the last rank's end of each step to that of the next: they add up to what a stopwatch says."""
        return [seconds for lap in self.laps for seconds in lap.step_seconds]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConformanceEvidence:
    """What a clause's scenario is judged by; empty in the matrix of cases."""

    scenario: str = ""
    base: Case | None = None
    """What the scenario varies."""
    samples: list[dict[str, list[float]]] = field(default_factory=list)
    """By rank, then name: what the passes of the conformance suite measure."""
    digests: list[str] = field(default_factory=list)
    """A hash of every parameter's bits, before the first step and after each."""
    known_gaps: list[KnownGap] = field(default_factory=list)
    """What the adapter knows that its framework gets wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """All that a reader needs to know of one pass over one case."""

    schema: int = SCHEMA
    case: Case
    adapter: str
    """"module:Class" that was run."""
    task: Task
    steps: int
    warmup: int = 0
    timing_budget_seconds: float = 0.0
    """How long steps could be added in one launch of the untouched pass."""
    environment: Environment
    sources: list[Source] = field(default_factory=list)
    """The user's own files that it was made with."""
    outcome: Outcome
    launch: LaunchSeconds = field(default_factory=LaunchSeconds)
    training: TrainingCurves = field(default_factory=TrainingCurves)
    equivalence: EquivalenceEvidence = field(default_factory=EquivalenceEvidence)
    memory: MemoryEvidence = field(default_factory=MemoryEvidence)
    traffic: TrafficEvidence = field(default_factory=TrafficEvidence)
    timing: TimingEvidence = field(default_factory=TimingEvidence)
    profiles: list[Profile] = field(default_factory=list)
    """By rank, of the profiled pass."""
    conformance: ConformanceEvidence = field(default_factory=ConformanceEvidence)
    fake_ranks: list[int] = field(default_factory=list)
    """Of a fake world: the ranks that were measured, each alone, in the order of every list by rank. Empty: the world
    was real, and every rank was there."""
    unmeasured: dict[str, str] = field(default_factory=dict)
    """By suite that cannot be judged: the adapter's method that failed, and how."""
    kernels: dict[str, str] = field(default_factory=dict)
    """Formats and kernels that PyTorch was set to compute with on the first rank."""
    verdicts: list[Verdict] = field(default_factory=list)
    not_judged: list[str] = field(default_factory=list)
    """What the verdicts of an observed pass leave out, in words; empty in records of old."""
    remarks: list[str] = field(default_factory=list)
    """What happened on the way that a reader should know."""

    @property
    def ranks(self) -> Sequence[int]:
        """The rank of each entry of the lists by rank."""
        return self.fake_ranks or range(self.case.world_size)

    def verdict(self, suite: str) -> Verdict | None:
        return next((v for v in self.verdicts if v.suite == suite), None)


# --- Validation of records that were read: a damaged or foreign file may hold what no run leaves.

_LONGEST_SECONDS = 1e9
_MOST_BYTES = 2**63


def validate_record(record: Record) -> None:
    """Raises `ValueError` for one whose line is no use to anybody."""
    _expect_times(record.timing)
    if record.task is Task.TIME and record.outcome.status is Status.OK and not record.timing.rank_step_seconds:
        raise ValueError("a timed pass that came to its end, and no step's time")
    for reading in record.memory.readings:
        for instant in (value for name in dataclasses.fields(reading) if (value := getattr(reading, name.name))):
            if dataclasses.is_dataclass(instant):
                _expect_bytes([getattr(instant, category.name) for category in dataclasses.fields(instant)])


def _expect_times(timing: TimingEvidence) -> None:
    if timing.lap_steps and sum(timing.lap_steps) != max(map(len, timing.rank_step_seconds), default=0):
        raise ValueError(f"laps of {timing.lap_steps[:4]} steps, which the times are not of")
    launches: list[TimingEvidence | Relaunch] = [timing, *timing.relaunches]
    for launch in launches:
        ranks = launch.rank_step_seconds
        if len({len(steps) for steps in ranks}) > 1:
            raise ValueError(f"times of {' and '.join(str(len(steps)) for steps in ranks[:4])} steps on its ranks")
        if launch.rank_starts and len(launch.rank_starts) != len(ranks):
            raise ValueError(f"times of {len(ranks)} ranks, of which {len(launch.rank_starts)} started")
        for laps in launch.rank_cpu_seconds:
            if not all(0 <= seconds < _LONGEST_SECONDS for seconds in laps):
                raise ValueError(f"laps that took {str(list(laps[:4]))[:80]} seconds of processors")
        for steps in ranks:
            if not (steps and min(steps) >= 0 and 0 < sum(steps) < _LONGEST_SECONDS):
                raise ValueError(f"steps that took {str(list(steps[:4]))[:80]} seconds")


def _expect_bytes(numbers: Sequence[float]) -> None:
    if not all(-_MOST_BYTES < number < _MOST_BYTES for number in numbers):
        raise ValueError("numbers of bytes that no machine has")
