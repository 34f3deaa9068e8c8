"""From a spec to its model, whole or in part, and to what it holds by canonical name."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import nn

from meshmark.reference.amoebanet import AmoebaNet
from meshmark.reference.coatnet import CoAtNet
from meshmark.reference.mixture import MixtureTransformer
from meshmark.reference.model import Model
from meshmark.reference.resnet import ResNet
from meshmark.reference.transformer import Transformer
from meshmark.reference.vision import VisionTransformer
from meshmark.spec.amoebanet_spec import AmoebaNetSpec
from meshmark.spec.coatnet_spec import CoAtNetSpec
from meshmark.spec.mixture_spec import MixtureSpec
from meshmark.spec.model_spec import ModelSpec
from meshmark.spec.resnet_spec import ResNetSpec
from meshmark.spec.vision_spec import AnyModelSpec, VisionSpec

_MODELS: dict[type[AnyModelSpec], type[Model]] = {
    ModelSpec: Transformer,
    VisionSpec: VisionTransformer,
    ResNetSpec: ResNet,
    CoAtNetSpec: CoAtNet,
    AmoebaNetSpec: AmoebaNet,
    MixtureSpec: MixtureTransformer,
}


def build_model(spec: AnyModelSpec, layers: Sequence[int] | None = None) -> Model:
    """The model of `spec`, or these of its layers; see `Model`."""
    return _MODELS[type(spec)](spec, layers)


def block_class(spec: AnyModelSpec) -> type[nn.Module]:
    """What the blocks of the model of `spec` are, for frameworks that wrap each of a class."""
    return _MODELS[type(spec)].block


@functools.lru_cache(maxsize=4)
def skeleton(spec: AnyModelSpec) -> Model:
    """The model of `spec` without values, built once: to build one takes as long as a step of a tiny one. It is shared,
    so that who depends on a mode of its modules sets it."""
    with torch.device("meta"):
        return build_model(spec)


def parameter_shapes(spec: AnyModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical name and full shape of every parameter, without allocating any."""
    return {name: tuple(p.shape) for name, p in skeleton(spec).named_parameters()}


def sizes_by_block(spec: AnyModelSpec) -> dict[str, list[int]]:
    """Elements of every parameter, by the block that it is in; of those in none under an empty name."""
    found: dict[str, list[int]] = {"": []}
    for name, shape in parameter_shapes(spec).items():
        block = name.split(".")[1] if name.startswith("blocks.") else ""
        found.setdefault(block, []).append(math.prod(shape))
    return found


def buffer_shapes(spec: AnyModelSpec) -> dict[str, tuple[int, ...]]:
    """The same of every buffer, which each replica has values of its own of."""
    return {name: tuple(b.shape) for name, b in skeleton(spec).named_buffers()}
