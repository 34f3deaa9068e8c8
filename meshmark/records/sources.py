"""The user's own files that a record was made with (adapter and workload), by digest and commit."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from meshmark.environment import project_of
from meshmark.spec.own_model import OwnModelConfig
from meshmark.spec.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A file that an adapter or a workload was loaded from."""

    target: str
    """Target as a command names it, "file.py:Class" or "package.module:Class", without the folder."""
    sha256: str
    """Hash of the file's content when this session first read it. Empty if it cannot be read."""
    commit: str
    """Commit of the repository that tracks the file, as in `Environment.project_commit`. Empty if none does."""

    @property
    def is_known(self) -> bool:
        """True if it identifies the code, including modules next to the file that it imports."""
        return bool(self.sha256 and self.commit) and "-dirty" not in self.commit


def sources_of(adapter: str, workload: Workload) -> list[Source]:
    """Return the sources that are not part of Meshmark, whose own version the environment records."""
    targets = [adapter] if not adapter.startswith("meshmark.") else []
    if isinstance(workload.model, OwnModelConfig):
        targets.append(workload.model.target)
    return [_source(target) for target in targets]


@functools.cache
def _source(target: str) -> Source:
    where, _, name = target.rpartition(":")
    file = _file(where)
    told = f"{Path(where).name if where.endswith('.py') else where}:{name}"
    try:
        digest = hashlib.sha256(file.read_bytes()).hexdigest() if file else ""
    except OSError:
        digest = ""
    return Source(target=told, sha256=digest, commit=_commit(file) if file else "")


def _file(where: str) -> Path | None:
    if where.endswith(".py"):
        return Path(where).resolve()
    try:
        spec = importlib.util.find_spec(where)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin else None


def _commit(file: Path) -> str:
    """Return the commit of the repository around a file, if the repository tracks the file. It counts as changed where
    the repository holds modules that are in no commit, which the file may import.
    """
    command = ["git", "ls-files", "--error-unmatch", "--", file.name]
    try:
        tracked = subprocess.run(command, cwd=file.parent, capture_output=True).returncode == 0
    except OSError:
        return ""
    if not tracked or not (commit := project_of(str(file.parent)).commit):
        return ""
    modules = _untracked_modules(file.parent)
    return f"{commit}-dirty.{modules}" if modules else commit


def _untracked_modules(folder: Path) -> str:
    """Return a digest of the Python files in the repository around `folder` that git neither tracks nor ignores."""
    command = ["git", "ls-files", "-z", "--others", "--exclude-standard", "--", ":/*.py"]
    listed = subprocess.run(command, cwd=folder, capture_output=True).stdout
    digest = hashlib.sha256()
    for name in filter(None, listed.split(b"\0")):
        with contextlib.suppress(OSError):
            digest.update(name + b"\0" + (folder / os.fsdecode(name)).read_bytes())
    return digest.hexdigest()[:8] if listed else ""
