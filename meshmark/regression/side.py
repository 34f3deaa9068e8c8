"""A side of an A/B comparison or bisection: a git ref, virtual environment or pip requirement to run suites in."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from meshmark.environment import run_git, without_repository
from meshmark.errors import InputError, ResultsError
from meshmark.launch.processes import die_with_parent
from meshmark.records.record import Record, Status
from meshmark.records.record_file import Ending, read_records
from meshmark.text import clip, pluralize

_WHOLE = (0, 1)
"""pytest's exit codes for a session that came to its end: all tests passed, or some failed."""
_TIME_UP = 2
"""Exit code of a session that ended early, which is accepted if the user gave `--max-time`."""
_SUITES = ("suites", "meshmark.suites")
_BARE = re.compile(r"[A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class Side:
    """Where to run a session of the suites."""

    name: str
    python: str = sys.executable
    folder: Path
    """Working directory. For a ref, its checkout."""
    paths: tuple[Path, ...] = ()
    """Folders to put first on the module path."""
    variables: dict[str, str] = field(default_factory=dict)


def run_suites(side: Side, options: Sequence[str], results: Path) -> list[Record]:
    """Run one fresh session and return its records. Failed tests are not errors, because their records say so.

    Raises `ResultsError` when the session left no record, ran nothing, did not come to its end, or met a fault of the
    machine, such as a full disk: cases that were not run would count as good.
    """
    named = any(option.partition("/")[0].partition("::")[0] in _SUITES for option in options)
    words = [*options] if named else ["--pyargs", "meshmark.suites", *options]
    # -P leaves the working directory, which may be a stranger's, off the module path.
    command = [side.python, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *words, "--results", str(results)]
    own = {**without_repository(os.environ), **side.variables}
    path = os.pathsep.join([*map(str, side.paths), *filter(None, [own.get("PYTHONPATH")])])
    environment = {**own, **({"PYTHONPATH": path} if path else {})}
    try:
        ends_with_us = functools.partial(die_with_parent, os.getpid())
        done = subprocess.run(
            command, cwd=side.folder, env=environment, capture_output=True, text=True, preexec_fn=ends_with_us
        )
    except OSError as error:
        raise InputError(f"{side.name}: {side.python}: {error.strerror}; expected a virtual environment") from error
    told = clip(f"{done.stdout}\n{done.stderr}".strip(), 3000)
    recorded = (results / "records.jsonl").exists()
    limited = any(option.startswith("--max-time") for option in options)
    if not recorded or done.returncode not in (*_WHOLE, *([_TIME_UP] if limited else [])):
        how = "before its last test" if recorded else "and no record"
        raise ResultsError(f"{side.name}: {shlex.join(command)} ended with {done.returncode} {how}:\n{told}")
    reading = read_records(results)
    records = reading.records
    tests = [attempt for session in reading.sessions[-1:] for attempt in session.attempts]
    left = [attempt.test for attempt in tests if attempt.ending is Ending.UNFINISHED]
    if left and not limited:
        raise ResultsError(
            f"{side.name}: {shlex.join(command)} ended before {pluralize(len(left), 'test')}, such as {left[0]}, as by "
            "-x in pytest's addopts or PYTEST_ADDOPTS; give -o addopts= behind --, or leave -x out"
        )
    ran = [record for record in records if record.outcome.status is not Status.SKIPPED]
    if not ran:
        reasons = {record.outcome.message for record in records}
        raise ResultsError(f"{side.name}: nothing was run: {'; '.join(sorted(reasons)) or told}")
    if stopped := next((record for record in ran if record.outcome.status.outside), None):
        why = f"{stopped.outcome.status}: {stopped.outcome.message}"
        raise ResultsError(f"{side.name}: {stopped.case.id} was not judged, for a reason outside of it: {why}")
    return ran


@contextmanager
def open_side(text: str, scratch: Path, label: str) -> Iterator[Side]:
    """Open the side named by `text`: a folder with bin/python, a commit of this repository, or a pip requirement.

    Raises `InputError` for other text, and for a requirement that pip cannot install.
    """
    here = Path.cwd()
    if text.startswith("-"):  # pip and git would take it for an option of theirs
        raise InputError(
            f"{text!r} begins with a dash: name a git ref, a virtual environment's folder or a pip requirement"
        )
    if (Path(text) / "bin" / "python").exists():
        yield Side(name=f"{label} ({text})", python=str((Path(text) / "bin" / "python").absolute()), folder=here)
    elif commit := commit_of(text):
        with checkout(commit, scratch / label) as folder:
            below = git("rev-parse", "--show-prefix")  # options name files as they are seen from here
            if not (folder / below).is_dir():
                raise InputError(f"{text!r} has no folder {below!r}, the current folder; run this in a parent folder")
            variables, mapped = _mapped(text, folder)
            paths = tuple(dict.fromkeys([folder, *mapped]))
            yield Side(name=f"{label} ({text})", folder=folder / below, paths=paths, variables=variables)
    elif _BARE.fullmatch(text.strip()) and not (text and Path(text).exists()):
        raise InputError(
            f"{text!r} is no folder with bin/python and no commit of the repository here; a package is named with its "
            f"release, such as {text.strip() or 'torch'}==1.0, so that a mistyped branch installs no unrelated package"
        )
    else:
        yield Side(name=f"{label} ({text})", folder=here, paths=(_installed(text, scratch / label),))


_IMPORTED = """
import json, os, sys
found = list(sys.path)
for finder in sys.meta_path:  # of packages that setuptools has installed as editable ones
    module = sys.modules.get(getattr(finder, "__module__", ""))
    found += [os.path.dirname(place) for place in getattr(module, "MAPPING", {}).values()]
print(json.dumps(found))
"""
"""Prints the places that modules are imported from: PYTHONPATH, the environment, and editable installs."""


def _mapped(text: str, checkout: Path) -> tuple[dict[str, str], list[Path]]:
    """Return variables without folders of the working tree, and the folders of the checkout in their place.

    A package of the repository may be imported from its own folder, such as `src`, after `pip install -e`. Raises
    `InputError` if the commit `text` has no such folder, because both sides would import that of the working tree.
    """
    top = Path(git("rev-parse", "--show-toplevel")).resolve()
    done = subprocess.run([sys.executable, "-P", "-c", _IMPORTED], capture_output=True, text=True, check=True)
    environment = Path(sys.prefix).resolve()
    asked = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]

    def is_ours(entry: str) -> bool:
        if not Path(entry).is_dir():  # an archive, or a name that an import hook knows
            return False
        place = Path(entry).resolve()
        return place.is_relative_to(top) and not (environment != top and place.is_relative_to(environment))

    ours = [Path(entry).resolve() for entry in dict.fromkeys([*asked, *json.loads(done.stdout)]) if is_ours(entry)]
    mapped = [checkout / place.relative_to(top) for place in ours]
    if missing := [place for place, there in zip(ours, mapped, strict=True) if not there.is_dir()]:
        raise InputError(
            f"{text!r} has no folder {missing[0].relative_to(top)}, from which Python imports here: the side would "
            "import the working tree's; name a virtual environment with that commit installed instead"
        )
    others = [entry for entry in asked if not is_ours(entry)]
    return ({"PYTHONPATH": os.pathsep.join(others)} if asked else {}), mapped


