"""The contract of a model family: what Meshmark asks of any model that it trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Self

from meshmark.errors import InputError
from meshmark.import_target import import_packages

if TYPE_CHECKING:
    from meshmark.spec.case import Case

UNKNOWN_THEORY = "meshmark.theory.model_theory:UnknownTheory"


class Family(StrEnum):
    """The kinds of models that adapters distinguish. Adding an image model does not add a member."""

    GPT = "gpt"
    """Learned positions, LayerNorm, biases, GELU feed-forward (GPT-2, arXiv:2005.14165)."""
    LLAMA = "llama"
    """Rotary positions, RMSNorm, no biases, SwiGLU feed-forward, grouped-query attention (arXiv:2302.13971)."""
    MIXTURE = "mixture"
    """The blocks of a GPT with a mixture of experts as the feed-forward network (arXiv:1701.06538)."""
    IMAGES = "images"
    """Any model of images: a vision transformer, or convolutions."""
    OWN = "own"
    """A user's own module."""
    VIT = "images"
    """Former name of `IMAGES`, as are the next three."""
    RESNET = "images"
    COATNET = "images"
    AMOEBANET = "images"


class Dataset(StrEnum):
    """The data that a workload trains on."""

    TEXT = "text"
    """Bytes of a corpus. Each byte is predicted from those before it."""
    MASKED_TEXT = "masked_text"
    """The same bytes, 15 % of which are prediction targets (BERT, arXiv:1810.04805 section 3.1).

    Of 10 targets, 8 are masked, one is replaced by another byte and one is left unchanged.
    """
    OWN = "own"
    """Batches that the user's own workload generates from seed and step."""
    DIGITS = "digits"
    """The 1,797 images of handwritten digits, 8 x 8 pixels, that scikit-learn ships (UCI, Alpaydin and Kaynak 1998)."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Dimensions of a model, and sizes derived from them. Does not import torch, so that planners start fast.

    A family is a subclass of this class, the module that it names and, if closed forms exist, the theory that it
    names. The rest of Meshmark calls these and never checks which family it has. A family leaves what it does not know
    at the default; suites then report *not planned*.
    """

    TAG: ClassVar = "kind"
    """Field written with the others, so that a reader can restore the class; see `meshmark.serial.Tagged`."""
    kind: ClassVar[str] = ""
    """Name of the class in records. Empty for abstract classes."""
    module: ClassVar[str] = ""
    """The described `torch.nn.Module`, as "package.module:Class".

    It takes this config and a selection of its layers.
    """
    theory: ClassVar[str] = UNKNOWN_THEORY
    """Closed forms of parameters, traffic and FLOPs, as "package.module:Class"; see `meshmark.theory.model_theory`."""
    initial_values: ClassVar[str] = "meshmark.models.module:drawn_value"
    """Function that makes the initial value of a parameter, or of a block of it, as "package.module:function"."""
    unit: ClassVar[str] = "tokens"
    """Unit of throughput: tokens, images or rows."""
    preload: ClassVar[tuple[str, ...]] = ()
    """Modules that are slow to import, for a server that forks ranks."""
    routes: ClassVar[bool] = False
    """True if values decide which weights a token uses. Rounding then decides close calls."""
    brings_plan: ClassVar[bool] = False
    """True if the model itself defines how tensor parallelism splits its modules."""
    name: str

    if TYPE_CHECKING:  # fields of some families, properties of others

        @property
        def family(self) -> Family: ...

        @property
        def num_layers(self) -> int:
            """Number of blocks. The embedding and the head are not counted."""

        @property
        def seq_len(self) -> int:
            """Positions per row that the model computes."""

        @property
        def causal(self) -> bool:
            """True if every position sees only those before it."""

        @property
        def tied_embeddings(self) -> bool:
            """True if the head uses the embedding's weight."""

        @property
        def dropout(self) -> float: ...

        @property
        def init_std(self) -> float:
            """Standard deviation of initial weights."""

        @property
        def num_parameters(self) -> int:
            """Number of trainable parameters. A tied weight counts once."""

        @property
        def embedding_parameters(self) -> int: ...

        @property
        def block_parameters(self) -> int:
            """Parameters of the largest block."""

        @property
        def head_parameters(self) -> int: ...

        @property
        def widest(self) -> int:
            """Largest number of values a layer handles per position."""

        @property
        def datasets(self) -> frozenset[Dataset]:
            """Datasets that the model can be trained on."""

        @property
        def outputs_per_row(self) -> int:
            """Logits per row."""

        def misfits(self, *, tp: int, num_stages: int, cp: int) -> list[str]:
            """Return why the model cannot be split this way, one reason each."""

    @property
    def stage_refusal(self) -> str:
        """Return why no part of the model, not even the whole, can be a pipeline stage. Empty if one can."""
        return ""

    def row_shape(self, layer: int) -> tuple[int, ...] | None:
        """Return the shape of one row of a layer's output, or None if that is unknown until the model runs."""
        return None

    def stage_layers(self, num_stages: int, stage: int) -> Sequence[int]:
        """Return the layers of one of `num_stages` pipeline stages: blocks split as evenly as they go, the first stages
        taking the rest; the embedding joins the first stage and the head the last."""
        share, rest = divmod(self.num_layers, num_stages)
        first = 1 + stage * share + min(stage, rest)
        layers = list(range(first, first + share + (stage < rest)))
        return [0] * (stage == 0) + layers + [self.num_layers + 1] * (stage == num_stages - 1)

    def stage_of_layers(self, num_stages: int) -> dict[int, int]:
        """Return the stage of every layer, of `num_stages`."""
        return {layer: stage for stage in range(num_stages) for layer in self.stage_layers(num_stages, stage)}

    @property
    def ties_ends(self) -> bool:
        """Whether the first and the last stage of a pipeline each hold a copy of one weight."""
        return self.tied_embeddings

    @property
    def couples_rows(self) -> bool:
        """True if rows of a micro-batch affect each other's gradients, as under a batch norm."""
        return False

    @property
    def saves_buffers(self) -> bool:
        """Whether a state dict of it holds tensors that are no parameters, as the statistics of batch norms."""
        return self.couples_rows

    @property
    def leaves_unused(self) -> bool:
        """True if some trainable parameters are not used in any step."""
        return False

    @property
    def gathers(self) -> tuple[tuple[int, int], ...]:
        """Parameters that modules read more than once per pass, as pairs of (elements, extra factor).

        A framework that gathers a parameter for each module gathers these as often as modules read them.
        """
        return ()

    @property
    def runs(self) -> int:
        """How often a module with parameters runs in one forward pass at most: several times as a recurrence's cell."""
        return 1

    @property
    def has_scalars(self) -> bool:
        """True if a parameter is a scalar without dimensions, such as CLIP's temperature."""
        return False

    @property
    def has_float_inputs(self) -> bool:
        """True if batches hold floating-point tensors that the model uses without a cast.

        The built-in models cast them to the dtype of their weights.
        """
        return False

    @property
    def indexed(self) -> int:
        """Elements of parameters for which autograd keeps a view.

        The view is a part, such as one of several experts in one tensor, or a transpose, such as in a GRU cell.
        """
        return 0

    @property
    def indexed_in_blocks(self) -> int:
        """Number of `indexed` elements that are in blocks. Recomputed blocks keep no view."""
        return 0

    @property
    def computes_weights(self) -> bool:
        """True if a linear layer's weight is computed from parameters, as weight normalisation does."""
        return False

    @property
    def repeats_arguments(self) -> bool:
        """True if a module is given one tensor twice, as self-attention is given queries, keys and values."""
        return False

    @property
    def reads_elsewhere(self) -> bool:
        """True if a parameter is used while the module that has it does not run, as by a function of another module."""
        return False

    def refusals(self, case: Case) -> list[str]:
        """Return why the model cannot be trained under `case` with any adapter, one reason each."""
        return []

    @classmethod
    def class_of(cls, tag: str) -> type[ModelConfig]:
        """Return the family whose `kind` is `tag`. Raises `ValueError` when there is none."""
        if tag not in model_classes():
            raise ValueError(f"model kind {tag!r} is not known here, expected one of {', '.join(model_classes())}")
        return model_classes()[tag]

    def on_images(self, *, num_channels: int, image_size: int, num_classes: int) -> Self:
        """Return the model resized for other images. Raises `InputError` if the model takes no images."""
        raise InputError(f"model {self.name!r} takes {', '.join(sorted(self.datasets))}, no images")


