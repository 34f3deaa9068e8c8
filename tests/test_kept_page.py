"""Pages whose typed tables are their record."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshmark.errors import ResultsError
from meshmark.report.kept_page import KeptTable, KeptText, keep_page, kept_page, read_blocks, record_path
from meshmark.report.table import table

ALIGNED = table([{"ranks": 8, "error": "+1.5%", "note": "a | b"}, {"ranks": 1024, "error": "-0.1%", "note": ""}])
PAGE = f"""# Title

Text with a | in it.

{ALIGNED}

| what | seconds |
|:--|:--|
| one, of `x|y` |  |
| two | 1,200.5 |

The end.
"""


def test_a_kept_page_renders_to_what_was_written(tmp_path: Path) -> None:
    written = PAGE.replace("`x|y`", "`x\\|y`").replace("|  |", "| |")
    keep_page(written, tmp_path / "page.md")
    record = record_path(tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == kept_page(record) == written
    kinds = [type(block) for block in read_blocks(record)]
    assert kinds == [KeptText, KeptTable, KeptText, KeptTable, KeptText]


def test_numbers_of_a_kept_page_are_numbers(tmp_path: Path) -> None:
    keep_page(PAGE.replace("`x|y`", "`xy`"), tmp_path / "page.md")
    aligned, plain = (b for b in read_blocks(record_path(tmp_path / "page.md")) if isinstance(b, KeptTable))
    assert [column.title for column in aligned.columns] == ["ranks", "error", "note"]
    assert aligned.columns[0].values == [8, 1024]
    assert aligned.columns[1].values == pytest.approx([0.015, -0.001]) and aligned.columns[1].form == "+.1%"
    assert aligned.columns[2].values[1] is None
    assert plain.columns[1].values == [None, 1200.5] and plain.columns[1].form == ",.1f"


def test_a_page_that_its_record_would_not_render_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="not have the 2 cells of the header: \\| 1 \\|"):
        keep_page("| a | b |\n|---|---|\n| 1 |\n", tmp_path / "page.md")
    with pytest.raises(ResultsError, match="rendered differently"):
        keep_page("| a | b |\n|:--|---|\n| 1 | 2 |\n", tmp_path / "page.md")
    (tmp_path / "page.jsonl").write_text("{}\n")
    with pytest.raises(ResultsError, match="is no record of a page"):
        kept_page(tmp_path / "page.jsonl")


def test_an_aligned_table_stays_aligned(tmp_path: Path) -> None:
    keep_page(f"{ALIGNED}\n", tmp_path / "page.md")
    (block, _) = read_blocks(record_path(tmp_path / "page.md"))
    assert isinstance(block, KeptTable) and block.style == "wide"
    assert len({len(line) for line in block.markdown().splitlines()}) == 1
