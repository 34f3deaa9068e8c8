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


@pytest.mark.slow
def test_nothing_on_any_page_of_the_site_is_clipped(browser: Any, tmp_path: Path) -> None:  # noqa: ANN401
    pytest.importorskip("mkdocs", reason="make docs installs it")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    shown = [*sorted(tmp_path.rglob("*.html")), *sorted(tmp_path.glob("reports/*.svg"))]
    assert len(shown) > 50
    problems = []
    for width in WIDTHS:
        page = opened(browser, width)
        for path in shown:
            page.goto(path.as_uri())
            problems += [f"{path.relative_to(tmp_path)} at {width} pixels: {one}" for one in clipped(page)]
        page.close()
    assert not problems, "\n".join(problems)
