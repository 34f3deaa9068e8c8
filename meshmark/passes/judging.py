"""Judge what ranks computed, in a process where PyTorch is as it was before the framework came.

Rank 0 judges in its own process, with PyTorch's functions put back (`judge.pristine`). Not all can be put back: a
framework may register other kernels for PyTorch's operators, or replace methods of the library that the model comes
from. A fingerprint of the truth is therefore compared with that of the noise runs, whose processes imported no
framework. If they differ, or if kernels were registered, a fresh Python process judges instead. It takes seconds to
start, so it is not used otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import torch

from meshmark import rank_progress
from meshmark.adapter.engine import RankContext
from meshmark.errors import JudgingError, MeshmarkError
from meshmark.judge.deviation import TruthPrint
from meshmark.judge.layered import all_cores, pieces_print
from meshmark.judge.pristine import other_kernels, pristine
from meshmark.judge.truth import truth_print
from meshmark.passes.kernels import pinned
from meshmark.records.request import Request
from meshmark.serial import decode, encode
from meshmark.text import describe_error

_PLACES = list(sys.path)
"""Folders to import from, before an adapter could change them."""
_FOLDER: str | None = None
"""The working directory, before an adapter could change it. None if it was removed."""
with contextlib.suppress(FileNotFoundError):
    _FOLDER = os.getcwd()
Parameters = ParamSpec("Parameters")
Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class Judged(Generic[Found]):
    """The result of a judge, and what of PyTorch was replaced in the rank's process."""

    found: Found
    replaced: list[str]
    """Functions, methods and hooks that were put back."""
    misled: str = ""
    """How this process's truth differs from a clean one's. If it does, a clean process has judged."""


def judge(
    request: Request,
    judging: Callable[Concatenate[Request, Parameters], Found],
    context: RankContext,
    *args: Parameters.args,
    **kwargs: Parameters.kwargs,
) -> Judged[Found]:
    """Return what `judging` finds for `request` and the other arguments, where PyTorch is as it was.

    `judging` is a function of a module, so that another process can import it. The arguments are pickled for it into a
    file in the rank's scratch folder. Raises `JudgingError` if that process fails, or if `judging` has a mistake.
    """
    with pristine() as replaced:
        misled = other_kernels() or _difference(request, context.device)
        if not misled:
            try:
                return Judged(found=judging(request, *args, **kwargs), replaced=replaced)
            except (MeshmarkError, OSError):
                raise
            except Exception as error:  # otherwise it would stand as one of the adapter's
                raise JudgingError(
                    f"judging raised {describe_error(error)}; if the stack does not end in a file of yours, please "
                    "report it"
                ) from error
    return Judged(
        found=_judge_elsewhere(request, judging, context.scratch, args, kwargs), replaced=replaced, misled=misled
    )


def fingerprint(request: Request, device: torch.device) -> TruthPrint:
    """Return the fingerprint of the truth that judges `request`. A large model's is computed on `device`."""
    if not request.sample:
        return truth_print(request.case.workload)
    with all_cores():
        return pieces_print(request.case.workload, device)


def _difference(request: Request, device: torch.device) -> str:
    """Return how the truth of this process differs from that of the noise runs, in words."""
    clean = request.tolerance_model.truth_print if request.tolerance_model else None
    return fingerprint(request, device).difference(clean) if clean else ""


def _judge_elsewhere(
    request: Request, judging: Callable[..., Found], scratch: Path, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Found:
    """Return what `judging` finds in a fresh process, which imports from the same folders as this one."""
    asked, answered = scratch / "judge-asked", scratch / "judge-answered"
    asked.write_bytes(pickle.dumps((judging.__module__, judging.__name__, args, kwargs)))
    (scratch / "judge-request").write_text(json.dumps(encode(request)))
    progress = rank_progress.path()
    command = [sys.executable, "-P", "-m", __name__, str(scratch), *([str(progress)] if progress else [])]
    places = os.pathsep.join(dict.fromkeys(filter(None, [*sys.path, *_PLACES])))
    done = subprocess.run(
        command,
        cwd=_FOLDER,
        env={**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode or not answered.is_file():
        raise JudgingError(f"the process that judges ended with {done.returncode}: {done.stdout[-2000:].strip()}")
    found: Found = pickle.loads(answered.read_bytes())
    return found


def main(scratch: Path, progress: Path | None) -> None:
    """Answer `_judge_elsewhere`."""
    if progress:
        rank_progress.watch(progress)
    request = decode(Request, json.loads((scratch / "judge-request").read_text()))
    module, name, args, kwargs = pickle.loads((scratch / "judge-asked").read_bytes())
    __import__(module)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with pinned(request.case.tuning):
        found = getattr(sys.modules[module], name)(request, *args, **kwargs)
    partial = scratch / "judge-partial"
    partial.write_bytes(pickle.dumps(found))
    partial.replace(scratch / "judge-answered")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if sys.argv[2:] else None)
