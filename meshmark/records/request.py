"""What a rank is asked to measure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from meshmark.judge.observed_path import ObservedPath
from meshmark.judge.sample import Sample
from meshmark.judge.tolerance_model import ToleranceModel
from meshmark.measure.gpu_power import GpuPower
from meshmark.spec.case import Case


class Task(StrEnum):
    """One of the passes over a case; each runs in processes of its own."""

    OBSERVE = "observe"
    """Instrumented: losses, gradients, parameters, memory, traffic."""
    TIME = "time"
    """Untouched: seconds per step."""
    PROFILE = "profile"
    """Under PyTorch's profiler: where a step's time goes."""
    PEAK = "peak"
    """What the cores or the GPU that a timed pass will use can compute at best, in one process."""
    LINKS = "links"
    """What the links between nodes carry; no framework is asked."""
    RETRACE = "retrace"
    """The steps of OBSERVE once more, and on to the last of TIME: what its ranks' losses and parameters must be."""
    NOISE = "noise"
    """How far rounding alone carries the adapter `single` from the truth, in one process."""
    SAVE = "save"
    """Train, and save halfway."""
    LOSE = "lose"
    """Train, and save halfway; then one rank is killed."""
    RESUME = "resume"
    """Go on in fresh processes from what SAVE, or LOSE, left."""
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
    """What a rank is to do; the same for every rank of a launch."""

    case: Case
    adapter: str
    """"module:Class" or "path/to/file.py:Class"."""
    task: Task
    device: str
    """cpu or cuda."""
    backend: str
    steps: int
    marks: list[int] = field(default_factory=list)
    """RETRACE: after how many steps the parameters are read beyond `steps`; the last is the end, if that is later."""
    warmup: int = 0
    """TIME: steps before the first that counts."""
    timing_budget_seconds: float = 0.0
    """TIME: how long steps may be added to the first `steps` in one launch, until the rate is known well."""
    num_threads: int = 1
    """PEAK: on a CPU."""
    power: list[GpuPower] = field(default_factory=list)
    """TIME, on GPUs: what was seen of them meanwhile."""
    peak_flops_per_second: float | None = None
    """TIME: what was measured of all cores or GPUs that the ranks can use."""
    fake_ranks: list[int] = field(default_factory=list)
    """FAKE_WORLD: which ranks are measured, one launch each; the first is the one that this launch is."""
    observed: ObservedPath | None = None
    """TIME: what its ranks' losses and parameters are held against, in the record."""
    assess: bool = True
    """OBSERVE: compare with the truth; False measures memory and traffic alone."""
    sample: Sample | None = None
    """OBSERVE and NOISE: what of a large model is compared, tensor by tensor; None compares all, in memory."""
    metered: bool = True
    """OBSERVE: measure memory and traffic; False compares with the truth alone."""
    tolerance_model: ToleranceModel | None = None
    """OBSERVE: what a run that exceeds it is diagnosed by."""
    scenario: str = ""
    """The conformance scenario that this belongs to, if any."""
    base: Case | None = None
    """What the scenario varies."""
    evaluate: bool = False
    """OBSERVE: evaluate every batch before it is trained on."""
    checkpoint: str = ""
    """SAVE and RESUME: folder that all ranks share."""
    traces: str = ""
    """PROFILE: the file that the first rank's trace is left in."""
    time_limit_seconds: float
