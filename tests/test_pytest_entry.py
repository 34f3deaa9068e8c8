"""When the entry point loads the plugin: for the suites, under whatever name, and for nothing else. What it does once
installed is in test_wheel.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshmark.pytest_plugin.entry import asks_for_suites

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "arguments, pyargs, folder, asked",
    [
        (["meshmark.suites"], True, "tests", True),
        (["meshmark"], True, "tests", True),
        (["mine", "meshmark.suites.test_memory::test_memory[ddp-dp2]"], True, "tests", True),
        (["meshmark.suites"], False, "tests", False),
        (["meshmark.suitesque"], True, "tests", False),
        (["suites"], False, ".", True),
        (["../meshmark/suites/test_memory.py::test_memory"], False, "tests", True),
        ([str(ROOT / "suites")], False, "tests", True),
        ([], False, "suites", True),
        ([], False, ".", False),
        (["tests", "adapters"], False, ".", False),
        (["suites"], False, "tests", False),
        (["x" * 5000], True, ".", False),
    ],
    ids=lambda value: (" ".join(value) or "-")[:40] if isinstance(value, list) else str(value),
)
def test_the_suites_are_asked_for_by_name_or_by_path(
    arguments: list[str], pyargs: bool, folder: str, asked: bool
) -> None:
    assert asks_for_suites(arguments, pyargs, ROOT / folder) is asked


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in the checkout", "elsewhere"])
def test_with_a_checkout_the_plugin_is_registered_once(tmp_path: Path, where: str) -> None:
    """By the entry point, and by the checkout's conftest where the run meets it."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only"]
    asked = ["-q", "--pyargs", "meshmark.suites.test_memory", "--adapters", "ddp", "--world", "2,4"]
    folder, env = ROOT if where == "in the checkout" else tmp_path, {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([*command, *asked], cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    ids = [line.partition("::")[2] for line in run.stdout.splitlines() if "::" in line]
    assert ids == ["test_memory[ddp-dp2.mb2-gpt-tiny-fp32]", "test_memory[ddp-dp4.mb2-gpt-tiny-fp32]"]
