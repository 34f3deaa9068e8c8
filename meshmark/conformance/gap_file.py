"""Read known gaps from a file (`--known-gaps FILE.toml`), in addition to those that adapters declare."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from meshmark.conformance.clauses import CLAUSES
from meshmark.errors import InputError, UnknownNameError, refuse_device
from meshmark.spec.known_gap import SUITES, KnownGap

_NEEDED = ("adapter", "clause", "reason", "symptom")
_KEYS = (*_NEEDED, "link", "zero-stages")
_STAGES = (0, 1, 2, 3)


def read_gaps(path: Path) -> tuple[tuple[str, KnownGap], ...]:
    """Return a pattern of adapter names and a gap for every table [[gap]].

    Raises `InputError` with the table and the key.
    """
    refuse_device(path)
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"--known-gaps: cannot read {path}: {error}; docs/ci.md shows such a file") from error
    for key in said:
        if key != "gap":
            raise UnknownNameError(f"table in {path}", key, ["gap"])
    tables = said.get("gap", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise InputError(f"{path}: expected a table [[gap]] for every known gap")
    return tuple(_gap(f"{path}: [[gap]] number {number}", table) for number, table in enumerate(tables, 1))


def _gap(where: str, said: Mapping[str, object]) -> tuple[str, KnownGap]:
    for key in said:
        if key not in _KEYS:
            raise UnknownNameError(f"key in {where}", key, _KEYS)
    texts = {key: said.get(key, "") for key in (*_NEEDED, "link")}
    for key, value in texts.items():
        if not isinstance(value, str) or (key in _NEEDED and not value.strip()):
            raise InputError(f"{where}: {key} is {str(value)[:40]!r}, expected a text; else any failure would match")
    told = {key: str(value) for key, value in texts.items()}
    if told["clause"] not in (*CLAUSES, *SUITES):
        raise UnknownNameError(f"clause or suite in {where}", told["clause"], (*CLAUSES, *SUITES))
    stages = said.get("zero-stages", list(_STAGES))
    if (
        not isinstance(stages, list)
        or not stages
        or not all(type(stage) is int and stage in _STAGES for stage in stages)
    ):
        raise InputError(f"{where}: zero-stages is {str(stages)[:40]}, expected a list of {_STAGES}")
    adapter = told.pop("adapter")
    return adapter, KnownGap(**told, zero_stages=tuple(stages))
