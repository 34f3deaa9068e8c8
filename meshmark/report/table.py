"""Tables of a report: typed cells, which the Markdown page and the interactive page write each in its own way.

Texts in a record are not trusted: whatever they contain, they stay one cell, one line or one block. Names and messages
come from adapters, frameworks and files of other people. Plain prose is left as it is. A text that could make a link, a
tag or a column is shown as code, in which nothing is interpreted.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshmark.text import clip

# --- Markdown from untrusted texts: whatever a record contains, it stays one cell, one line or one block.

LINE_CHARACTERS = 2000
"""Characters of one text within a line. The record has the whole text."""

_CODE_SPAN = re.compile(r"`[^`]+`")
_MEANS_SOMETHING = re.compile(r"[<>\[\]\\`&|]|://|www\.|@|~~~", re.IGNORECASE)
"""Pattern of what may begin a link, a tag, an entity, a column or a code span. Emphasis injects nothing and is
allowed.
"""
_UNSEEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
"""Control characters, those that change the writing direction, and surrogates, which no file can hold."""


class Markup(str):
    """Intended Markdown within a line, made of parts that went through `inline`."""


def inline(text: object, characters: int = LINE_CHARACTERS) -> str:
    """Return `text` in one line, without any Markdown syntax."""
    line = _line(text, characters)
    return _as_code(line) if _MEANS_SOMETHING.search(_CODE_SPAN.sub("", line)) else line


def code(text: object) -> str:
    """Return `text` as a code span of one line."""
    return _as_code(_line(text, LINE_CHARACTERS))


def _line(text: object, characters: int) -> str:
    return clip(one_line(str(text)[: 2 * characters]), characters)


def one_line(text: str) -> str:
    return " ".join(visible(text).split())


def _as_code(line: str) -> str:
    marks = fence(line, least=1)
    room = " " if "`" in (line[:1], line[-1:]) else ""
    return f"{marks}{room}{line or ' '}{room}{marks}"


def visible(text: str) -> str:
    """Return `text` with characters that are invisible, or cannot be written, as code points."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def fence(text: str, *, least: int = 3) -> str:
    """Return marks of a code block or span that nothing in `text` closes."""
    return "`" * max(least, 1 + max((len(run) for run in re.findall("`+", text)), default=0))


def block(text: str) -> str:
    """Return `text` as a code block, clipped."""
    shown = "\n".join(visible(line) for line in clip(text).splitlines()).strip("\n")
    marks = fence(shown)
    return f"{marks}\n{shown}\n{marks}"


def details(summary: str, body: str) -> str:
    """Return `body` (Markdown) folded under a summary line of plain text."""
    return f"<details><summary>{html.escape(_line(summary, LINE_CHARACTERS))}</summary>\n\n{body}\n\n</details>"


WIDTH = 160
"""Maximum width of a table in characters, which can be read without horizontal scrolling."""
_LONG = 48
"""Maximum length of a cell or title in a table that would otherwise be too wide."""


@dataclass(frozen=True, kw_only=True)
class _Column:
    title: str
    values: Sequence[object]
    cells: Sequence[str]

    @property
    def width(self) -> int:
        return max(map(len, (self.title, *self.cells)))

    @property
    def constant(self) -> bool:
        return len(self.cells) > 1 and len(set(self.cells)) == 1


def table(rows: Sequence[dict[str, object]], keys: int = 1) -> str:
    """Return a Markdown table. Missing values stay empty; see `table_of`."""
    names = dict.fromkeys(name for row in rows for name in row)
    return table_of([(name, [row.get(name) for row in rows]) for name in names], keys)


def table_of(columns: Sequence[tuple[str, Sequence[object]]], keys: int = 1, together: int = 1) -> str:
    """Return a Markdown table of columns, each a title and its values.

    No line is wider than `WIDTH`. In a table that would be wider, values that are the same in every row are stated
    once above it, long texts become numbered notes below it, and it continues in further tables that begin with the
    same first `keys` columns. Of the other columns, each `together` stay side by side.
    """
    whole = [_Column(title=_cell(title), values=values, cells=[*map(_cell, values)]) for title, values in columns]
    if not whole:
        return ""
    if _width(whole) + 2 * len(whole) <= WIDTH:
        return _laid(whole, room=2)
    short = [dataclasses.replace(column, title=_cell(column.title[:_LONG])) for column in whole]
    return _laid(short) if _width(short) <= WIDTH else _narrow(short[:keys], short[keys:], together)


