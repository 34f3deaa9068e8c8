"""Each record is rendered, or named: what no page can show costs its own rows and no other's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from meshmark.errors import ResultsError
from meshmark.report.markdown import visible
from meshmark.text import clip, told

_COMPLAINT_CHARACTERS = 500
T = TypeVar("T")
R = TypeVar("R")


def rendered(
    page: Callable[[Sequence[T], Sequence[str]], R], items: Sequence[T], name: Callable[[T], str]
) -> tuple[R, list[str]]:
    """What `page` makes of all items that it can be made of, given complaints about the others, and these complaints.

    Raises `ResultsError` where nothing can be made even of those that each can be rendered.
    """
    try:
        return page(items, ()), []
    except OSError:  # of the place, not of the records
        raise
    except Exception:
        good, complaints = _sorted_out(page, items, name)
    try:
        return page(good, complaints), complaints
    except OSError:
        raise
    except Exception as error:
        raise ResultsError(f"these records cannot be shown together: {told(error)}") from error


def _sorted_out(
    page: Callable[[Sequence[T], Sequence[str]], R], items: Sequence[T], name: Callable[[T], str]
) -> tuple[list[T], list[str]]:
    """Half by half, for almost all of them are good."""
    try:
        page(items, ())
        return list(items), []
    except Exception as error:
        if len(items) <= 1:
            return [], [f"{name(item)} cannot be shown: {clip(told(error), _COMPLAINT_CHARACTERS)}" for item in items]
    middle = len(items) // 2
    (left, one), (right, other) = (_sorted_out(page, part, name) for part in (items[:middle], items[middle:]))
    return left + right, one + other


def write_page(path: Path, parts: Iterable[str]) -> None:
    """A page that any reader takes, of parts with an empty line between them: what no file can hold stands there as its
    code point. Part by part, for of a hundred thousand cases a page is large."""
    with path.open("w", encoding="utf-8") as file:
        for number, part in enumerate(parts):
            file.write("\n\n" if number else "")
            file.write(visible(part))
        file.write("\n")
