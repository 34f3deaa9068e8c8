"""However pytest ends while a rank hangs, no process of its run is left, and its records are."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from meshmark.launch import processes
from meshmark.records.record_file import read_records

ROOT = Path(__file__).parent.parent
END_SECONDS = 15


def wait_until(true: Callable[[], object], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not true after {seconds} s"
        time.sleep(0.1)


def processes_of(mark: str) -> list[psutil.Process]:
    """Those that have inherited `mark` in their environment, and still run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("MESHMARK_TEST") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def heed_signals() -> None:
    """Restore the handling of Ctrl-C and SIGHUP, which processes started in the background or under nohup ignore."""
    for ending in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(ending, signal.SIG_DFL)


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run with one record made, now inside a case whose rank 1 hangs, and has put a process into a session of its
    own."""
    target = ROOT / "tests" / "broken" / "outcomes.py"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "suites/test_throughput.py",
        "--adapters",
        "ddp",
        "--workload",
        "gpt-mini",
        "--adapter",
        f"{target}:LeavesDaemon",
        "--timing-budget=0",
        "--results",
        str(tmp_path / "results"),
        "-p",
        "no:cacheprovider",
    ]
    (tmp_path / "temporary").mkdir()
    environment = {
        **os.environ,
        "TMPDIR": str(tmp_path / "temporary"),
        "MESHMARK_TEST": str(tmp_path),
        "MESHMARK_TEST_HANGS": str(tmp_path / "hangs"),
    }
    running = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
        preexec_fn=heed_signals,
    )
    try:
        wait_until((tmp_path / "hangs").exists, seconds=120)
        yield running
    finally:
        for process in processes_of(str(tmp_path)):
            with contextlib.suppress(psutil.Error):
                process.kill()
        running.wait()


@pytest.mark.parametrize(
    "ending",
    [
        signal.SIGKILL,
        signal.SIGINT,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGTERM, signal.SIGHUP)),
    ],
    ids=lambda s: s.name,
)
def test_no_process_is_left_and_records_are(
    hanging: subprocess.Popen[bytes], tmp_path: Path, ending: signal.Signals
) -> None:
    assert len(processes_of(str(tmp_path))) >= 5, "pytest, two servers, two ranks"
    others = tmp_path / "temporary" / f"meshmark-{hanging.pid}-another"
    others.mkdir()  # by a process of the same number, in a container that shares the folder
    hanging.send_signal(ending)
    wait_until(lambda: not processes_of(str(tmp_path)), seconds=END_SECONDS)
    assert hanging.wait() == (-signal.SIGKILL if ending is signal.SIGKILL else pytest.ExitCode.INTERRUPTED)
    assert [record.case.adapter for record in read_records(tmp_path / "results").records] == ["ddp"]
    assert [*(tmp_path / "temporary").glob("meshmark-*")] == [others], "a launch's folder is left"


def test_a_signal_that_nohup_ignores_stays_ignored(tmp_path: Path) -> None:
    """Otherwise the run would end with the terminal after all."""
    code = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "from meshmark.errors import signals_end_like_ctrl_c\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "with signals_end_like_ctrl_c():\n"
        "    signal.raise_signal(signal.SIGHUP)\n"
        "    try: signal.raise_signal(signal.SIGTERM)\n"
        "    except KeyboardInterrupt as ended: print(ended)\n"
        "    signal.raise_signal(signal.SIGTERM); print('torn down')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[:2] == ["SIGTERM", "torn down"], done.stderr


STARTS = """
import sys, time
from meshmark.launch.folders import private_folder
from meshmark.launch.fork_server import ForkServer
with private_folder() as folder:
    server = ForkServer.start({"PYTHONPATH": sys.argv[1], "MESHMARK_TEST": sys.argv[2]}, ["slow"])
    print(folder, flush=True)
    time.sleep(60)
"""


def test_a_launcher_that_is_killed_while_its_server_imports_leaves_no_folder(tmp_path: Path) -> None:
    """The kernel kills that server too, so another process has to clean up."""
    (tmp_path / "slow.py").write_text(f"open({str(tmp_path / 'importing')!r}, 'w')\nimport time\ntime.sleep(60)\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    with subprocess.Popen(
        [sys.executable, "-c", STARTS, path, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout
        folder = Path(launcher.stdout.readline().strip())
        wait_until((tmp_path / "importing").exists, seconds=60)
        assert folder.parent == tmp_path and folder.is_dir()
        launcher.kill()
    wait_until(lambda: not folder.exists(), seconds=END_SECONDS)
    wait_until(lambda: not processes_of(str(tmp_path)), seconds=END_SECONDS)


ADOPTS = """
import os, subprocess, sys, threading, time
from meshmark.launch.processes import adopt_orphans, end_own_children
adopt_orphans()
for _ in range(10):
    parent, read = os.getpid(), os.pipe()
    if (child := os.fork()) == 0:
        memory = b"x" * 200_000_000  # takes the kernel a while to free
        for _ in range(16):
            threading.Thread(target=time.sleep, args=(60,)).start()
        os.write(read[1], str(subprocess.Popen(["sleep", "60"]).pid).encode())
        time.sleep(60)
    grandchild = int(os.read(read[0], 20))
    os.kill(child, 9)
    end_own_children()
    if os.path.exists(f"/proc/{grandchild}"):
        sys.exit(f"{grandchild} is left")
"""


def test_children_of_a_process_whose_main_thread_ended_first_are_adopted_and_ended() -> None:
    """Such a process looks like a zombie while it still has children, which nobody has adopted yet."""
    done = subprocess.run([sys.executable, "-c", ADOPTS], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_children_are_killed_however_long_a_look_at_all_processes_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With thousands of processes a look takes longer than the time that all looks may take."""
    child = subprocess.Popen(["sleep", "600"])
    monkeypatch.setattr(processes, "_END_SECONDS", 0.1)

    def look() -> list[int]:
        time.sleep(0.2)
        return [child.pid] if child.poll() is None else []

    assert processes._end_all(look) == 1
    assert child.wait(10) == -signal.SIGKILL
