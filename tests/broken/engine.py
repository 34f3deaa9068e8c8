"""Base of engines that are broken on purpose: access to any engine's local parameters and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.deepspeed.engine import masters
from meshmark.reference.data import Batch
from meshmark.spec.case import Case

ONE_NORM = "blocks.1.attention_norm.weight"


def average(tensors: Iterable[Tensor]) -> None:
    """Put the mean over all ranks in the place of every tensor."""
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor.div_(dist.get_world_size())


class Broken(Engine):
    """Comes before an engine's class in the order of resolution."""

    case: Case
    context: RankContext
    optimizer: Any
    batch: Batch
    steps: int
    """Done so far."""
    total_weight: float
    tied_group: Any

    def prepare(self) -> None:
        """Once, after the engine is built."""

    def after_backward(self) -> None:
        """Once a step, when gradients are reduced."""

    def root(self) -> nn.Module:
        found: nn.Module = getattr(self, "model", None) or self.module
        return found

    def modules(self) -> Iterable[nn.Module]:
        return self.root().modules()

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by canonical name, flat ones of FairScale by theirs."""
        names = self.named_parameters() if hasattr(self, "named_parameters") else self.root().named_parameters()
        yield from names

    def locals(self) -> list[Tensor]:
        """Return this rank's part of every parameter; of every master under DeepSpeed."""
        if hasattr(self, "zero"):
            return [master.detach() for master in masters(self.zero)]
        return [_local(p.detach()) for _, p in self.named()]

    def inner_optimizer(self) -> Any:  # noqa: ANN401
        """PyTorch's own, inside whatever wraps it."""
        if hasattr(self, "zero"):
            return self.zero.optimizer
        inner = getattr(self.optimizer, "optim", self.optimizer)  # FairScale's OSS
        return inner.optimizer if type(inner).__module__.startswith("accelerate") else inner

    def moments(self, *names: str) -> list[Tensor]:
        """This rank's part of AdamW's moments, or of those with these names."""
        states = self.inner_optimizer().state.values()
        return [_local(state[n]) for state in states for n in names or ("exp_avg", "exp_avg_sq") if n in state]

    def grads(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of every gradient."""
        for name, parameter in self.named():
            if parameter.grad is not None:
                yield name, _local(parameter.grad)

    @torch.no_grad()
    def put(self, values: Iterable[Tensor]) -> None:
        copy(self.locals(), values)


@torch.no_grad()
def copy(tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def breaks(engine: Any, mixin: type[Broken]) -> Any:  # noqa: ANN401
    """`engine`, with `mixin` in front of its class."""

    class Instrumented(mixin, type(engine)):
        def backward(self, batch: Batch) -> Tensor:
            self.batch = batch
            loss: Tensor = super().backward(batch)
            with torch.no_grad():
                self.after_backward()
            self.steps += 1
            return loss

    engine.__class__ = Instrumented
    engine.steps = 0
    engine.prepare()
    return engine
