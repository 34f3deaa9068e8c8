"""Run the script under the recorder on one rank; rank 0 then judges the recordings of all ranks."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from meshmark.check.options import add_options, make_private, mistake_in, no_space, write_page
from meshmark.check.verdict import Finding, Level, Outcome, Verdict
from meshmark.errors import InputError
from meshmark.launch.folders import means_no_space
from meshmark.launch.processes import leave
from meshmark.text import some_of

if TYPE_CHECKING:
    from meshmark.check.recorder import Recorder
    from meshmark.check.recording import Folder

VERDICT = "verdict.txt"
"""File in the folder that `meshmark check` reads. Its first line is the outcome, and the text follows."""
PAGE = "page.md"
"""File in the folder with the page that `-o` asks for."""
STARTED_BY = "MESHMARK_CHECK_FOLDER"
"""Variable in the environment of all that `meshmark check` starts. Its value is the folder of recordings."""
LATE_SECONDS = 5.0
"""Seconds to wait for the recordings of other ranks if the first rank has waited for them in vain before."""
WAIT_SECONDS = 60.0
"""Seconds to wait for the recordings of other ranks once the first rank has all its steps."""


def main(arguments: list[str]) -> NoReturn:
    """Run the script in this process and end with the verdict's exit code."""
    parser = argparse.ArgumentParser(prog="python -m meshmark.check", description=__doc__)
    add_options(parser)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--starter", type=int, help=argparse.SUPPRESS)
    parser.set_defaults(owns_process=True)
    parser.add_argument("--temporary", action="store_true", help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    script = Path(parsed.script)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if mistake := mistake_in(parsed, makes_folder=rank == 0):
        parser.error(mistake)
    try:
        place = Path(parsed.folder) if parsed.folder else meeting_folder(parsed, rank)
    except InputError as error:
        parser.error(str(error))  # a code of its own: the script has not been run
    if parsed.starter:
        threading.Thread(target=_end_with, args=(parsed.starter, place, parsed.temporary), daemon=True).start()
    outcome = Outcome.COULD_NOT_RUN
    try:
        outcome = run(parsed, script, place, rank, world)
    except BaseException as error:
        if means_no_space(error, [place]):  # no recordings, and maybe no room for a verdict that says so
            print(f"meshmark check: {no_space(place)}", file=sys.stderr)
        else:
            traceback.print_exc()  # a defect of Meshmark's own
    _leave(parsed, place, rank, outcome)


def _leave(parsed: argparse.Namespace, place: Path, rank: int, outcome: Outcome) -> NoReturn:
    """End this process."""
    if rank == 0 and not parsed.folder and not parsed.keep:
        shutil.rmtree(place, ignore_errors=True)
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None where whoever started this has closed it
        with contextlib.suppress(OSError):
            stream.flush()
    # torchrun reports a rank that ends with another code than 0 in thirty lines, which would bury the verdict.
    code = 0 if parsed.folder and outcome is not Outcome.COULD_NOT_RUN else outcome.code
    leave(code)


def _end_with(starter: int, place: Path, temporary: bool) -> None:
    """End this process as soon as `starter`, the process of `meshmark check`, has ended, as by SIGKILL.

    It ends its ranks and removes a `temporary` folder itself where it can.
    """
    if not hasattr(os, "pidfd_open"):
        return
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(starter)], [], [])
    while temporary and place.exists():  # other ranks may still write to it
        shutil.rmtree(place, ignore_errors=True)
    with contextlib.suppress(OSError):  # torchrun's agent has ended
        if b"torch.distributed.run" in Path(f"/proc/{os.getppid()}/cmdline").read_bytes():
            os.kill(os.getppid(), signal.SIGKILL)  # without its folder it would wait for minutes
    os.kill(os.getpid(), signal.SIGKILL)


def meeting_folder(parsed: argparse.Namespace, rank: int) -> Path:
    """Return the folder that all ranks of one torchrun write to. Rank 0 makes it. Raises `InputError` if it cannot."""
    places = [Path(parsed.keep)] if parsed.keep else _meeting_places()
    if rank == 0:
        path = _make_first(places)
        if not parsed.keep:
            _remove_at_end(path)
        return path
    if not _wait(lambda: any(map(_is_own_folder, places)), WAIT_SECONDS):
        raise InputError(f"rank 0 has made no folder {places[0]} of this user's: ranks must share a file system")
    return next(filter(_is_own_folder, places))


