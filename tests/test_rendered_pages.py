"""The pages of reports/: rendered from committed records, marked where they are stale, and of one mind."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from meshmark.conformance.clauses import CLAUSES
from meshmark.conformance.finding import ClauseResult
from meshmark.errors import ResultsError
from meshmark.records.record import Record
from meshmark.records.record_file import Reading, line_of, read_records
from meshmark.report.conformance import (
    conformance_page,
    draw_clauses,
    judged,
    keep_conformance,
    read_conformance,
    write_conformance,
)
from meshmark.report.guard import write_page
from meshmark.report.kept_page import SUFFIX
from meshmark.report.memory_by_ranks import BEYOND
from studies import pages
from tests.factories import make_case, make_good
from tests.test_conformance import plain, plain_conformance

SLOW = {"validation", "gpu", "gpu-nccl", "scale"}
"""Pages that are computed, or whose records are large."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in pages.PAGES]
)
def test_the_committed_page_is_what_its_records_say(name: str, tmp_path: Path) -> None:
    pages.renderer(name)(tmp_path / f"{name}.md")
    committed = pages.REPORTS / f"{name}.md"
    fresh = (tmp_path / f"{name}.md").read_text()
    assert pages.unmarked(fresh) == pages.unmarked(committed.read_text()), "run `make pages`"


def test_every_page_is_rendered_from_records() -> None:
    assert {page.stem for page in pages.REPORTS.glob("*.md")} == set(pages.PAGES)
    for name, page in pages.PAGES.items():
        kept = (pages.RECORDS / f"{name}{SUFFIX}").exists()
        assert page.render or (kept and page.anew.startswith("make ")), name
    for name in pages.PAGES:
        assert (pages.REPORTS / f"{name}.md").read_text().count(pages.MARK) == 1, f"{name}: run `make pages`"


def plain_run() -> list[Record]:
    """A run of two adapters through the scenario that most clauses read."""
    return [plain(), plain(conformance=plain_conformance(base=make_case("fsdp2")))]


def test_what_is_kept_of_a_run_renders_the_same_page(tmp_path: Path) -> None:
    reading = Reading(records=plain_run(), complaints=[])
    write_conformance(reading, tmp_path / "page.md", "command")
    kept = judged(reading.records)
    assert kept is not None
    keep_conformance(kept, tmp_path / "kept.clauses.jsonl")
    read = read_conformance(tmp_path / "kept.clauses.jsonl")
    picture = (tmp_path / "page-clauses.svg").read_text()
    (tmp_path / "page-clauses.svg").unlink()
    again = conformance_page(read, "command", picture=draw_clauses(read, tmp_path / "page.md"))
    write_page(tmp_path / "again.md", again)
    assert (tmp_path / "again.md").read_text() == (tmp_path / "page.md").read_text()
    assert (tmp_path / "page-clauses.svg").read_text() == picture and "](page-clauses.svg)" in "".join(again)
    (tmp_path / "kept.clauses.jsonl").write_text("{}\n")
    with pytest.raises(ResultsError, match="no judged clauses"):
        read_conformance(tmp_path / "kept.clauses.jsonl")


def test_packed_records_are_read_as_records_are(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl.gz"
    path.write_bytes(gzip.compress(line_of(make_good())))
    (read,) = read_records(path).records
    assert read == make_good()
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ResultsError, match="no records at"):
        read_records(path)


