"""One forward and backward pass of a user's module in a plain process: what no formula tells of it.

Which parameters have a gradient, which are met again in another module, and how many bytes autograd saves.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from meshmark.reference.build import build_model
from meshmark.reference.data import make_batch
from meshmark.reference.own_model import OwnModel, OwnWorkload
from meshmark.spec.case import Case
from meshmark.spec.own_model import OwnModelConfig

LARGEST = 100_000_000
"""Parameters of the largest model that is run so: a larger one takes minutes, and its activations are not planned."""


@dataclass(frozen=True, kw_only=True)
class Use:
    """What a pass does with the parameters."""

    unused: tuple[str, ...]
    """Trained parameters that have no gradient."""
    gathers: tuple[tuple[int, int], ...]
    """As `ModelConfig.gathers`."""
    indexed: int
    """As `ModelConfig.indexed`."""
    repeats: bool
    """As `OwnModelConfig.repeats`."""
    chooses: bool
    """As `OwnModelConfig.chooses`."""


def use_of(own: OwnWorkload, module: nn.Module, batch: Any) -> Use:  # noqa: ANN401
    """Run one forward and backward pass of a module with its values."""
    reads = {id(p): list[bool]() for p in module.parameters()}
    inside = Counter[int]()

    def enter(part: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        differentiable = any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves((args, kwargs)))
        for parameter in map(id, part.parameters(recurse=False)):
            if not inside[parameter]:  # else a module around it reads it already
                reads[parameter].append(differentiable)
            inside[parameter] += 1

    def leave(part: nn.Module, _args: object, _output: object) -> None:
        inside.subtract(id(p) for p in part.parameters(recurse=False))

    units = {module, *OwnModel.around(module).blocks.values()}
    runs = Counter[int]()
    handles = [unit.register_forward_pre_hook(lambda part, _: runs.update([id(part)])) for unit in units]
    handles += [part.register_forward_pre_hook(enter, with_kwargs=True) for part in module.modules()]
    handles += [part.register_forward_hook(leave) for part in module.modules()]
    wholes = {p.untyped_storage().data_ptr(): p for p in module.parameters()}
    indexed = set[int]()
    linear = torch.nn.functional.linear

    def note(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        whole = wholes.get(address)
        if whole is not None and (tensor.shape, tensor.stride()) != (whole.shape, whole.stride()):
            indexed.add(address)
        return tensor

    def linear_of_a_whole(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute as `linear`. It saves a transposed view, where DeepSpeed's own saves the weight itself."""
        before, found = set(indexed), linear(x, weight, bias)
        if isinstance(weight, nn.Parameter):
            indexed.intersection_update(before)
        return found

    torch.nn.functional.linear = linear_of_a_whole  # type: ignore[assignment]
    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), _Choices() as choices:
            total = own.loss(module, batch)[0]
    finally:
        torch.nn.functional.linear = linear
    total.backward()  # type: ignore[no-untyped-call]
    for handle in handles:
        handle.remove()
    named = OwnModel.around(module).named_parameters()
    more = [(p.numel(), _num_reads(reads[id(p)]) - 2) for p in module.parameters()]
    return Use(
        unused=tuple(name for name, p in named if p.requires_grad and p.grad is None),
        gathers=tuple((elements, times) for elements, times in more if times),
        indexed=sum(wholes[address].numel() for address in indexed),
        repeats=max(runs.values(), default=0) > 1,
        chooses=choices.found,
    )


class _Choices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether an operation picks the largest of floating-point numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(  # noqa: ANN202
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func.overloadpacket in _PICK and args[0].is_floating_point():
            self.found = True
        return func(*args, **(kwargs or {}))


_PICK = (torch.ops.aten.topk, torch.ops.aten.argmax, torch.ops.aten.argmin, torch.ops.aten.sort, torch.ops.aten.argsort)


def _num_reads(calls: list[bool]) -> int:
    """Return how often a parameter is gathered in a forward and a backward pass, by whether the inputs of each call are
    differentiable: after the backward of one that is not, nothing tells a framework to release it."""
    found, there = len(calls), False
    for differentiable in reversed(calls):
        found += not there
        there = not differentiable
    return found


@functools.lru_cache(maxsize=256)
def activation_bytes(case: Case, rank: int, step: int, casts_weights: bool) -> int | None:
    """Return the bytes that autograd saves in the forward pass of the first micro-batch of `rank` at `step`.

    Parameters, buffers and the batch itself are not counted, and what two operations save is counted once.
    `casts_weights`: in mixed precision the weights are cast, in place of autocast. None where it is not known.
    """
    config = case.workload.model
    assert isinstance(config, OwnModelConfig)
    if config.num_parameters > LARGEST:
        return None
    precision, low = case.precision, getattr(torch, case.precision.compute)
    model = build_model(config)
    model.initialize(case.workload.seed)
    if not precision.is_mixed:
        model.to(low)
    part = make_batch(case.workload, step).shard(case.layout.coordinates(rank).dp, case.layout.dp)
    inputs = next(part.micro_batches(case.layout.num_micro_batches)).inputs
    whole = _storages([*model.parameters(), *model.buffers(), *pytree.tree_leaves(part.inputs)])
    saved = weakref.WeakSet[_Saved]()  # what only a part of the graph that is forgotten again has saved, is gone

    def note(tensor: Tensor) -> _Saved:
        saved.add(made := _Saved(tensor))
        return made

    weights = {}
    if precision.is_mixed and casts_weights:
        weights = {name: p.detach().to(low).requires_grad_() for name, p in model.named_parameters()}
        whole |= _storages(weights.values())
    autocast = precision.is_mixed and not casts_weights
    with torch.autograd.graph.saved_tensors_hooks(note, lambda each: each.tensor), torch.autocast("cpu", low, autocast):
        kept = torch.func.functional_call(model, weights, (inputs,))
    found = sum(size for address, size in _storages(each.tensor for each in saved).items() if address not in whole)
    del kept
    return found


class _Saved:
    """A tensor that autograd keeps."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _storages(tensors: Iterable[object]) -> dict[int, int]:
    """Return the address and size of every storage, which the caller must keep alive."""
    storages = [t.untyped_storage() for t in tensors if isinstance(t, Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
