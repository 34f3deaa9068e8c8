"""Tensors that engines return: checked by name on arrival, and made plain if they are sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from meshmark.adapter.engine import Engine
from meshmark.adapter.holdings import Holdings
from meshmark.errors import AdapterError
from meshmark.judge.deviation import Tensors
from meshmark.judge.trace import host_copy
from meshmark.reference.build import parameter_shapes
from meshmark.spec.workload import Workload

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_CATEGORIES = ("parameters", "gradients", "optimizer_states", "communication")


@torch.no_grad()
def host_parameters(engine: Engine, workload: Workload) -> Tensors:
    """Return a copy of `engine.parameters()`, a collective call.

    Raises `AdapterError` for anything that is neither a full tensor under its canonical name nor sharded.
    """
    return {name: host_copy(tensor) for name, tensor in full_parameters(engine, workload)[1]}


@torch.no_grad()
def host_gradients(engine: Engine, workload: Workload) -> Tensors:
    """Return a copy of `engine.gradients()`; see `host_parameters`."""
    return {name: host_copy(tensor) for name, tensor in full_gradients(engine, workload)[1]}


NamedTensors = tuple[list[str], Iterator[tuple[str, Tensor]]]
"""Names, and an iterator over names and tensors in order. Each tensor is gathered on demand: a collective call."""


def full_parameters(engine: Engine, workload: Workload) -> NamedTensors:
    """Return the tensors of `engine.parameters()` one after the other. For `AdapterError` see `host_parameters`."""
    return _full("parameters()", engine.parameters(), workload)


def full_gradients(engine: Engine, workload: Workload) -> NamedTensors:
    """Return the tensors of `engine.gradients()` one after the other."""
    return _full("gradients()", engine.gradients(), workload)


@torch.no_grad()
def local_holdings(engine: Engine) -> Holdings:
    """Return `engine.holdings()` with the local part of each sharded tensor.

    Raises `AdapterError` for anything without its own storage.
    """
    held: object = engine.holdings()
    if not isinstance(held, Holdings):
        raise AdapterError(f"holdings() returned {_kind(held)}; expected a Holdings")
    return Holdings(
        **{
            name: [_local(f"holdings(): {name}[{i}]", t) for i, t in enumerate(getattr(held, name))]
            for name in _CATEGORIES
        }
    )


def _full(method: str, told: object, workload: Workload) -> NamedTensors:
    if not isinstance(told, Mapping):
        raise AdapterError(f"{method} returned {_kind(told)}; expected a mapping of canonical names to tensors")
    shapes = parameter_shapes(workload.model)
    for name in told:
        if name not in shapes:
            raise AdapterError(f"{method} returned {name!r}; the canonical names are {', '.join(shapes)}")
    return list(told), _whole(method, told, shapes)


def _whole(
    method: str, told: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    for name in told:
        value = told[name]
        # A DTensor's ranks bring it together here, all in the order in which they return it.
        tensor = value.full_tensor() if _is_sharded(value) else value
        tensor = _check(f"{method}: {name}", tensor, f"a plain float tensor of shape {tuple(shapes[name])}")
        if tensor.shape != shapes[name]:
            raise AdapterError(f"{method}: {name} has shape {tuple(tensor.shape)}; its full shape is {shapes[name]}")
        yield name, tensor
        del value, tensor  # whoever asks for the next has no use for this one


def _local(where: str, value: object) -> Tensor:
    tensor = value.to_local() if _is_sharded(value) else value
    return _check(where, tensor, "a plain tensor, whose storage is counted")


def _is_sharded(value: object) -> TypeGuard[DTensor]:
    from torch.distributed.tensor import DTensor  # a second, which only ranks should take

    return isinstance(value, DTensor)


def _check(where: str, value: object, expected: str) -> Tensor:
    """Return `value` if it is a tensor whose operators and storage PyTorch can access."""
    if not isinstance(value, Tensor) or type(value.detach()) is not Tensor:
        problem = f"is {_kind(value)}"
    elif value.is_meta:
        problem = "is on the meta device, without values"
    elif value.layout is not torch.strided:
        problem = f"is of layout {value.layout}"
    elif "float" not in expected or value.is_floating_point():
        return value
    else:
        problem = f"is of {value.dtype}"
    raise AdapterError(f"{where} {problem}; expected {expected}")


def _kind(value: object) -> str:
    cls = type(value)
    return cls.__name__ if cls.__module__ in ("builtins", "torch") else f"{cls.__module__}.{cls.__name__}"
