"""Command `meshmark check`: start the script's ranks under the recorder, and exit with the verdict's code."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from meshmark.check.options import add_options, make_private, mistake_in
from meshmark.check.rank import VERDICT
from meshmark.check.verdict import Finding, Level, Outcome, Verdict
from meshmark.errors import InputError

EPILOG = """exit codes: 0 right, 1 wrong, 2 a mistake in the command, 3 cannot tell, 4 could not run"""


def add_check(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `meshmark check`."""
    parser.epilog = EPILOG
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks, under torchrun (default: 1, without)")
    parser.add_argument(
        "--timeout", type=float, default=1800.0, metavar="SECONDS", help="for script and verdict (default: 1800)"
    )
    add_options(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Start the ranks and wait for the verdict, which rank 0 prints."""
    if parsed.nproc < 1:
        raise InputError(f"--nproc must be 1 or more, got {parsed.nproc}")
    if mistake := mistake_in(parsed):
        raise InputError(mistake)
    place = Path(parsed.keep) if parsed.keep else Path(tempfile.mkdtemp(prefix="meshmark-check-"))
    if parsed.keep:
        make_private(place)
    try:
        ended = _start(parsed, place)
        verdict = place / VERDICT
        if verdict.exists():
            outcome, _, text = verdict.read_text().partition("\n")
            print(text)
            return Outcome(outcome).code
        failed = Verdict(script=Path(parsed.script).name)
        text = "its ranks ended without a word" if ended else f"no verdict within {parsed.timeout:g} seconds"
        failed.findings.append(Finding(level=Level.FAILED, fault="no verdict", text=text))
        print(failed.text)
        return failed.outcome.code
    finally:
        if not parsed.keep:
            shutil.rmtree(place, ignore_errors=True)


def _start(parsed: argparse.Namespace, place: Path) -> bool:
    """Run all ranks, and return whether they ended in time."""
    options = ["--folder", str(place), "--steps", str(parsed.steps), "--max-disk", str(parsed.max_disk)]
    if parsed.objective:
        options += ["--objective", parsed.objective]
    if parsed.output:
        options += ["--output", str(Path(parsed.output).absolute())]
    command = [sys.executable]
    if parsed.nproc > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(parsed.nproc)]
    command += ["-m", "meshmark.check", *options, parsed.script, *parsed.arguments]
    environment = dict(os.environ)
    if parsed.nproc > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, with five lines of warning
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
                process.wait()
