"""Find tensors inside the values that a model takes and returns: tuples, lists, mappings, dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, cast

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:  # noqa: ANN401
    """Yield every tensor, in a fixed order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_in(inner)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:  # noqa: ANN401
    """Return a copy with every tensor changed. Values that are no containers stay the same objects."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        changed = {key: with_tensors(inner, change) for key, inner in value.items()}
        if type(value) is dict:
            return changed
        found = copy.copy(value)
        for key, inner in changed.items():
            found[key] = inner
        return found
    if isinstance(value, MutableMapping):  # such as Transformers' BatchEncoding
        found = copy.copy(cast(Any, value))
        if hasattr(found, "data") and isinstance(found.data, dict):
            found.data = dict(found.data)
        for key, inner in list(value.items()):
            found[key] = with_tensors(inner, change)
        return found
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(with_tensors(inner, change) for inner in value))
    if isinstance(value, list | tuple):
        return type(value)(with_tensors(inner, change) for inner in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = copy.copy(cast(Any, value))
        for field in dataclasses.fields(value):
            object.__setattr__(found, field.name, with_tensors(getattr(value, field.name), change))
        return found
    return value
