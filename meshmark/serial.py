"""Convert frozen dataclasses to plain JSON values and back, driven by their type annotations."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any


@typing.runtime_checkable
class Written(typing.Protocol):
    """A value that is written as its `str`, and that may be a key of a dictionary."""

    @classmethod
    def parse(cls, text: str) -> typing.Self:
        """Return the value written as `text`. Raises `ValueError` for other text."""


@typing.runtime_checkable
class Tagged(typing.Protocol):
    """A dataclass with subclasses. The class attribute named by `TAG` is written with the fields and identifies the
    class.
    """

    TAG: typing.ClassVar[str]

    @classmethod
    def class_of(cls, tag: str) -> type:
        """Return the subclass that is written with `tag`. Raises `ValueError` when there is none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Form:
    """How values of one class are written."""

    is_text: bool
    presets: Mapping[str, object]
    fields: tuple[str, ...]
    tag: str | None


@functools.cache
def _form(kind: type) -> _Form:
    """Return the form of a dataclass. Protocols take long to check, and a record of many ranks has many values."""
    return _Form(
        is_text=issubclass(kind, Written),
        presets=getattr(kind, "PRESETS", {}),
        fields=tuple(f.name for f in dataclasses.fields(kind)),
        tag=kind.TAG if hasattr(kind, "TAG") and hasattr(kind, "class_of") else None,
    )


