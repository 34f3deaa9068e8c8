"""Faults of clusters, each as `make cluster-test` tries it. They take minutes, root, SLURM and network namespaces, and
run when they are asked for: `CLUSTER_TRIALS=1 python -m pytest tests/test_cluster_trials.py -k link_down`."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.cluster.row import Row
from benchmarks.cluster.trials import Ground, Named, trials

ASKED = "CLUSTER_TRIALS"


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    folder = Path(tempfile.mkdtemp(prefix="mmc-"))  # sockets' paths are short
    with Ground(folder) as ground:
        yield ground
    assert not ground.left()
    shutil.rmtree(folder)


def judge(trial: Named, ground: Ground) -> None:
    """Raises `AssertionError` where something was wrong, `Skipped` where it cannot be tried."""
    if not os.environ.get(ASKED):
        pytest.skip(f"takes minutes, and root: `make cluster-test` tries all; {ASKED}=1 makes them tests of pytest")
    if reason := trial.lacks():
        pytest.skip(reason)
    row = trial.run(ground)
    assert not row.wrong, f"{row.engine}, {row.shape}, {row.fault}: {row.wrong}"


@pytest.mark.parametrize("trial", [pytest.param(trial, id=trial.name) for trial in trials()])
def test_trial(trial: Named, ground: Ground) -> None:
    judge(trial, ground)


def test_a_trial_is_skipped_with_its_reason_or_fails_by_what_was_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = Row(engine="by hand", shape="2 x 1 x 1", wrong=["node 1 had not ended"])
    trial, place = Named(name="planted", run=lambda ground: wrong, needs=()), Ground(tmp_path)
    monkeypatch.delenv(ASKED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="`make cluster-test` tries all"):
        judge(trial, place)
    monkeypatch.setenv(ASKED, "1")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(pytest.skip.Exception, match="run it as root"):
        judge(trial, place)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("benchmarks.cluster.trials._uncommitted", lambda: "")
    with pytest.raises(pytest.skip.Exception, match="no-such-command: not installed; apt-get install"):
        judge(Named(name="planted", run=trial.run, needs=("no-such-command",)), place)
    with pytest.raises(AssertionError, match="by hand, 2 x 1 x 1, none: .'node 1 had not ended'"):
        judge(trial, place)
    assert not any(tmp_path.iterdir()), "nothing was started for it"


def test_trials_have_names_of_their_own() -> None:
    assert {name for name, count in Counter(trial.name for trial in trials()).items() if count > 1} == set()