def _narrow(keys: Sequence[_Column], others: Sequence[_Column], together: int) -> str:
    said = [column for column in (*keys, *others) if column.constant] if together == 1 else []
    if all(key in said for key in keys):
        said.remove(keys[0])
    notes: dict[str, int] = {}
    lead = [key for key in keys if key not in said]
    left = [column for column in others if column not in said]
    groups = [left[i : i + together] for i in range(0, len(left), together)]
    widest = max(map(_least, groups), default=0)
    while len(lead) > 1 and 1 + _least(lead) + widest > WIDTH:
        groups.insert(0, [lead.pop()])
    lead = [_with_notes(key, notes, _LONG if _width(lead) + widest > WIDTH else WIDTH) for key in lead]
    room = (WIDTH - _width(lead)) // together - 3
    parts = [list(lead)]
    for group in groups:
        shown = [_with_notes(column, notes, room) for column in group]
        if _width([*parts[-1], *shown]) > WIDTH:
            with_more = dict(notes)
            shorter = [_with_notes(column, with_more, _LONG) for column in group]
            if _width([*parts[-1], *shorter]) <= WIDTH:  # more notes rather than one more table
                shown = shorter
                notes.update(with_more)
            else:
                parts.append(list(lead))
        parts[-1] += shown
    alike = [f"{column.title}: {_text(column.values[0])}" for column in said if column.cells[0]]
    above = [f"In every row: {'; '.join(alike)}."] if alike else []
    below = ["\n".join(f"- ({number}) {text}" for text, number in notes.items())] if notes else []
    return "\n\n".join([*above, *map(_laid, parts), *below])


def _least(columns: Sequence[_Column]) -> int:
    """Return the width of columns whose long texts are notes."""
    return sum(min(column.width, _LONG) + 3 for column in columns)


def _with_notes(column: _Column, notes: dict[str, int], room: int) -> _Column:
    """Replace long texts by the numbers of their notes if the column is wider than `room`."""
    if column.width <= room:
        return column
    pairs = list(zip(column.values, column.cells, strict=True))
    return dataclasses.replace(
        column,
        cells=[
            f"({notes.setdefault(_text(value), len(notes) + 1)})" if len(cell) > min(_LONG, room) else cell
            for value, cell in pairs
        ],
    )


def _width(columns: Sequence[_Column]) -> int:
    return 1 + sum(column.width + 3 for column in columns)


def _laid(columns: Sequence[_Column], room: int = 0) -> str:
    return laid([column.title for column in columns], [column.cells for column in columns], room)


def laid(titles: Sequence[str], cells: Sequence[Sequence[str]], room: int = 0) -> str:
    """Return a table of titles and cells by column, all of them Markdown without line breaks.

    `room` is added between a title and the next column, as tabulate does.
    """
    widths = [max(len(title) + room, *map(len, own)) for title, own in zip(titles, cells, strict=True)]
    rule = "|".join(f":{'-' * (width + 1)}" for width in widths)
    body = [_row(line, widths) for line in zip(*cells, strict=True)]
    return "\n".join([_row(titles, widths), f"|{rule}|", *body])


def _row(cells: Iterable[str], widths: Iterable[int]) -> str:
    return f"| {' | '.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))} |"


def _cell(value: object) -> str:
    """Return `value` as one line without column separators."""
    return "" if value is None else _cell_of(value if isinstance(value, str) else str(value))


@functools.lru_cache(maxsize=16_384, typed=True)  # most cells of a long table stand in it many times
def _cell_of(value: str) -> str:
    return _text(value).replace("|", "\\|")


def _text(value: object) -> str:
    return " ".join(value.split()) if isinstance(value, Markup) else inline(value)


# --- Tables of a report: typed cells, which the Markdown page and the interactive page write each in its own way.

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
        return table(self.rows, keys=self.keys)


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
