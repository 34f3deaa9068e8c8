"""Generated pages are for people: as wide as a person reads, and short."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshmark.report.markdown import WIDTH

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "reports").glob("*.md"))]
MOST_BYTES = 80_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_is_too_wide_or_too_long_for_a_reader(page: Path) -> None:
    text = page.read_text()
    wide = [line for line in text.splitlines() if line.startswith("|") and len(line) > WIDTH]
    assert not wide, wide[0]
    assert len(text.encode()) <= MOST_BYTES
