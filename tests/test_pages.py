"""Pages are for people: tables as wide as a person reads; and those that are generated, short."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshmark.report.markdown import WIDTH

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "reports").glob("*.md"))]
WRITTEN = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), ROOT / "baselines" / "README.md"]
MOST_BYTES = 80_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_is_too_long_for_a_reader(page: Path) -> None:
    assert len(page.read_text().encode()) <= MOST_BYTES


@pytest.mark.parametrize("page", sorted({*PAGES, *WRITTEN}), ids=lambda page: page.name)
def test_no_table_is_too_wide_for_a_reader(page: Path) -> None:
    wide = [line for line in page.read_text().splitlines() if line.lstrip().startswith("|") and len(line) > WIDTH]
    assert not wide, wide[0]
