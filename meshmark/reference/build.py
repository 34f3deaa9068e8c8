"""From a spec to its model, whole or in part, and to what it holds by canonical name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshmark.reference.model import Model
from meshmark.reference.transformer import Transformer
from meshmark.reference.vision import VisionTransformer
from meshmark.spec.vision_spec import AnyModelSpec, VisionSpec


def build_model(spec: AnyModelSpec, layers: Sequence[int] | None = None) -> Model:
    """The model of `spec`, or these of its layers; see `Model`."""
    return VisionTransformer(spec, layers) if isinstance(spec, VisionSpec) else Transformer(spec, layers)


def parameter_shapes(spec: AnyModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical name and full shape of every parameter, without allocating any."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in build_model(spec).named_parameters()}


def buffer_shapes(spec: AnyModelSpec) -> dict[str, tuple[int, ...]]:
    """The same of every buffer, which each replica has values of its own of."""
    with torch.device("meta"):
        return {name: tuple(b.shape) for name, b in build_model(spec).named_buffers()}
