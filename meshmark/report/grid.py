"""Tables of the interactive page: what the markdown page shows, in columns that sort by what they mean."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from meshmark.report.markdown import one_line
from meshmark.report.tables import Rows

_UNITS = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40, "%": 0.01, "ms": 0.001}
_NUMBER = re.compile(r"([-+±]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?) ?(B|KiB|MiB|GiB|TiB|%|ms)?(?![\w.-])")
_BAD = re.compile(r"\*\*([^*]*)\*\*(.*)", re.DOTALL)
_STRUCK = re.compile(r"~~([^~]*)~~(.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One text, with the two emphases that reports have."""

    text: str
    struck: str = ""
    """What stands before it and is no result."""
    bad: bool = False
    order: float | None = None
    """What it is sorted by; None sorts by its text."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """One table."""

    title: str
    told: str
    """What its columns mean."""
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def grid(title: str, rows: Rows, told: str = "") -> Grid:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[cell(row.get(name)) for name in columns] for row in rows]
    return Grid(title=title, told=told, columns=columns, rows=cells)


def cell(value: object) -> Cell:
    text = "" if value is None else one_line(str(value))
    order = _order(text.lstrip("*~"))
    if found := _BAD.fullmatch(text):
        return Cell(text=found[1] + found[2], bad=True, order=order)
    if found := _STRUCK.fullmatch(text):
        return Cell(text=found[2].strip(), struck=found[1], order=order)
    return Cell(text=text, order=order)


def _order(text: str) -> float | None:
    """The number that a text begins with, in its base unit."""
    found = _NUMBER.match(text)
    if found is None:
        return None
    return float(found[1].replace(",", "").lstrip("±")) * _UNITS.get(found[2] or "", 1.0)
