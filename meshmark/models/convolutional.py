"""Shared parts of convolutional image models: layers of unequal size and no tokens. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshmark.errors import InputError
from meshmark.models.config import ImageModelConfig, LayerSizes


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """One convolution without a bias."""

    inner: int
    """Input channels."""
    outer: int
    """Output channels."""
    kernel: int
    """Weights per pair of input and output channel."""
    pixels: int
    """Pixels of an output image."""
    groups: int = 1
    """Number of channel groups, each convolved separately. A depthwise convolution has one group per channel."""
    normed: bool = True
    """True if a norm follows, with a scale and a shift per channel."""

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
        """Multiply-adds of one image: every weight times every output pixel."""
        return self.weights * self.pixels


def layer_of(convolutions: Sequence[Convolution], outputs: int) -> LayerSizes:
    """Return the sizes of a layer that consists of `convolutions` and has `outputs` output values."""
    return LayerSizes(
        num_parameters=sum(c.num_parameters for c in convolutions),
        num_tensors=sum(c.num_tensors for c in convolutions),
        products=sum(c.products for c in convolutions),
        outputs=outputs,
        normed=tuple(c.outer for c in convolutions if c.normed),
    )


class Convolutional(ImageModelConfig):
    """Base class of models whose layers are of unequal size and have no tokens."""

    @property
    def batch_norm(self) -> bool:
        """True: norms run over all pixels of the images of *one micro-batch of one replica*; see
        `VisionSpec.batch_norm`.
        """
        return True

    def check_sizes(self, widths: Sequence[int], num_halved: int) -> None:
        """Raise `InputError` if sizes contradict each other. `num_halved` is how often the image side is halved."""
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
    def dropout(self) -> float:
        """Always 0: norms take the place of dropout (arXiv:1512.03385 section 3.4)."""
        return 0.0

    @property
    def num_layers(self) -> int:
        return len(self.layers) - 2

    @property
    def seq_len(self) -> int:
        """Pixels of an image, which are the positions that the model computes."""
        return self.image_size**2

    def misfits(self, *, tp: int, num_stages: int, cp: int) -> list[str]:
        """Return why the model cannot be split this way, one reason each."""
        asked = {
            f"tp {tp} splits no convolution": tp > 1,
            f"pp {num_stages} stages are more than {self.num_layers} blocks": num_stages > self.num_layers,
            f"cp {cp} deals out no pixels": cp > 1,
        }
        return [problem for problem, there in asked.items() if there]
