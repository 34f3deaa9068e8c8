"""How fast? Seconds per optimizer step, through pytest-benchmark."""

from collections.abc import Iterator

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from meshmark.pytest_plugin.plugin import expect, expect_no_worse, expect_not_wrong
from meshmark.records.record import Record
from meshmark.regression.baseline_gate import BaselineGate
from meshmark.run.runner import Runner
from meshmark.run.throughput import throughput


class Replay:
    """A clock for pytest-benchmark that ticks off durations measured elsewhere: each pair of looks is one sample."""

    __name__ = "meshmark.replay"

    def __init__(self) -> None:
        self._ticks: Iterator[float] = iter(())

    def load(self, samples: list[float]) -> None:
        self._ticks = (tick for sample in samples for tick in (0.0, sample))

    def __call__(self) -> float:
        return next(self._ticks)


replay = Replay()


@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")  # by a case that trains wrongly
@pytest.mark.benchmark(group="step", timer=replay)
def test_throughput(timed: Record, runner: Runner, benchmark: BenchmarkFixture, baseline: BaselineGate | None) -> None:
    """Raw samples after warm-up, of a run that this session has not found wrong, and of the steps that it judged."""
    expect_not_wrong(runner.observed(timed.case))
    samples = timed.timing.step_seconds
    replay.load(samples)
    benchmark.pedantic(  # type: ignore[no-untyped-call]
        lambda: None, rounds=len(samples), iterations=1
    )
    speed = throughput(timed)
    benchmark.extra_info.update(case=timed.case.id, mfu=speed.mfu, peak=speed.peak_source)
    benchmark.extra_info[f"{speed.unit}_per_second"] = speed.per_second
    if timed.verdict("throughput"):  # a large model's steps are not held against the truth
        expect(timed, "throughput")
    expect_no_worse(timed, "throughput", baseline)
    benchmark.extra_info.update(relative_interval=speed.relative, settled=speed.settled)
