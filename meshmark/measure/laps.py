"""Timed steps: laps that all ranks start together, when to run another, and their results.

A lap lasts from when the first rank leaves a barrier to the last rank's end, as an external stopwatch would measure.
Between laps, off the clock, ranks exchange their times, and all decide alike whether to add steps.

Power, clocks and processes of GPUs come from the driver's NVML (`nvidia-ml-py`) while steps are timed. The launcher's
process samples them ten times per second; it times nothing itself and does not use CUDA.

`SteadyClock` notices that somebody set the machine's clock while it was used to order events. PyTorch's profiler and
flight recorder stamp events with the time of day. A clock that is set meanwhile, by a person, a virtual machine that
wakes up, or a first answer of NTP, puts events into the wrong order.

`mean_interval` is the confidence interval of the mean of an autocorrelated series, by block means and Student's t.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from meshmark.errors import ClockError

# --- Measure several things in alternation, so that the load of a machine falls on all of them alike.

T = TypeVar("T")


def in_rounds(calls: Mapping[str, Callable[[], T]], rounds: int, warm_up: int = 1) -> dict[str, list[T]]:
    """Return what each call measured, once a round. The first `warm_up` rounds are left out.

    Each round begins with the call after the one that the last round began with, so that none always follows the
    same other.
    """
    names, found = list(calls), dict[str, list[T]]({name: [] for name in calls})
    for index in range(warm_up + rounds):
        at = index % len(names)
        for name in names[at:] + names[:at]:
            value = calls[name]()
            if index >= warm_up:
                found[name].append(value)
    return found


# --- Confidence interval of the mean of an autocorrelated series: block means and Student's t.

CONFIDENCE = 0.95
LEAST_BLOCKS = 8
"""Least number of blocks. With fewer, the interval would be dominated by Student's t."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean and its uncertainty."""

    mean: float
    half_width: float
    """Half width of the interval that contains the true mean with CONFIDENCE. Infinite for fewer than two samples."""
    block: int
    """Samples per block."""

    @property
    def relative(self) -> float:
        return self.half_width / self.mean


def mean_interval(samples: Sequence[float], repeat: int = 0) -> Interval:
    """Return the interval of the mean of `samples`, in order.

    Uses means of blocks of 1, 2, 4, ... samples. With correlated neighbours, the error estimate rises with the block
    length until blocks exceed the correlation length (Flyvbjerg and Petersen, J. Chem. Phys. 91, 461, 1989). The
    widest interval therefore counts, among lengths with at least LEAST_BLOCKS blocks. `repeat` is how many samples
    share the same processes, if there are several such repeats; these count as blocks however few they are.
    """
    lengths = [1]
    while len(samples) // (2 * lengths[-1]) >= LEAST_BLOCKS:
        lengths.append(2 * lengths[-1])
    lengths += [repeat] if repeat else []
    widths = [_half_width(_block_means(samples, length)) for length in lengths]
    widest = max(widths)
    return Interval(mean=statistics.fmean(samples), half_width=widest, block=lengths[widths.index(widest)])


