"""`meshmark submit`: run the matrix as a SLURM job array, with a part per task, and gather the records in one
folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshmark.errors import InputError, MeshmarkError, ResultsError
from meshmark.records.record import Record, Status
from meshmark.records.record_file import Ending, Reading, Session, latest_attempts, merge, read_records
from meshmark.text import pluralize

_POLL_SECONDS = 2.0
_SILENT_SECONDS = 1800.0
"""How long squeue may fail before the job is not followed any longer."""
_UNKNOWN_JOB = "Invalid job id"
"""Words of squeue about a job that left the queue long ago. All its other errors say nothing about the job."""
_ENDED_WELL = (0, 1, 5)
"""pytest's exit codes for a run that ended regularly: all passed, some failed, no test was in this part."""
_MOST_TASKS = 100_000
"""Largest number of tasks. Slurm's own limit on the indices of an array is often 1,000."""
_OWN = ("--results", "--resume", "--shard", "--nnodes", "--node-rank", "--rdzv")
_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={tasks_per_node}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={folder}/task-%a/output
export MESHMARK_NOISE={folder}/noise
exec srun {python} -P -m pytest --pyargs meshmark.suites {pytest} \\
    --shard $SLURM_ARRAY_TASK_ID/{tasks} --resume --results {folder}/task-$SLURM_ARRAY_TASK_ID
"""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A job array, and where it leaves its records."""

    folder: Path
    """Absolute path, visible to every node."""
    tasks: int
    nodes: int
    """Nodes per task."""
    tasks_per_node: int
    options: tuple[str, ...]
    """Options for sbatch."""
    pytest: tuple[str, ...]
    earlier: frozenset[str] = frozenset()
    """Sessions that were in the folder before. They say nothing about this job."""
    earlier_records: tuple[int, ...] = ()
    """How many records each task's folder held before."""

    @property
    def script(self) -> str:
        return _SCRIPT.format(
            name=re.sub(r"\W", "-", f"meshmark-{self.folder.name}"),
            nodes=self.nodes,
            tasks_per_node=self.tasks_per_node,
            folder=shlex.quote(str(self.folder)),
            python=shlex.quote(sys.executable),
            pytest=shlex.join(self.pytest),
            tasks=self.tasks,
        )

    def command(self, tasks: Sequence[int]) -> list[str]:
        chosen = ",".join(map(str, tasks))
        return ["sbatch", "--parsable", f"--array={chosen}", *self.options, str(self.folder / "submit.sbatch")]

    def task_folder(self, task: int) -> Path:
        return self.folder / f"task-{task}"

    def reading(self, task: int) -> Reading:
        """Return the records and sessions of a task so far, if any."""
        try:
            return read_records(self.task_folder(task))
        except ResultsError:
            return Reading(records=[], complaints=[])

    def ended(self, task: int) -> int | None:
        """Return pytest's exit code, or None if the task was cut off or never began."""
        sessions = self.sessions(task)
        return sessions[-1].exit_code if sessions else None

    def sessions(self, task: int) -> list[Session]:
        """Return the sessions of a task in this job."""
        return [session for session in self.reading(task).sessions if session.session not in self.earlier]

    @property
    def has_run_nothing(self) -> bool:
        """True if every case of every part was skipped. One part alone may have nothing but skips."""
        for task in range(1, self.tasks + 1):
            sessions = self.sessions(task)
            attempts = [a for conforming in (False, True) for a, _ in latest_attempts(sessions, conforming=conforming)]
            if any(attempt.ending is not Ending.SKIPPED for attempt in attempts):
                return False
            cases, records = {attempt.case for attempt in attempts}, self.reading(task).records
            if not cases and self.earlier_records:
                records = records[self.earlier_records[task - 1] :]
            for record in records:  # a known gap, which has been run, counts as skipped for pytest
                about = {record.case.id, record.conformance.base.id if record.conformance.base else ""}
                if (about & cases or not cases) and record.outcome.status is not Status.SKIPPED:
                    return False
        return True

    def output_tail(self, task: int) -> str:
        """Return the end of the task's output."""
        output = self.task_folder(task) / "output"
        return output.read_text(errors="replace")[-800:] if output.is_file() else "it printed nothing"


