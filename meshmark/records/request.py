"""The measurements that a rank is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from meshmark.judge.deviation import ObservedPath, Sample
from meshmark.judge.tolerance_model import ToleranceModel
from meshmark.measure.laps import GpuPower
from meshmark.spec.case import Case


class Task(StrEnum):
    """A pass over a case. Each pass runs in its own processes."""

    OBSERVE = "observe"
    """Instrumented: losses, gradients, parameters, memory, traffic."""
    TIME = "time"
    """Untouched: seconds per step."""
    PROFILE = "profile"
    """Under PyTorch's profiler: where the time of a step goes."""
    PEAK = "peak"
    """Peak speed of the cores or the GPU that a timed pass will use, in one process."""
    LINKS = "links"
    """Bandwidth of the links between nodes. No framework is involved."""
    RETRACE = "retrace"
    """Repeats the steps of OBSERVE and continues to the last step of TIME, to know the losses and parameters it must
    have.
    """
    NOISE = "noise"
    """How far rounding alone moves the adapter `single` from the truth, in one process."""
    SAVE = "save"
    """Train, and save halfway."""
    LOSE = "lose"
    """Train, and save halfway; then one rank is killed."""
    RESUME = "resume"
    """Continue in fresh processes from the checkpoint of SAVE or LOSE."""
    ENDURE = "endure"
    """Many steps: does memory grow?"""
    DROPOUT = "dropout"
    """The same step again and again: is dropout random where it should be, and of the right strength?"""
    OVERFLOW = "overflow"
    """fp16: one rank's gradients overflow."""
    LOCALISE = "localise"
    """A case that failed once more, to find the module in which it begins to deviate."""
    FAIL = "fail"
    """One rank raises an error while the others train on."""
    FAKE_WORLD = "fake world"
    """One rank of the case's world, in one process without peers: memory and traffic. See `measure.fake_world`."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Instructions for a launch, the same for every rank."""

    case: Case
    adapter: str
    """"module:Class" or "path/to/file.py:Class"."""
    task: Task
    device: str
    """cpu or cuda."""
    backend: str
    steps: int
    marks: list[int] = field(default_factory=list)
    """RETRACE: step counts beyond `steps` at which the parameters are read.

    The last one is the end, if it is later.
    """
    warmup: int = 0
    """TIME: steps before the first that counts."""
    timing_budget_seconds: float = 0.0
    """TIME: how long steps may be added to the first `steps` in one launch, until the rate is precise."""
    num_threads: int = 1
    """PEAK: number of threads, on a CPU."""
    power: list[GpuPower] = field(default_factory=list)
    """TIME, on GPUs: power readings during the pass."""
    peak_flops_per_second: float | None = None
    """TIME: measured peak of all cores or GPUs that the ranks can use."""
    fake_ranks: list[int] = field(default_factory=list)
    """FAKE_WORLD: ranks to measure, one launch each. This launch is the first of them."""
    observed: ObservedPath | None = None
    """TIME: the path that the ranks' losses and parameters are compared with in the record."""
    assess: bool = True
    """OBSERVE: compare with the truth. False measures only memory and traffic."""
    sample: Sample | None = None
    """OBSERVE and NOISE: the part of a large model to compare, tensor by tensor.

    None compares all of it, in memory.
    """
    metered: bool = True
    """OBSERVE: measure memory and traffic. False only compares with the truth."""
    tolerance_model: ToleranceModel | None = None
    """OBSERVE: tolerances. A run that exceeds them is diagnosed."""
    scenario: str = ""
    """The conformance scenario that this request belongs to, if any."""
    base: Case | None = None
    """The case that the scenario varies."""
    evaluate: bool = False
    """OBSERVE: evaluate every batch before training on it."""
    checkpoint: str = ""
    """SAVE and RESUME: folder that all ranks share."""
    traces: str = ""
    """PROFILE: file for the trace of the first rank."""
    time_limit_seconds: float
