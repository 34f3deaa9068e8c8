"""A graph network on molecules of unequal size: rows are graphs, padded, with masks for the nodes that are there."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshmark

MOST = 9
"""Nodes of the largest graph."""


class MessagePassing(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(width, width), nn.GRUCell(width, width)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        heard = edges @ self.message(nodes)
        return self.update(heard.flatten(0, 1), nodes.flatten(0, 1)).view_as(nodes)


class GraphNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(5, 24)
        self.rounds = nn.ModuleList(MessagePassing(24) for _ in range(3))
        self.readout = nn.Linear(24, 1)

    def forward(self, kinds: Tensor, edges: Tensor, there: Tensor) -> Tensor:
        nodes = self.kinds(kinds)
        for step in self.rounds:
            nodes = step(nodes, edges)
        return (self.readout(nodes).squeeze(-1) * there).sum(1)


class Molecules(meshmark.Workload):
    def model(self) -> nn.Module:
        return GraphNetwork()

    def batch(self, step: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(step)
        size = torch.randint(3, MOST + 1, (16, 1), generator=drawn)
        there = (torch.arange(MOST) < size).float()
        bonds = torch.rand(16, MOST, MOST, generator=drawn).round()
        bonds = (bonds + bonds.transpose(1, 2)).clamp(max=1) * there[:, :, None] * there[:, None, :]
        kinds = torch.randint(5, (16, MOST), generator=drawn)
        return {"kinds": kinds, "edges": bonds / MOST, "there": there, "energy": (kinds * there).sum(1)}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        found = model(batch["kinds"], batch["edges"], batch["there"])
        return F.mse_loss(found, batch["energy"], reduction="sum"), batch["there"].sum()
