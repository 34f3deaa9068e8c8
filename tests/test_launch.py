"""Whatever happens to a rank is an outcome with its evidence, and nothing is left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import meshmark
from meshmark.launch.folders import private_base
from meshmark.launch.launch import ForkserverLauncher
from meshmark.launch.watchdog import stack_state
from meshmark.records.rank_report import StackState
from meshmark.records.record import Record, Status
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.workload import workload

ACCIDENTS = {
    name.lower(): f"tests.broken.outcomes:{name}"
    for name in (
        "Raises",
        "Killed",
        "ExitsEarly",
        "HangsAlone",
        "HangsInMeshmark",
        "Slow",
        "Stopped",
        "OutOfMemory",
        "NotANumber",
        "LeavesChild",
        "LeavesDaemon",
        "LeavesSharedMemory",
    )
}


LIMIT = 16
"""Seconds that a case may take. A busy machine needs several of them to start it, and a hang is silent for half."""


@pytest.fixture(scope="module")
def runner(launcher: ForkserverLauncher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    options = RunOptions(time_limit_seconds=LIMIT, observed_steps=4, timed_steps=4)
    running = Runner(
        launcher,
        ACCIDENTS | {"ddp": "meshmark.adapters.ddp:DDP"},
        dataclasses.replace(options, time_limit_seconds=120),
        tmp_path_factory.mktemp("results"),
    )
    run(running, "ddp")  # the forkserver is up before we count what is left, and a busy machine takes its time
    running.options = options
    yield running
    running.close()


def run(runner: Runner, adapter: str) -> Record:
    layout = Layout(dp=2, num_micro_batches=2)
    return runner.time(Case(adapter=adapter, workload=workload("gpt-tiny"), layout=layout))


def descendants() -> set[int]:
    """Also those that have another parent by now: they inherit the environment of the server."""
    found = {p.pid for p in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("MESHMARK_LAUNCHER") == str(os.getpid()) != str(process.pid):
                found.add(process.pid)
    return found


@pytest.fixture(autouse=True)
def nothing_left(runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process of a rank, and no temporary file, outlives its launch."""
    import torch._dynamo  # noqa: F401  # at its first import in this process it makes a folder for itself

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = descendants()
    yield
    time.sleep(0.1)
    assert descendants() <= before
    assert [path for path in tmp_path.iterdir() if path != private_base(tmp_path)] == []


def test_a_correct_case_ends_well(runner: Runner) -> None:
    record = run(runner, "ddp")
    assert record.outcome.status is Status.OK
    assert len(record.timing.step_seconds) == 4 and all(seconds > 0 for seconds in record.timing.step_seconds)


def test_an_exception_is_told_with_rank_traceback_and_log(runner: Runner) -> None:
    outcome = run(runner, "raises").outcome
    assert (outcome.status, outcome.rank) == (Status.RAISED, 1)
    assert outcome.message == "ArithmeticError: planted in step 3"
    assert "in happen" in outcome.traceback
    assert "about to raise" in outcome.log_tail


def test_a_killed_rank_is_blamed_rather_than_the_peer_that_lost_it(runner: Runner) -> None:
    outcome = run(runner, "killed").outcome
    assert (outcome.status, outcome.rank) == (Status.KILLED, 1)
    assert "SIGKILL" in outcome.message


def test_a_rank_that_leaves_without_a_word_is_blamed_rather_than_the_peer_that_lost_it(runner: Runner) -> None:
    outcome = run(runner, "exitsearly").outcome
    assert (outcome.status, outcome.rank) == (Status.EXITED, 1), outcome.message
    assert outcome.message == "ended with exit code 0 before it could report"


def test_a_rank_s_shared_memory_is_removed(runner: Runner) -> None:
    """By Python, as when the rank was a program of its own."""
    before = set(os.listdir("/dev/shm"))
    assert run(runner, "leavessharedmemory").outcome.status is Status.OK
    assert set(os.listdir("/dev/shm")) <= before


def test_a_hang_ends_at_the_limit_with_every_ranks_stack(runner: Runner) -> None:
    """And with what the rank has put into a session of its own."""
    record = run(runner, "leavesdaemon")
    assert (record.outcome.status, record.outcome.rank) == (Status.HUNG, 1), "its peer waits for it in a collective"
    assert record.launch.seconds < LIMIT + 4
    assert set(record.outcome.stacks) == {0, 1}
    assert "wait_for_ever" in record.outcome.stacks[1]
    assert "backward" in record.outcome.stacks[0]


