"""Not what was asked for: sharding, states or traffic other than the layout's; what memory and communication judge."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import all_reduce

from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import Engine, Holdings, RankContext
from meshmark.adapters.ddp import DDP
from meshmark.adapters.deepspeed.engine import gradient_tensors
from meshmark.spec.case import Case
from tests.broken.engine import Broken


class ShardingIgnored(Adapter):
    """Plain data parallelism under the name of the sharding plugin."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return DDP().build(case, context)


class StaysOnDevice(Adapter):
    """Offload is asked for, and nothing is offloaded."""

    def zero_options(self, case: Case, context: RankContext) -> dict[str, object]:
        return {}


class BucketsUnreduced(Adapter):
    """FairScale's default: gradients in its buckets are not reduced after the first `zero_grad()`."""

    def build(self, case: Case, context: RankContext) -> Engine:
        from fairscale.nn import data_parallel

        real = data_parallel.ShardedDataParallel
        data_parallel.ShardedDataParallel = lambda *a, **k: real(*a, **{**k, "reduce_buffer_size": 2**23})
        return super().build(case, context)


class KeepsGradients(Broken):
    """A second copy of every gradient, for whatever reason."""

    def holdings(self) -> Holdings:
        held: Holdings = super().holdings()
        self.copies = [grad.clone() for grad in held.gradients]
        return Holdings(
            parameters=held.parameters,
            gradients=[*held.gradients, *self.copies],
            optimizer_states=held.optimizer_states,
        )


class KeepsGradientsUnnamed(Broken):
    """The same copy, of which `holdings()` says nothing."""

    copies: list[Tensor]

    def after_backward(self) -> None:
        self.copies = [grad.clone() for _, grad in self.grads()]


class KeepsMastersUnnamed(Broken):
    """A copy of every weight that nobody reads, from the start, and says nothing."""

    def prepare(self) -> None:
        self.copies = [local.clone() for local in self.locals()]


class CopiesWhileItAccumulates(Broken):
    """A copy of what DeepSpeed accumulates of gradients, from each micro-batch to the next, and none after the last."""

    zero: Any

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        with super().micro_batch(last):  # type: ignore[misc]
            yield
        held = [] if last else gradient_tensors(self.zero, [parameter for _, parameter in self.named()])
        self.copies = [tensor.clone() for tensor in held]


class CacheGrows(Broken):
    """One more tensor a step, each no more than a thousandth of what is held."""

    cache: list[Tensor]

    def prepare(self) -> None:
        self.cache = []

    def after_backward(self) -> None:
        self.cache.append(torch.zeros(512))


class ReducesEveryMicroBatch(Broken):
    """Correct, at four times the traffic."""

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        yield


class ReducesAgain(Broken):
    """Correct, but all gradients travel twice."""

    def after_backward(self) -> None:
        for _, grad in self.grads():
            all_reduce(grad)
            grad.div_(self.context.world_size)


class StaysWhole(Broken):
    """Parameters are not given back between forward and backward."""

    def prepare(self) -> None:
        self.module.set_reshard_after_forward(False)
