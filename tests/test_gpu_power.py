"""Reading of NVML's answers, from values as it gives them. Nothing here has met a GPU."""

from __future__ import annotations

import sys
import time
import types

import pytest

from meshmark.measure.laps import GpuPower, GpuSample, GpuWatch, nvml, power_of, spoilt
from meshmark.records.rank_report import RankReport
from meshmark.report.results import results
from meshmark.report.tables import answer
from meshmark.run.throughput import power_of_ranks
from tests.factories import make_timed, make_timing


def sample(at: float, watts: float = 500.0, mhz: int = 1980, gpu: str = "a", **changes: int) -> GpuSample:
    return GpuSample(gpu=gpu, time=at, watts=watts, sm_mhz=mhz, celsius=changes.pop("celsius", 60), **changes)


def test_energy_is_the_mean_power_of_the_timed_steps_over_their_time() -> None:
    """Warm-up and building are left out, and GPUs on which no rank was."""
    samples = [
        sample(0.5, watts=90.0, mhz=300),
        sample(1.0, watts=400.0, reasons=0x1),
        sample(2.0, watts=600.0, mhz=1700, reasons=0x4, celsius=71, num_processes=2),
        sample(2.5, gpu="b"),
        sample(9.0, watts=90.0),
    ]
    assert power_of(samples, ["a", "a", "c"], (1.0, 3.0)) == [
        GpuPower(
            gpu="a",
            num_samples=2,
            joules=1000.0,
            lowest_mhz=1700,
            highest_mhz=1980,
            highest_celsius=71,
            throttles=["power cap"],
            num_processes=2,
        )
    ]


@pytest.mark.parametrize(
    "seen, ranks, reasons",
    [
        ({}, 1, []),
        ({"reasons": 0x1 | 0x4 | 0x2}, 1, []),
        ({"reasons": 0x20}, 1, ["GPU a: software thermal slowdown"]),
        ({"reasons": 0x48}, 1, ["GPU a: hardware slowdown", "GPU a: hardware thermal slowdown"]),
        ({"num_processes": 2}, 2, []),
        ({"num_processes": 3}, 2, ["GPU a: 3 processes, where 2 were started"]),
    ],
    ids=["quiet", "idle, at its cap, set clocks", "warm", "hot", "as started", "shared"],
)
def test_a_rate_is_spoilt_by_heat_and_by_company(seen: dict[str, int], ranks: int, reasons: list[str]) -> None:
    assert spoilt(power_of([sample(1.0, **seen)], ["a"], (0.0, 2.0)), ranks) == reasons


def test_a_spoilt_rate_is_struck_in_the_report() -> None:
    rates = {
        spoils: answer(results([make_timed(timing=make_timing(spoilt=spoils))]))[0]["tokens/s"]
        for spoils in ((), ("GPU a: hot",))
    }
    assert "~~" not in str(rates[()]) and str(rates[("GPU a: hot",)]) == f"~~{rates[()]}~~ GPU a: hot"


def test_ranks_name_their_gpus_and_when_they_were_timed() -> None:
    watched = GpuWatch(None)
    watched.samples = [sample(float(t), watts=100.0 * t) for t in range(10)]
    timed = [
        RankReport(rank=r, build_seconds=0.0, run_seconds=0.0, timed_span=span, kernels={"GPU": "a"})
        for r, span in enumerate([(2.0, 4.0), (3.0, 5.0)])
    ]
    (found,) = power_of_ranks(watched, timed)
    assert found.joules == pytest.approx((200 + 300 + 400 + 500) / 4 * 3.0)
    assert power_of_ranks(watched, []) == []


@pytest.mark.parametrize(
    "told_by", ["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"]
)
def test_the_driver_is_asked_again_and_again_and_its_errors_cost_nothing(
    told_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a stand-in for `pynvml` with the functions that are called, one of which fails once. Reasons have an
    older name and a newer one."""
    clocks = iter([1980, 1980, RuntimeError("GPU is lost")])

    def clock(handle: str, kind: int) -> int:
        value = next(clocks, 1500)
        if isinstance(value, Exception):
            raise value
        return value

    library = types.SimpleNamespace(
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda i: f"handle {i}",
        nvmlDeviceGetUUID=lambda handle: "GPU-aaaa-bb",
        nvmlDeviceGetPowerUsage=lambda handle: 431_250,
        nvmlDeviceGetClockInfo=clock,
        nvmlDeviceGetTemperature=lambda handle, kind: 55,
        **{told_by: lambda handle: 0x1},
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [object()],
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)  # type: ignore[arg-type]
    with nvml() as ask, GpuWatch(ask) as watched:
        deadline = time.monotonic() + 20
        while len(watched.samples) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
    first, _, third = watched.samples[:3]
    assert (first.gpu, first.watts, first.sm_mhz, first.celsius) == ("aaaa-bb", 431.25, 1980, 55)
    assert (first.reasons, first.num_processes) == (1, 1) and third.sm_mhz == 1500


def test_where_nobody_can_be_asked_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # type: ignore[arg-type]
    with nvml() as ask, GpuWatch(ask) as watched:
        assert ask is None
    assert watched.samples == []
