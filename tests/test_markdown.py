"""Texts that would be markup: whatever a record holds stays one cell, one line or one block of a page."""

from __future__ import annotations

import pytest

from meshmark.clip import LIMIT, clip, clip_tail, told
from meshmark.report.markdown import LINE_CHARACTERS, Markup, block, code, details, inline, table
from tests.hostile_texts import HOSTILE, kinds, parse, texts

MEANINGS = {
    "heading_open",
    "link_open",
    "image",
    "html_block",
    "html_inline",
    "hr",
    "bullet_list_open",
    "ordered_list_open",
    "blockquote_open",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_text_in_a_line_means_nothing(text: str) -> None:
    """Nor its beginning, wherever it is cut."""
    for shown in [inline(text), code(text), *(inline(text, n) for n in range(1, 40, 3))]:
        page = f"before {shown} after"
        assert len(page.splitlines()) == 1 and page.isprintable()
        assert not kinds(page) & MEANINGS - {"html_inline"} and not texts(page, "html_inline"), page
        outside = " ".join(texts(page, "text"))
        assert outside.startswith("before ") and outside.endswith(" after"), "a code span that runs on"
        assert "://" not in outside and "www." not in outside, "an address that readers make a link of"
        page.encode()


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_text_in_a_cell_stays_there(text: str) -> None:
    """The others stand where they stood, and the next row is a row."""
    page = table([{"a": "left", text: text, "c": "right"}, {"a": "1", text: "2", "c": "3"}])
    tokens = parse(page)
    assert not kinds(page) & MEANINGS, page
    assert sum(t.type == "tr_open" for t in tokens) == 3
    rows = [tokens[i + 1].content for i, t in enumerate(tokens) if t.type in ("td_open", "th_open")]
    assert len(rows) == 9 and rows[3] == "left" and rows[5:] == ["right", "1", "2", "3"], page


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_text_in_a_block_stays_there(text: str) -> None:
    page = details(text, block(f"{text}\n{text}")) + "\n\nafter"
    assert not kinds(page) & (MEANINGS - {"html_block"}), page
    assert len(texts(page, "fence")) == 1 and texts(page, "inline") == ["after"]
    tags = "".join(texts(page, "html_block")).replace("<details><summary>", "").replace("</summary>", "")
    assert "<" not in tags.replace("</details>", ""), tags
    page.encode()


def test_plain_prose_is_left_as_it_is() -> None:
    for text in (
        "a reason, with `code`; 1 % of 2 (three)",
        "all_reduce of gradients/head.norm.bias",
        "**no**",
        "~~5~~",
    ):
        assert inline(text) == text


def test_markup_on_purpose_is_left_as_it_is() -> None:
    assert "| gap [1](#gaps) |" in table([{"a": Markup("gap [1](#gaps)")}])


def test_a_table_is_as_wide_as_its_widest_cell() -> None:
    rows: list[dict[str, object]] = [{"name": "a", "b": 1}, {"name": "longer", "c": None}]
    assert table(rows).splitlines() == [
        "| name   | b   | c   |",
        "|:-------|:----|:----|",
        "| a      | 1   |     |",
        "| longer |     |     |",
    ]
    assert table([]) == ""


def test_what_is_long_is_cut_and_says_so() -> None:
    text = "a" * 10**6
    assert len(inline(text)) < LINE_CHARACTERS + 50 and "characters more)" in inline(text)
    assert len(block(text)) < LIMIT + 100 and f"{len(text) - LIMIT:,} characters more)" in block(text)
    assert clip("a" * LIMIT) == clip_tail("a" * LIMIT) == "a" * LIMIT
    assert clip_tail(f"begin{text}end").endswith("aend") and clip(f"begin{text}end").startswith("begina")
    assert max(len(clip(text)), len(clip_tail(text))) < LIMIT + 50


def test_an_exception_that_has_no_text_is_named() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no")

    assert told(Mute()) == "Mute: (its text cannot be had: ValueError)"
    assert told(KeyError("k")) == "KeyError: 'k'" and len(told(RuntimeError("x" * 2 * 10**8))) < LIMIT + 50
