"""PyTorch as it was before a framework was imported.

Frameworks replace functions and methods of PyTorch in the whole process: fused kernels stand in for
`torch.nn.functional.layer_norm`, `LayerNorm.forward` or an optimizer's `step`. The truth is computed in the same
process. It would compute the same wrong function as the run, and a run that is wrong everywhere would be right.

This module remembers PyTorch's functions, classes and hooks when it is imported, which is before any adapter is.
`pristine` puts them back while the truth is computed. It does not see other kernels for PyTorch's operators
(`torch.library.Library.impl`), nor replacements in the library that a model comes from: `passes.judging` does.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from meshmark.models.module import Model
from meshmark.reference import objective

_PREFIXES = ("torch.nn.", "torch.optim.", "torch.linalg", "torch.autograd", "torch.func")
_OWN = (objective, sys.modules[Model.__module__])
_HOOKS = [
    hooks
    for module in map(importlib.import_module, ("torch.nn.modules.module", "torch.optim.optimizer"))
    for name, hooks in vars(module).items()
    if name.startswith("_global_") and isinstance(hooks, dict)
]
"""Hooks of all modules and of all optimizers, in dictionaries that are changed in place."""
_TORCH = str(Path(torch.__file__).parent)
_COMPILER = f"{_TORCH}/_dynamo/"
_MISSING = object()
HOOKS = "hooks of all modules or optimizers"
_KERNELS = set(torch.library._impls)
"""Kernels that Python had registered for operators, such as `aten/gelu/CPU`."""


def _classes(base: type) -> Iterator[type]:
    yield base
    subclasses: list[type] = type.__subclasses__(base)
    for subclass in subclasses:
        yield from _classes(subclass)


def _owners() -> list[ModuleType | type]:
    modules = [module for name, module in sys.modules.items() if name.startswith(_PREFIXES)]
    bases: tuple[type, ...] = (nn.Module, torch.optim.Optimizer, torch.autograd.Function)
    classes = {each for base in bases for each in _classes(base)}
    return [torch, torch.nn, torch.optim, *modules, *_OWN, torch.Tensor, *classes]


def _callables(owner: ModuleType | type) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if _computes(value)}


def _computes(value: object) -> bool:
    return callable(value) or isinstance(value, classmethod | staticmethod | property)


_REMEMBERED: list[tuple[ModuleType | type, dict[str, Any]]] = [(owner, _callables(owner)) for owner in _owners()]


def other_kernels() -> str:
    """Return which kernels or modes a framework has put before PyTorch's operators, in words; empty if none."""
    new = sorted(torch.library._impls - _KERNELS)
    if names := [name for name in new if name.startswith("aten/") and not name.endswith("/Meta")]:
        return f"PyTorch's operators have other kernels there, such as {names[0].removeprefix('aten/')}"
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        return "a mode intercepts PyTorch's functions there"
    return ""


@contextlib.contextmanager
def pristine() -> Iterator[list[str]]:
    """Put PyTorch's own functions, methods and hooks back, and afterwards what was in their place.

    Yields the names of what had been replaced, such as `torch.nn.functional.gelu`.
    """
    changed = [(owner, *each) for owner, remembered in _REMEMBERED for each in _replaced(owner, remembered)]
    names = [f"{_name(owner)}.{name}" for owner, name, _, _ in changed]
    for owner, name, _, before in changed:
        _put(owner, name, before)
    hooks, default = [dict(each) for each in _HOOKS], torch.get_default_dtype()
    if any(hooks):
        names.append(HOOKS)
    if default is not torch.float32:
        names.append(f"the default dtype, by {str(default).removeprefix('torch.')}")
    for held in _HOOKS:
        held.clear()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield sorted(set(names))
    finally:
        torch.set_default_dtype(default)
        for held, own in zip(_HOOKS, hooks, strict=True):
            held.update(own)
        for owner, name, now, _ in changed:
            _put(owner, name, now)


def _replaced(owner: ModuleType | type, remembered: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return names in `owner` with the value of now, and with the remembered one, where the two differ."""
    there = vars(owner)
    found = [
        (name, now, before)
        for name, before in remembered.items()
        if (now := there.get(name, _MISSING)) is not before and not _is_same(now, before)
    ]
    if isinstance(owner, type):  # what it inherited then, and defines now
        added = [(name, value) for name, value in there.items() if name not in remembered and _computes(value)]
        for name, value in added:
            inherited = [vars(base)[name] for base in owner.__mro__[1:] if name in vars(base)]
            if inherited and not name.startswith("__abstract") and not _is_same(value, inherited[0]):
                found.append((name, value, _MISSING))
    return found


def _is_same(now: object, before: object) -> bool:
    """Return whether a value is the remembered one, or what PyTorch itself has put in its place."""
    core = _core(now)
    code = getattr(core, "__code__", None)
    return core is _core(before) or (code is not None and code.co_filename.startswith(_COMPILER))


def _core(value: object) -> object:
    """Return what PyTorch itself has wrapped in `value`, or else `value`.

    PyTorch wraps an optimizer's `step` at its first use, and some functions when it imports its compiler.
    """
    while True:
        code = getattr(value, "__code__", None)
        inner = getattr(value, "_torchdynamo_orig_callable", None) or getattr(value, "__wrapped__", None)
        if code is None or inner is None or not code.co_filename.startswith(_TORCH):
            return value
        value = inner


def _put(owner: ModuleType | type, name: str, value: object) -> None:
    if value is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _name(owner: ModuleType | type) -> str:
    return owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
