"""What a residual network is: its dimensions and what follows from them. No torch, as in `model_spec`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshmark.errors import InputError
from meshmark.spec.model_spec import Family


@dataclass(frozen=True, kw_only=True)
class ResNetSpec:
    """Dimensions of a residual network (arXiv:1512.03385 section 4.2): a convolution, blocks of two, the mean over
    pixels and a classifier; a batch norm behind every convolution. Where blocks become wider, their images become half
    as high and wide, and the shortcut is a convolution of single pixels (its option B).

    Raises `InputError` when the dimensions contradict each other.
    """

    name: str
    image_size: int
    """Pixels a side."""
    num_channels: int = 1
    num_classes: int
    widths: tuple[int, ...]
    """Channels, block by block; the first convolution has those of the first."""
    init_std: float = 0.1

    def __post_init__(self) -> None:
        for field in ("image_size", "num_channels", "num_classes"):
            if (got := getattr(self, field)) < 1:
                raise InputError(f"model {self.name!r}: {field} is {got}, expected at least 1")
        if not self.widths or min(self.widths) < 1:
            raise InputError(f"model {self.name!r}: widths are {self.widths}, expected at least 1 of every block")
        if self.image_size % (halved := 2 ** sum(block.stride == 2 for block in self.blocks)):
            raise InputError(
                f"model {self.name!r}: image_size {self.image_size} is not divisible by {halved}: every change of "
                f"widths {self.widths} halves it"
            )

    @property
    def blocks(self) -> list[ResidualSizes]:
        return list(self._blocks())

    def _blocks(self) -> Iterator[ResidualSizes]:
        inner, size = self.widths[0], self.image_size
        for outer in self.widths:
            stride = 1 if inner == outer else 2
            size //= stride
            yield ResidualSizes(inner=inner, outer=outer, stride=stride, pixels=size**2)
            inner = outer

    @property
    def family(self) -> Family:
        return Family.RESNET

    @property
    def batch_norm(self) -> bool:
        """Over all pixels of the images of *one micro-batch of one replica*; see `VisionSpec.batch_norm`."""
        return True

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
        """None: batch norms stand in its place (arXiv:1512.03385 section 3.4)."""
        return 0.0

    @property
    def num_layers(self) -> int:
        return len(self.widths)

    @property
    def seq_len(self) -> int:
        """Pixels of an image, the positions that the model computes."""
        return self.image_size**2

    @property
    def widest(self) -> int:
        """Numbers at a position that a layer works on: the patches of a convolution, laid out."""
        return 9 * max(self.widths)

    @property
    def embedding_parameters(self) -> int:
        """The first convolution, and its norm."""
        return (9 * self.num_channels + 2) * self.widths[0]

    @property
    def block_parameters(self) -> int:
        """Of the largest block."""
        return max(block.num_parameters for block in self.blocks)

    @property
    def head_parameters(self) -> int:
        """Classifier, which has no bias."""
        return self.widths[-1] * self.num_classes

    @property
    def num_parameters(self) -> int:
        return self.embedding_parameters + sum(b.num_parameters for b in self.blocks) + self.head_parameters

    @property
    def num_tensors(self) -> int:
        """Of a convolution and its norm three; the classifier's weight."""
        return 3 * (1 + sum(3 if block.projects else 2 for block in self.blocks)) + 1

    @property
    def forward_flops(self) -> float:
        """Of one image: convolutions and the classifier, a multiply-add counted as two."""
        first = 9 * self.num_channels * self.widths[0] * self.image_size**2
        return 2.0 * (first + sum(block.products for block in self.blocks) + self.head_parameters)

    def misfits(self, *, tp: int, num_stages: int, cp: int) -> list[str]:
        """Why the model cannot be split so, one reason each."""
        asked = {
            f"tp {tp} splits no convolution": tp > 1,
            f"pp {num_stages} stages are more than {self.num_layers} blocks": num_stages > self.num_layers,
            f"cp {cp} deals out no pixels": cp > 1,
        }
        return [problem for problem, there in asked.items() if there]


@dataclass(frozen=True, kw_only=True)
class ResidualSizes:
    """One block."""

    inner: int
    """Channels that come in."""
    outer: int
    """That go out."""
    stride: int
    pixels: int
    """Of an image as it goes out."""

    @property
    def projects(self) -> bool:
        """Whether the shortcut is a convolution."""
        return self.inner != self.outer

    @property
    def weights(self) -> int:
        """Of its convolutions, each of which every pixel that goes out is multiplied with once."""
        return 9 * self.inner * self.outer + 9 * self.outer**2 + self.projects * self.inner * self.outer

    @property
    def num_parameters(self) -> int:
        """And the norms' scales and shifts."""
        return self.weights + 2 * self.outer * (2 + self.projects)

    @property
    def products(self) -> int:
        """Multiply-adds of one image."""
        return self.weights * self.pixels


RESNET_MINI = ResNetSpec(name="resnet-mini", image_size=8, num_classes=10, widths=(8, 16))
"""A block of either kind; small enough for milliseconds."""
