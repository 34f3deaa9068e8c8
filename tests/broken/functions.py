"""Functions other than the one asked for: recomputation that computes something else, weights that are not tied.
Mixins over engines."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from meshmark.models.transformer.module import Transformer
from tests.broken.engine import Broken


class Recomputes(Broken):
    """Blocks are computed again of `inputs`."""

    again = False

    def inputs(self, block: nn.Module, x: Tensor) -> Tensor:
        raise NotImplementedError

    def prepare(self) -> None:
        for module in self.modules():
            if isinstance(module, Transformer):
                module.recompute = self.run

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        def compute(x: Tensor) -> Tensor:
            out: Tensor = block(self.inputs(block, x) if self.again else x)
            return out

        contexts = lambda: (contextlib.nullcontext(), self._recomputing())  # noqa: E731
        out: Tensor = checkpoint(compute, x, use_reentrant=False, context_fn=contexts)
        return out

    @contextlib.contextmanager
    def _recomputing(self) -> Iterator[None]:
        self.again = True
        try:
            yield
        finally:  # the checkpoint leaves by an error once it has all that it needs
            self.again = False


class RecomputesRounded(Recomputes):
    """Recompute from inputs that were kept in bf16."""

    def inputs(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + (x.bfloat16().to(x.dtype) - x).detach()


class RecomputesOtherInput(Recomputes):
    """Recompute from a buffer that the next sequence has overwritten."""

    def inputs(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + (x.roll(1, 0) - x).detach()


class RecomputesOtherWeights(Recomputes):
    """With a norm that has been updated meanwhile."""

    def inputs(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + (x * 1e-4).detach()


class DrawsOtherMasks(Broken):
    """Random states are not put back before blocks are computed again."""

    checkpoint = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)

    def prepare(self) -> None:
        for module in self.modules():
            if isinstance(module, Transformer) and module.recompute:
                module.recompute = self.checkpoint


class PutsBackPyTorchsStates(DrawsOtherMasks):
    """And Megatron's own not."""

    checkpoint = functools.partial(checkpoint, use_reentrant=False)


class KeepsActivations(Broken):
    """The option is not heard."""

    def prepare(self) -> None:
        for module in self.modules():
            if isinstance(module, Transformer):
                module.recompute = None


class HeadIsACopy(Broken):
    """The head has the embedding's first values, and nobody trains them."""

    def prepare(self) -> None:
        for head in _heads(self):
            head.forward = functools.partial(F.linear, weight=_whole(head.weight))


class HeadHasNoGradient(Broken):
    """The tied weight is trained as an embedding alone."""

    def prepare(self) -> None:
        for head in _heads(self):
            head.forward = functools.partial(_project, head)


def _heads(engine: Broken) -> Iterator[Any]:
    for module in engine.modules():
        if isinstance(module, Transformer) and module.head is not None:
            yield module.head.output


def _project(head: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, head.weight.detach())


def _whole(parameter: Any) -> Tensor:  # noqa: ANN401
    if isinstance(parameter, DTensor):
        return parameter.detach().full_tensor().clone()
    if not hasattr(parameter, "ds_tensor"):
        return torch.as_tensor(parameter.detach().clone())
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameter):
        return torch.as_tensor(parameter.detach().clone())