def add_submit(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `submit`."""
    parser.add_argument(
        "--tasks", type=int, default=1, metavar="N", help="tasks of the array, each with a part of cases (default: 1)"
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes per task (default: 1)")
    parser.add_argument("--ntasks-per-node", type=int, default=1, metavar="N", help="1 (default), or one per GPU")
    parser.add_argument(
        "--results", type=Path, default=Path("results"), metavar="DIR", help="results folder that all nodes see"
    )
    parser.add_argument(
        "--sbatch", default="", metavar="OPTIONS", help="options of sbatch, such as --sbatch='--time=2:00:00 -p gpu'"
    )
    parser.add_argument(
        "--retries", type=int, default=2, metavar="N", help="retries of tasks that were cut off (default: 2)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the script and the command")
    parser.add_argument("pytest", nargs="*", metavar="-- OPTIONS", help="pytest options of every task")
    parser.set_defaults(run=submit)


def submit(arguments: argparse.Namespace) -> int:
    """Submit, follow the job to its end, and gather the records. Returns 0 when tests were run, and all passed."""
    asked = _submission(arguments)
    if arguments.dry_run:
        print(asked.script + "\n" + shlex.join(asked.command(range(1, asked.tasks + 1))))
        return 0
    tasks = range(1, asked.tasks + 1)
    for task in tasks:
        asked.task_folder(task).mkdir(parents=True, exist_ok=True)
    before = [asked.reading(task) for task in tasks]
    asked = dataclasses.replace(
        asked,
        earlier=frozenset(session.session for reading in before for session in reading.sessions),
        earlier_records=tuple(len(reading.records) for reading in before),
    )
    (asked.folder / "submit.sbatch").write_text(asked.script)
    left = list(tasks)
    for attempt in range(1 + arguments.retries):
        try:
            job = _sbatch(asked.command(left))
        except MeshmarkError:
            if attempt:  # what ended is kept
                _gather(asked, left)
            raise
        try:
            _follow(asked, left, job)
        except KeyboardInterrupt:
            where = f"its records are in {asked.folder}/task-*"
            print(f"job {job} goes on: `scancel {job}` ends it, {where}", file=sys.stderr)
            raise
        left = [task for task in left if asked.ended(task) not in _ENDED_WELL]
        if not left or attempt == arguments.retries:
            break
        print(f"submitted again, to go on: tasks {', '.join(map(str, left))}", flush=True)
    return _gather(asked, left)


def _submission(arguments: argparse.Namespace) -> Submission:
    words = arguments.pytest
    if words and not words[0].startswith("-"):
        raise InputError(
            f"{words[0]!r}: expected options of pytest behind --, such as -- --world 4; the suites are given by "
            "`meshmark submit` itself"
        )
    for word in words:
        if word.partition("=")[0] in _OWN:
            raise InputError(f"{word} is what `meshmark submit` itself gives each task; leave it out behind --")
    for name in ("tasks", "nodes", "ntasks_per_node"):
        if getattr(arguments, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: expected at least 1")
    if arguments.tasks > _MOST_TASKS:
        raise InputError(f"--tasks {arguments.tasks}: expected at most {_MOST_TASKS}")
    if arguments.retries < 0:
        raise InputError(f"--retries {arguments.retries}: expected at least 0")
    try:
        options = tuple(shlex.split(arguments.sbatch))
    except ValueError as error:
        raise InputError(f"--sbatch {arguments.sbatch!r} cannot be split into options: {error}") from error
    if words:
        _expect_tests(words)
    return Submission(
        folder=arguments.results.absolute(),
        tasks=arguments.tasks,
        nodes=arguments.nodes,
        tasks_per_node=arguments.ntasks_per_node,
        options=options,
        pytest=tuple(words),
    )


def _expect_tests(words: Sequence[str]) -> None:
    """Raise `InputError` where pytest refuses options, or finds no test by them: all tasks of the array would fail."""
    command = [sys.executable, "-P", "-m", "pytest", "--pyargs", "meshmark.suites", *words]
    found = subprocess.run([*command, "--collect-only", "-q"], capture_output=True, text=True, errors="replace")
    if found.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise InputError(f"-- {shlex.join(words)}: no test is selected by these options")
    if found.returncode:
        lines = [line for line in (found.stdout + found.stderr).splitlines() if line.strip()]
        told = [line for line in lines if line.upper().startswith("ERROR") or " error: " in line] or lines[-3:]
        raise InputError(f"-- {shlex.join(words)}: pytest refuses this: {' '.join(told)}")


def _sbatch(command: Sequence[str]) -> str:
    """Run sbatch and return the job's number."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().partition(";")[0]
    except FileNotFoundError as error:
        raise MeshmarkError("sbatch is not here: submit from a node of the cluster, or see --dry-run") from error
    except subprocess.CalledProcessError as error:
        raise MeshmarkError(f"{shlex.join(command)}: {error.stderr.strip()}") from error


def _follow(asked: Submission, tasks: Sequence[int], job: str) -> None:
    """Follow a job until it has left the queue, and print every record as it arrives.

    Raises `MeshmarkError` where squeue fails for long: the job may still run.
    """
    heard = time.monotonic()
    seen = {task: len(asked.reading(task).records) for task in tasks}
    print(f"job {job}: {pluralize(len(tasks), 'task')}", flush=True)
    queued = True
    while queued:
        time.sleep(_POLL_SECONDS)
        listed = _squeue(job)
        if listed.returncode == 0 or _UNKNOWN_JOB in listed.stderr:
            queued, heard = bool(listed.stdout.strip()), time.monotonic()
        elif time.monotonic() - heard > _SILENT_SECONDS:
            raise MeshmarkError(
                f"squeue has failed for {_SILENT_SECONDS / 60:.0f} minutes: {listed.stderr.strip()}; job {job} may "
                f"still run; its records are in {asked.folder}/task-*"
            )
        for task in tasks:
            for record in asked.reading(task).records[seen[task] :]:
                seen[task] += 1
                _print_outcome(task, record)


def _squeue(job: str) -> subprocess.CompletedProcess[str]:
    command = ["squeue", "--noheader", f"--jobs={job}"]
    try:
        return subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return subprocess.CompletedProcess(command, 1, "", f"squeue: {error.strerror}")


def _print_outcome(task: int, record: Record) -> None:
    if record.outcome.status is not Status.SKIPPED:
        what, seconds = record.conformance.scenario or record.task, record.launch.seconds
        print(f"[task {task}] {what} {record.case.id} {record.outcome.status} in {seconds:.1f} s", flush=True)


def _gather(asked: Submission, left: Sequence[int]) -> int:
    for task in left:
        print(f"task {task} did not come to its end:\n{asked.output_tail(task)}", file=sys.stderr)
    folders = [asked.task_folder(task) for task in range(1, asked.tasks + 1)]
    merged = merge([folder for folder in folders if (folder / "records.jsonl").is_file()], asked.folder)
    for complaint in merged.complaints:
        print(f"meshmark: {complaint}", file=sys.stderr)
    of = f"{pluralize(len(merged.records), 'record')} of {pluralize(asked.tasks, 'task')}"
    print(f"{asked.folder}: {of}; `meshmark report {asked.folder}`")
    failed = any(asked.ended(task) == 1 for task in range(1, asked.tasks + 1))
    if not left and asked.has_run_nothing and "--allow-skipped" not in asked.pytest:
        print(
            "every case of every part was skipped: nothing was judged, so it fails; the outputs in "
            f"{asked.folder}/task-* say why, and --allow-skipped behind -- lets it pass",
            file=sys.stderr,
        )
        failed = True
    return 2 if left or merged.num_lost else int(failed)
