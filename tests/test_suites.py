"""The suites as their users run them: through pytest, in a process of their own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from meshmark.records.record_file import RecordFile, read_records

ROOT = Path(__file__).parent.parent


def suites(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "suites",
        "-p",
        "no:cacheprovider",
        "--timing-budget=0",
        "--steps=3",
        *map(str, arguments),
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_collection_lists_stable_ids_and_imports_no_framework() -> None:
    code = (
        "import sys, pytest; pytest.main(['suites', '--collect-only', '-q', '--world=2,4', '-p', 'no:cacheprovider']);"
        "print(sorted({m.split('.')[0] for m in sys.modules}"
        " & {'deepspeed', 'accelerate', 'fairscale', 'megatron', 'scipy'}))"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120).stdout
    assert "suites/test_equivalence.py::test_equivalence[ddp-dp2.mb3-gpt-tiny-fp32]" in out
    assert "suites/test_throughput.py::test_throughput[gpipe-pp4.mb6-gpt-tiny-fp32]" in out
    assert out.strip().splitlines()[-1] == "[]"


def test_a_run_leaves_records_junit_and_benchmark_data(tmp_path: Path) -> None:
    done = suites(
        "--adapters",
        "ddp",
        "--workload",
        "gpt-mini",
        "--results",
        tmp_path / "r",
        f"--junitxml={tmp_path / 'junit.xml'}",
        f"--benchmark-json={tmp_path / 'bench.json'}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    observed, timed = read_records(tmp_path / "r").records
    assert [v.suite for v in observed.verdicts] == ["equivalence", "memory", "communication"]
    benchmark = json.loads((tmp_path / "bench.json").read_text())["benchmarks"][0]
    assert benchmark["stats"]["data"] == timed.timing.step_seconds
    assert benchmark["extra_info"]["tokens_per_second"] > 0
    names = [case.get("name") for case in ElementTree.parse(tmp_path / "junit.xml").iter("testcase")]
    assert "test_equivalence[ddp-dp2.mb4-gpt-mini-fp32]" in names
    told = {one.get("name"): one.get("value") for one in ElementTree.parse(tmp_path / "junit.xml").iter("property")}
    assert int(told["peak_bytes"] or 0) == max(reading.peak.total for reading in observed.memory.readings)
    assert float(told["tokens_per_second"] or 0) == benchmark["extra_info"]["tokens_per_second"]
    assert "[1/2] observe ddp-dp2.mb4-gpt-mini-fp32" in done.stdout
    assert "record_property is incompatible" not in done.stdout


def test_a_warning_is_an_error_here() -> None:
    """In tests of Meshmark's own."""
    with pytest.raises(UserWarning, match="planted"):
        warnings.warn("planted", stacklevel=1)


