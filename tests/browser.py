"""Defects of a page at one width in a browser: tables off the edge, sideways scrolling, labels cut off."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

WIDTHS = (400, 1280, 1920)
"""Widths of a phone, a laptop and a desktop, in CSS pixels."""

CLIPPED = """() => {
  const edge = document.documentElement.clientWidth, found = [];
  const shown = (one) => one.checkVisibility() && one.getBoundingClientRect().width > 0;
  const called = (one) => `${one.tagName.toLowerCase()} «${one.textContent.trim().replace(/\\s+/g, " ").slice(0, 60)}»`;
  const inside = (one) => { const at = one.getBoundingClientRect(); return at.left >= -1 && at.right <= edge + 1; };

  // Whether a reader can bring both ends of `one` into view by scrolling it, or something around it, sideways.
  function reached(one) {
    if (inside(one) && one.scrollWidth <= one.clientWidth) return true;
    const last = one.tagName === "TABLE" ? one.rows[0].lastElementChild : one;
    for (let box = one; box && box !== document.body; box = box.parentElement) {
      if (!["auto", "scroll"].includes(getComputedStyle(box).overflowX) || !inside(box)) continue;
      const before = box.scrollLeft, frame = box.getBoundingClientRect();
      box.scrollLeft = 0;
      const left = one.getBoundingClientRect().left >= frame.left - 1;
      box.scrollLeft = box.scrollWidth;
      const right = last.getBoundingClientRect().right <= frame.right + 1, moved = box.scrollLeft > 0;
      box.scrollLeft = before;
      if (left && right && moved) return true;
    }
    return inside(one) && inside(last);
  }

  for (const table of document.querySelectorAll("table")) {
    if (shown(table) && !reached(table)) found.push(`${called(table)} runs off the edge`);
  }
  for (const image of document.querySelectorAll("img")) {
    if (shown(image) && !reached(image)) found.push(`the picture ${image.getAttribute("src")} runs off the edge`);
  }
  scrollTo(10000, scrollY);
  if (scrollX > 0 && document.body) found.push(`the page scrolls sideways by ${scrollX} pixels`);
  scrollTo(0, scrollY);
  for (const text of document.querySelectorAll("svg text")) {
    const canvas = text.ownerSVGElement.getBoundingClientRect(), at = text.getBoundingClientRect();
    const fits = at.left >= canvas.left - 1 && at.right <= canvas.right + 1 && at.top >= canvas.top - 1
      && at.bottom <= canvas.bottom + 1;
    if (text.textContent.trim() && shown(text) && !fits) found.push(`${called(text)} is outside its picture`);
  }
  return found;
}"""
"""JavaScript that returns what no reader can see of the page that is open."""


def clipped(page: Any) -> list[str]:  # noqa: ANN401
    """Return what a reader cannot see of the page that is open, in words. Empty if nothing is clipped."""
    found: list[str] = page.evaluate(CLIPPED)
    return found


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Start Debian's Chromium. Skips the test where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="in the dev extra: pip install playwright")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with playwright.sync_playwright() as running:
        with contextlib.closing(running.chromium.launch(executable_path=program, args=quiet)) as opened:
            yield opened
