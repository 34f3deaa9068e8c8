"""Base of all models that are trained here: a list of layers, canonical names, values drawn by name.

Shape suffixes: B rows, T positions, C hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor, nn

from meshmark.reference.initial import initial_value
from meshmark.spec.model_config import ModelConfig

if TYPE_CHECKING:
    from meshmark.reference.data import Batch
    from meshmark.reference.tensor_plan import Style

Recomputer = Callable[[nn.Module, Tensor], Tensor]
"""`torch.utils.checkpoint.checkpoint`, or a framework's own."""


class Model(nn.Module, ABC):
    """All of a model, or some of its layers: 0 is the embedding, 1 to num_layers the blocks, num_layers + 1 the head.

    Names of parameters and buffers are canonical: the same for a part as for the whole.
    Values are not initialised (build under `torch.device("meta")` to allocate none); see `initialize`.
    """

    block: ClassVar[type[nn.Module]]
    """Class of every block."""

    def __init__(self, spec: ModelConfig, layers: Sequence[int] | None = None) -> None:
        super().__init__()
        layers = range(spec.num_layers + 2) if layers is None else layers
        self.spec = spec
        self.skipped_block: int | None = None
        """Left out of the forward pass; set before every step."""
        self.recompute: Recomputer | None = None
        """Runs a block so that its activations are computed again in the backward pass; None keeps them."""
        self.embedding: nn.Module | None = self.make_embedding() if 0 in layers else None
        self.blocks = nn.ModuleDict({str(i - 1): self.make_block(i - 1) for i in layers if 1 <= i <= spec.num_layers})
        self.head: nn.Module | None = self.make_head() if spec.num_layers + 1 in layers else None

    @abstractmethod
    def make_embedding(self) -> nn.Module:
        """First layer: inputs [B, ...] to the residual stream [B, T, C]."""

    @abstractmethod
    def make_block(self, index: int) -> nn.Module:
        """[B, T, C] to [B, T, C]; of a residual network, channels of images to the like."""

    @abstractmethod
    def make_head(self) -> nn.Module:
        """Last layer: the residual stream to logits, one row of them for every target."""

    @classmethod
    def join(cls, chunks: Sequence[Model]) -> Model:
        """Return a model that holds all that some parts hold, for names, optimizer and checkpoints."""
        if len(chunks) == 1:
            return chunks[0]
        joined = cls(chunks[0].spec, layers=())
        joined.embedding, joined.head = chunks[0].embedding, chunks[-1].head
        for chunk in chunks:
            joined.blocks.update(dict(chunk.blocks.items()))
        return joined

    @classmethod
    def skeleton(cls, spec: ModelConfig) -> Model:
        """Return a model whose parameters are replaced by others before it computes; here it has no values at all."""
        with torch.device("meta"):
            return cls(spec)

    @classmethod
    def block_classes_of(cls, spec: ModelConfig) -> set[type[nn.Module]]:
        """Return the classes of the blocks, for frameworks that wrap each module of a class."""
        return {cls.block}

    @classmethod
    def initial_buffers(cls, spec: ModelConfig, seed: int) -> dict[str, Tensor]:
        """Return the values that buffers start with, by canonical name."""
        shapes = {name: tuple(b.shape) for name, b in cls.skeleton(spec).named_buffers()}
        return {
            name: torch.full(shape, initial_buffer(name), dtype=torch.float64 if shape else torch.int64)
            for name, shape in shapes.items()
        }

    def hold(self, batch: Batch) -> None:
        """Keep what stages of a pipeline look up in a step, before it is run; here nothing."""

    def stage_inputs(self, batch: Batch) -> Tensor:
        """Return what the first stage of a pipeline is given, dealt to micro-batches along its first dimension."""
        return cast(Tensor, batch.inputs)

    def stage_loss(self, outputs: Tensor, numbers: Tensor) -> Tensor:
        """Return the sum of the loss of the rows with these numbers, where the model has a loss of its own."""
        raise NotImplementedError

    def tensor_parallel_plan(self) -> Mapping[str, Style]:
        """Return how each module is split, where `ModelConfig.brings_plan`."""
        raise NotImplementedError

    def split_dims(self) -> Mapping[str, int]:
        """Return the dimension along which each parameter that the plan splits is split, by canonical name."""
        raise NotImplementedError

    def block_of(self, name: str) -> str:
        """Return the key of the block that holds the parameter `name`; empty where none does."""
        return name.split(".")[1] if name.startswith("blocks.") else ""

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for index, block in self.blocks.items():
            if int(index) != self.skipped_block:
                x = self.recompute(block, x) if self.recompute and self.training else block(x)
        return x if self.head is None else cast(Tensor, self.head(x))

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Fill every (materialised, unsharded) parameter, and every buffer, with its initial value."""
        for name, parameter in self.named_parameters():
            parameter.copy_(
                initial_value(
                    self.spec, drawn_name(self.spec, name), parameter.shape, seed=seed, device=parameter.device
                )
            )
        self.initialize_buffers()

    @torch.no_grad()
    def initialize_buffers(self) -> None:
        for name, buffer in self.named_buffers():
            buffer.fill_(initial_buffer(name))


def drawn_name(spec: ModelConfig, name: str) -> str:
    """The name under which a parameter's values are drawn: a tied head's copy takes the embedding's."""
    tied = spec.tied_embeddings and name == "head.output.weight"
    return "embedding.tokens.weight" if tied else name


def initial_buffer(name: str) -> float:
    """Every element of the buffer with this canonical name, at the start: a batch norm's running variance is one, its
    mean and its count of batches zero."""
    return 1.0 if name.endswith("running_var") else 0.0