def ratio_interval(ones: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Return the geometric mean of one / other over pairs, in order, and half its interval."""
    logs = mean_interval([math.log(one / other) for one, other in zip(ones, others, strict=True)])
    return math.exp(logs.mean), math.exp(logs.mean) * logs.half_width


def _block_means(samples: Sequence[float], length: int) -> list[float]:
    """Return means of whole blocks.

    Surplus samples at the start are dropped, because the end is further from warm-up.
    """
    over = len(samples) % length
    return [statistics.fmean(samples[i : i + length]) for i in range(over, len(samples), length)]


def _half_width(means: Sequence[float]) -> float:
    if len(means) < 2:
        return math.inf
    middle, degrees = statistics.fmean(means), len(means) - 1
    variance = math.fsum((mean - middle) ** 2 for mean in means) / degrees  # statistics.stdev takes ten times as long
    return student_t(degrees) * math.sqrt(variance / len(means))


@functools.cache
def student_t(degrees: int) -> float:
    """Return the two-sided quantile of Student's t at CONFIDENCE for `degrees` degrees of freedom."""
    low, high = 0.0, 1.0
    while _within(high, degrees) < CONFIDENCE:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < CONFIDENCE else (low, middle)
    return high


def _within(t: float, degrees: int) -> float:
    """Return the probability that Student's t is between -t and t: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan2(t, math.sqrt(degrees))
    odd = degrees % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for power in range(2 + odd, degrees + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power - 1) / power
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


# --- Notice that somebody set the machine's clock while it was used to order events.

_LIMIT_NS = 10_000_000
"""Jumps of up to 10 ms go unnoticed. Reading both clocks takes less, also on a busy machine."""
_SLEW = 1e-3
"""NTP corrects a running clock by at most 0.5 ms a second, which changes no order."""


class SteadyClock:
    """Compare the time of day with the monotonic clock, which nobody can set."""

    def __init__(self) -> None:
        self._offset_ns, self._read_ns = _offset_ns()

    def check(self) -> None:
        """Raise `ClockError` if the clock was set since the last call, or since this object was made."""
        before, since = self._offset_ns, self._read_ns
        self._offset_ns, self._read_ns = _offset_ns()
        moved = self._offset_ns - before
        if abs(moved) > _LIMIT_NS + _SLEW * (self._read_ns - since):
            raise ClockError(
                f"this machine's clock was set by {moved / 1e9:+.3g} s during the measurement, and the profiler orders"
                " events by it: run the case again"
            )


def _offset_ns() -> tuple[int, int]:
    """Return the time of day less the monotonic time, and the latter. A reading that was interrupted is repeated."""
    best = None
    for _ in range(3):
        before = time.monotonic_ns()
        now = time.time_ns()
        after = time.monotonic_ns()
        if best is None or after - before < best[0]:
            best = after - before, now - before, before
    assert best
    return best[1], best[2]


# --- Power, clocks and processes of GPUs while steps are timed, from the driver's NVML (`nvidia-ml-py`).

_HERTZ = 10.0
_THROTTLES = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Bits of NVML's clock event reasons that mean a reduced clock. Idle and set clocks are not faults."""


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """One GPU at one instant."""

    gpu: str
    """UUID of the GPU."""
    time: float
    """Monotonic clock, which all processes of a machine share."""
    watts: float
    sm_mhz: int
    celsius: int
    reasons: int = 0
    """NVML's bits for why the clock is not higher."""
    num_processes: int = 0
    """Number of processes that compute on the GPU."""


@dataclass(frozen=True, kw_only=True)
class GpuPower:
    """One GPU over the timed steps."""

    gpu: str
    """UUID of the GPU."""
    num_samples: int
    joules: float
    """Mean power times seconds."""
    lowest_mhz: int
    highest_mhz: int
    highest_celsius: int
    throttles: list[str] = field(default_factory=list)
    """Reasons why its clock was reduced."""
    num_processes: int = 0
    """Largest number of processes that computed on it at once."""


Ask = Callable[[], list[GpuSample]]


def power_of(samples: Sequence[GpuSample], gpus: Iterable[str], span: tuple[float, float]) -> list[GpuPower]:
    """Return the power of each of `gpus` from the samples within `span`. GPUs without samples are left out."""
    found = list[GpuPower]()
    for gpu in sorted(set(gpus)):
        own = [s for s in samples if s.gpu == gpu and span[0] <= s.time <= span[1]]
        if not own:
            continue
        bits = 0
        for sample in own:
            bits |= sample.reasons
        found.append(
            GpuPower(
                gpu=gpu,
                num_samples=len(own),
                joules=sum(s.watts for s in own) / len(own) * (span[1] - span[0]),
                lowest_mhz=min(s.sm_mhz for s in own),
                highest_mhz=max(s.sm_mhz for s in own),
                highest_celsius=max(s.celsius for s in own),
                throttles=[reason for bit, reason in _THROTTLES.items() if bits & bit],
                num_processes=max(s.num_processes for s in own),
            )
        )
    return found


def together(launches: Iterable[Sequence[GpuPower]]) -> list[GpuPower]:
    """Combine several launches by GPU."""
    by_gpu: dict[str, list[GpuPower]] = {}
    for one in itertools.chain.from_iterable(launches):
        by_gpu.setdefault(one.gpu, []).append(one)
    return [
        GpuPower(
            gpu=gpu,
            num_samples=sum(one.num_samples for one in own),
            joules=sum(one.joules for one in own),
            lowest_mhz=min(one.lowest_mhz for one in own),
            highest_mhz=max(one.highest_mhz for one in own),
            highest_celsius=max(one.highest_celsius for one in own),
            throttles=list(dict.fromkeys(reason for one in own for reason in one.throttles)),
            num_processes=max(one.num_processes for one in own),
        )
        for gpu, own in by_gpu.items()
    ]


def spoilt(power: Sequence[GpuPower], ranks_per_gpu: int) -> list[str]:
    """Return why a rate measured with these readings does not represent the machine.

    Reasons are a clock reduced for another reason than the power cap, which is normal under load, and other processes.
    """
    found = list[str]()
    for one in power:
        held_down = [reason for reason in one.throttles if reason != _THROTTLES[0x4]]
        found += [f"GPU {one.gpu}: {reason}" for reason in held_down]
        if one.num_processes > ranks_per_gpu:
            found.append(f"GPU {one.gpu}: {one.num_processes} processes, where {ranks_per_gpu} were started")
    return found


class GpuWatch:
    """Samples GPUs in a thread while its context is active."""

    def __init__(self, ask: Ask | None) -> None:
        """`ask` returns samples, or is None if there is nothing to sample."""
        self.samples: list[GpuSample] = []
        self._ask, self._over = ask, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> GpuWatch:
        if self._ask:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._ask:
            self._thread.join()

    def _run(self) -> None:
        assert self._ask
        while not self._over.wait(1 / _HERTZ):
            with contextlib.suppress(Exception):  # a driver's error must not cost a pass
                self.samples += self._ask()


@contextlib.contextmanager
def nvml() -> Iterator[Ask | None]:
    """Yield a function that samples all GPUs, or None if `nvidia-ml-py` is not installed or no driver answers."""
    try:
        library: Any = importlib.import_module("pynvml")
        library.nvmlInit()
    except Exception:
        yield None
        return
    try:
        handles = [library.nvmlDeviceGetHandleByIndex(i) for i in range(library.nvmlDeviceGetCount())]
        yield lambda: [_sample(library, handle) for handle in handles]
    finally:
        library.nvmlShutdown()


def _sample(library: Any, handle: Any) -> GpuSample:  # noqa: ANN401
    """Return a sample. Uses NVML's name of the reasons since driver 535 if available; the older name is deprecated."""
    older = "nvmlDeviceGetCurrentClocksThrottleReasons"
    reasons = getattr(library, "nvmlDeviceGetCurrentClocksEventReasons", None) or getattr(library, older)
    return GpuSample(
        gpu=library.nvmlDeviceGetUUID(handle).removeprefix("GPU-"),
        time=time.monotonic(),
        watts=library.nvmlDeviceGetPowerUsage(handle) / 1000,
        sm_mhz=library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM),
        celsius=library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU),
        reasons=reasons(handle),
        num_processes=len(library.nvmlDeviceGetComputeRunningProcesses(handle)),
    )


