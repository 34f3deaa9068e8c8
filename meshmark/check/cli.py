"""Command `meshmark check`: start the script's ranks under the recorder, and exit with the verdict's code."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from meshmark.check.options import add_options, make_private, mistake_in, no_space, write_page
from meshmark.check.rank import PAGE, STARTED_BY, VERDICT
from meshmark.check.verdict import Finding, Level, Outcome, Verdict
from meshmark.environment import memory_bytes
from meshmark.errors import InputError, signals_end_like_ctrl_c
from meshmark.launch.folders import is_full, python_path
from meshmark.launch.processes import await_cleaners, end_started_with
from meshmark.text import pluralize

EPILOG = """exit codes: 0 right, 1 wrong, 2 a mistake in the command, 3 cannot tell, 4 could not run"""

_LEAST_BYTES = 100 * 2**20
"""Memory of a rank's own that PyTorch takes when it is imported, at the least."""


def add_check(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `meshmark check`."""
    parser.epilog = EPILOG
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks; several use torchrun (default: 1)")
    parser.add_argument(
        "--timeout", type=float, default=1800.0, metavar="SECONDS", help="time for script and verdict (default: 1800)"
    )
    add_options(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Start the ranks and wait for the verdict, which rank 0 prints. No rank and no recording is left of it."""
    if parsed.nproc < 1:
        raise InputError(f"--nproc must be 1 or more, got {parsed.nproc}")
    if not parsed.timeout > 0:
        raise InputError(f"--timeout must be a number of seconds above 0, got {parsed.timeout:g}")
    if (needed := parsed.nproc * _LEAST_BYTES) > (available := memory_bytes()):
        raise InputError(
            f"--nproc {parsed.nproc}: that many ranks need {needed / 2**30:.0f} GiB before they import a model; this "
            f"machine has {available / 2**30:.0f} GiB"
        )
    if mistake := mistake_in(parsed):
        raise InputError(mistake)
    with signals_end_like_ctrl_c():  # `place` is absolute, for the script may work in another folder
        place = Path(parsed.keep).absolute() if parsed.keep else Path(tempfile.mkdtemp(prefix="meshmark-check-"))
        if parsed.keep:
            make_private(place)
        try:
            return _judged(parsed, place)
        finally:
            if not parsed.keep:
                shutil.rmtree(place, ignore_errors=True)


def _judged(parsed: argparse.Namespace, place: Path) -> int:
    """Run all ranks, print the verdict, and return its exit code."""
    ended = _start(parsed, place)
    verdict = place / VERDICT
    if verdict.exists():
        outcome, _, text = verdict.read_text().partition("\n")
        print(text, flush=True)
        written = not parsed.output or write_page(Path(parsed.output), (place / PAGE).read_text())
        return Outcome(outcome).code or (0 if written else 2)
    failed = Verdict(script=Path(parsed.script).name)
    if is_full(place):
        fault, text = "no space", no_space(place)
    elif ended:
        fault, text = "no verdict", "its ranks ended without a word"
    else:
        fault, text = "time-out", f"no verdict within the {parsed.timeout:g} seconds of --timeout"
    failed.findings.append(Finding(level=Level.FAILED, fault=fault, text=text))
    print(failed.text)
    return failed.outcome.code


def _torchrun(place: Path, num_ranks: int) -> list[str]:
    """Return torchrun's part of the command, with a rendezvous in a file of `place` that nobody else can open.

    With `--standalone` its agent would listen on all addresses, and unpickle whatever is sent to it.
    """
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={place.absolute()}/rendezvous", "--rdzv-conf=store_type=file"]
    where = ["--nnodes=1", "--local-addr=localhost", f"--nproc-per-node={num_ranks}", f"--log-dir={place.absolute()}"]
    return ["-m", "torch.distributed.run", *meeting, *where, "--no-python"]


def _start(parsed: argparse.Namespace, place: Path) -> bool:
    """Run all ranks, and return whether they ended in time."""
    options = ["--folder", str(place), "--steps", str(parsed.steps), "--max-disk", str(parsed.max_disk)]
    options += ["--starter", str(os.getpid()), *([] if parsed.keep else ["--temporary"])]
    if parsed.objective:
        options += ["--objective", parsed.objective]
    if parsed.output:
        options += ["--output", str(Path(parsed.output).absolute())]
    python = [sys.executable, "-P"]  # without the working directory on the path, which may be a stranger's
    command = [*python, *_torchrun(place, parsed.nproc), *python] if parsed.nproc > 1 else python
    command = [*command, "-m", "meshmark.check", *options, parsed.script, *parsed.arguments]
    environment = {**os.environ, "PYTHONPATH": python_path(os.environ)}
    if parsed.nproc > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, with five lines of warning
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # the agent would listen, on all addresses
    environment[STARTED_BY] = str(place)
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        process.wait(parsed.timeout)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its ranks, which are in sessions of their own
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel may be busy with it, on a slow disk
                    process.wait(10)
        await_cleaners(STARTED_BY, str(place))
        # What the script started and did not end, such as a server. It would hold the terminal or a pipe open.
        if left := end_started_with(STARTED_BY, str(place)):
            print(f"meshmark check: ended {pluralize(left, 'process', 'processes')} of the script", file=sys.stderr)
