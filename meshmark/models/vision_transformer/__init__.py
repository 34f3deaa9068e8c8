"""Vision transformers: dimensions and derived sizes. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from meshmark.errors import InputError
from meshmark.models.config import ImageModelConfig, LayerSizes, MultiHead
from meshmark.models.mixture import MixtureSpec
from meshmark.models.transformer import ModelSpec


@dataclass(frozen=True, kw_only=True)
class VisionSpec(MultiHead, ImageModelConfig):
    """Dimensions of a vision transformer (arXiv:2010.11929) without a class token: it classifies the mean over
    patches.

    Embedded patches are normalised, as in arXiv:2103.00020.

    Raises `InputError` when the dimensions contradict each other.
    """

    kind: ClassVar[str] = "vision-transformer"
    module: ClassVar[str] = "meshmark.models.vision_transformer.module:VisionTransformer"
    patch_size: int
    """Height and width of the square patches that an image is cut into, in pixels."""
    num_layers: int
    """Transformer blocks; the patch embedding and the head are not counted."""
    hidden: int
    num_heads: int
    ffn_hidden: int
    batch_norm: bool = False
    """Normalise embedded patches over the batch (arXiv:1502.03167) instead of each by itself.

    Statistics run over all patches of the images of *one micro-batch of one replica*, as in every framework by
    default. The exact gradient, and the running statistics of each replica, therefore depend on how a layout divides
    the batch.
    """
    dropout: float = 0.0
    """Dropout probability, applied to embedded patches, attention weights and both residual branches."""
    init_std: float = 0.02

    def __post_init__(self) -> None:
        sizes = ("image_size", "patch_size", "num_channels", "num_classes", "num_layers", "hidden", "num_heads")
        for field in (*sizes, "ffn_hidden"):
            if (got := getattr(self, field)) < 1:
                raise InputError(f"model {self.name!r}: {field} is {got}, expected at least 1")
        for whole, part in (("image_size", "patch_size"), ("hidden", "num_heads")):
            if getattr(self, whole) % getattr(self, part):
                raise InputError(
                    f"model {self.name!r}: {whole} {getattr(self, whole)} is not divisible by {part} "
                    f"{getattr(self, part)}"
                )
        if not 0.0 <= self.dropout < 1.0:
            raise InputError(f"model {self.name!r}: dropout is {self.dropout}, expected 0 <= dropout < 1")

    @property
    def seq_len(self) -> int:
        """Patches per image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def patch_values(self) -> int:
        """Values per patch."""
        return self.patch_size**2 * self.num_channels

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the patch projection, the norm's scale and shift, and the learned positions."""
        return (self.patch_values + 2 + self.seq_len) * self.hidden

    @property
    def block_parameters(self) -> int:
        """Parameters of one transformer block: norms (4 h), attention, feed-forward, and all biases but that of the
        keys.
        """
        h, f = self.hidden, self.ffn_hidden
        return 4 * h * h + 3 * h + 2 * h * f + f + h + 4 * h

    @property
    def head_parameters(self) -> int:
        """Parameters of the final norm and of the classifier, which has no bias."""
        return (2 + self.num_classes) * self.hidden

    @cached_property
    def layers(self) -> tuple[LayerSizes, ...]:
        """The embedding, the blocks and the head.

        The embedding has a projection, a norm (two tensors) and positions. A block has norms and linear layers, all
        with biases but that of the keys. The head has a norm and a classifier.
        """
        patches, h = self.seq_len, self.hidden
        embedding = LayerSizes(
            num_parameters=self.embedding_parameters,
            num_tensors=4,
            products=patches * self.patch_values * h,
            outputs=patches * h,
            normed=(h,),
        )
        block = LayerSizes(
            num_parameters=self.block_parameters,
            num_tensors=2 * 2 + 2 * 6 - 1,
            products=patches * (4 * h**2 + 2 * h * self.ffn_hidden + 2 * patches * h),
            outputs=patches * h,
        )
        head = LayerSizes(
            num_parameters=self.head_parameters,
            num_tensors=3,
            products=self.num_classes * h,
            outputs=self.num_classes,
        )
        return (embedding, *[block] * self.num_layers, head)

    @property
    def widest(self) -> int:
        """Largest number of values a layer handles per position: four residual streams, or one row of scores per
        head.
        """
        return max(4 * self.hidden, self.num_heads * self.seq_len)

    def misfits(self, *, tp: int, num_stages: int, cp: int) -> list[str]:
        """Return why the model cannot be split this way, one reason each."""
        problems = []
        if self.num_heads % tp or self.ffn_hidden % tp:
            problems.append(f"tp {tp} does not divide {self.num_heads} heads and ffn_hidden {self.ffn_hidden}")
        if num_stages > self.num_layers:
            problems.append(f"pp {num_stages} stages are more than {self.num_layers} layers")
        if self.seq_len % cp:
            problems.append(f"cp {cp} does not divide {self.seq_len} patches")
        return problems


TransformerSpec = ModelSpec | VisionSpec | MixtureSpec
"""Specs of models that consist of transformer blocks."""

VIT_MINI = VisionSpec(
    name="vit-mini",
    image_size=8,
    patch_size=2,
    num_classes=10,
    num_layers=2,
    hidden=32,
    num_heads=4,
    ffn_hidden=64,
    init_std=0.15,
)
"""A model small enough to train in milliseconds. Its wide initial values keep attention far from uniform."""
DIGITS = {"vit-digits": VIT_MINI, "vit-digits-bn": replace(VIT_MINI, name="vit-mini-bn", batch_norm=True)}