# --- Timed steps: laps that all ranks start together, when to run another, and their results.

PRECISION = 0.02
"""Relative precision of the rate. Steps are added until the half width of its interval is no larger."""
LEAST_SETTLED = 64
"""Least number of steps for which an interval is trusted.

With fewer, blocks are too short to show the correlation of neighbours. In simulations that stop by this rule, the
interval contains the true rate in 95 to 98 % of runs with normally distributed steps, in 94 % with correlation 0.3
between neighbours, in 90 % with 0.6, and in 81 % with 0.8 or with lognormal outliers.
"""
LEAST_LAUNCHES = 4
"""Least number of launches for which an interval is trusted.

The conditions of a launch's processes (their placement, their memory) shift all its steps alike, by 5 to 15 % on a
shared machine. No number of steps of one launch shows this.
"""
LEAST_LAP = 5
"""Least steps per lap. A shorter lap would be mostly its start."""


@dataclass(frozen=True, kw_only=True)
class Lap:
    """Steps without a break."""

    rank_ends: list[list[float]]
    """End of each step by rank, in seconds since the first rank of the same node started."""

    @property
    def ends(self) -> list[float]:
        """End of every step on the last rank."""
        return [max(ranks) for ranks in zip(*self.rank_ends, strict=True)]

    @property
    def step_seconds(self) -> list[float]:
        """Seconds between the last rank's ends of successive steps. They add up to the duration of the lap."""
        return [end - start for start, end in itertools.pairwise([0.0, *self.ends])]

    @property
    def gaps(self) -> list[float]:
        """Seconds by step from the first rank's end to the last one's."""
        return [max(ranks) - min(ranks) for ranks in zip(*self.rank_ends, strict=True)]


def laps_of(
    rank_step_seconds: Sequence[Sequence[float]],
    rank_starts: Sequence[Sequence[float]] = (),
    lap_steps: Sequence[int] = (),
) -> list[Lap]:
    """Return the laps from every rank's seconds of all steps.

    `rank_starts` is by rank, then lap, how long after the first rank of its node a rank started (by default together).
    `lap_steps` is the steps per lap (by default one lap).
    """
    counts = lap_steps or [len(rank_step_seconds[0])]
    borders = list(itertools.pairwise(itertools.accumulate(counts, initial=0)))
    starts = rank_starts or [[0.0] * len(counts)] * len(rank_step_seconds)
    return [
        Lap(
            rank_ends=[
                list(itertools.accumulate(own[begin:end], initial=start[lap]))[1:]
                for own, start in zip(rank_step_seconds, starts, strict=True)
            ]
        )
        for lap, (begin, end) in enumerate(borders)
    ]


def is_settled(num_steps: int, interval: Interval, num_launches: int = LEAST_LAUNCHES) -> bool:
    """Return whether the rate is known to within PRECISION, given the interval of the mean of `num_steps` steps."""
    enough = num_steps >= LEAST_SETTLED and num_launches >= LEAST_LAUNCHES
    return enough and interval.relative <= PRECISION


def num_steps_to_add(step_seconds: Sequence[float], budget_seconds: float) -> int:
    """Return the number of steps of the next lap.

    It is 0 when the rate is known to within PRECISION, or `budget_seconds` of timed steps are over. Otherwise it is as
    many as there were, limited by the budget.
    """
    interval = mean_interval(step_seconds)
    if is_settled(len(step_seconds), interval):
        return 0
    room = int((budget_seconds - sum(step_seconds)) / interval.mean)
    return 0 if room < LEAST_LAP else min(room, len(step_seconds))
