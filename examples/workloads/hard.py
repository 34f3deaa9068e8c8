"""One small model of everything that frameworks get wrong: reuse, ties, chunks, frozen parts, uneven sizes and groups.

`Hard` is what most of them take. `HardScalar` adds a parameter without a dimension, `HardUnused` one that no step uses.
`HardDeep` has layers for four stages of a pipeline, none of which parts what shares a weight.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshmark
from meshmark.spec.optimizer import OptimizerSpec

WIDTH, HEADS, TOKENS, LENGTH = 16, 2, 61, 12


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens)


class Block(nn.Module):
    """Attention by one product that `chunk` splits, and two linear layers that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.second(F.gelu(self.first(x)))


class Head(nn.Module):
    """A last tensor with a number of rows that no two ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = Head()
        self.blocks[1].requires_grad_(False)  # the middle is frozen, and gradients pass through it

    def order(self) -> list[nn.Module]:
        """Return the parts in the order of the forward pass. The first block runs twice."""
        first, middle, last = self.blocks
        return [self.embedding, first, first, middle, last, self.head]

    def forward(self, x: Tensor) -> Tensor:
        for part in self.order():
            x = part(x)
        return x


class Hard(meshmark.Workload):
    optimizer = OptimizerSpec(clip_norm=0.5, warmup_steps=8, no_decay=("*.bias", "*.norm.weight", "*.out.weight"))
    units = ("Block",)

    def model(self) -> nn.Module:
        return Model()

    def batch(self, step: int) -> dict[str, Tensor]:
        """Rows of unequal length, and as many as three micro-batches of four ranks take."""
        drawn = torch.Generator().manual_seed(step)
        window = torch.randint(TOKENS, (12, LENGTH + 1), generator=drawn)
        length = torch.randint(3, LENGTH + 1, (12, 1), generator=drawn)
        return {
            "tokens": window[:, :-1],
            "targets": window[:, 1:].masked_fill(torch.arange(LENGTH) >= length, -100),
        }

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = model(batch["tokens"])
        total = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=-100, reduction="sum")
        return total, (batch["targets"] != -100).sum()

    def layers(self, model: nn.Module) -> list[nn.Module]:
        return model.order()


class ScaledHead(Head):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


class HardScalar(Hard):
    def model(self) -> nn.Module:
        model = Model()
        model.head = ScaledHead()
        return model


class HardUnused(Hard):
    def model(self) -> nn.Module:
        model = Model()
        model.head.spare = nn.Parameter(torch.ones(WIDTH))
        return model


class DeepModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(0, Block())
        self.blocks.append(Block())

    def order(self) -> list[nn.Module]:
        """Return the parts in the order of the forward pass. The second block runs twice."""
        before, twice, middle, last, after = self.blocks
        return [self.embedding, before, twice, twice, middle, last, after, self.head]


class HardDeep(Hard):
    def model(self) -> nn.Module:
        return DeepModel()
