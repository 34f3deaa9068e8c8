"""The pages of docs/: links that lead somewhere, no page left out of the site, and words that say what the code does.

`make docs` builds the site, with warnings as errors; here is what can be known without."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from meshmark.plan.frameworks import FRAMEWORKS
from meshmark.plan.layout_columns import READ
from meshmark.spec.hardware import GPUS
from meshmark.spec.layout_id import GLOSSARY
from meshmark.suite_file import CASES, GATES, OPTIONS

ROOT = Path(__file__).parent.parent
PAGES = sorted(ROOT.glob("docs/**/*.md"))


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as mkdocs and GitHub make them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http", "mailto:")):
            path, _, anchor = target.partition("#")
            there = page.parent / path if path else page
            assert there.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(there), f"{page.name}: {target}"


def test_every_page_is_in_the_site() -> None:
    said = re.sub(r"!!python/\S+", "''", (ROOT / "mkdocs.yml").read_text())
    listed = set(re.findall(r"[\w-]+\.md", str(yaml.safe_load(said)["nav"])))
    assert listed == {page.name for page in PAGES}


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("glossary.md", GLOSSARY),
        ("planner.md", READ),
        ("planner.md", GPUS),
        ("planner.md", FRAMEWORKS),
        ("ci.md", (*CASES, *OPTIONS, *GATES)),
    ],
    ids=["layouts", "columns", "gpus", "frameworks", "suite files"],
)
def test_a_page_names_all_that_there_is(page: str, words: tuple[str, ...]) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert not [word for word in words if not re.search(rf"[`\s]{re.escape(word)}[`,\s]", text)]
