"""Texts that would be markup: whatever a record holds stays one cell, one line or one block of a page."""

from __future__ import annotations

import pytest

from meshmark.report.table import LINE_CHARACTERS, WIDTH, Markup, block, code, details, inline, table, table_of
from meshmark.text import LIMIT, clip, clip_tail, describe_error
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
def test_a_text_that_does_not_fit_a_table_stands_below_it_without_a_meaning(text: str) -> None:
    """Nor in the line above, nor among the keys of further tables."""
    long = 8 * f"{text} " or "x"
    page = table([{text or "a": i, "b": long, "c": f"{text}{i}", "d": long + str(i)} for i in range(2)], keys=3)
    assert not kinds(page) & MEANINGS - {"bullet_list_open"} and kinds(page) >= {"table_open"}, page
    assert len(texts(page, "bullet_list_open")) <= 1
    assert all(len(line) <= WIDTH for line in page.splitlines() if line.startswith("|"))


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

    assert describe_error(Mute()) == "Mute: (its text cannot be had: ValueError)"
    assert (
        describe_error(KeyError("k")) == "KeyError: 'k'"
        and len(describe_error(RuntimeError("x" * 2 * 10**8))) < LIMIT + 50
    )


def lines_of(page: str) -> list[str]:
    assert max(map(len, page.splitlines())) <= WIDTH, page
    return page.splitlines()


def test_no_table_is_wider_than_a_page() -> None:
    """Rows' common values are stated once; the others go on below, behind the same keys."""
    rows: list[dict[str, object]] = [
        {"case": f"case {i}", "of": "mini", **{f"column number {n}": f"{i}.{n}" for n in range(20)}} for i in range(2)
    ]
    found = lines_of(table(rows, keys=2))
    assert found[0] == "In every row: of: mini."
    heads = [line for line in found if line.startswith("| case ") and "column" in line]
    assert len(heads) == 3 and sum(head.count("column") for head in heads) == 20
    assert sum(line.startswith("| case 1 ") for line in found) == 3 and "1.19" in found[-1]


def test_a_table_just_too_wide_loses_its_room_first() -> None:
    rows: list[dict[str, object]] = [{f"{n}{14 * 'x'}": n for n in range(8)}]
    found = lines_of(table(rows))
    assert len(found) == 3 and found[0].count("x |") == 8, "no room behind a title, and no second table"


def test_a_long_text_stands_below_its_table_once() -> None:
    why, other = "because " * 40, "`or`|" * 60
    rows: list[dict[str, object]] = [{"case": i, "why": why if i else other, "n": 5 * i} for i in range(3)]
    found = lines_of("\n".join(table(rows).splitlines()[:5]))
    assert [line.split("|")[2].strip() for line in found[2:]] == ["(1)", "(2)", "(2)"]
    *_, one, two = table(rows).splitlines()
    assert one.startswith("- (1) ``") and two == f"- (2) {why.strip()}", "as a line, in which a bar needs no mark"


def test_keys_that_leave_no_room_are_not_repeated() -> None:
    rows: list[dict[str, object]] = [{f"key {n}": 40 * "k" for n in range(5)} | {"value": 40 * "v"}, {"value": "-"}]
    found = lines_of(table(rows, keys=5))
    assert [line.count("key") for line in found if line.startswith("| key")] == [3, 3, 3, 2]


def test_columns_that_belong_together_stay_together() -> None:
    columns = [
        (name, [f"{name[0]} {i}" for i in range(2)])
        for n in range(5)
        for name in (f"{n} {20 * 'x'}", "computed", "error")
    ]
    heads = [line for line in lines_of(table_of([("of", ["a", "b"]), *columns], together=3)) if "computed" in line]
    assert len(heads) == 2 and all(head.startswith("| of | ") and head.rstrip("| ").endswith("error") for head in heads)
    assert [head.count("computed") for head in heads] == [3, 2]
