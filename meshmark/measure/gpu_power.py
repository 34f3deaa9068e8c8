"""Power, clocks and processes of GPUs while steps are timed, from the driver's NVML (`nvidia-ml-py`).

The launcher's process samples ten times per second; it times nothing itself and does not use CUDA.
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
