"""What Meshmark asks of any model that it trains: the contract of a model family."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Self

from meshmark.errors import InputError

if TYPE_CHECKING:
    from meshmark.spec.case import Case
    from meshmark.spec.model_spec import Family

UNKNOWN_THEORY = "meshmark.theory.model_theory:UnknownTheory"


class Dataset(StrEnum):
    """What a workload trains on."""

    TEXT = "text"
    """Bytes of a corpus, each predicted from those before it."""
    MASKED_TEXT = "masked_text"
    """The same bytes, of which 15 % are to be found again: 8 of 10 of these are hidden, one is another, one as it was
    (BERT, arXiv:1810.04805 section 3.1)."""
    OWN = "own"
    """What the user's own workload makes of seed and step."""
    DIGITS = "digits"
    """The 1,797 images of handwritten digits, 8 x 8 pixels, that scikit-learn ships (UCI, Alpaydin and Kaynak 1998)."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Dimensions of a model, and what follows from them. No torch here, so that planners stay light.

    A family is a subclass of this class, the module that it names, and, where there are closed forms, the theory that
    it names. The rest of Meshmark calls these and never asks which family it has. What a family does not know, it
    leaves at the default, and suites then say *not planned*.
    """

    TAG: ClassVar = "kind"
    """Written with the fields, so that a reader knows the class again; see `meshmark.serial.Tagged`."""
    kind: ClassVar[str] = ""
    """Name of the class in records; empty for classes that are not models themselves."""
    module: ClassVar[str] = ""
    """The `torch.nn.Module` that this describes, as "package.module:Class"; it takes this, and some of its layers."""
    theory: ClassVar[str] = UNKNOWN_THEORY
    """Closed forms of parameters, traffic and FLOPs, as "package.module:Class"; see `meshmark.theory.model_theory`."""
    initial_values: ClassVar[str] = "meshmark.reference.initial:drawn_value"
    """Function that makes the initial value of one parameter, or of a block of it, as "package.module:function"."""
    unit: ClassVar[str] = "tokens"
    """What throughput counts: tokens, images or rows."""
    preload: ClassVar[tuple[str, ...]] = ()
    """Modules that take long to import, for a server that forks ranks."""
    routes: ClassVar[bool] = False
    """Whether values decide which weights a token meets: where a decision is close, rounding makes it."""
    brings_plan: ClassVar[bool] = False
    """Whether the model itself says how tensor parallelism splits its modules."""
    name: str

    if TYPE_CHECKING:  # fields of some families, properties of others

        @property
        def family(self) -> Family: ...

        @property
        def num_layers(self) -> int:
            """Blocks; the embedding and the head are not counted."""

        @property
        def seq_len(self) -> int:
            """Positions of a row that the model computes."""

        @property
        def causal(self) -> bool:
            """Whether every position sees those before it alone."""

        @property
        def tied_embeddings(self) -> bool:
            """Whether the head uses the embedding's weight."""

        @property
        def dropout(self) -> float: ...

        @property
        def init_std(self) -> float:
            """Standard deviation of initial weights."""

        @property
        def num_parameters(self) -> int:
            """All trainable parameters, a tied weight counted once."""

        @property
        def embedding_parameters(self) -> int: ...

        @property
        def block_parameters(self) -> int:
            """Parameters of the largest block."""

        @property
        def head_parameters(self) -> int: ...

        @property
        def widest(self) -> int:
            """Numbers at a position that a layer works on, at most."""

        @property
        def datasets(self) -> frozenset[Dataset]:
            """What the model can be trained on."""

        @property
        def outputs_per_row(self) -> int:
            """Logits of one row."""

        def misfits(self, *, tp: int, num_stages: int, cp: int) -> list[str]:
            """Return why the model cannot be split so, one reason each."""

    @property
    def stage_refusal(self) -> str:
        """Why no part of the model can be a stage of a pipeline, not even all of it; empty where it can."""
        return ""

    def row_shape(self, layer: int) -> tuple[int, ...] | None:
        """Return the shape of one row behind a layer, where the model knows it without being run."""
        return None

    def stage_layers(self, num_stages: int, stage: int) -> Sequence[int]:
        """Return the layers of one of `num_stages` pipeline stages: blocks split as evenly as they go, the first stages
        taking the rest; the embedding joins the first stage and the head the last."""
        share, rest = divmod(self.num_layers, num_stages)
        first = 1 + stage * share + min(stage, rest)
        layers = list(range(first, first + share + (stage < rest)))
        return [0] * (stage == 0) + layers + [self.num_layers + 1] * (stage == num_stages - 1)

    @property
    def ties_ends(self) -> bool:
        """Whether the first and the last stage of a pipeline each hold a copy of one weight."""
        return self.tied_embeddings

    @property
    def couples_rows(self) -> bool:
        """Whether the rows of a micro-batch enter one another's gradients, as under a batch norm."""
        return False

    @property
    def saves_buffers(self) -> bool:
        """Whether a state dict of it holds tensors that are no parameters, as the statistics of batch norms."""
        return self.couples_rows

    @property
    def leaves_unused(self) -> bool:
        """Whether it has trained parameters that no step uses."""
        return False

    @property
    def gathers(self) -> tuple[tuple[int, int], ...]:
        """Elements of parameters that modules do not read once in a forward and once in a backward pass, and how much
        more often they do: where a framework gathers a parameter for each module, it does so as often."""
        return ()

    @property
    def runs(self) -> int:
        """How often a module with parameters runs in one forward pass at most: several times as a recurrence's cell."""
        return 1

    @property
    def has_scalars(self) -> bool:
        """Whether a parameter has no dimension, as CLIP's temperature."""
        return False

    @property
    def has_float_inputs(self) -> bool:
        """Whether a batch holds floating-point tensors that the model takes as they are: the built-in models cast them
        to the format of their weights."""
        return False

    @property
    def indexed(self) -> int:
        """Elements of parameters of which autograd keeps a view: a part, as of the experts that one tensor holds, or a
        transpose, as of a GRU's cell."""
        return 0

    @property
    def indexed_in_blocks(self) -> int:
        """How many of these are of blocks, which keep none where they are recomputed."""
        return 0

    def refusals(self, case: Case) -> list[str]:
        """Return why the model cannot be trained under `case`, whatever the adapter, one reason each."""
        return []

    @classmethod
    def class_of(cls, tag: str) -> type[ModelConfig]:
        """Return the family whose `kind` is `tag`. Raises `ValueError` where there is none."""
        if tag not in model_classes():
            raise ValueError(f"model kind {tag!r} is not known here, expected one of {', '.join(model_classes())}")
        return model_classes()[tag]

    def on_images(self, *, num_channels: int, image_size: int, num_classes: int) -> Self:
        """Return the model for other images. Raises `InputError` where it takes none."""
        raise InputError(f"model {self.name!r} takes {', '.join(sorted(self.datasets))}, no images")


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """One layer: the embedding, a block, or the head."""

    num_parameters: int
    num_tensors: int
    products: int
    """Multiply-adds of one image."""
    outputs: int
    """Numbers of one image as it goes out: what a pipeline sends on."""
    normed: tuple[int, ...] = ()
    """Channels of every norm that stands behind a convolution; where these are batch norms, they keep statistics."""


