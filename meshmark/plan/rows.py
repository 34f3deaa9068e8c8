"""Read CSV files of layouts as rows of text."""

from __future__ import annotations

import csv
from pathlib import Path

from meshmark.errors import InputError, refuse_device

Row = dict[str, str]


def read_rows(path: Path) -> list[Row]:
    """Return all rows of a CSV file. Raises `InputError` if it is missing, not CSV, or has no rows."""
    refuse_device(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # Excel begins a file with a mark
            reader = csv.DictReader(file, restval="")
            rows, columns = list(reader), list(reader.fieldnames or ())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is no text in UTF-8 ({error.reason} at byte {error.start}); save it as CSV"
        ) from error
    except csv.Error as error:
        raise InputError(f"{path} is no table of layouts: {error}; expected CSV, one layout a row") from error
    if len(columns) == 1 and any(mark in columns[0] for mark in ";\t"):
        raise InputError(f"{path} has one column, {columns[0][:80]!r}; expected commas between cells, save it as CSV")
    if long := [i for i, row in enumerate(rows) if None in row]:
        raise InputError(f"{path} row {long[0] + 2} has more cells than the header has columns; is a comma unquoted?")
    if twice := sorted({column for column in columns if columns.count(column) > 1}):
        raise InputError(f"{path} has more than one column {twice[0][:80]!r}; keep one")
    if not rows:
        raise InputError(f"{path} has no rows; expected a header and one layout a row")
    return rows


def number(row: Row, column: str) -> float:
    """Return a cell as a number, or NaN if it is empty or not a number."""
    try:
        return float(row.get(column) or "nan")
    except ValueError:
        return float("nan")
