"""A recommender with two towers: users and items meet in a dot product, and clicks are weighed."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Tower(nn.Module):
    def __init__(self, num_ids: int, width: int) -> None:
        super().__init__()
        self.ids = nn.Embedding(num_ids, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.SiLU()) for _ in range(2))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.ids(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x)


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = Tower(100, 32), Tower(200, 32)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.users(user) * self.items(item)).sum(-1)


class TwoTowers:
    def model(self) -> nn.Module:
        return Recommender()

    def batch(self, step: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(step)
        return {
            "user": torch.randint(100, (16,), generator=drawn),
            "item": torch.randint(200, (16,), generator=drawn),
            "clicked": torch.randint(2, (16,), generator=drawn).float(),
            "weight": torch.rand(16, generator=drawn) + 0.5,
        }

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        scores = model(batch["user"], batch["item"])
        each = F.binary_cross_entropy_with_logits(scores, batch["clicked"], reduction="none")
        return (batch["weight"] * each).sum(), batch["weight"].sum()