def test_a_hang_in_our_own_code_is_no_fault_of_the_framework(runner: Runner) -> None:
    outcome = run(runner, "hangsinmeshmark").outcome
    assert (outcome.status, outcome.rank) == (Status.UNFINISHED, 1) and outcome.status.outside, outcome.message
    assert re.search(r"Meshmark's own code, meshmark/rank_progress.py:\d+ in advance", outcome.message)


HERE = Path(meshmark.__file__).parent
JUDGE, OBSERVER = HERE / "judge" / "truth.py", HERE / "run" / "passes" / "observer.py"
MODEL, ENGINE = HERE / "reference" / "transformer.py", HERE / "adapters" / "ddp.py"
TORCH, LIBRARY = torch.nn.functional.__file__, json.__file__


@pytest.mark.parametrize(
    "frames, stands",
    [
        ([HERE / "measure" / "allocations.py", OBSERVER], StackState.OWN),
        ([HERE / "measure" / "watch.py", TORCH, ENGINE, OBSERVER], StackState.OWN),
        ([LIBRARY, HERE / "serial.py", OBSERVER], StackState.OWN),
        ([TORCH, MODEL, TORCH, JUDGE], StackState.OWN),
        ([TORCH, MODEL, TORCH, ENGINE, OBSERVER], StackState.OUTSIDE),
        ([MODEL, TORCH, HERE / "adapter" / "data_parallel.py", OBSERVER], StackState.OUTSIDE),
        (["/somewhere/engine.py", OBSERVER], StackState.OUTSIDE),
        (["/venv/lib/python3.11/site-packages/deepspeed/engine.py", OBSERVER], StackState.OUTSIDE),
        ([torch.distributed.distributed_c10d.__file__, JUDGE], StackState.INSIDE),
    ],
)
def test_whose_code_a_rank_stands_in_is_told_by_its_stack(frames: list[Path | str], stands: StackState) -> None:
    lines = [f'  File "{file}", line 1 in some_function' for file in frames]
    stack = "\n".join(["Thread 0x1 (most recent call first):", '  File "/other.py", line 2 in run', ""])
    assert stack_state("\n".join([stack, "Current thread 0x2 (most recent call first):", *lines])) is stands


def test_what_comes_on_until_the_limit_is_slow_and_not_hung(runner: Runner) -> None:
    outcome = run(runner, "slow").outcome
    assert outcome.status is Status.SLOW, outcome.message
    assert re.search(
        rf"no end within {LIMIT} s, but still coming on: [0-9] of [34] steps, .*--time-limit", outcome.message
    )
    assert "sleep" in outcome.stacks[1] or "backward" in outcome.stacks[1], "where its time goes"


def test_a_rank_that_stands_still_is_hung_though_a_peer_comes_on_without_it(
    runner: Runner, tmp_path_factory: pytest.TempPathFactory
) -> None:
    options = dataclasses.replace(runner.options, timed_steps=1000)
    enduring = Runner(runner.launcher, runner.adapters, options, tmp_path_factory.mktemp("results"))
    outcome = run(enduring, "hangsalone").outcome
    enduring.close()
    assert (outcome.status, outcome.rank) == (Status.HUNG, 1), outcome.message
    assert "no progress: 0 of 1000 steps" in outcome.message


def test_a_stopped_process_is_no_fault_of_the_adapter(runner: Runner) -> None:
    """Whoever has stopped it: its peers wait for it, and nothing says that the framework would have hung."""
    outcome = run(runner, "stopped").outcome
    assert (outcome.status, outcome.rank) == (Status.UNFINISHED, 1)
    assert "a signal (SIGSTOP, SIGTSTP) or a debugger had stopped it" in outcome.message
    assert "backward" in outcome.stacks[0]
    assert outcome.stacks[1] == "none: the process answered no signal (stopped)"


def test_running_out_of_memory_has_its_own_outcome(runner: Runner) -> None:
    outcome = run(runner, "outofmemory").outcome
    assert (outcome.status, outcome.rank) == (Status.OOM, 1)
    assert "allocate" in outcome.message


@pytest.mark.slow
def test_a_loss_that_is_not_a_number_is_an_outcome(runner: Runner) -> None:
    record = runner.observe(
        Case(adapter="notanumber", workload=workload("gpt-mini"), layout=Layout(dp=2, num_micro_batches=2))
    )
    assert record.outcome.status is Status.NAN
    assert "step 2" in record.outcome.message


def test_what_a_rank_started_ends_with_it(runner: Runner) -> None:
    assert run(runner, "leaveschild").outcome.status is Status.RAISED


def test_the_run_goes_on_after_a_failure(runner: Runner) -> None:
    run(runner, "killed")
    fresh = Case(adapter="ddp", workload=workload("gpt-tiny"), layout=Layout(dp=2))
    assert runner.time(fresh).outcome.status is Status.OK
