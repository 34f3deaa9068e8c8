"""Frozen dataclasses to plain JSON values and back, driven by their type annotations."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from enum import StrEnum
from pathlib import Path
from typing import Any


def encode(value: object) -> Any:  # noqa: ANN401
    """JSON-ready copy of `value`; a number that is not finite becomes null, which every JSON reader takes. One of the
    PRESETS of its class, where that has any, becomes its name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if value in (presets := getattr(value, "PRESETS", {})).values():
            return next(name for name, preset in presets.items() if preset == value)
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [encode(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, StrEnum | Path) else value


@functools.lru_cache(maxsize=64)
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def decode(kind: Any, value: Any) -> Any:  # noqa: ANN401
    """The `kind` (a dataclass, or any annotation made of them) that `encode` made `value` from.

    Raises `TypeError` or `ValueError` when `value` has another form.
    """
    if dataclasses.is_dataclass(kind):
        if isinstance(value, str) and value in (presets := getattr(kind, "PRESETS", {})):
            return presets[value]
        _expect(dict, value, typing.cast(type, kind).__name__)
        hints = _hints(typing.cast(type, kind))
        if unknown := set(value) - set(hints):
            raise ValueError(f"{typing.cast(type, kind).__name__} has no field {', '.join(sorted(unknown))}")
        return typing.cast(Any, kind)(**{name: decode(hints[name], v) for name, v in value.items()})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None if type(None) in arguments else math.nan
        plain = [a for a in arguments if a is not type(None)]
        return decode(_form_of(plain, value), value) if len(plain) == 1 or isinstance(value, dict) else value
    if origin is list or origin is tuple:
        _expect(list, value, str(kind))
    if origin is list:
        return [decode(arguments[0], v) for v in value]
    if origin is tuple:
        inner = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(decode(a, v) for a, v in zip(inner, value, strict=True))
    if origin is dict:
        _expect(dict, value, str(kind))
        return {decode(arguments[0], k): decode(arguments[1], v) for k, v in value.items()}
    if kind is float:
        return math.nan if value is None else float(value)
    if kind is int and not isinstance(value, int | str):
        raise TypeError(f"expected a whole number, got {value!r}")
    return kind(value) if isinstance(kind, type) else value


def _form_of(kinds: list[Any], value: object) -> Any:  # noqa: ANN401
    """Of several dataclasses, the one whose fields `value` has; the first where none does."""
    names = set(value) if isinstance(value, dict) else set()
    forms = {kind: {f.name for f in dataclasses.fields(kind)} for kind in kinds if dataclasses.is_dataclass(kind)}
    return next((kind for kind, fields in forms.items() if names <= fields), kinds[0])


def _expect(form: type, value: object, what: str) -> None:
    """Raise `TypeError` unless `value` has the form that `what` is read from."""
    if not isinstance(value, form):
        raise TypeError(f"{what} from {value!r}: expected a {form.__name__}")
