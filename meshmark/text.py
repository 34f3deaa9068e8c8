"""Bound the size of texts that frameworks print and raise, and write numbers of things."""

from __future__ import annotations

LIMIT = 65_536
"""Characters of a message, of a traceback, of a log."""


def clip(text: str, characters: int = LIMIT) -> str:
    """The beginning of `text`, which says what happened, and how much is left out."""
    return text if len(text) <= characters else f"{text[:characters]} ... ({len(text) - characters:,} characters more)"


def clip_tail(text: str, characters: int = LIMIT) -> str:
    """The end of `text`, where a log says why it ends."""
    left_out = len(text) - characters
    return text if left_out <= 0 else f"({left_out:,} characters before) ... {text[left_out:]}"


def told(error: BaseException) -> str:
    """`Type: what it says`, clipped."""
    return clip(f"{type(error).__name__}: {text_of(error)}")


def text_of(error: BaseException) -> str:
    """What it says, clipped; an exception that cannot say it is no reason for another."""
    try:
        return clip(str(error))
    except BaseException as other:
        return f"(its text cannot be had: {type(other).__name__})"


def pluralize(number: int, one: str, many: str = "") -> str:
    """`1 case`, `2 cases`, `1,000 cases`; `many`: a plural that is not `one` with an s."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
