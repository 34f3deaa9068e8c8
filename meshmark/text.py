"""Limit the length of texts from frameworks, and write numbers of things."""

from __future__ import annotations

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
    """Return `Type: message`, clipped."""
    return clip(f"{type(error).__name__}: {text_of(error)}")


def text_of(error: BaseException) -> str:
    """Return the error's message, clipped. Never raises, even if the exception's `str` does."""
    try:
        return clip(str(error))
    except BaseException as other:
        return f"(its text cannot be had: {type(other).__name__})"


def pluralize(number: int, one: str, many: str = "") -> str:
    """Return `1 case`, `2 cases` or `1,000 cases`. `many` is a plural other than `one` with an s."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
