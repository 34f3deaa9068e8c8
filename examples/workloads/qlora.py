"""QLoRA (arXiv:2305.14314): bitsandbytes' 4-bit weights stay, and low-rank adapters beside them are trained.

It takes `pip install bitsandbytes`. The 4-bit weights are buffers: every rank holds them whole.
"""

from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from bitsandbytes import functional, matmul_4bit
from torch import Tensor, nn

import meshmark

TEXT = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
WIDTH, LENGTH, RANK, ALPHA, BLOCK = 64, 24, 4, 8.0, 64


class QuantizedLinear(nn.Module):
    """y = W x + alpha / r B A x, in which W has 4 bits and A and B are trained."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        packed, state = functional.quantize_4bit(
            torch.randn(outputs, inputs) / inputs**0.5, blocksize=BLOCK, quant_type="nf4"
        )
        self.shape = torch.Size([outputs, inputs])
        self.register_buffer("packed", packed)
        self.register_buffer("largest", state.absmax)
        self.register_buffer("codes", state.code)
        self.a, self.b = nn.Linear(inputs, RANK, bias=False), nn.Linear(RANK, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + ALPHA / RANK * self.b(self.a(x))

    def base(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float64:  # the truth, by code of our own
            return F.linear(x, self.dequantized())
        state = functional.QuantState(
            self.largest.float(), self.shape, self.codes.float(), BLOCK, "nf4", dtype=torch.float32
        )
        return matmul_4bit(x, self.packed.t(), state)

    def dequantized(self) -> Tensor:
        """Return W in float64: two codes a byte, each times the largest absolute value of its block."""
        index = torch.stack([self.packed >> 4, self.packed & 15], -1).flatten().long()
        blocks = self.codes.double()[index].view(-1, BLOCK) * self.largest.double()[:, None]
        return blocks.view(self.shape)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = QuantizedLinear(WIDTH, 2 * WIDTH), QuantizedLinear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        past = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return x + self.down(F.gelu(self.up(self.norm(x + past))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 256, bias=False)
        self.requires_grad_(False)
        for block in self.blocks:
            for layer in (block.up, block.down):
                layer.a.requires_grad_(True)
                layer.b.requires_grad_(True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class QLoRA(meshmark.Workload):
    units = ("Block",)

    def model(self) -> nn.Module:
        return Model()

    def batch(self, step: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(step)
        start = torch.randint(len(TEXT) - LENGTH - 1, (8, 1), generator=drawn)
        window = TEXT[start + torch.arange(LENGTH + 1)]
        return {"tokens": window[:, :-1], "targets": window[:, 1:]}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = model(batch["tokens"]).flatten(0, 1)
        total = F.cross_entropy(logits, batch["targets"].flatten(), reduction="sum")
        return total, torch.tensor(float(batch["targets"].numel()))
