"""The user's own files that a record was made with (adapter and workload), by digest and commit."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
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
    """Return the commit of the repository around a file, if the repository tracks the file."""
    command = ["git", "ls-files", "--error-unmatch", "--", file.name]
    try:
        tracked = subprocess.run(command, cwd=file.parent, capture_output=True).returncode == 0
    except OSError:
        return ""
    return project_of(str(file.parent)).commit if tracked else ""