def _meeting_places() -> list[Path]:
    """Return the folders that all ranks of one torchrun can name: among temporary files and, because anybody can take
    that name before them, among the user's own caches."""
    run = str(os.getppid())
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":  # ranks of several agents, which have a run's id in common
        run = re.sub(r"[^A-Za-z0-9]", "_", os.environ.get("TORCHELASTIC_RUN_ID", "none"))[:40]
    name = "-".join(["meshmark-check", str(os.getuid()), os.environ.get("MASTER_PORT", "0"), run])
    places = [Path(tempfile.gettempdir()) / name]
    with contextlib.suppress(RuntimeError):  # the user has no home
        places.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshmark" / name)
    return places


def _make_first(places: Sequence[Path]) -> Path:
    """Make the first of `places` that nobody has taken. Raises `InputError` if there is none."""
    for place in places[:-1]:
        with contextlib.suppress(InputError):
            make_private(place)
            return place
    if len(places) > 1:
        with contextlib.suppress(OSError):  # making the folder itself then says why
            places[-1].parent.mkdir(parents=True, exist_ok=True)
    make_private(places[-1])
    return places[-1]


def _is_own_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid()


_JANITOR = """
import os, shutil, sys, time
sys.stdin.buffer.read()  # until the rank has ended
end = time.monotonic() + 60  # other ranks may still write
while os.path.exists(sys.argv[1]) and time.monotonic() < end:
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    time.sleep(0.05)
"""
_janitors: list[subprocess.Popen[bytes]] = []
"""Held until this process ends, and with them their standard input."""


def _remove_at_end(folder: Path) -> None:
    """Have another process remove `folder` when this one ends, which torchrun kills if another rank fails."""
    command = [sys.executable, "-I", "-S", "-c", _JANITOR, str(folder)]
    quiet, around = subprocess.DEVNULL, {name: value for name, value in os.environ.items() if name != STARTED_BY}
    _janitors.append(
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, env=around, start_new_session=True)
    )


def run(parsed: argparse.Namespace, script: Path, place: Path, rank: int, world: int) -> Outcome:
    """Observe the script, and judge it on rank 0."""
    return observe(parsed, script.name, lambda: execute(script, parsed.arguments), place, rank, world)


def observe(
    parsed: argparse.Namespace, name: str, train: Callable[[], object], place: Path, rank: int, world: int
) -> Outcome:
    """Observe what `train` does, which the verdict calls `name`, and judge it on rank 0.

    With `parsed.owns_process`, a `train` that catches everything and goes on is ended with the process.
    """
    from meshmark.check.recorder import EnoughError, Recorder, SpawnsError, install
    from meshmark.check.recording import Folder

    folder = Folder(place)
    recorder = Recorder(folder, rank=rank, world=world, steps=parsed.steps, limit=int(parsed.max_disk * 1e9 / world))
    install(recorder)
    import meshmark.judge.pristine  # noqa: F401  # remembers PyTorch's functions before the script replaces any

    def conclude() -> NoReturn:
        outcome = Outcome.COULD_NOT_RUN
        try:
            outcome = _conclude(parsed, name, recorder, "enough")
        except BaseException:
            traceback.print_exc()
        _leave(parsed, place, rank, outcome)

    recorder.conclude = conclude if parsed.owns_process else None
    end, detail = "script ended", ""
    try:
        train()
    except EnoughError:
        end = "enough"
    except SpawnsError as reason:
        recorder.refuse(str(reason))
    except BaseException as error:
        ended = [folder.facts(other) for other in range(world) if other != rank and folder.has_facts(other)]
        if isinstance(error, SystemExit) and error.code in (None, 0):
            pass
        elif any(facts is not None and facts.end == "enough" for facts in ended):
            end = "left behind"  # another rank has all its steps, and takes no part in collectives any more
        elif recorder.reason or not recorder.active:
            end = "enough"  # it was stopped, and raised something of its own on the way out
        else:
            end, detail = "raised", f"{type(error).__name__}: {error}".strip().splitlines()[0]
            traceback.print_exc()
    return _conclude(parsed, name, recorder, end, detail)


