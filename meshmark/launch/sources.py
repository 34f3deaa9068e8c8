"""Which code a result is of: that of an adapter's file and of a workload's, and of what they import."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import meshmark
from meshmark.adapter.registry import load_adapter
from meshmark.environment import PACKAGES, code_digest, distributions_of, project_of
from meshmark.errors import AdapterError
from meshmark.records.record import Source
from meshmark.spec.own_model import OwnModelConfig
from meshmark.spec.workload import Workload


def sources_of(adapter: str, workload: Workload) -> list[Source]:
    """Return the sources that are not part of Meshmark, whose own version the environment records."""
    targets = [adapter] if not adapter.startswith("meshmark.") else []
    if isinstance(workload.model, OwnModelConfig):
        targets.append(workload.model.target)
    return [_source(target, target == adapter) for target in targets]


@functools.cache
def code_digest_of(adapter: str) -> str:
    """Return a hash of an adapter's file and of all that it imports, by which nodes are compared, whatever repositories
    they have it from. Empty if it cannot be read.
    """
    file = _file(adapter.rpartition(":")[0])
    try:
        return _digest(file, _required(adapter), whole=True) if file else ""
    except OSError:
        return ""


@functools.cache
def _source(target: str, is_adapter: bool) -> Source:
    where, _, name = target.rpartition(":")
    file = _file(where)
    told = f"{Path(where).name if where.endswith('.py') else where}:{name}"
    try:
        digest = _digest(file, _required(target) if is_adapter else ()) if file else ""
    except OSError:
        digest = ""
    return Source(target=told, sha256=digest, commit=_commit(file) if file else "")


def _required(adapter: str) -> list[str]:
    """Return the distributions that an adapter says it requires, whoever imports them."""
    try:
        return [requirement.distribution for requirement in load_adapter(adapter).requires]
    except AdapterError:
        return []


def _file(where: str) -> Path | None:
    if where.endswith(".py"):
        return Path(where).resolve()
    try:
        spec = importlib.util.find_spec(where)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin else None


_MOST_FILES = 2_000
"""Number of imported files from which on code counts as unknown."""
_CONFIGURATIONS = frozenset(".json .toml .yaml .yml".split())
_SUFFIXES = _CONFIGURATIONS | frozenset(".py .so .pyd .c .cc .cpp .cu .cuh .h .hpp".split())
"""Files that a package computes with: its modules, compiled ones, what is compiled as it runs, and configurations."""
_LARGE_BYTES = 64 * 2**20
"""Size from which on a file is told by its size and date."""


def _digest(file: Path, required: Iterable[str] = (), *, whole: bool = False) -> str:
    """Return a hash of a file, of what it and what it imports import from other folders, of installed distributions
    among that, those that are `required` too, and of what git does not track of that in the file's own folder, such as
    another repository's clone.

    Not of what git tracks next to it, which `_commit` covers, unless it is to be the `whole` code. Empty if that is too
    much. Raises `OSError` if the file cannot be read.
    """
    found, seen, queue, distributions = {file: file.read_bytes()}, {file}, [file], set(required)
    tracked = set[Path]() if whole else _tracked(file.parent)
    while queue:
        each = queue.pop()
        names, beside = _imported(each, found.get(each) or _content(each))
        distributions.update(*map(distributions_of, names))
        new = {*beside, *(code for name in names for code in _code_of_package(name))} - seen
        seen |= new
        found |= {one: _content(one) for one in new if _is_unknown(one, file.parent, tracked)}
        queue += [one for one in new if one.suffix == ".py"]
        if len(seen) > _MOST_FILES:
            return ""
    digest = hashlib.sha256(found.pop(file))
    for each in sorted(found):
        digest.update(hashlib.sha256(found[each]).digest())
    if others := distributions - {"meshmark", *PACKAGES}:  # the environment has a digest of those
        digest.update(code_digest(others).encode())
    return digest.hexdigest()


def _content(file: Path) -> bytes:
    """Return what tells one version of a file from another: its bytes, or of a large one its size and date."""
    about = file.stat()
    if about.st_size > _LARGE_BYTES:
        return f"{about.st_size} {about.st_mtime_ns}".encode()
    return file.read_bytes()


def _imported(file: Path, source: bytes) -> tuple[set[str], set[Path]]:
    """Return the names of the packages that a file imports anywhere, and the modules that it imports by relative
    names. Names that are made when it runs are not seen.
    """
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return set(), set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    beside = list[Path]()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = file.parents[node.level - 1] if node.level <= len(file.parents) else file.parent
            base = base.joinpath(*(node.module or "").split("."))
            beside += [base, *(base / alias.name for alias in node.names)]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                names.append(node.args[0].value)
    modules = {each for one in beside for each in (one.with_name(f"{one.name}.py"), one / "__init__.py")}
    packages = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {""}
    return packages, {each for each in modules if each.is_file()}


def _tracked(folder: Path) -> set[Path] | None:
    """Return the files in `folder` that git tracks. None if no repository has it."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=folder, capture_output=True)
    except OSError:
        return None
    names = listed.stdout.split(b"\0")
    return None if listed.returncode else {folder / os.fsdecode(name) for name in names if name}


def _code_of_package(name: str) -> list[Path]:
    """Return the files of code of a package that is not installed, compiled ones among them."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return []
    roots = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    if spec and spec.origin and not roots:
        roots = [Path(spec.origin)]
    roots = [
        root
        for root in roots
        if not {"site-packages", "dist-packages"} & set(root.parts)
        and not root.is_relative_to(Path(meshmark.__file__).parent)
    ]
    files = [each for root in roots for each in ([root] if root.is_file() else sorted(root.rglob("*")))]
    return [each for each in files if each.suffix in _SUFFIXES and "__pycache__" not in each.parts and each.is_file()]


def _is_unknown(file: Path, folder: Path, tracked: set[Path] | None) -> bool:
    """Return whether no commit of the repository around `folder` tells what a file of code holds: it is elsewhere, or
    not `tracked`.

    Configurations in `folder`, which a run may write, count if they are another repository's. Nothing in `folder` does
    if `tracked` is None: then it has no repository, and what is in it is not known at all.
    """
    if not file.is_relative_to(folder):
        return True
    if tracked is None or file in tracked:
        return False
    *between, _ = file.relative_to(folder).parents
    return file.suffix not in _CONFIGURATIONS or any((folder / each / ".git").exists() for each in between)


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
    """Return a digest of what git does not track of the modules in the repository around `folder`.

    Those in Python count if git does not ignore them, compiled ones always: they are built there. Configurations count
    in `folder` itself.
    """
    listing = ["git", "ls-files", "-z", "--others"]
    configurations = [f":(glob)*{suffix}" for suffix in sorted(_CONFIGURATIONS)]
    names = list[bytes]()
    for command in (
        [*listing, "--exclude-standard", "--", ":/*.py", *configurations],
        [*listing, "--", ":/*.so"],
    ):
        listed = subprocess.run(command, cwd=folder, capture_output=True).stdout
        names += [name for name in listed.split(b"\0") if name and b"site-packages" not in name]
    digest = hashlib.sha256()
    for name in names:
        with contextlib.suppress(OSError):
            digest.update(name + b"\0" + _content(folder / os.fsdecode(name)))
    return digest.hexdigest()[:8] if names else ""
