"""`make tables` can fail: where a table is further off than its numbers may be, or compares nothing any more."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from studies import tables
from studies.table import Cell, Table
from studies.tables_goals import BOUNDS, Judged, judged

TITLE = "A100 peaks"


def make_table(*computed: float, title: str = TITLE, flagged: str = "") -> Table:
    cells = [Cell(published=100.0, computed=number, flagged=flagged) for number in computed]
    rows = [((), (cell,)) for cell in cells]
    return Table(title=title, source="here", formula="", labels=(), columns=("bytes",), rows=rows)


def of(title: str, *given: Table) -> Judged:
    return next(table for table in judged(given) if table.title == title)


def test_the_mean_error_of_a_table_is_held_against_its_bound() -> None:
    good, bad = of(TITLE, make_table(100.0, 100.9)), of(TITLE, make_table(100.0, 101.1))
    assert good.holds and good.line == f"{TITLE}: 0.0045 bound 0.005 held"
    assert not bad.holds and bad.line.endswith("BROKEN")
    assert of(TITLE, make_table(100.0), make_table(300.0, flagged="a misprint", title="flagged")).holds


@pytest.mark.parametrize(
    "table", [make_table(), make_table(math.nan), make_table(100.0, flagged="a misprint"), make_table(title="other")]
)
def test_a_table_that_compares_nothing_any_more_is_broken(table: Table) -> None:
    assert not of(TITLE, table).holds


def test_a_table_that_compares_without_a_bound_is_broken_and_one_of_facts_is_not() -> None:
    assert not of("new", make_table(100.0, title="new")).holds
    assert of("facts", make_table(title="facts")).holds


@pytest.mark.slow
def test_the_command_ends_as_its_tables_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the committed evidence, as it is and with every computed number a twentieth larger."""
    real = tables.all_tables()
    assert {table.title for table in real if table.cells} == BOUNDS.keys()
    assert tables.main(["-o", str(tmp_path / "tables.md")]) == 0

    def off(table: Table) -> Table:
        grown = [
            (ls, tuple(c and dataclasses.replace(c, computed=1.05 * c.computed) for c in cs)) for ls, cs in table.rows
        ]
        return dataclasses.replace(table, rows=grown)

    monkeypatch.setattr(tables, "all_tables", lambda: [off(table) for table in real])
    assert tables.main(["-o", str(tmp_path / "tables.md")]) == 1
    broken = [table.title for table in judged([off(table) for table in real]) if not table.holds]
    assert {title for title, bound in BOUNDS.items() if bound <= 0.025} <= set(broken)
