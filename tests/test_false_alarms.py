"""The claimed rate of false alarms is the one that was counted, by the tolerance model that judges."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.false_alarms import Line, count_alarms, read
from benchmarks.honest import PROBABILITIES, Group, Honest, Tail
from benchmarks.power_page import Power
from meshmark.judge.tolerance_model import FALSE_ALARMS, AlarmCounts, FalseAlarms, design_effect, shown, upper_limit
from meshmark.passes.kernels import ATTENTION
from meshmark.passes.noise import FORMAT, noise_key
from tests.factories import make_case, make_environment


def test_the_committed_counts_are_of_this_tolerance_model() -> None:
    """Whoever changes the noise or its factors counts anew: `make power-long`."""
    assert shown().version == FORMAT
    assert shown().alarms <= FALSE_ALARMS * shown().runs, "as seldom as factors aim at"
    assert shown().bound < 3 * FALSE_ALARMS, "what is claimed of correct runs rests on tens of thousands"
    assert shown().design_effect >= 1
    assert f"in {shown().runs:,} correct runs" in str(shown())


@pytest.mark.parametrize("num_runs", [28, 1040, 30_000])
def test_no_alarm_bounds_the_rate_by_three_over_the_number_of_runs(num_runs: int) -> None:
    assert upper_limit(0, num_runs) == pytest.approx(-math.log(0.05) / num_runs, rel=0.06)
    assert upper_limit(1, num_runs) == pytest.approx(4.74 / num_runs, rel=0.07)
    assert upper_limit(num_runs, num_runs) == 1.0


def test_the_bound_is_printed_and_not_the_aim() -> None:
    found = FalseAlarms(version=FORMAT, machines=[], torch=[], counted=[])
    assert (found.bound, str(found)) == (1.0, "not counted yet: run make power-long")
    some = [
        AlarmCounts(what="a", problems=1, tolerance_models=1, runs=400, alarms=0),
        AlarmCounts(what="b", problems=1, tolerance_models=2, runs=600, alarms=1),
    ]
    told = str(FalseAlarms(version=FORMAT, machines=[], torch=[], design_effect=2.5, counted=some))
    assert told == "1 alarm in 1,000 correct runs, which show as much as 400 independent ones: below 0.0093 (95%)"


def test_runs_that_fare_alike_within_a_problem_count_as_fewer() -> None:
    """50 problems of 40 runs: independent ones, and such that all runs of a problem end alike."""
    rng = np.random.default_rng(0)
    runs = rng.normal(size=(50, 40))
    assert design_effect(runs.tolist()) < 1.5
    alike = np.repeat(rng.normal(size=(50, 1)), 40, axis=1)
    assert design_effect(alike.tolist()) == pytest.approx(40, rel=0.05)
    assert design_effect([[0.5, 0.6]]) == design_effect([]) == 1.0


def line(seed: int, excesses: list[float], version: int = FORMAT) -> Line:
    tail = Tail(compared=9, beyond=[0] * len(PROBABILITIES), largest=1.0)
    group = Group(
        what="single, gpt",
        seed=seed,
        tolerance_models=1,
        excesses=excesses,
        worst="loss, step 0",
        tails={"number": tail},
    )
    return Line(version=version, machine="m", torch="t", how="single", number=seed, seconds=1.0, group=group)


def test_each_group_counts_once_and_an_alarm_is_counted(tmp_path: Path) -> None:
    found = count_alarms([line(0, [0.5, 0.6]), line(0, [0.5, 0.6]), line(1, [0.5, 1.01])])
    assert [(c.problems, c.tolerance_models, c.runs, c.alarms) for c in found.counted] == [(2, 2, 4, 1)]
    assert (tmp_path / "groups.jsonl").write_text('{"version": 6, "mach')
    assert read(tmp_path / "groups.jsonl") == []


@pytest.mark.parametrize("name", ["MKL_CBWR", "OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA", "NVIDIA_TF32_OVERRIDE"])
def test_noise_is_of_the_settings_under_which_it_was_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    before = noise_key(make_case(), 3)
    assert before == noise_key(make_case(), 3)
    monkeypatch.setenv(name, "7")
    assert noise_key(make_case(), 3) != before


def test_noise_is_of_the_machine_and_the_library_that_it_was_measured_on(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [noise_key(make_case(), 3)]
    for changed, value in (
        ("meshmark.passes.noise.machine", lambda device: "another processor"),
        ("torch.__config__.show", lambda: "built with another library"),
        ("meshmark.passes.noise.ATTENTION", ATTENTION[:1]),  # pinned in every rank, as the format of products is
    ):
        with monkeypatch.context() as patch:
            patch.setattr(changed, value)
            keys.append(noise_key(make_case(), 3))
    assert len(set(keys)) == len(keys)


def test_what_is_not_good_is_said() -> None:
    """Correct runs that are further out than their noise runs' spread says, here four times as often, are a reason."""
    tail = Tail(compared=10_000, beyond=[100, 40, 4, 1], largest=2.0)
    group = Group(
        what="single, gpt", seed=0, tolerance_models=1, excesses=[0.5], worst="loss, step 0", tails={"number": tail}
    )
    power = Power(
        trials=[],
        smallest=[],
        cells=[],
        real=[],
        algorithms=[],
        limits=[],
        honest=Honest(groups=[group]),
        seconds=1.0,
        environment=make_environment(),
    )
    assert power.complaints == ["misfit: of 10,000 comparisons of number, 40 where 0.001 of them should be"]
    alarmed = replace(power, honest=Honest(groups=[replace(group, excesses=[0.5, 1.1], tails={})]))
    assert alarmed.complaints == ["alarmed: single, gpt seed 0 (loss, step 0)"]
