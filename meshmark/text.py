"""Limit the length of texts from frameworks, and write numbers of things."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path

LIMIT = 65_536
"""Maximum length in characters of a message, a traceback or a log."""


def clip(text: str, characters: int = LIMIT) -> str:
    """Return the beginning of `text`, which says what happened, and how much is left out."""
    return text if len(text) <= characters else f"{text[:characters]} ... ({len(text) - characters:,} characters more)"


def clip_tail(text: str, characters: int = LIMIT) -> str:
    """Return the end of `text`, where a log says why it ends."""
    left_out = len(text) - characters
    return text if left_out <= 0 else f"({left_out:,} characters before) ... {text[left_out:]}"


def describe_error(error: BaseException) -> str:
    """Return `Type: message`, clipped. An error without a message, as of a bare assert, has the line that raised it."""
    message = text_of(error) or _raising_line(error)
    return clip(f"{type(error).__name__}: {message}")


def _raising_line(error: BaseException) -> str:
    """Return the line of source that raised `error`, and its place; empty if it is not known."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not frames[-1].line:
        return ""
    return f"`{frames[-1].line}` ({Path(frames[-1].filename).name}:{frames[-1].lineno})"


def text_of(error: BaseException) -> str:
    """Return the error's message, clipped. Never raises, even if the exception's `str` does."""
    try:
        return clip(str(error))
    except BaseException as other:
        return f"(its text cannot be had: {type(other).__name__})"


def some_of(names: Sequence[str]) -> str:
    """Return the first three names, and how many more there are."""
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


def pluralize(number: int, one: str, many: str = "") -> str:
    """Return `1 case`, `2 cases` or `1,000 cases`. `many` is a plural other than `one` with an s."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
