"""Numbers of things, as a sentence has them."""

from __future__ import annotations


def pluralize(number: int, one: str, many: str = "") -> str:
    """`1 case`, `2 cases`, `1,000 cases`; `many`: a plural that is not `one` with an s."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
