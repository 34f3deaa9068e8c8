"""The site that `make docs` builds, in a browser at three widths: nothing is clipped, and every table can be read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import WIDTHS, chromium, clipped

ROOT = Path(__file__).parent.parent
CELLS = "<tr><td>name</td><td>a cell of a table that is far too wide for any phone</td><td>last</td></tr>"
TABLE = f"<table style='white-space: nowrap; width: 900px'>{CELLS}</table>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


def opened(browser: Any, width: int) -> Any:  # noqa: ANN401
    """Return an empty page of a width, without any network."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.route("**/*", lambda one: one.continue_() if one.request.url.startswith("file:") else one.abort())
    return page


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (TABLE, "runs off the edge"),
        (f"<div style='overflow-x: hidden'>{TABLE}</div>", "runs off the edge"),
        (f"<div style='overflow-x: auto; width: 900px'>{TABLE}</div>", "runs off the edge"),
        (f"<div style='overflow-x: clip'><div style='overflow-x: auto; width: 900px'>{TABLE}</div></div>", "runs off"),
        (f"<div style='overflow-x: auto'>{TABLE}</div>", ""),
        ("<p style='width: 900px'>text</p>", "the page scrolls sideways"),
        ("<svg viewBox='0 0 90 20'><text x='80' y='15'>14k tokens</text></svg>", "is outside its picture"),
        ("<svg viewBox='0 0 90 20'><text x='5' y='15'>14k</text></svg>", ""),
    ],
    ids=["bare", "hidden", "wide scroller", "clipped scroller", "scrolls", "wide text", "cut label", "whole label"],
)
def test_what_is_clipped_is_found(browser: Any, tmp_path: Path, body: str, found: str) -> None:  # noqa: ANN401
    """The test below stands on this."""
    (tmp_path / "page.html").write_text(f"<!doctype html><body style='margin: 8px'>{body}")
    page = opened(browser, 400)
    page.goto((tmp_path / "page.html").as_uri())
    said = clipped(page)
    assert (not said) if not found else any(found in one for one in said), said


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site. Returns its folder."""
    pytest.importorskip("mkdocs", reason="make docs installs it")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return folder


@pytest.mark.slow
def test_nothing_on_any_page_of_the_site_is_clipped(browser: Any, site: Path) -> None:  # noqa: ANN401
    shown = [*sorted(site.rglob("*.html")), *sorted(site.glob("reports/*.svg"))]
    assert len(shown) > 50
    problems = []
    for width in WIDTHS:
        page = opened(browser, width)
        for path in shown:
            page.goto(path.as_uri())
            problems += [f"{path.relative_to(site)} at {width} pixels: {one}" for one in clipped(page)]
        page.close()
    assert not problems, "\n".join(problems)


@pytest.mark.slow
def test_the_site_is_searched_without_a_server(browser: Any, site: Path) -> None:  # noqa: ANN401
    page = opened(browser, 1280)
    page.goto((site / "index.html").as_uri())
    page.click(".md-search__input")
    page.keyboard.type("resume exactly")
    found = page.wait_for_selector(".md-search-result__item a")
    assert "Which framework?" in found.inner_text()
    found.click()
    page.wait_for_url("**/reports/which.html*")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("link", "answer"),
    [
        ("Which framework?", "Train llama-7b on 8 a100-40"),
        ("Which framework?", "Resume exactly from a checkpoint"),
        ("Which framework?", "Change the least of a plain PyTorch loop"),
        ("Which framework?", "Train in bf16"),
        ("Memory as ranks are added", "deepspeed ZeRO-1"),
        ("all defects", "defects in"),
    ],
)
def test_one_link_of_the_first_page_leads_to_an_answer(browser: Any, site: Path, link: str, answer: str) -> None:  # noqa: ANN401
    """The answer is in view, without scrolling, in a window of 1280 x 900."""
    page = opened(browser, 1280)
    page.goto((site / "index.html").as_uri())
    page.click(f"article a:has-text('{link}')")
    page.wait_for_load_state()
    at = page.locator(f"article :is(li, td, p):has-text('{answer}')").first.bounding_box()
    assert at and 0 < at["y"] < 900 - at["height"], at