_SUBMODULE = "160000 commit "
"""What `git ls-tree` prints for a submodule, before its commit."""


def commit_of(text: str, folder: Path | None = None) -> str | None:
    """Return the commit that `text` names in the repository of `folder`, or None."""
    try:
        done = run_git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{text}^{{commit}}", folder=folder)
    except OSError:
        return None
    return done.stdout.decode().strip() if done.returncode == 0 else None


@contextmanager
def checkout(commit: str, place: Path) -> Iterator[Path]:
    """Provide a checkout of `commit` at `place`, and remove it afterwards.

    It is a clone that shares the repository's objects, not a worktree: SIGKILL would leave that in the repository.
    """
    try:
        _clone(Path(git("rev-parse", "--show-toplevel")), commit, place)
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _clone(repository: Path, commit: str, place: Path) -> None:
    """Check `commit` out at `place`, with the submodules that are there in `repository`. These are not fetched.

    Raises `InputError` if a submodule's repository lacks the commit: its side would import nothing, or another version.
    """
    git("clone", "--quiet", "--shared", "--no-checkout", str(repository), str(place))
    git("-C", str(place), "checkout", "--quiet", "--detach", commit)
    for entry in git("-C", str(place), "ls-tree", "-r", "-z", commit).split("\0"):
        described, _, name = entry.partition("\t")
        if not described.startswith(_SUBMODULE) or not (repository / name / ".git").exists():
            continue
        wanted = described.split()[2]
        if commit_of(wanted, repository / name) is None:
            raise InputError(
                f"submodule {name} has no commit {wanted[:12]}, which {commit[:12]} names: git -C {name} fetch"
            )
        _clone(repository / name, wanted, place / name)


def git(*words: str) -> str:
    """Run git and return its output. Raises `InputError` with git's message when it fails."""
    done = run_git(*words)
    if done.returncode:
        raise InputError(f"git {shlex.join(words)}: {done.stderr.decode(errors='replace').strip()}")
    return os.fsdecode(done.stdout).strip()


def _installed(requirement: str, target: Path) -> Path:
    """Install `requirement` without dependencies into `target`, to be used on top of this environment."""
    command = [sys.executable, "-P", "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), "--"]
    done = subprocess.run([*command, *shlex.split(requirement)], capture_output=True, text=True)
    if done.returncode:
        raise InputError(
            f"{requirement!r} is no folder with bin/python, no commit of the repository here, and pip cannot install "
            f"it: {clip(done.stderr.strip(), 1000)}"
        )
    return target
