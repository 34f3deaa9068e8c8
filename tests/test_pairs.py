"""Variations meet: few cases bring every two together, and resuming goes wrong where two of them do."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from benchmarks import pairs
from meshmark.launch.launch import ForkserverLauncher
from meshmark.run.runner import Runner, RunOptions
from tests.broken.meeting import LosesTheSecondGroup


def test_every_two_variations_are_together_and_apart() -> None:
    names = list(pairs.VARIATIONS)
    chosen = pairs.pairwise(names)
    assert len(chosen) < 12
    for a, b in itertools.combinations(names, 2):
        assert {(a in each, b in each) for each in chosen} == set(itertools.product((False, True), repeat=2))


def test_a_run_is_saved_after_an_odd_step() -> None:
    assert pairs.STEPS // 2 % 2 == 1


def test_cases_differ_by_what_their_names_say() -> None:
    varied = dict(pairs.cases("ddp", 2))
    assert len(varied) == len(pairs.pairwise(list(pairs.VARIATIONS))) == len(set(varied.values()))
    for name, case in varied.items():
        chosen = name.split("+")
        assert case.precision.is_mixed == ("bf16" in chosen)
        assert bool(case.workload.frozen) == ("frozen" in chosen)
        assert case.workload.optimizer.groups_decay == ("groups" in chosen)
        assert case.layout.num_micro_batches == (2 if "accumulated" in chosen else 1)


@pytest.mark.slow
def test_a_checkpoint_that_loses_a_group_fails_where_there_are_groups_alone(
    launcher: ForkserverLauncher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clause "resume" alone, without groups, passes."""
    target = f"{LosesTheSecondGroup.__module__}:{LosesTheSecondGroup.__qualname__}"
    runner = Runner(launcher, {"ddp": target}, RunOptions(), tmp_path, lambda what, case, record: None)
    varied = [each for each in pairs.cases("ddp", 2) if each[0] in ("plain", "groups+warm-up+tied+recomputed")]
    assert pairs.try_pairs(runner, varied) == 1
    runner.close()
    plain, grouped = capsys.readouterr().out.splitlines()
    assert plain.startswith("pass") and grouped.startswith("fail")
