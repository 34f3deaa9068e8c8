"""`make tables`: every published table as shown, each cell beside what the planner computes, with the error.

Written to reports/tables.md; ends with 1 where a table is further off than `tables_goals.py` lets it be. A table is a
`Table`; `tables_memory.py` and `tables_time.py` make them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from meshmark.report.table import table_of
from studies.table import Cell, Table
from studies.tables_goals import judged

REPORTS_DIR = Path(__file__).parents[1] / "reports"


def table_lines(table: Table) -> list[str]:
    """A table in Markdown: published, computed, error."""
    lines = [f"## {table.title}", "", f"Source: {table.source}.", ""]
    if table.formula:
        lines += [f"Computed: {table.formula}.", ""]
    labels = [(name, [texts[i] for texts, _ in table.rows]) for i, name in enumerate(table.labels)]
    compared = [
        column
        for i, name in enumerate(table.columns)
        for column in zip(
            (name, "computed", "error %"),
            zip(*(_cell_texts(cells[i]) for _, cells in table.rows), strict=True),
            strict=True,
        )
    ]
    lines += [table_of([*labels, *compared], keys=len(labels), together=3)]
    flags = [
        f"- {', '.join(labels[:2])}: {cell.flagged}"
        for labels, cells in table.rows
        for cell in cells
        if cell and cell.flagged
    ]
    lines += ["", "Flagged in the source:", "", *dict.fromkeys(flags)] if flags else []
    lines += ["", *table.notes] if table.notes else []
    lines += ["", f"Measured here: {table.measured}."] if table.measured else []
    return [*lines, ""]


def _cell_texts(cell: Cell | None) -> list[str]:
    if cell is None:
        return ["", "", ""]
    mark = " (!)" if cell.flagged else ""
    error = "" if np.isnan(cell.error) else f"{100 * cell.error:+.1f}"
    return [f"{cell.published:.6g}{mark}", f"{cell.computed:.3g}", error]


def summary_lines(tables: list[Table]) -> list[str]:
    """One line a table: cells, mean and largest error, flagged cells."""
    lines = [
        "## Summary",
        "",
        "| table | cells compared | mean error % | largest error % | flagged in the source |",
        "|---|---|---|---|---|",
    ]
    compared = [(table, fair) for table in tables if (fair := _errors(table))]
    for table, fair in sorted(compared, key=lambda pair: np.mean(pair[1])):
        flagged = sum(bool(c.flagged) for c in table.cells)
        lines.append(f"| {table.title} | {len(fair)} | {100 * np.mean(fair):.3g} | {100 * max(fair):.3g} | {flagged} |")
    facts = [table.title for table in tables if not _errors(table)]
    return [*lines, "", *([f"Shown below without a number to compare: {'; '.join(facts)}.", ""] if facts else [])]


def _errors(table: Table) -> list[float]:
    """Return the relative errors of all cells but those that are wrong in their source."""
    return [abs(c.error) for c in table.cells if not c.flagged and not np.isnan(c.error)]


def answer(tables: list[Table]) -> str:
    """Return how far off the planner is, in a sentence, with what it does not do."""
    means = {table.title: float(np.mean(fair)) for table in tables if (fair := _errors(table))}
    near = sum(mean < _NEAR for mean in means.values())
    far = max(means, key=lambda title: means[title])
    return (
        f"**In {near} of {len(means)} tables the planner is within {100 * _NEAR:.0f} % of what was published, in the "
        f"mean.** It is worst in *{far}*: {100 * means[far]:.0f} %. Published numbers are *measured* by their authors, "
        "or *computed* in the source. Ours are *computed*."
    )


_NEAR = 0.05
"""Mean relative error below which a table counts as met."""


def all_tables() -> list[Table]:
    """Every table, in the order of the report."""
    from studies.tables_facts import FACT_TABLES
    from studies.tables_memory import MEMORY_TABLES
    from studies.tables_time import TIME_TABLES

    makers: list[Callable[[], Table]] = [*MEMORY_TABLES, *TIME_TABLES, *FACT_TABLES]
    return [make() for make in makers]


def main(arguments: list[str] | None = None) -> int:
    """Write the report and print its summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=REPORTS_DIR / "tables.md")
    parsed = parser.parse_args(arguments)
    tables = all_tables()
    head = [
        "# Published tables beside the planner",
        "",
        "Made by `make tables`; not edited by hand. A cell marked",
        "(!) is wrong in its source, with the reason below its table, and is not in the summary.",
        "",
        answer(tables),
        "",
    ]
    lines = head + summary_lines(tables)
    for table in tables:
        lines += table_lines(table)
    parsed.output.parent.mkdir(parents=True, exist_ok=True)
    parsed.output.write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(summary_lines(tables)))
    print(f"written: {parsed.output}")
    found = judged(tables)
    print("\n".join(table.line for table in found if table.bound is not None or not table.holds))
    return 0 if all(table.holds for table in found) else 1


if __name__ == "__main__":
    sys.exit(main())
