"""Values of command-line options that pytest and `meshmark` share. All raise `InputError`."""

from __future__ import annotations

from meshmark.adapter.registry import known_adapters, outside_name, select
from meshmark.errors import InputError

_DIGITS = 5
"""Of a number of ranks: no cluster has more."""


def split_values(option: str, text: str) -> list[str]:
    """The values of `a,b`, each once, at least one."""
    values = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not values:
        raise InputError(f"{option} {text!r}: expected at least one value")
    return values


def chosen_adapters(patterns: str, outside: list[str]) -> dict[str, str]:
    """Name to target of what `--adapters` (names or patterns) and `--adapter` (targets) ask for; adapters from outside
    alone where there are some and nothing else was named."""
    for target in outside:
        if ":" not in target:
            raise InputError(
                f"--adapter {target!r}: expected FILE.py:CLASS or package.module:Class; --adapters takes names"
            )
    named = split_values("--adapters", patterns)
    if files := [name for name in named if ":" in name]:
        raise InputError(f"--adapters {', '.join(files)}: expected names or patterns; --adapter takes FILE.py:CLASS")
    own = {outside_name(target): target for target in outside}
    clash = sorted(own.keys() & known_adapters().keys()) if own else []
    if clash or len(own) < len(outside):
        raise InputError(f"--adapter: {', '.join(clash or own)} would stand for two adapters; rename the class")
    return own if own and named == ["*"] else select(named, known_adapters()) | own


def positive(option: str, text: str) -> int:
    """A whole number of at least 1, such as a world size: each of its ranks is a process."""
    if not text.isdecimal() or len(text) > _DIGITS or int(text) < 1:
        raise InputError(f"{option} {text[:40]!r}: expected a whole number of at least 1, of at most {_DIGITS} digits")
    return int(text)