def encode(value: object) -> Any:  # noqa: ANN401
    """Return a JSON-ready copy of `value`.

    A number that is not finite becomes null, because JSON has no other form for it. A value among the `PRESETS` of its
    class becomes the preset's name.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        form = _form(type(value))
        if form.is_text:
            return str(value)
        if form.presets and value in form.presets.values():
            return next(name for name, preset in form.presets.items() if preset == value)
        written = {name: encode(getattr(value, name)) for name in form.fields}
        return {form.tag: str(getattr(value, form.tag)), **written} if form.tag else written
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [encode(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, StrEnum | Path) else value


def decode(kind: Any, value: Any) -> Any:  # noqa: ANN401
    """Return the value of type `kind` (a dataclass, or an annotation made of them) that `encode` wrote as `value`.

    Dataclasses and mappings in `value` may already be decoded. Raises `TypeError` or `ValueError` when `value` has
    another form.
    """
    return _reader(kind)(value)


Reader = Callable[[Any], Any]
"""Function from a JSON value to a value of one type. Annotations are analysed once, because there are many records."""


@functools.cache
def _reader(kind: Any) -> Reader:  # noqa: ANN401
    if dataclasses.is_dataclass(kind):
        return _of_tagged(kind) if hasattr(kind, "TAG") else _of_dataclass(typing.cast(type, kind))
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _of_union(arguments)
    if origin is list:
        return _of_list(kind, arguments[0])
    if origin is tuple:
        return _of_tuple(kind, arguments)
    if origin is dict or origin is Mapping:
        return _of_mapping(kind, *arguments)
    if kind is float:
        return _float
    if kind is int:
        return _int
    if kind is str:
        return _str
    return kind if isinstance(kind, type) else lambda value: value


def _of_tagged(cls: Any) -> Reader:  # noqa: ANN401
    """Return a reader for a class with subclasses, which a tag tells apart."""

    def read(value: Any) -> Any:  # noqa: ANN401
        if isinstance(value, cls):
            return value
        _expect(dict, value, cls.__name__)
        if cls.TAG not in value:
            raise ValueError(f"{cls.__name__} without {cls.TAG}, got the fields {', '.join(value)}")
        fields = {name: each for name, each in value.items() if name != cls.TAG}
        return _reader_of_fields(cls.class_of(str(value[cls.TAG])))(fields)

    return read


@functools.cache
def _reader_of_fields(cls: type) -> Reader:
    return _of_dataclass(cls)


def _of_dataclass(cls: type) -> Reader:
    if issubclass(cls, Written):
        written = functools.lru_cache(maxsize=4096)(cls.parse)

        def parse(value: Any) -> Any:  # noqa: ANN401
            _expect(str, value, cls.__name__)
            return written(value)

        return parse
    presets: dict[str, Any] = getattr(cls, "PRESETS", {})
    hints, fields = typing.get_type_hints(cls), [f.name for f in dataclasses.fields(typing.cast(Any, cls))]
    readers: dict[str, Reader] = {}  # filled by the first value, for a kind may hold itself

    def read(value: Any) -> Any:  # noqa: ANN401
        if type(value) is not dict:
            if isinstance(value, cls):
                return value
            if isinstance(value, str) and value in presets:
                return presets[value]
            _expect(dict, value, cls.__name__)
        if not readers:
            readers.update({name: _reader(hints[name]) for name in fields})
        if not value.keys() <= readers.keys():
            raise ValueError(f"{cls.__name__} has no field {', '.join(sorted(value.keys() - readers.keys()))}")
        return cls(**{name: readers[name](v) for name, v in value.items()})

    return read


def _of_union(kinds: Sequence[Any]) -> Reader:
    plain = [kind for kind in kinds if kind is not type(None)]
    nothing = None if len(plain) < len(kinds) else math.nan
    one = _reader(plain[0]) if len(plain) == 1 else None

    def read(value: Any) -> Any:  # noqa: ANN401
        if value is None:
            return nothing
        if one:
            return one(value)
        return _reader(_form_of(plain, value))(value) if isinstance(value, dict) else value

    return read


def _of_list(kind: Any, inner: Any) -> Reader:  # noqa: ANN401
    """Return a reader for lists. Equal neighbours are decoded once, because ranks often hold and send the same."""
    reader, name, small = _reader(inner), str(kind), inner in (float, int, str)

    def read(value: Any) -> Any:  # noqa: ANN401
        _expect(list, value, name)
        if small or len(value) < 2:
            return list(map(reader, value))
        found = [reader(value[0])]
        for before, after in itertools.pairwise(value):
            found.append(found[-1] if before == after else reader(after))
        return found

    return read


def _of_tuple(kind: Any, inner: Sequence[Any]) -> Reader:  # noqa: ANN401
    readers, name = [_reader(k) for k in inner if k is not Ellipsis], str(kind)

    def read(value: Any) -> Any:  # noqa: ANN401
        _expect(list, value, name)
        if inner[-1] is Ellipsis:
            return tuple(map(readers[0], value))
        return tuple(reader(v) for reader, v in zip(readers, value, strict=True))

    return read


def _of_mapping(kind: Any, key: Any, inner: Any) -> Reader:  # noqa: ANN401
    """Return a reader for mappings. Equal text mappings, such as versions, are shared by thousands of records."""
    of_key, reader, name = _reader(key), _reader(inner), str(kind)
    texts = functools.lru_cache(maxsize=4096)(dict[str, str])

    def read(value: Any) -> Any:  # noqa: ANN401
        if type(value) is not dict:
            if isinstance(value, Mapping):
                return value
            _expect(dict, value, name)
        if key is inner is str:
            return texts(tuple((_str(k), _str(v)) for k, v in value.items()))
        return {of_key(k): reader(v) for k, v in value.items()}

    return read


def _float(value: Any) -> float:  # noqa: ANN401
    if type(value) is float:
        return value
    return math.nan if value is None else float(value)


def _str(value: Any) -> str:  # noqa: ANN401
    """Return an interned string, because thousands of records repeat the same texts."""
    return sys.intern(str(value))


def _int(value: Any) -> int:  # noqa: ANN401
    if type(value) is int:
        return value
    if not isinstance(value, int | str):
        raise TypeError(f"expected a whole number, got {value!r}")
    return int(value)


def _form_of(kinds: Sequence[Any], value: dict[str, object]) -> Any:  # noqa: ANN401
    """Return the dataclass whose fields include those of `value`, or the first one if none does."""
    forms = {kind: {f.name for f in dataclasses.fields(kind)} for kind in kinds if dataclasses.is_dataclass(kind)}
    return next((kind for kind, fields in forms.items() if value.keys() <= fields), kinds[0])


def _expect(form: type, value: object, what: str) -> None:
    """Raise `TypeError` unless `value` is an instance of `form`, from which `what` is read."""
    if not isinstance(value, form):
        raise TypeError(f"{what} from {value!r:.200}: expected a {form.__name__}")
