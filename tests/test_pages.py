"""Pages are for people: tables as wide as a person reads; and those that are generated, short."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos.campaign import Results
from benchmarks.chaos.page import CampaignStart, write_line
from meshmark.environment import Environment
from meshmark.report.table import WIDTH
from studies import pages

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


def test_the_page_of_chaos_is_rendered_of_its_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "RECORDS", tmp_path)
    here = Environment(
        date="2026-01-02 03:04",
        command="",
        commit="0123456789ab",
        machine="a machine",
        system="Linux",
        num_cpus=2,
        memory_bytes=1,
        device="cpu",
        backend="gloo",
        nnodes=1,
    )
    write_line(tmp_path / "chaos-1.jsonl", CampaignStart(seed=7, faults=3, root=True, environment=here))
    write_line(tmp_path / "chaos-1.jsonl", Results(complaints=["left a process"]))
    pages._chaos(tmp_path / "chaos.md")
    text = (tmp_path / "chaos.md").read_text()
    assert "1 complaints" in text and "seed 7, 3 faults" in text and "left a process" in text
