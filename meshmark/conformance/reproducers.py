"""Scripts that reproduce framework defects without Meshmark: `adapters/gaps/*.py`.

Each script begins with a block of inline metadata
(https://packaging.python.org/specifications/inline-script-metadata). Its dependencies name the versions that show the
defect, and the table [tool.meshmark] describes it. While the defect exists, a script ends with exit code 1 and the
line "expected: ...; got: ...". Once it is fixed, it ends with 0.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshmark.adapter.registry import known_adapters, load_adapter
from meshmark.errors import InputError, UnknownNameError

FOLDER = Path(__file__).parent.parent / "adapters" / "gaps"
_BLOCK = re.compile(r"^# /// script\n((?:#.*\n)+?)# ///\n", re.MULTILINE)
_REQUIRED = ("title", "framework", "symptom", "cause", "processes")
_OPTIONAL = ("upstream", "operators", "launcher")


Clauses = Mapping[str, tuple[str, ...]]
"""By adapter: conformance clauses that it fails."""


@dataclass(frozen=True, kw_only=True)
class Reproducer:
    """A script that shows one defect of one framework."""

    name: str
    """Name of the file without its suffix."""
    title: str
    framework: str
    """Distribution that has the defect."""
    versions: Mapping[str, str]
    """Versions that show it: those of the framework and of the packages it was tried with."""
    symptom: str
    cause: str
    upstream: str
    """URL of an issue, or empty."""
    num_processes: int
    launcher: str
    """Command to which the file's name is appended."""
    operators: tuple[str, ...]
    """C++ operators of DeepSpeed that the script needs."""
    source: str
    """The script without its metadata."""

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.py"

    @property
    def command(self) -> str:
        return f"{self.launcher} {self.name}.py"


def read_reproducers() -> list[Reproducer]:
    """Return all reproducers, by framework and title."""
    return sorted(map(read_reproducer, FOLDER.glob("*.py")), key=lambda each: (each.framework, each.title))


def read_reproducer(path: Path) -> Reproducer:
    """Return the reproducer in a script. Raises `InputError` if its metadata is missing or incomplete."""
    text = path.read_text(encoding="utf-8")
    if not (block := _BLOCK.search(text)):
        raise InputError(f"{path.name}: expected a block '# /// script' ... '# ///' of inline script metadata")
    metadata = tomllib.loads("".join(line[2:] or "\n" for line in block[1].splitlines(keepends=True)))
    fields = metadata.get("tool", {}).get("meshmark", {})
    for key in fields:
        if key not in (*_REQUIRED, *_OPTIONAL):
            raise UnknownNameError(f"key of [tool.meshmark] in {path.name}", key, (*_REQUIRED, *_OPTIONAL))
    if missing := [key for key in _REQUIRED if key not in fields]:
        raise InputError(f"{path.name}: [tool.meshmark] lacks {', '.join(missing)}")
    versions = dict(dependency.split("==") for dependency in metadata["dependencies"])
    if fields["framework"] not in versions:
        raise InputError(f"{path.name}: its dependencies pin no version of {fields['framework']}")
    return Reproducer(
        name=path.stem,
        **{key: " ".join(str(fields[key]).split()) for key in ("title", "framework", "symptom", "cause")},
        versions=versions,
        upstream=fields.get("upstream", ""),
        num_processes=fields["processes"],
        launcher=fields.get("launcher", f"torchrun --nproc-per-node {fields['processes']}"),
        operators=tuple(fields.get("operators", "").split()),
        source=text[block.end() :].strip(),
    )


def failed_clauses() -> dict[str, Clauses]:
    """Return, by reproducer, the clauses that adapters fail because of its defect, as their known gaps declare."""
    failed: dict[str, dict[str, tuple[str, ...]]] = {}
    for name, target in known_adapters().items():
        for gap in load_adapter(target).known_gaps:
            clauses = failed.setdefault(gap.reproducer, {}).get(name, ())
            failed[gap.reproducer][name] = tuple(dict.fromkeys((*clauses, gap.clause)))
    return dict(failed)