@pytest.mark.slow
def test_a_warning_is_none_in_the_suites(tmp_path: Path) -> None:
    """A user's adapter may warn, and pytest-benchmark does when there is nothing yet to compare with."""
    (tmp_path / "warns.py").write_text(
        "import warnings\nfrom adapters.ddp import DDP\nwarnings.warn('on import')\nclass Warns(DDP):\n"
        "    @classmethod\n    def modules(cls):\n        warnings.warn('in a fixture')\n        return []\n"
    )
    first_run = ("--benchmark-autosave", "--benchmark-compare", f"--benchmark-storage={tmp_path / 'b'}")
    warning = ("--adapter", f"{tmp_path / 'warns.py'}:Warns", "--workload", "gpt-mini")
    done = suites("-k", "throughput", *warning, *first_run, "--results", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "UserWarning: in a fixture" in done.stdout and "1 passed" in done.stdout
    assert list((tmp_path / "b").rglob("*.json"))


@pytest.mark.slow
def test_the_last_launch_is_the_last_that_was_counted(tmp_path: Path) -> None:
    """Also when some are refused, skipped by another plugin, or fail before what stands on them."""
    (tmp_path / "unsaved.py").write_text(
        "from meshmark.adapters.ddp import DDP\nclass Unsaved(DDP):\n"
        "    def build(self, case, context):\n        engine = super().build(case, context)\n"
        "        def save(folder):\n            raise OSError('disk full')\n"
        "        engine.save = save\n        return engine\n"
    )
    unsaved = ("--adapter", f"{tmp_path / 'unsaved.py'}:Unsaved", "--workload", "gpt-mini")
    failing = suites("--conformance", "-k", "loss or resume or reshard", *unsaved, "--results", tmp_path / "a")
    assert failing.returncode == 1
    assert counters(failing.stdout) == [(1, 4), (2, 2)]
    some = ("--adapters", "gpipe,single", "--precision", "fp16,fp32", "--workload", "gpt-mini", "--benchmark-only")
    refused = suites(*some, "--results", tmp_path / "b")
    assert refused.returncode == 0
    assert [done for done, _ in counters(refused.stdout)] == [1, 2, 3]
    assert counters(refused.stdout)[-1] == (3, 3)


def counters(output: str) -> list[tuple[int, int]]:
    """(n, N) of every line `[n/N] ...`."""
    return [(int(n), int(total)) for n, total in re.findall(r"^\[(\d+)/(\d+)\]", output, re.MULTILINE)]


@pytest.mark.slow
def test_a_broken_adapter_from_outside_fails_the_equivalence_suite_and_has_no_speed(tmp_path: Path) -> None:
    target = ROOT / "tests" / "broken" / "mutants.py"
    broken = ("--adapter", f"{target}:ddp_NoReduction", "--workload", "gpt-mini")
    kept = tmp_path / "bench.json"
    done = suites(*broken, "--results", tmp_path, "-k", "equivalence or throughput", f"--benchmark-json={kept}")
    assert done.returncode == 1
    assert "FAILED suites/test_equivalence.py::test_equivalence[ddp_noreduction-dp2.mb4-gpt-mini-fp32]" in done.stdout
    assert "x its noise" in done.stdout
    assert "FAILED suites/test_throughput.py::test_throughput[ddp_noreduction-dp2.mb4-gpt-mini-fp32]" in done.stdout
    assert "trains wrongly, so its speed counts for nothing" in done.stdout
    assert not kept.exists() or not kept.read_text() or not json.loads(kept.read_text())["benchmarks"]


def test_ctrl_c_leaves_readable_records_and_no_process(tmp_path: Path) -> None:
    target = ROOT / "tests" / "broken" / "outcomes.py"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "suites/test_throughput.py",
        "--adapters",
        "ddp",
        "--adapter",
        f"{target}:Hangs",
        "--workload",
        "gpt-mini",
        "--timing-budget=0",
        "--results",
        str(tmp_path),
        "-p",
        "no:cacheprovider",
    ]
    running = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "MESHMARK_TEST": str(tmp_path), "MESHMARK_TEST_HANGS": str(tmp_path / "hangs")},
        # What a shell starts in the background ignores Ctrl-C, and so would all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_until((tmp_path / "hangs").exists, seconds=120)
        os.killpg(running.pid, signal.SIGINT)
        out, _ = running.communicate(timeout=30)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.communicate()
    assert running.returncode == 2, out.decode()
    left = read_records(tmp_path)
    assert [r.case.adapter for r in left.records] == ["ddp"]
    assert left.sessions[-1].exit_code == 2
    assert [a.ending for a in left.sessions[-1].attempts] == ["passed", "unfinished"]
    wait_until(lambda: not processes_that_mention(str(tmp_path)), seconds=10)


def wait_until(true: Callable[[], bool], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not true after {seconds} s"
        time.sleep(0.1)


def processes_that_mention(text: str) -> list[int]:
    """Every process inherits its command line or its environment from the run that started it."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if text in " ".join(process.cmdline()) or text in process.environ().get("MESHMARK_TEST", ""):
                found.append(process.pid)
    return found


@pytest.mark.slow
def test_a_framework_that_is_not_installed_is_a_skip_with_the_command(tmp_path: Path) -> None:
    (tmp_path / "absent.py").write_text(
        "from meshmark.adapters.ddp import DDP\nfrom meshmark.adapter.contract import Requirement\n"
        "class Absent(DDP):\n    requires = (Requirement(module='no_such_framework', distribution='no-such'),)\n"
    )
    done = suites("--adapter", f"{tmp_path / 'absent.py'}:Absent", "--results", tmp_path, "-k", "equivalence", "-rs")
    assert done.returncode == 1, "nothing else was run"
    assert "absent" in done.stdout and "pip install no-such" in done.stdout
    assert read_records(tmp_path).records[0].outcome.status == "skipped"


def test_a_second_run_in_one_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    holder = RecordFile(tmp_path)
    done = suites("--adapters", "ddp", "--results", tmp_path)
    holder.close()
    assert done.returncode == 4
    assert done.stdout.count("is in use by another run") == 1
