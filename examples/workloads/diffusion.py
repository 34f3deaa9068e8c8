"""A diffusion transformer (DiT, arXiv:2212.09748, in-context conditioning) that removes noise from images of waves."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshmark

SIDE, PATCH, WIDTH, HEADS = 8, 2, 32, 4
NUM_PATCHES = (SIDE // PATCH) ** 2


class Embedding(nn.Module):
    """Patches, behind a token for the time and one for the class."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.time, self.label = nn.Linear(16, WIDTH), nn.Embedding(4, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(NUM_PATCHES, WIDTH))
        self.register_buffer("frequencies", torch.exp(-math.log(1e4) * torch.arange(8) / 8), persistent=False)

    def forward(self, noisy: Tensor, time: Tensor, label: Tensor) -> Tensor:
        angles = time[:, None] * self.frequencies
        condition = torch.stack([self.time(torch.cat([angles.sin(), angles.cos()], 1)), self.label(label)], 1)
        return torch.cat([condition, self.patches(noisy).flatten(2).transpose(1, 2) + self.positions], 1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (part(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, PATCH**2)

    def forward(self, x: Tensor) -> Tensor:
        return F.fold(self.output(self.norm(x[:, 2:])).transpose(1, 2), SIDE, PATCH, stride=PATCH)


class DiT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = Embedding(), Head()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, noisy: Tensor, time: Tensor, label: Tensor) -> Tensor:
        x = self.embedding(noisy, time, label)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Diffusion(meshmark.Workload):
    def model(self) -> nn.Module:
        return DiT()

    def batch(self, step: int) -> dict[str, Tensor]:
        """Noise and times are drawn here: a loss that draws them differs from call to call."""
        drawn = torch.Generator().manual_seed(step)
        label, phase = torch.randint(4, (16,), generator=drawn), torch.rand(16, 1, generator=drawn)
        wave = (torch.arange(SIDE) * (label[:, None] + 1) / SIDE + phase).mul(math.tau).sin()
        time, noise = torch.rand(16, generator=drawn), torch.randn(16, 1, SIDE, SIDE, generator=drawn)
        images = (wave[:, :, None] * wave[:, None, :])[:, None]
        mixed = time.view(-1, 1, 1, 1) * noise + (1 - time.view(-1, 1, 1, 1)) * images
        return {"noisy": mixed, "time": time, "label": label, "target": noise - images}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        found = model(batch["noisy"], batch["time"], batch["label"])
        return F.mse_loss(found, batch["target"], reduction="sum"), torch.tensor(float(found.numel()))

    def layers(self, model: nn.Module) -> list[nn.Module]:
        return [model.embedding, *model.blocks, model.head]

    def tensor_parallel_plan(self) -> dict[str, str]:
        columns, rows = ("q", "k", "v", "up"), ("out", "down")
        return {f"blocks.*.{name}": "colwise" for name in columns} | {f"blocks.*.{name}": "rowwise" for name in rows}
