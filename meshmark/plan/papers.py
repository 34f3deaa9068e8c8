"""The published tables under baselines/papers/, as columns of text; a row's `source` says where it comes from."""

from __future__ import annotations

import csv
from pathlib import Path

from meshmark.errors import InputError, UnknownNameError

PAPERS_DIR = Path(__file__).parents[2] / "baselines" / "papers"

Row = dict[str, str]


def read_rows(path: Path) -> list[Row]:
    """All rows of a CSV file. Raises `InputError` when it is missing or has no rows."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    if not rows:
        raise InputError(f"{path} has no rows; expected a header and one layout a row")
    return rows


def paper(name: str) -> list[Row]:
    """The rows of one published table. Raises `UnknownNameError` when there is none of that name."""
    known = {path.stem: path for path in PAPERS_DIR.glob("*.csv")}
    if name not in known:
        raise UnknownNameError("published table", name, known)
    return read_rows(known[name])


def number(row: Row, column: str) -> float:
    """A cell as a number; NaN when it is empty or not one."""
    try:
        return float(row.get(column) or "nan")
    except ValueError:
        return float("nan")
