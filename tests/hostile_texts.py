"""Texts that would be markup, and what a reader of markdown makes of a page."""

from __future__ import annotations

from typing import Any

import pytest

HOSTILE = {
    "heading": "fine\n\n# All cases pass\n\nfine",
    "heading below": "All cases pass\n===",
    "heading after a carriage return": "fine\r# All cases pass",
    "heading after a line separator": "fine\u2028# All cases pass",
    "link": "[a page](https://evil.example)",
    "reference": "[a page]\n\n[a page]: https://evil.example",
    "image": "![seen](https://evil.example/seen.png)",
    "address": "see https://evil.example or www.evil.example, or me@evil.example",
    "address in brackets": "<https://evil.example>",
    "script": "<script>alert(1)</script>",
    "tag that is cut": "x <img src=x onerror=alert(1)",
    "comment": "<!-- the rest of the page",
    "entity": "&lt;script&gt; &#35; &colon;",
    "end of details": "</details></summary><h1>no</h1>",
    "columns": "a | b | **yes** |\n| c | d |",
    "columns behind backslashes": r"a \| b \\| c \\\| d",
    "backslash at the end": "C:\\temp\\",
    "fence": "```\nout\n```\n# out",
    "long fence": "`````` out ``````",
    "fence of tildes": "~~~\n# out\n~~~",
    "span": "`` ` [a](https://evil.example) ` ``",
    "spans that do not match": "`a` `[b](c)``",
    "list": "1. one\n- two\n> three\n\n    four\n---\n***",
    "nothing": "",
    "spaces": " \n\t ",
    "half a character": "c\udcff.txt",
    "control": "\x1b[31mred\x1b[0m \x00 \x85 \u202egnp.exe",
}


def parse(page: str) -> list[Any]:
    """The tokens of a page, as a reader that takes tags and tables would have them."""
    markdown_it = pytest.importorskip("markdown_it", reason="in the dev extra: pip install markdown-it-py")
    parser = markdown_it.MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    tokens: list[Any] = parser.parse(page)
    return tokens


def kinds(page: str) -> set[str]:
    """Return the kinds of all tokens, inner ones included."""
    tokens = parse(page)
    return {token.type for token in tokens} | {inner.type for token in tokens for inner in token.children or ()}


def texts(page: str, kind: str) -> list[str]:
    """Return the contents of all tokens of one kind."""
    return [t.content for token in parse(page) for t in [token, *(token.children or ())] if t.type == kind]
