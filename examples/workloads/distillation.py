"""Distillation (arXiv:1503.02531): a small language model learns a larger one's probabilities, and the text."""

from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshmark

TEXT = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
LENGTH, TEMPERATURE, SHARE = 24, 2.0, 0.7
"""Tokens of a row, temperature of the softened probabilities, and their share in the loss."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Conv1d(width, width, 4)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(F.pad(self.norm(x).transpose(1, 2), (3, 0))).transpose(1, 2)
        return x + self.down(F.gelu(self.up(x)))


class LanguageModel(nn.Module):
    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class StudentAndTeacher(nn.Module):
    """The teacher is frozen: it is sharded like the rest, has no gradient, and must not move."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = LanguageModel(16, 2), LanguageModel(32, 3)
        self.teacher.requires_grad_(False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            taught = self.teacher(tokens)
        return self.student(tokens), taught


class Distillation(meshmark.Workload):
    units = ("Block",)

    def model(self) -> nn.Module:
        return StudentAndTeacher()

    def batch(self, step: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(step)
        start = torch.randint(len(TEXT) - LENGTH - 1, (8, 1), generator=drawn)
        window = TEXT[start + torch.arange(LENGTH + 1)]
        return {"tokens": window[:, :-1], "targets": window[:, 1:]}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        student, teacher = (logits.flatten(0, 1) for logits in model(batch["tokens"]))
        total = distillation_loss(student, teacher, batch["targets"].flatten())
        return total, torch.tensor(float(batch["targets"].numel()))


def distillation_loss(student: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
    """Return the summed loss at logits of shape (tokens, vocabulary)."""
    hard = F.cross_entropy(student, targets, reduction="sum")
    soft = F.kl_div(
        F.log_softmax(student / TEMPERATURE, -1),
        F.log_softmax(teacher / TEMPERATURE, -1),
        reduction="sum",
        log_target=True,
    )
    # Gradients of softened probabilities shrink with the square of the temperature.
    return (1 - SHARE) * hard + SHARE * TEMPERATURE**2 * soft
