"""Engines whose replicas tell a server, which is the first of them, and are told by it; after the equations of
`meshmark.algorithms.compressed.transition`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from meshmark.adapters.compressed.codecs import codec_of
from meshmark.adapters.compressed.engines import CompressedEngine
from meshmark.adapters.compressed.exchange import Gathered, Messages

SERVER = 0
"""Rank."""
Tensors = dict[str, Tensor]


class DoubleSqueezeEngine(CompressedEngine):
    """`kept["left"]`: what was not sent; `kept["left of server"]`, on the server alone: what it did not."""

    exchange: Gathered

    def make_exchange(self) -> Gathered:
        compressor = self.algorithm.compressor
        assert compressor is not None
        return Gathered(codec_of(compressor), self.case.workload.seed)

    def direction(self, own: Tensors) -> Tensors:
        message = self.compressed("left", own)
        every = [torch.empty_like(message) for _ in range(dist.get_world_size())] if self.serves else None
        dist.gather(message, every, SERVER)
        if every is not None:
            message = self.served(Messages(self.exchange.codec, every, own))
        dist.broadcast(message, SERVER)
        return self.read(message, own)

    @property
    def serves(self) -> bool:
        return dist.get_rank() == SERVER

    def served(self, every: Messages) -> Tensor:
        """The server's message to all."""
        return self.compressed("left of server", every.mean())

    def compressed(self, left: str, wanted: Tensors) -> Tensor:
        """A message of `wanted`, which becomes what is left of it and of what was left before."""
        if left in self.kept:
            torch._foreach_add_(list(wanted.values()), list(self.kept.pop(left).values()))
        message = self.exchange.message(wanted, self.steps_done)
        torch._foreach_sub_(list(wanted.values()), list(self.read(message, wanted).values()))
        self.kept[left] = wanted
        return message

    def read(self, message: Tensor, like: Tensors) -> Tensors:
        return dict(Messages(self.exchange.codec, [message], like).read(message))
