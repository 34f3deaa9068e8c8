"""Tables of a report: typed cells, which the Markdown page and the interactive page write each in its own way."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshmark.report.markdown import one_line
from meshmark.report.markdown import table as markdown_table

KIB = 1024.0
_FEW = 7
"""Number of columns that fit into any window."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell: what it shows, how it is emphasised, and the number that it is sorted by."""

    text: str
    order: float | None = None
    """Number that the cell is sorted by, in SI units or bytes. None sorts by the text."""
    struck: str = ""
    """A number that is no result, shown struck out before the text."""
    bad: str = ""
    """The part of the text that is a failure, and is emphasised: its beginning or its end."""

    @property
    def pieces(self) -> tuple[str, str, str]:
        """The text before, at and after the emphasised part."""
        if self.text.startswith(self.bad):
            return "", self.bad, self.text.removeprefix(self.bad)
        before, bad, behind = self.text.rpartition(self.bad)
        return before, bad, behind

    def __str__(self) -> str:
        """The cell in Markdown."""
        before, bad, behind = self.pieces
        text = f"{before}**{bad}**{behind}" if bad else self.text
        return f"~~{self.struck}~~ {text}".rstrip() if self.struck else text

    def strike(self, why: str = "") -> Cell:
        """Return this cell struck out, with the reason behind it. It is still sorted by its number."""
        return Cell(text=why, order=self.order, struck=self.text)


EMPTY = Cell(text="")

Rows = list[dict[str, object]]
"""Rows of a table, by column. A value is a `Cell`, a text, a number or None."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with a title and a note on its columns."""

    title: str
    note: str = ""
    rows: Rows
    keys: int = 3
    """How many of the first columns name a row; where a wide table is split, each part begins with them."""

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))

    @property
    def cells(self) -> list[list[Cell]]:
        """Cells by row, one for every column."""
        columns = self.columns
        return [[to_cell(row.get(name)) for name in columns] for row in self.rows]

    @property
    def narrow(self) -> tuple[str, Table]:
        """Text about columns that are the same in every row, and the table without them.

        A table with few columns is returned unchanged.
        """
        columns, cells = self.columns, self.cells
        if len(columns) <= _FEW or len(cells) < 2:
            return "", self
        same = [i for i in range(1, len(columns)) if len({str(row[i]) for row in cells}) == 1 and not cells[0][i].bad]
        said = "; ".join(f"{columns[i]}: {cells[0][i].text}" for i in same if cells[0][i].text)
        left = [name for i, name in enumerate(columns) if i not in same]
        rows: Rows = [{name: row.get(name) for name in left} for row in self.rows]
        return said, dataclasses.replace(self, rows=rows)

    @property
    def markdown(self) -> str:
        return markdown_table(self.rows, keys=self.keys)


def to_cell(value: object) -> Cell:
    """Return a value of `Rows` as a cell of one line."""
    if isinstance(value, Cell):
        texts = {name: one_line(getattr(value, name)) for name in ("text", "struck", "bad")}
        return Cell(order=value.order, **texts)
    order = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    return Cell(text="" if value is None else one_line(str(value)), order=order)


def yes_or_no(right: bool) -> Cell:
    return Cell(text="yes") if right else Cell(text="no", bad="no")


def bytes_text(count: float) -> str:
    """Return bytes in binary units with three significant digits: `925 KiB`, `2.90 MiB`; `4 KiB` if it is just that."""
    if math.isnan(count):
        return "unknown"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{_three_digits(count)} {unit}"
        count /= KIB
    return f"{_three_digits(count)} TiB"


def _three_digits(value: float) -> str:
    """Return three significant digits, or fewer where these are the number itself."""
    short = f"{value:.3g}"
    return short if float(short) == value else f"{value:#.3g}".rstrip(".")


def bytes_cell(count: float) -> Cell:
    return Cell(text=bytes_text(count), order=None if math.isnan(count) else float(count))


def number(value: object, form: str = ".3g") -> Cell:
    """Return a number in a format of Python's; `no bound` where it is infinite, nothing where there is none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return EMPTY
    if not math.isfinite(value):
        return Cell(text="no bound", order=math.inf)
    return Cell(text=format(value, form), order=float(value))


def milliseconds(seconds: float, form: str = ".3g") -> Cell:
    return Cell(text=f"{1000 * seconds:{form}} ms", order=float(seconds))


def filled(tables: Sequence[Table]) -> list[Table]:
    """Return the tables that have rows."""
    return [table for table in tables if table.rows]