class MultiHead:
    """Sizes of attention with as many heads of keys and values as of queries, for families with these fields."""

    if TYPE_CHECKING:

        @property
        def hidden(self) -> int: ...

        @property
        def num_heads(self) -> int: ...

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def kv_hidden(self) -> int:
        return self.hidden


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """One layer: the embedding, a block, or the head."""

    num_parameters: int
    num_tensors: int
    products: int
    """Multiply-adds of one image."""
    outputs: int
    """Output values of one image, which a pipeline sends to the next stage."""
    normed: tuple[int, ...] = ()
    """Channels of every norm that follows a convolution. Batch norms keep statistics for them."""


@dataclass(frozen=True, kw_only=True)
class ImageModelConfig(ModelConfig):
    """Base class of image models, which derives sizes from the model's `layers`."""

    unit: ClassVar[str] = "images"
    theory: ClassVar[str] = "meshmark.theory.model_theory:LayeredTheory"
    num_channels: int = 1
    num_classes: int
    image_size: int
    """Height and width of an image, in pixels."""

    if TYPE_CHECKING:

        @property
        def layers(self) -> Sequence[LayerSizes]:
            """The embedding, the blocks and the head."""

        @property
        def batch_norm(self) -> bool:
            """True if it normalises over the images of one micro-batch of one replica."""

    @property
    def family(self) -> Family:
        return Family.IMAGES

    @property
    def couples_rows(self) -> bool:
        return self.batch_norm

    @property
    def causal(self) -> bool:
        """False: pixels have no order."""
        return False

    @property
    def tied_embeddings(self) -> bool:
        """False: pixels and classes share no weights."""
        return False

    @property
    def embedding_parameters(self) -> int:
        return self.layers[0].num_parameters

    @property
    def block_parameters(self) -> int:
        """Parameters of the largest block."""
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
        """FLOPs of one image: convolutions and matrix products, a multiply-add counted as two."""
        return 2.0 * sum(layer.products for layer in self.layers)

    @property
    def datasets(self) -> frozenset[Dataset]:
        return frozenset({Dataset.DIGITS})

    @property
    def outputs_per_row(self) -> int:
        return self.num_classes

    def on_images(self, *, num_channels: int, image_size: int, num_classes: int) -> Self:
        return dataclasses.replace(self, num_channels=num_channels, image_size=image_size, num_classes=num_classes)


def digit_models() -> Mapping[str, ImageModelConfig]:
    """Return the presets of all families that train on the digit images, by the name of their workload.

    A family declares them as `DIGITS` in its package, which is found by its place in this folder.
    """
    families = import_packages("meshmark.models")
    return {name: model for family in families for name, model in getattr(family, "DIGITS", {}).items()}


def model_classes() -> Mapping[str, type[ModelConfig]]:
    """Return all imported model families by kind."""
    return {cls.kind: cls for cls in _subclasses(ModelConfig) if cls.kind}


def _subclasses(cls: type[ModelConfig]) -> Iterator[type[ModelConfig]]:
    for derived in cls.__subclasses__():
        yield derived
        yield from _subclasses(derived)


def with_kind(value: dict[str, object]) -> dict[str, object]:
    """Return a model's JSON value of record schema 2 with a `kind`, which it did not have.

    The kind is that of the first family that has all its fields. Raises `ValueError` when there is none.
    """
    if ModelConfig.TAG in value:
        return value
    for kind, cls in model_classes().items():
        if value.keys() <= {field.name for field in dataclasses.fields(cls)}:
            return {ModelConfig.TAG: kind, **value}
    raise ValueError(f"no model family has the fields {', '.join(value)}")
