"""Power, clocks and company of GPUs while steps are timed, as the driver's NVML tells them (`nvidia-ml-py`).

Asked ten times a second from the launcher's process, which times nothing itself and does not touch CUDA. No line of the
part that asks has met a GPU yet; what is made of its answers is held to values by tests.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_HERTZ = 10.0
_THROTTLES = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Bits of NVML's clock event reasons that mean less than the full clock; idle and set clocks are no fault."""


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """One GPU at one instant."""

    gpu: str
    """Its UUID."""
    time: float
    """Of the monotonic clock, which all processes of a machine share."""
    watts: float
    sm_mhz: int
    celsius: int
    reasons: int = 0
    """NVML's bits: why the clock is not higher."""
    num_processes: int = 0
    """That compute on it."""


@dataclass(frozen=True, kw_only=True)
class GpuPower:
    """One GPU over the timed steps."""

    gpu: str
    """Its UUID."""
    num_samples: int
    joules: float
    """Mean power times seconds."""
    lowest_mhz: int
    highest_mhz: int
    highest_celsius: int
    throttles: list[str] = field(default_factory=list)
    """Why its clock was held down."""
    num_processes: int = 0
    """The most that computed on it at once."""


Ask = Callable[[], list[GpuSample]]


def power_of(samples: Sequence[GpuSample], gpus: Iterable[str], span: tuple[float, float]) -> list[GpuPower]:
    """Of each of `gpus`, by the samples within `span`; nothing of one that has none."""
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
    """Of several launches, by GPU."""
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
    """Why a rate over these is no rate of the machine: a clock that was held down for another reason than its power
    cap, which is how a GPU runs that has much to do; or somebody else's work."""
    found = list[str]()
    for one in power:
        held_down = [reason for reason in one.throttles if reason != _THROTTLES[0x4]]
        found += [f"GPU {one.gpu}: {reason}" for reason in held_down]
        if one.num_processes > ranks_per_gpu:
            found.append(f"GPU {one.gpu}: {one.num_processes} processes, where {ranks_per_gpu} were started")
    return found


class GpuWatch:
    """Samples while it is entered, in a thread."""

    def __init__(self, ask: Ask | None) -> None:
        """`ask` is None where there is nobody to ask."""
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
    """Asks all GPUs; None where `nvidia-ml-py` is not installed, or no driver answers."""
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
    """The reasons by NVML's name for them since driver 535, where the package has it: the older one is to go."""
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