def _conclude(parsed: argparse.Namespace, name: str, recorder: Recorder, end: str, detail: str = "") -> Outcome:
    """Finish this rank's recordings, and judge those of all ranks on rank 0."""
    folder, rank, world, place = recorder.folder, recorder.rank, recorder.world, recorder.folder.path
    recorder.finish(end, detail)
    if end == "raised":
        verdict = Verdict(script=name)
        verdict.findings.append(
            Finding(level=Level.FAILED, fault="the script raised", text=f"on rank {rank}: {detail}")
        )
        return _deliver(parsed, place, verdict)
    if rank:
        _wait(lambda: all(folder.has_facts(r) for r in range(world)), WAIT_SECONDS)
        return Outcome.RIGHT  # rank 0 has the verdict
    _wait(lambda: all(folder.has_facts(r) for r in range(world)), WAIT_SECONDS if recorder.met else LATE_SECONDS)
    verdict = _verdict(parsed, name, folder, recorder, world)
    return _deliver(parsed, place, verdict)


def _deliver(parsed: argparse.Namespace, place: Path, verdict: Verdict) -> Outcome:
    """Print the verdict, or leave it to `meshmark check` if that started the ranks."""
    if parsed.folder:
        if parsed.output:
            (place / PAGE).write_text(verdict.page)
        part = place / f".verdict-{os.getpid()}"
        part.write_text(f"{verdict.outcome}\n{verdict.text}")
        if not (place / VERDICT).exists():  # the first of several ranks that fail has the cause
            part.rename(place / VERDICT)
        return verdict.outcome
    print(verdict.text, flush=True)
    if parsed.output:
        write_page(Path(parsed.output), verdict.page)
    return verdict.outcome


def _verdict(parsed: argparse.Namespace, name: str, folder: Folder, recorder: Recorder, world: int) -> Verdict:
    """Return the verdict on the recordings."""
    from meshmark.check.judge.judge import Judge
    from meshmark.check.run import Run

    verdict = Verdict(script=name)
    facts = [folder.facts(r) for r in range(world)]
    silent = [r for r in range(world) if not folder.has_facts(r)]
    if silent:
        told = f"rank {silent[0]} does not end: rank 0 has waited {WAIT_SECONDS:.0f} seconds for it"
        if None in facts:
            told = f"rank {facts.index(None)} has taken no step of an optimizer, and does not end: rank 0 has waited "
            told += f"{WAIT_SECONDS:.0f} seconds for it"
            verdict.findings.append(Finding(level=Level.UNKNOWN, fault="not judged", text=told))
            return verdict
        told += "; steps that all ranks have ended are judged"
        verdict.findings.append(Finding(level=Level.NOTE, fault="not the same number of steps", text=told))
    judge = Judge(
        run=Run(folder=folder, facts=[f for f in facts if f is not None]),
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
    verdict.findings += _replaced()
    return verdict


def _replaced() -> list[Finding]:
    """Return findings on what of PyTorch is replaced in this process."""
    from meshmark.judge.pristine import HOOKS, other_kernels, pristine

    with pristine() as replaced:
        kernels = other_kernels()
    names = [name for name in replaced if name != HOOKS]  # the recorder has some
    found = []
    if names:
        text = (
            f"the script or its libraries replaced {some_of(names)}; losses and gradients are judged by what is there "
            "now, updates by PyTorch's own optimizers"
        )
        found.append(Finding(level=Level.NOTE, fault="functions of PyTorch were replaced", text=text))
    if kernels:
        text = f"{kernels.replace(' there', '')}; float64 would use them too"
        found.append(Finding(level=Level.UNKNOWN, fault="PyTorch computes otherwise", text=text))
    return found


def execute(script: Path, arguments: list[str]) -> None:
    """Run `script` as `python script.py` does.

    The script stays `__main__` afterwards, because recordings may contain objects of its classes.
    """
    module = types.ModuleType("__main__")
    module.__dict__["__file__"] = str(script)
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.argv = [str(script), *arguments]
    sys.path[: not sys.flags.safe_path] = [str(script.parent.resolve())]  # in the place of the working directory
    code = compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _wait(until: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not until():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
