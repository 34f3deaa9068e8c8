"""List the releases of a package between two versions, from its index."""

from __future__ import annotations

import re
import subprocess
import sys

from packaging.version import InvalidVersion, Version

from meshmark.errors import InputError
from meshmark.text import clip

_PINNED = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\s*==\s*(?P<version>[^\s*,;]+)")
_LISTED = re.compile(r"^Available versions:\s*(.*)$", re.MULTILINE)


def release_of(text: str) -> tuple[str, Version] | None:
    """Return package and version of `name==version`, or None for any other text."""
    found = _PINNED.fullmatch(text.strip())
    try:
        return (found["name"], Version(found["version"])) if found else None
    except InvalidVersion:
        return None


def releases_between(good: str, bad: str) -> list[str] | None:
    """Return requirements of the releases after `good` up to `bad`, oldest first; None if neither is a release.

    Raises `InputError` unless they are two ordered releases of one package, or if the index cannot be read.
    """
    one, other = release_of(good), release_of(bad)
    if one is None and other is None:
        return None
    if one is None or other is None or one[0].lower() != other[0].lower():
        raise InputError(
            f"--good {good} and --bad {bad}: expected two commits, or two releases such as torch==2.12.1 of one package"
        )
    if one[1] >= other[1]:
        raise InputError(f"--bad {bad} is no later release than --good {good}; are they the other way round?")
    early = one[1].is_prerelease or other[1].is_prerelease
    found = sorted(v for v in _versions(one[0], early) if one[1] < v <= other[1])
    if other[1] not in found:
        there = ", ".join(map(str, found[-5:])) or "none after --good"
        raise InputError(f"--bad {bad}: its index lists no such release for this python; it has {there}")
    return [f"{one[0]}=={version}" for version in found]


def _versions(name: str, early: bool) -> list[Version]:
    """Return the versions that pip lists, with its configuration and environment."""
    command = [sys.executable, "-P", "-m", "pip", "index", "versions", name, *(["--pre"] if early else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    listed = _LISTED.search(done.stdout)
    if done.returncode or listed is None:
        raise InputError(
            f"the releases of {name!r} cannot be listed: {clip((done.stderr or done.stdout).strip(), 1000)}"
        )
    return [Version(text.strip()) for text in listed[1].split(",") if text.strip()]
