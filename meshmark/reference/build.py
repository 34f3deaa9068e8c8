"""From a spec to its model, whole or in part, and to what it holds by canonical name."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from meshmark.reference.model import Model
from meshmark.reference.transformer import Transformer
from meshmark.reference.vision import VisionTransformer
from meshmark.spec.vision_spec import AnyModelSpec, VisionSpec


def build_model(spec: AnyModelSpec, layers: Sequence[int] | None = None) -> Model:
    """The model of `spec`, or these of its layers; see `Model`."""
    return VisionTransformer(spec, layers) if isinstance(spec, VisionSpec) else Transformer(spec, layers)


@functools.lru_cache(maxsize=4)
def skeleton(spec: AnyModelSpec) -> Model:
    """The model of `spec` without values, built once: to build one takes as long as a step of a tiny one. It is shared,
    so that who depends on a mode of its modules sets it."""
    with torch.device("meta"):
        return build_model(spec)


def parameter_shapes(spec: AnyModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical name and full shape of every parameter, without allocating any."""
    return {name: tuple(p.shape) for name, p in skeleton(spec).named_parameters()}


def buffer_shapes(spec: AnyModelSpec) -> dict[str, tuple[int, ...]]:
    """The same of every buffer, which each replica has values of its own of."""
    return {name: tuple(b.shape) for name, b in skeleton(spec).named_buffers()}
