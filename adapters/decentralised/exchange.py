"""Exchange between neighbours in a graph: one message in each direction, with everything that is mixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshmark.algorithms.decentralised.graph import Graph


class Exchange:
    """Messages of one step, which are under way from its construction on."""

    def __init__(self, graph: Graph, step: int, tensors: Sequence[Tensor]) -> None:
        self.rank, count = dist.get_rank(), dist.get_world_size()
        self.weights = graph.weights(count, step, self.rank)
        self.shapes = [tensor.shape for tensor in tensors]
        self.own = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        self.heard = {j: torch.empty_like(self.own) for j in graph.hears(count, step, self.rank)}
        operations = [dist.P2POp(dist.isend, self.own, peer) for peer in graph.recipients(count, step, self.rank)]
        operations += [dist.P2POp(dist.irecv, there, peer) for peer, there in self.heard.items()]
        self.works = dist.batch_isend_irecv(operations) if operations else []

    def mixed(self, weights: Mapping[int, float] | None = None) -> list[Tensor]:
        """Return the weighted sum of all neighbours' tensors and this rank's own.

        `weights` override those of the graph. Call this once, because the sum is computed in the sent buffer.
        """
        for work in self.works:
            work.wait()
        chosen = weights or self.weights
        self.own.mul_(chosen[self.rank])
        for peer, there in self.heard.items():
            self.own.add_(there, alpha=chosen[peer])
        self.heard = {}
        parts = torch.split(self.own, [shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
