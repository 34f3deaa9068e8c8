"""Markdown made of texts that nobody has vouched for: whatever a record says, it stays one cell, one line or one block.

Names and messages come from adapters, frameworks and files of strangers. Plain prose is left as it is; a text that
could make a link, a tag or a column is shown as code, in which nothing has a meaning.
"""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Iterable, Sequence

from meshmark.clip import clip

LINE_CHARACTERS = 2000
"""Of one text within a line; all of it stands in the record."""

_CODE_SPAN = re.compile(r"`[^`]+`")
_MEANS_SOMETHING = re.compile(r"[<>\[\]\\`&|]|://|www\.|@|~~~", re.IGNORECASE)
"""What may begin a link, a tag, an entity, a column or a code span. Emphasis is left alone: it injects nothing."""
_UNSEEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
"""Control characters, those that turn the direction of writing, and halves of a character, which no file can hold."""


class Markup(str):
    """Markdown on purpose, within a line; what it is made of has been through `inline`."""


def inline(text: object, characters: int = LINE_CHARACTERS) -> str:
    """`text` in one line, without any meaning of its own."""
    line = _line(text, characters)
    return _as_code(line) if _MEANS_SOMETHING.search(_CODE_SPAN.sub("", line)) else line


def code(text: object) -> str:
    """`text` as a code span of one line."""
    return _as_code(_line(text, LINE_CHARACTERS))


def _line(text: object, characters: int) -> str:
    return clip(one_line(str(text)[: 2 * characters]), characters)


def one_line(text: str) -> str:
    return " ".join(visible(text).split())


def _as_code(line: str) -> str:
    marks = fence(line, least=1)
    room = " " if "`" in (line[:1], line[-1:]) else ""
    return f"{marks}{room}{line or ' '}{room}{marks}"


def visible(text: str) -> str:
    """`text` with whatever cannot be seen, or written, as its code point."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def fence(text: str, *, least: int = 3) -> str:
    """Marks of a code block, or of a code span, that nothing in `text` closes."""
    return "`" * max(least, 1 + max((len(run) for run in re.findall("`+", text)), default=0))


def block(text: str) -> str:
    """`text` as a block of code, clipped."""
    shown = "\n".join(visible(line) for line in clip(text).splitlines()).strip("\n")
    marks = fence(shown)
    return f"{marks}\n{shown}\n{marks}"


def details(summary: str, body: str) -> str:
    """`body`, markdown, folded away under a line of plain text."""
    return f"<details><summary>{html.escape(_line(summary, LINE_CHARACTERS))}</summary>\n\n{body}\n\n</details>"


def table(rows: Sequence[dict[str, object]]) -> str:
    """A markdown table; what a row lacks stays empty."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if not columns:
        return ""
    titles = [_cell(name) for name in columns]
    cells = [[_cell(row.get(name)) for name in columns] for row in rows]
    widths = [max(len(title) + 2, *(len(row[i]) for row in cells)) for i, title in enumerate(titles)]
    rule = "|".join(f":{'-' * (width + 1)}" for width in widths)
    return "\n".join([_row(titles, widths), f"|{rule}|", *(_row(row, widths) for row in cells)])


def _row(cells: Iterable[str], widths: Iterable[int]) -> str:
    return f"| {' | '.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))} |"


def _cell(value: object) -> str:
    """One line, and no column separator in it."""
    return "" if value is None else _cell_of(value if isinstance(value, str) else str(value))


@functools.lru_cache(maxsize=16_384, typed=True)  # most cells of a long table stand in it many times
def _cell_of(value: str) -> str:
    text = " ".join(value.split()) if isinstance(value, Markup) else inline(value)
    return text.replace("|", "\\|")
