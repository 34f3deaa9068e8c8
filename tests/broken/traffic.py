"""Right in every number, and sent otherwise than theory says; what communication alone judges."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import Engine, RankContext
from meshmark.spec.case import Case
from tests.broken.engine import ONE_NORM, Broken
from tests.broken.gradients import WrongGroup


class SameBytesInPairs(WrongGroup):
    """The right bytes over two ranks of four; the gradients are wrong too."""


class ReplicasOverTensorRanks(Adapter):
    """Gradients are averaged over the ranks that share a replica, in place of those that hold the same part of it."""

    def build(self, case: Case, context: RankContext) -> Engine:
        from megatron.core import parallel_state

        parallel_state.get_data_parallel_group = parallel_state.get_tensor_model_parallel_group
        return super().build(case, context)  # type: ignore[safe-super]


class NormOverAllRanks(Broken):
    """The right norm of a pipeline, summed over its replicas too and divided by their number: its four bytes go
    through another group."""

    def _clip(self, max_norm: float) -> Tensor:
        parameters = [p for p in self.root().parameters() if p.grad is not None]
        square = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).square()
        dist.all_reduce(square)
        norm = (square / self.case.layout.dp).sqrt()
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm


class TwiceHalfTheBytes(Broken):
    """Every all-reduce in two halves."""

    def prepare(self) -> None:
        whole = dist.all_reduce

        def halves(tensor: Tensor, *arguments: Any, **how: Any) -> Any:  # noqa: ANN401
            if tensor.numel() == 1:
                return whole(tensor, *arguments, **how)
            first, second = tensor.view(-1).chunk(2)
            whole(first, *arguments, **{**how, "async_op": False})
            return whole(second, *arguments, **how)

        dist.all_reduce = halves


class BroadcastsToGather(Broken):
    """Every rank broadcasts its shard, in place of one all-gather of all."""

    def prepare(self) -> None:
        def broadcasts(output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:  # noqa: ANN401
            parts = output_tensor.chunk(dist.get_world_size(group))
            parts[dist.get_rank(group)].copy_(input_tensor)
            works = [dist.broadcast(p, group=group, group_src=r, async_op=async_op) for r, p in enumerate(parts)]
            return works[-1]

        dist.all_gather_single = broadcasts


class ReducesOneAgain(Broken):
    """One small gradient, 128 bytes of it, is averaged a second time, which changes nothing."""

    def after_backward(self) -> None:
        for name, grad in self.grads():
            if name == ONE_NORM:
                dist.all_reduce(grad)
                grad.div_(self.context.world_size)


class ReducesOneScalarMore(Broken):
    """A number that nobody asked for, such as a loss to print."""

    def after_backward(self) -> None:
        dist.all_reduce(torch.zeros(1))
