"""What models of images that are made of convolutions have in common: layers of unequal size, no tokens. No torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from meshmark.errors import InputError
from meshmark.spec.model_config import ImageModelConfig, LayerSizes


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """One of them, without a bias."""

    inner: int
    """Channels that come in."""
    outer: int
    """That go out."""
    kernel: int
    """Weights of one channel that comes in for one that goes out."""
    pixels: int
    """Of an image as it goes out."""
    groups: int = 1
    """Parts that channels are in, each of which sees itself alone; as many as channels in a depthwise one."""
    normed: bool = True
    """Whether a norm follows, with a scale and a shift a channel."""

    @property
    def weights(self) -> int:
        return self.kernel * self.inner * self.outer // self.groups

    @property
    def num_parameters(self) -> int:
        return self.weights + 2 * self.outer * self.normed

    @property
    def num_tensors(self) -> int:
        return 1 + 2 * self.normed

    @property
    def products(self) -> int:
        """Every weight with every pixel that goes out once."""
        return self.weights * self.pixels


def layer_of(convolutions: Sequence[Convolution], outputs: int) -> LayerSizes:
    """A layer of nothing but these."""
    return LayerSizes(
        num_parameters=sum(c.num_parameters for c in convolutions),
        num_tensors=sum(c.num_tensors for c in convolutions),
        products=sum(c.products for c in convolutions),
        outputs=outputs,
        normed=tuple(c.outer for c in convolutions if c.normed),
    )


class Convolutional(ImageModelConfig):
    """Everything that follows from the `layers` that a spec has."""

    theory: ClassVar[str] = "meshmark.theory.model_theory:LayeredTheory"

    if TYPE_CHECKING:

        @property
        def batch_norm(self) -> bool: ...

    @property
    @abstractmethod
    def layers(self) -> Sequence[LayerSizes]:
        """The embedding, the blocks and the head."""

    def check_sizes(self, widths: Sequence[int], num_halved: int) -> None:
        """Raises `InputError` when they contradict each other: `num_halved` is how often an image's side is halved."""
        for field in ("image_size", "num_channels", "num_classes"):
            if (got := getattr(self, field)) < 1:
                raise InputError(f"model {self.name!r}: {field} is {got}, expected at least 1")
        if not widths or min(widths) < 1:
            raise InputError(f"model {self.name!r}: widths are {widths}, expected at least 1 of every block")
        if self.image_size % (halved := 2**num_halved):
            raise InputError(
                f"model {self.name!r}: image_size {self.image_size} is not divisible by {halved}: every change of "
                f"widths {widths} halves it"
            )

    @property
    def couples_rows(self) -> bool:
        """Whether it normalises over the images of one micro-batch of one replica."""
        return self.batch_norm

    @property
    def causal(self) -> bool:
        """It has no tokens."""
        return False

    @property
    def tied_embeddings(self) -> bool:
        """Pixels and classes share nothing."""
        return False

    @property
    def dropout(self) -> float:
        """None: norms stand in its place (arXiv:1512.03385 section 3.4)."""
        return 0.0

    @property
    def num_layers(self) -> int:
        return len(self.layers) - 2

    @property
    def seq_len(self) -> int:
        """Pixels of an image, the positions that the model computes."""
        return self.image_size**2

    @property
    def embedding_parameters(self) -> int:
        """The first convolution, and its norm."""
        return self.layers[0].num_parameters

    @property
    def block_parameters(self) -> int:
        """Of the largest block."""
        return max(layer.num_parameters for layer in self.layers[1:-1])

    @property
    def head_parameters(self) -> int:
        return self.layers[-1].num_parameters

    @property
    def num_parameters(self) -> int:
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def num_tensors(self) -> int:
        return sum(layer.num_tensors for layer in self.layers)

    @property
    def forward_flops(self) -> float:
        """Of one image: convolutions and matrix products, a multiply-add counted as two."""
        return 2.0 * sum(layer.products for layer in self.layers)

    def misfits(self, *, tp: int, num_stages: int, cp: int) -> list[str]:
        """Why the model cannot be split so, one reason each."""
        asked = {
            f"tp {tp} splits no convolution": tp > 1,
            f"pp {num_stages} stages are more than {self.num_layers} blocks": num_stages > self.num_layers,
            f"cp {cp} deals out no pixels": cp > 1,
        }
        return [problem for problem, there in asked.items() if there]
