"""Values of command-line options that pytest and `meshmark` share. All raise `InputError`."""

from __future__ import annotations

from meshmark.errors import InputError


def split_values(option: str, text: str) -> list[str]:
    """The values of `a,b`, each once, at least one."""
    values = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not values:
        raise InputError(f"{option} {text!r}: expected at least one value")
    return values


def positive(option: str, text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise InputError(f"{option} {text!r}: expected a whole number of at least 1")
    return int(text)