def test_a_page_is_stale_when_what_it_depends_on_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Chaos` depends on the launch folder alone; the answers of git are given."""
    file = "meshmark/launch/store.py"
    listed = {"aaaaaaaaaaaa": f"{file}\n", "bbbbbbbbbbbb": "", "cccccccccccc": None, "dddddddddddd": f"{file}\n"}
    sources = {
        "HEAD": '"""Holds keys."""\n\n# New words.\nLIMIT = 3\n',
        "aaaaaaaaaaaa": "LIMIT = 2\n",
        "dddddddddddd": '"""Of keys."""\nLIMIT = 3  # old words\n',
    }

    def git(command: str, *arguments: str) -> str | None:
        return sources[arguments[0].partition(":")[0]] if command == "show" else listed[arguments[1]]

    monkeypatch.setattr(pages, "_git", git)
    pages.changed.cache_clear()
    said = {letter: pages.status("chaos", f"at commit {12 * letter}.") for letter in "abcd"}
    pages.changed.cache_clear()
    assert "**Stale**: since then meshmark/launch changed" in said["a"]
    assert "Not stale" in said["b"] and "not known" in said["c"]
    assert "Not stale" in said["d"], "comments and docstrings alone have changed"
    assert "not known" in pages.status("chaos", "no commit")
    text = pages.marked("chaos", "# Chaos\n\nbody\n")
    assert pages.unmarked(text) == "# Chaos\n\nbody\n" and pages.marked("chaos", text) == text


@pytest.mark.parametrize("name", [name for name, page in pages.PAGES.items() if page.render])
def test_no_note_is_cut(name: str) -> None:
    """A table puts long texts below it, where there is room for all of them."""
    page = (pages.REPORTS / f"{name}.md").read_text()
    assert not re.findall(r".*\(\d+ characters more\).*", page)


def test_trainers_by_default_stand_above_the_table() -> None:
    page = (pages.REPORTS / "trainers.md").read_text()
    (said,) = re.findall(r"^By default:\n\n((?:- .*\n)+)\n\| trainer", page, re.MULTILINE)
    assert "transformers.Trainer" in said and "lightning.Trainer" in said


# Two numbers for one thing are one number.


def cells(name: str) -> dict[tuple[str, str], dict[str, str]]:
    """Every cell of a page's tables with the columns adapter and layout, by both, in every table that has them."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    text = Path(name).read_text()
    for table in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
        if head[:2] == ["adapter", "layout"]:
            for row in rows:
                own = found.setdefault((row[0], row[1]), {})
                for column, value in zip(head, row, strict=True):
                    own.setdefault(column, value.partition(" (")[0])
    return found


@pytest.mark.parametrize("one, other", [("report", "which"), ("report", "README"), ("which", "README")])
def test_pages_say_one_number_of_one_thing(one: str, other: str) -> None:
    place = {name: str(pages.REPORTS / f"{name}.md") for name in pages.PAGES} | {
        "README": str(pages.ROOT / "README.md")
    }
    first, second = cells(place[one]), cells(place[other])
    compared = 0
    for case in first.keys() & second.keys():
        for column in ("ranks", "model states / rank", "peak / rank", "sent / rank", "smallest detectable error"):
            if column in first[case] and column in second[case]:
                compared += 1
                assert first[case][column] == second[case][column], (case, column)
    assert compared >= 10, "nothing to compare: were columns renamed?"


def by_ranks(name: str, least_columns: int) -> dict[tuple[str, str], str]:
    """Every cell of a page's tables of memory as ranks are added, by the kind of layout and the number of ranks."""
    found: dict[tuple[str, str], str] = {}
    for table in re.findall(r"(?:^\|.*\|\n)+", (pages.REPORTS / f"{name}.md").read_text(), re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
        if head[0] == "data parallelism of" and len(head) >= least_columns:
            found |= {(f"{row[0]} {row[1]}", head[i]): row[i] for row in rows for i in range(2, len(head))}
    return found


def test_pages_say_one_number_of_memory_by_ranks_or_why_not() -> None:
    """Numbers of both pages are the same; a measured one differs by more than `BEYOND` only where a page says why."""
    first, second = by_ranks("report", 8), by_ranks("scale", 8)
    explained = {row for name in ("report", "scale") for row in _beyond(name)}
    shared = first.keys() & second.keys()
    assert len(shared) >= 40, "nothing to compare: were columns renamed?"
    for kind, world in shared:
        one, other = first[kind, world].split()[0], second[kind, world].split()[0]
        ranks = world.removesuffix(" ranks")
        alike = one == other or ("–" not in one + other and float(one) == pytest.approx(float(other), rel=BEYOND))
        assert alike or (kind, ranks) in explained, (kind, world, one, other)


def _beyond(name: str) -> set[tuple[str, str]]:
    """Return the rows, with a reason, of where what was measured is not the closed form: kind of layout, and ranks."""
    page = (pages.REPORTS / f"{name}.md").read_text()
    found = set()
    for table in re.findall(r"(?:^\|.*\|\n)+", page, re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
        if {"data parallelism of", "measured", "closed form"} <= set(head):
            rows = [dict(zip(head, row, strict=True)) for row in rows]
            found |= {(f"{row['data parallelism of']} {row.get('precision', 'fp32')}", row["ranks"]) for row in rows}
    return found


def test_counts_of_clauses_adapters_and_gaps_agree() -> None:
    """README, the conformance page, its records and the page of gaps count alike. A new clause may not have run yet."""
    kept = pages.clauses_of("conformance").columns
    page = (pages.REPORTS / "conformance.md").read_text()
    holding = sum(f.result is ClauseResult.PASS for column in kept for f in column.findings.values())
    assert f"**{holding} of " in page
    assert {name for column in kept for name in column.findings} <= set(CLAUSES), "a clause that is gone"
    scale = re.search(r"\*\*(\d+ of \d+) cases hold", (pages.REPORTS / "scale.md").read_text())
    assert scale and f"{scale[1]} cases as planned" in (pages.ROOT / "README.md").read_text()
    gaps = (pages.REPORTS / "gaps.md").read_text()
    assert len(re.findall(r"^- \[", gaps, re.MULTILINE)) == len(re.findall(r'^<a id="', gaps, re.MULTILINE))
