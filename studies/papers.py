"""The published tables under baselines/papers/, as columns of text; a row's `source` says where it comes from."""

from __future__ import annotations

from pathlib import Path

from meshmark.errors import UnknownNameError
from meshmark.plan.rows import Row, read_rows

PAPERS_DIR = Path(__file__).parents[1] / "baselines" / "papers"


def paper(name: str) -> list[Row]:
    """The rows of one published table. Raises `UnknownNameError` when there is none of that name."""
    known = {path.stem: path for path in PAPERS_DIR.glob("*.csv")}
    if name not in known:
        raise UnknownNameError("published table", name, known)
    return read_rows(known[name])
