"""Keep a page as a record of its text and typed tables: `keep_page` writes the record, `kept_page` renders it.

This is for studies whose raw measurements are too large to keep, or are lost. The record is a file of JSON lines, one
per block of the page. A block is a text, or a table whose columns say how their values are formatted. Numbers are kept
as numbers. `keep_page` fails if the record would render a different page; only the spaces in an empty cell may differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshmark.errors import ResultsError
from meshmark.report.table import laid
from meshmark.serial import decode, encode

SUFFIX = ".page.jsonl"
"""Ending of a record's name, after the page's name."""
_RULE = re.compile(r"\|(?:[:-]+\|)+")
_BORDER = re.compile(r"(?<!\\)\|")
_EMPTY = re.compile(r"\| +(?=\|)")
_INTEGERS = ("d", ",d", "+d")
_FLOATS = (*(f"{sign}.{digits}{kind}" for kind in "f%eg" for digits in range(5) for sign in ("", "+")), ",.1f")
_PADDINGS = {"wide": 2, "narrow": 0}
"""Styles of tables whose columns are aligned: room between a title and the next column."""

Value = str | int | float | None
"""A value of a cell. None where the cell is empty."""


@dataclass(frozen=True, kw_only=True)
class KeptText:
    """Paragraphs of a page, as Markdown."""

    text: str


@dataclass(frozen=True, kw_only=True)
class KeptColumn:
    """One column of a kept table."""

    title: str
    """In Markdown."""
    form: str
    """How its numbers are written: a format of Python's. Empty for a column of texts in Markdown."""
    values: list[Value]
    """From the first row to the last."""

    def cells(self) -> list[str]:
        """Return the cells in Markdown."""
        return ["" if value is None else format(value, self.form) for value in self.values]


@dataclass(frozen=True, kw_only=True)
class KeptTable:
    """One table of a page."""

    style: str
    """`wide` or `narrow` for aligned columns; else the rule of each column, such as `---`."""
    columns: list[KeptColumn]

    def markdown(self) -> str:
        """Return the table in Markdown."""
        titles, cells = [column.title for column in self.columns], [column.cells() for column in self.columns]
        if self.style in _PADDINGS:
            return laid(titles, cells, _PADDINGS[self.style])
        lines = [titles, *zip(*cells, strict=True)]
        written = ["".join(f"| {cell} " if cell else "| " for cell in line) + "|" for line in lines]
        return "\n".join([written[0], "|" + f"{self.style}|" * len(titles), *written[1:]])


Block = KeptText | KeptTable


def keep_page(text: str, path: Path) -> None:
    """Write a page of Markdown to `path`, and its record into the folder `records` beside it.

    Raises `ResultsError` for a table that its record would render differently.
    """
    record = record_path(path)
    record.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(encode(block), ensure_ascii=False) + "\n" for block in _blocks(text)]
    record.write_text("".join(lines), encoding="utf-8")
    path.write_text(kept_page(record), encoding="utf-8")


def record_path(page: Path) -> Path:
    """Return where the record of a page lies."""
    return page.parent / "records" / f"{page.stem}{SUFFIX}"


def kept_page(record: Path) -> str:
    """Return the page that a record renders. Raises `ResultsError` if it is no record of a page."""
    return "\n".join(block.text if isinstance(block, KeptText) else block.markdown() for block in read_blocks(record))


def read_blocks(record: Path) -> list[Block]:
    """Return the texts and tables of a record, in the order of the page."""
    try:
        lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
        return [decode(KeptText if "text" in line else KeptTable, line) for line in lines]
    except (OSError, TypeError, ValueError) as error:
        raise ResultsError(f"{record} is no record of a page: {error}") from error


def _blocks(text: str) -> Iterator[Block]:
    lines = text.split("\n")
    prose: list[str] = []
    while lines:
        if len(lines) > 1 and lines[0].startswith("|") and _RULE.fullmatch(lines[1]):
            length = next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))
            if prose:
                yield KeptText(text="\n".join(prose))
            yield _table(lines[:length])
            prose, lines = [], lines[length:]
        else:
            prose.append(lines.pop(0))
    if prose:
        yield KeptText(text="\n".join(prose))


def _table(lines: Sequence[str]) -> KeptTable:
    head, _, *rows = [[cell.strip() for cell in _BORDER.split(line)[1:-1]] for line in lines]
    uneven = next((line for line, row in zip(lines[2:], rows, strict=True) if len(row) != len(head)), None)
    if uneven is not None:
        raise ResultsError(f"this table row does not have the {len(head)} cells of the header: {uneven}")
    columns = [_column(title, [row[i] for row in rows]) for i, title in enumerate(head)]
    for style in (*_PADDINGS, lines[1].split("|")[1]):
        table = KeptTable(style=style, columns=columns)
        if _EMPTY.sub("| ", table.markdown()) == _EMPTY.sub("| ", "\n".join(lines)):
            return table
    raise ResultsError(f"a table would be rendered differently than it was written: {lines[0]}")


def _column(title: str, cells: Sequence[str]) -> KeptColumn:
    for kind, forms in ((int, _INTEGERS), (float, _FLOATS)):
        for form in forms:
            values: list[Value] = [_number(kind, form, cell) for cell in cells]
            column = KeptColumn(title=title, form=form, values=values)
            if any(value is not None for value in values) and column.cells() == list(cells):
                return column
    return KeptColumn(title=title, form="", values=[cell or None for cell in cells])


def _number(kind: type[int] | type[float], form: str, cell: str) -> int | float | None:
    """Return the number that a cell shows, or None if it shows none in this form."""
    text = cell.replace(",", "")
    try:
        return float(f"{text[:-1]}e-2") if form.endswith("%") and text.endswith("%") else kind(text)
    except ValueError:
        return None
