"""A language model of gated causal convolutions (Dauphin et al., arXiv:1612.08083), over the bytes of Python's docs."""

from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshmark

TEXT = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))


class GatedBlock(nn.Module):
    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.pad = kernel - 1
        self.mix = nn.Conv1d(width, 2 * width, kernel)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(self.norm(x).transpose(1, 2), (self.pad, 0))
        return x + F.glu(self.mix(padded), dim=1).transpose(1, 2)


class GatedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, 32)
        self.blocks = nn.ModuleList(GatedBlock(32, kernel=4) for _ in range(3))
        self.head = nn.Linear(32, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class GatedConvolution(meshmark.Workload):
    def model(self) -> nn.Module:
        return GatedLanguageModel()

    def batch(self, step: int) -> dict[str, Tensor]:
        """Rows of unequal length, so that a mean of means is not the mean."""
        drawn = torch.Generator().manual_seed(step)
        start = torch.randint(len(TEXT) - 33, (8, 1), generator=drawn)
        length = torch.randint(8, 33, (8, 1), generator=drawn)
        window = TEXT[start + torch.arange(33)]
        targets = window[:, 1:].masked_fill(torch.arange(32) >= length, -100)
        return {"tokens": window[:, :-1], "targets": targets}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = model(batch["tokens"])
        total = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=-100, reduction="sum")
        return total, (batch["targets"] != -100).sum()

    def layers(self, model: nn.Module) -> list[nn.Module]:
        """Return the layers that a pipeline may be cut between: each takes the output of the one before it."""
        return [model.tokens, *model.blocks, model.head]
