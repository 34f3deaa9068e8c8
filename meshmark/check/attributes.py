"""Plain attributes of modules, such as a counter, a factor that a script sets anew, or a state that a call leaves.

They are neither parameters nor buffers, and a model computes with them nevertheless.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshmark.check.pieces import bare_modules
from meshmark.check.tree import with_tensors

MOST_ELEMENTS = 1 << 16
"""Number of elements from which on a tensor is not recorded."""
_MOST_ENTRIES = 64
"""Number of entries from which on a list or a dictionary is not recorded."""
_OF_MODULES = frozenset(vars(nn.Module()))

Path = tuple[str, ...]
"""A module's name, its attribute, and for an object such as a configuration the attribute of that."""


def plain_attributes(model: nn.Module) -> dict[Path, Any]:
    """Return numbers, texts and small tensors that modules hold, also in lists, dictionaries and plain objects.

    A tensor that requires a gradient is left out: it belongs to the call that has made it, or is a view of a parameter.
    """
    found: dict[Path, Any] = {}
    seen = set[int]()
    for prefix, module in bare_modules(model):
        for name, value in vars(module).items():
            if name in _OF_MODULES:
                continue
            if _is_plain(value):
                found[prefix, name] = value
            elif not name.startswith("_") and id(value) not in seen:
                seen.add(id(value))
                found |= {(prefix, name, inner): x for inner, x in _inside(value) if _is_plain(x)}
    return found


def kept(value: Any) -> Any:  # noqa: ANN401
    """Return a copy that what happens later does not change."""
    return with_tensors(value, lambda tensor: tensor.detach().cpu().clone())


def is_same(own: Any, other: Any) -> bool:  # noqa: ANN401
    """Return whether two values of one attribute are the same."""
    if type(own) is not type(other):
        return False
    if isinstance(own, Tensor):
        return own.shape == other.shape and own.dtype == other.dtype and torch.equal(own.cpu(), other.cpu())
    if isinstance(own, dict):
        return own.keys() == other.keys() and all(is_same(x, other[key]) for key, x in own.items())
    if isinstance(own, list | tuple):
        return len(own) == len(other) and all(map(is_same, own, other))
    return bool(own == other)


def set_attributes(model: nn.Module, values: Mapping[Path, Any], dtype: torch.dtype | None) -> None:
    """Give attributes back their recorded values. Tensors of float32 get `dtype`, if there is one."""

    def copied(tensor: Tensor) -> Tensor:
        return tensor.to(dtype, copy=True) if dtype is not None and tensor.dtype is torch.float32 else tensor.clone()

    modules = dict(bare_modules(model))
    for (prefix, *names), value in values.items():
        holder: Any = modules.get(prefix)
        for name in names[:-1]:
            holder = vars(holder).get(name) if holder is not None else None
        if holder is not None:
            vars(holder)[names[-1]] = with_tensors(value, copied)


def _is_plain(value: Any) -> bool:  # noqa: ANN401
    """Return whether a value is one that can be recorded."""
    if type(value) is Tensor:
        return not value.requires_grad and value.layout is torch.strided and value.numel() < MOST_ELEMENTS
    if type(value) in (list, tuple):
        return len(value) < _MOST_ENTRIES and all(map(_is_plain, value))
    if type(value) is dict:
        return len(value) < _MOST_ENTRIES and all(map(_is_plain, value.values()))
    return value is None or type(value) in (bool, int, float, complex, str)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """Yield the attributes of an object of a class of the script's or a library's own, such as a configuration."""
    is_module = isinstance(value, nn.Module | Tensor | type) or callable(value)
    if not is_module and hasattr(value, "__dict__") and not type(value).__module__.startswith("torch"):
        yield from vars(value).items()