@dataclass(frozen=True, kw_only=True)
class ImageModelConfig(ModelConfig):
    """What models of images share."""

    unit: ClassVar[str] = "images"
    num_channels: int = 1
    num_classes: int
    image_size: int
    """Pixels a side."""

    if TYPE_CHECKING:

        @property
        def layers(self) -> Sequence[LayerSizes]:
            """The embedding, the blocks and the head."""

        @property
        def forward_flops(self) -> float:
            """Of one image, a multiply-add counted as two."""

    @property
    def datasets(self) -> frozenset[Dataset]:
        return frozenset({Dataset.DIGITS})

    @property
    def outputs_per_row(self) -> int:
        return self.num_classes

    def on_images(self, *, num_channels: int, image_size: int, num_classes: int) -> Self:
        return dataclasses.replace(self, num_channels=num_channels, image_size=image_size, num_classes=num_classes)


def model_classes() -> Mapping[str, type[ModelConfig]]:
    """Return all model families that are imported, by kind."""
    return {cls.kind: cls for cls in _subclasses(ModelConfig) if cls.kind}


def _subclasses(cls: type[ModelConfig]) -> Iterator[type[ModelConfig]]:
    for derived in cls.__subclasses__():
        yield derived
        yield from _subclasses(derived)


def with_kind(value: dict[str, object]) -> dict[str, object]:
    """Return a model's JSON value of record schema 2, which had no kind, with that of the family of its fields."""
    if ModelConfig.TAG in value:
        return value
    for kind, cls in model_classes().items():
        if value.keys() <= {field.name for field in dataclasses.fields(cls)}:
            return {ModelConfig.TAG: kind, **value}
    raise ValueError(f"no model family has the fields {', '.join(value)}")
