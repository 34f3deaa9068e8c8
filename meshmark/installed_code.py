"""Digests of the code of installed distributions, which two of the same version may not share.

Installers list every file with its hash and size in `RECORD`. A file that was edited since is hashed anew.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import importlib.metadata
import os
from collections.abc import Iterable
from pathlib import Path

CODE = (".py", ".so", ".pyd")


def code_digest(distributions: Iterable[str]) -> str:
    """Return a digest of the code of these distributions. Those that are not installed are left out."""
    own = [f"{name} {digest}" for name in sorted(set(distributions)) if (digest := _digest(name))]
    return hashlib.sha256("\n".join(own).encode()).hexdigest()[:16]


def distributions_of(package: str) -> list[str]:
    """Return the names of the distributions that install a top-level package or module."""
    return _by_package().get(package, [])


@functools.cache
def _by_package() -> dict[str, list[str]]:
    return {name: sorted(set(own)) for name, own in importlib.metadata.packages_distributions().items()}


@functools.cache
def _digest(name: str) -> str:
    """Return a digest of a distribution's code, or "" where its installer has left no list of it."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
    text = found.read_text("RECORD")
    if not text:
        return ""
    root = str(found.locate_file(""))
    installed_ns = max(
        (_mtime_ns(os.path.join(root, row[0])) for row in csv.reader(text.splitlines()) if _is_record(row)), default=0
    )
    digest = hashlib.sha256()
    for row in sorted(row for row in csv.reader(text.splitlines()) if len(row) == 3 and row[0].endswith(CODE)):
        path, listed, size = row
        digest.update(f"{path}\0{_hash(os.path.join(root, path), listed, size, installed_ns)}\n".encode())
    return digest.hexdigest()


def _is_record(row: list[str]) -> bool:
    return bool(row) and row[0].endswith(".dist-info/RECORD")


def _mtime_ns(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _hash(path: str, listed: str, size: str, installed_ns: int) -> str:
    """Return the hash of a file: the listed one, unless the file has changed since."""
    try:
        about = os.stat(path)
        if listed and str(about.st_size) == size and about.st_mtime_ns <= installed_ns:
            return listed
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return "unreadable"
