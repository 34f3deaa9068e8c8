"""From a spec to its model, whole or in part, and to what it holds by canonical name."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Sequence

from torch import nn

from meshmark.reference.model import Model
from meshmark.spec.model_config import ModelConfig


def module_class(spec: ModelConfig) -> type[Model]:
    """Return the module class that the model's family names."""
    where, _, name = spec.module.partition(":")
    found: type[Model] = getattr(importlib.import_module(where), name)
    return found


def build_model(spec: ModelConfig, layers: Sequence[int] | None = None) -> Model:
    """Return the module of `spec`, or of some of its layers; see `Model`."""
    return module_class(spec)(spec, layers)


def block_classes(spec: ModelConfig) -> set[type[nn.Module]]:
    """Return the classes of the model's blocks, for frameworks that wrap each module of a class."""
    return module_class(spec).block_classes_of(spec)


@functools.lru_cache(maxsize=4)
def skeleton(spec: ModelConfig) -> Model:
    """The model of `spec` without values, built once: to build one takes as long as a step of a tiny one. It is shared,
    so that who depends on a mode of its modules sets it."""
    return module_class(spec).skeleton(spec)


def parameter_shapes(spec: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name and full shape of every parameter, without allocating any."""
    return {name: tuple(p.shape) for name, p in skeleton(spec).named_parameters()}


def sizes_by_block(spec: ModelConfig) -> dict[str, list[int]]:
    """Elements of every parameter, by the block that it is in; of those in none under an empty name."""
    found: dict[str, list[int]] = {"": []}
    for name, shape in parameter_shapes(spec).items():
        block = block_of(spec, name)
        found.setdefault(block, []).append(math.prod(shape))
    return found


def block_of(spec: ModelConfig, name: str) -> str:
    """Return the key of the block that holds the parameter `name`; empty where none does."""
    return skeleton(spec).block_of(name)


def buffer_shapes(spec: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The same of every buffer, which each replica has values of its own of."""
    return {name: tuple(b.shape) for name, b in skeleton(spec).named_buffers()}
