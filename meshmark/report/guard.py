"""Render records so that one that cannot be shown costs only its own rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from meshmark.errors import ResultsError
from meshmark.report.table import visible
from meshmark.text import clip, describe_error

_COMPLAINT_CHARACTERS = 500
T = TypeVar("T")
R = TypeVar("R")


def rendered(
    page: Callable[[Sequence[T], Sequence[str]], R], items: Sequence[T], name: Callable[[T], str]
) -> tuple[R, list[str]]:
    """Return what `page` makes of all items that can be shown, and complaints about the others.

    `page` also receives the complaints. Raises `ResultsError` if the items can be shown one by one but not together.
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
        raise ResultsError(f"these records cannot be shown together: {describe_error(error)}") from error


def _sorted_out(
    page: Callable[[Sequence[T], Sequence[str]], R], items: Sequence[T], name: Callable[[T], str]
) -> tuple[list[T], list[str]]:
    """Find items that cannot be shown, by bisection, because almost all items are good."""
    try:
        page(items, ())
        return list(items), []
    except Exception as error:
        if len(items) <= 1:
            return [], [
                f"{name(item)} cannot be shown: {clip(describe_error(error), _COMPLAINT_CHARACTERS)}" for item in items
            ]
    middle = len(items) // 2
    (left, one), (right, other) = (_sorted_out(page, part, name) for part in (items[:middle], items[middle:]))
    return left + right, one + other


def write_page(path: Path, parts: Iterable[str]) -> None:
    """Write parts to a page, with an empty line between them.

    Characters that no file can hold are written as code points. Parts are written one by one, because a page of a
    hundred thousand cases is large.
    """
    with path.open("w", encoding="utf-8") as file:
        for number, part in enumerate(parts):
            file.write("\n\n" if number else "")
            file.write(visible(part))
        file.write("\n")
