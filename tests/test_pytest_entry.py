"""When the entry point loads the plugin: for the suites, under whatever name, and for nothing else. What it does once
installed is in test_wheel.py. And how its sessions end, whatever adapters do at exit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from meshmark.pytest_plugin.entry import asks_for_suites
from meshmark.pytest_plugin.session_log import keep_exit_status

pytest_plugins = ["pytester"]
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
    assert ids == ["test_memory[ddp-dp2.mb3-gpt-tiny-fp32]", "test_memory[ddp-dp4.mb3-gpt-tiny-fp32]"]


@pytest.mark.slow
def test_a_project_whose_warnings_are_errors_runs_the_suites(tmp_path: Path) -> None:
    """With Meshmark as it is installed: pytest warned that parts of the plugin had been imported already."""
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nfilterwarnings = ["error"]\n')
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q"]
    asked = ["--pyargs", "meshmark.suites.test_memory", "--adapters", "ddp", "--world", "2"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run([*command, *asked], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and "test_memory[ddp-dp2" in run.stdout, run.stdout + run.stderr


ENDS = """
import atexit, os
from os import _exit
from meshmark.adapter.contract import Adapter, Capabilities

def leave():
    _exit(0)

{end}

class Mine(Adapter):
    capabilities = Capabilities(degrees=frozenset({{"dp"}}))
    def build(self, case, context):
        raise NotImplementedError
"""


def end_of(folder: Path, end: str, *options: str, start: str = "-m pytest") -> subprocess.CompletedProcess[str]:
    """Return how pytest ends that collects the cases of an adapter whose module has the line `end`."""
    (folder / "mine.py").write_text(ENDS.format(end=end))
    asked = ["--pyargs", "meshmark.suites.test_memory", "--adapter", "mine.py:Mine", "--collect-only", "-q", *options]
    return subprocess.run(
        [sys.executable, *start.split(" ", 1), "-p", "no:cacheprovider", *asked],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("end", ["atexit.register(os._exit, 0)", "atexit.register(leave)"])
def test_an_adapter_that_ends_the_process_at_exit_leaves_a_failed_session_its_status(tmp_path: Path, end: str) -> None:
    """Frameworks that hang at exit are often left like this."""
    done = end_of(tmp_path, end, "-k", "nothing")
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout + done.stderr
    assert "no tests collected" in done.stdout


@pytest.mark.slow
def test_an_adapter_that_was_imported_before_leaves_a_failed_session_its_status(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import atexit, os\natexit.register(os._exit, 0)\n")
    done = end_of(tmp_path, "", "-k", "nothing", "--confcutdir", str(tmp_path), "--rootdir", str(tmp_path), ".")
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout + done.stderr


def test_exit_work_of_others_is_done_whatever_the_status(tmp_path: Path) -> None:
    """Coverage saves what it measured, and pytest removes folders."""
    done = end_of(tmp_path, "atexit.register(print, 'tidied up')", "-k", "nothing")
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout + done.stderr
    assert done.stdout.endswith("tidied up\n")


@pytest.mark.slow
@pytest.mark.parametrize(("end", "status"), [("atexit.register(os._exit, 0)", 0), ("atexit.register(os._exit, 7)", 7)])
def test_a_session_that_passed_ends_as_the_adapter_says(tmp_path: Path, end: str, status: int) -> None:
    assert end_of(tmp_path, end).returncode == status


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("os._exit(0)", pytest.ExitCode.INTERNAL_ERROR),
        pytest.param("os._exit(7)", 7, marks=pytest.mark.slow),
        ("os.fork() or os._exit(0); assert os.wait()[1] == 0", pytest.ExitCode.OK),
    ],
)
def test_an_import_that_ends_the_process_is_no_passed_session(tmp_path: Path, end: str, status: int) -> None:
    """A process that it forked may end as it likes."""
    done = end_of(tmp_path, end)
    assert done.returncode == status, done.stdout + done.stderr
    told = "os._exit(0) was called before the session had ended"
    assert (told in done.stderr) is (status == pytest.ExitCode.INTERNAL_ERROR)


@pytest.mark.slow
def test_a_program_that_runs_pytest_ends_as_it_likes(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, sys, pytest\nprint('pytest:', int(pytest.main(sys.argv[1:])), flush=True)\nos._exit(0)\n"
    )
    done = end_of(tmp_path, "", "-k", "nothing", start="program.py")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "pytest: 5"), done.stdout + done.stderr


def test_a_session_within_another_changes_nothing(pytester: pytest.Pytester) -> None:
    before = os._exit
    pytester.makeconftest(
        "from meshmark.pytest_plugin.session_log import keep_exit_status\n"
        "def pytest_collection(session):\n    keep_exit_status(session)\n"
    )
    assert pytester.runpytest_inprocess().ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert os._exit is before


def test_it_needs_a_program(request: pytest.FixtureRequest) -> None:
    """Called in a thread, nothing tells who started it."""
    before = os._exit
    thread = threading.Thread(target=keep_exit_status, args=(request.session,))
    thread.start()
    thread.join()
    assert os._exit is before
