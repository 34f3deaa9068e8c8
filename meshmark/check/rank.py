"""Run the script under the recorder on one rank; rank 0 then judges the recordings of all ranks."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from meshmark.check.options import add_options, make_private, mistake_in
from meshmark.check.verdict import Finding, Level, Outcome, Verdict

if TYPE_CHECKING:
    from meshmark.check.recorder import Recorder
    from meshmark.check.recording import Folder

VERDICT = "verdict.txt"
"""File in the folder that `meshmark check` reads. Its first line is the outcome, and the text follows."""
WAIT_SECONDS = 60.0
"""Seconds to wait for the recordings of other ranks once the first rank has all its steps."""


def main(arguments: list[str]) -> NoReturn:
    """Run the script in this process and end with the verdict's exit code."""
    parser = argparse.ArgumentParser(prog="python -m meshmark.check", description=__doc__)
    add_options(parser)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    script = Path(parsed.script)
    if mistake := mistake_in(parsed):
        parser.error(mistake)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    place = Path(parsed.folder) if parsed.folder else _meeting_folder(parsed, rank)
    outcome = Outcome.COULD_NOT_RUN
    try:
        outcome = run(parsed, script, place, rank, world)
    except BaseException:
        traceback.print_exc()  # a defect of Meshmark's own
    if rank == 0 and not parsed.folder and not parsed.keep:
        shutil.rmtree(place, ignore_errors=True)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    started_by_check = parsed.folder and outcome is not Outcome.COULD_NOT_RUN
    # Threads and process groups of a script that was stopped may never end. torchrun reports a rank that ends with
    # another code than 0 in thirty lines, which would bury the verdict.
    os._exit(0 if started_by_check else outcome.code)


def _meeting_folder(parsed: argparse.Namespace, rank: int) -> Path:
    """Return the folder that all ranks of one torchrun write to. Rank 0 makes it."""
    path = (
        Path(parsed.keep)
        if parsed.keep
        else Path(tempfile.gettempdir())
        / "-".join(["meshmark-check", str(os.getuid()), os.environ.get("MASTER_PORT", "0"), str(os.getppid())])
    )
    if rank == 0:
        make_private(path)
    elif not _wait(path.is_dir, WAIT_SECONDS) or path.stat().st_uid != os.getuid():
        raise SystemExit(f"meshmark: rank 0 has made no folder {path} of this user's: ranks must share a file system")
    return path


def run(parsed: argparse.Namespace, script: Path, place: Path, rank: int, world: int) -> Outcome:
    """Observe the script, and judge it on rank 0."""
    from meshmark.check.recorder import EnoughError, Recorder, SpawnsError, install
    from meshmark.check.recording import Folder

    folder = Folder(place)
    recorder = Recorder(folder, rank=rank, world=world, steps=parsed.steps, limit=int(parsed.max_disk * 1e9 / world))
    install(recorder)
    end, detail = "script ended", ""
    try:
        execute(script, parsed.arguments)
    except EnoughError:
        end = "enough"
    except SpawnsError as reason:
        recorder.refuse(str(reason))
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            pass
        elif recorder.reason or not recorder.active:
            end = "enough"  # it was stopped, and raised something of its own on the way out
        else:
            end, detail = "raised", f"{type(error).__name__}: {error}".strip().splitlines()[0]
            traceback.print_exc()
    recorder.finish(end, detail)
    if end == "raised":
        verdict = Verdict(script=script.name)
        verdict.findings.append(
            Finding(level=Level.FAILED, fault="the script raised", text=f"on rank {rank}: {detail}")
        )
        return _deliver(parsed, place, verdict)
    if rank:
        _wait(lambda: all(folder.has_facts(r) for r in range(world)), WAIT_SECONDS)
        return Outcome.RIGHT  # rank 0 has the verdict
    _wait(lambda: all(folder.has_facts(r) for r in range(world)), WAIT_SECONDS)
    verdict = _verdict(parsed, script, folder, recorder, world)
    return _deliver(parsed, place, verdict)


def _deliver(parsed: argparse.Namespace, place: Path, verdict: Verdict) -> Outcome:
    """Print the verdict, or leave it to `meshmark check` if that started the ranks."""
    if parsed.output:
        Path(parsed.output).write_text(verdict.page)
    if parsed.folder:
        part = place / f".verdict-{os.getpid()}"
        part.write_text(f"{verdict.outcome}\n{verdict.text}")
        if not (place / VERDICT).exists():  # the first of several ranks that fail has the cause
            part.rename(place / VERDICT)
    else:
        print(verdict.text, flush=True)
    return verdict.outcome


def _verdict(parsed: argparse.Namespace, script: Path, folder: Folder, recorder: Recorder, world: int) -> Verdict:
    """Return the verdict on the recordings."""
    from meshmark.check.judge import Judge
    from meshmark.check.run import Run

    verdict = Verdict(script=script.name)
    silent = [r for r in range(world) if not folder.has_facts(r)]
    if silent:
        told = f"rank {silent[0]} has not ended {WAIT_SECONDS:.0f} seconds after rank 0"
        verdict.findings.append(Finding(level=Level.UNKNOWN, fault="not judged", text=told))
        return verdict
    judge = Judge(
        run=Run(folder=folder, facts=[folder.facts(r) for r in range(world)]),
        copies=recorder.copies,
        objective=parsed.objective,
        asked=parsed.steps,
        verdict=verdict,
    )
    try:
        judge.judge()
    except Exception as error:
        traceback.print_exc()
        told = f"Meshmark failed while it judged the script ({type(error).__name__}: {error}); please report this"
        verdict.findings.append(Finding(level=Level.UNKNOWN, fault="not judged", text=told))
    return verdict


def execute(script: Path, arguments: list[str]) -> None:
    """Run `script` as `python script.py` does.

    The script stays `__main__` afterwards, because recordings may contain objects of its classes.
    """
    module = types.ModuleType("__main__")
    module.__dict__["__file__"] = str(script)
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.parent.resolve())
    code = compile(script.read_bytes(), str(script), "exec")
    exec(code, module.__dict__)


def _wait(until: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not until():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
