"""Adapters whose ranks start in a virtual environment of their own."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.ddp import DDP
from meshmark.environment import ENVIRONMENTS
from meshmark.launch.launch import ForkserverLauncher
from meshmark.records.record import Status
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.workload import workload


class There(DDP):
    """Trains where a package is that this environment has not."""

    virtual_environment = "near"

    def build(self, case: Case, context: RankContext) -> Engine:
        import only_there  # type: ignore[import-not-found]

        assert Path(only_there.__file__).is_relative_to(sys.prefix)
        return super().build(case, context)


CASE = Case(adapter="there", workload=workload("gpt-mini"), layout=Layout(dp=2))
TARGET = f"{__name__}:There"


@pytest.fixture
def near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A virtual environment that sees this one's packages, and has one more."""
    folder = tmp_path / "environments"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "near")], check=True)
    [packages] = (folder / "near").glob("lib/python*/site-packages")
    (packages / "near.pth").write_text(f"{sysconfig.get_path('purelib')}\n{Path(__file__).parents[1]}\n")
    (packages / "only_there.py").write_text("")
    monkeypatch.setenv(ENVIRONMENTS, str(folder))
    return folder


def test_ranks_start_there_and_the_record_says_so(launcher: ForkserverLauncher, near: Path, tmp_path: Path) -> None:
    runner = Runner(launcher, {"there": TARGET}, RunOptions(observed_steps=3), tmp_path / "results")
    record = runner.observe(CASE)
    runner.close()
    assert record.outcome.status is Status.OK, record.outcome.message
    assert record.environment.versions["virtual environment"] == "near"
    assert all(verdict.passed for verdict in record.verdicts)


def test_one_that_is_not_there_is_a_skip_with_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ENVIRONMENTS, str(tmp_path))
    adapter: type[Adapter] = There
    assert "make env NAME=near" in str(adapter.refusal(CASE, "cpu", "gloo"))
