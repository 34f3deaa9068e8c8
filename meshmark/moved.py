"""Modules that adapters of older versions import, by their old names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "meshmark.adapter.arithmetic": "meshmark.adapter.contract",
    "meshmark.adapter.capabilities": "meshmark.adapter.contract",
    "meshmark.adapter.data_parallel": "meshmark.adapter.engine",
    "meshmark.adapter.gathered": "meshmark.adapter.engine",
    "meshmark.adapter.holdings": "meshmark.adapter.engine",
    "meshmark.adapter.traffic_source": "meshmark.adapter.engine",
    "meshmark.algorithms.replicas": "meshmark.algorithms.contract",
    "meshmark.reference.amoebanet": "meshmark.models.amoebanet.module",
    "meshmark.reference.build": "meshmark.models.module",
    "meshmark.reference.coatnet": "meshmark.models.coatnet.module",
    "meshmark.reference.mixture": "meshmark.models.mixture.module",
    "meshmark.reference.model": "meshmark.models.module",
    "meshmark.reference.optimizers": "meshmark.reference.objective",
    "meshmark.reference.resnet": "meshmark.models.resnet.module",
    "meshmark.reference.transformer": "meshmark.models.transformer.module",
    "meshmark.reference.vision": "meshmark.models.vision_transformer.module",
    "meshmark.spec.amoebanet_spec": "meshmark.models.amoebanet",
    "meshmark.spec.coatnet_spec": "meshmark.models.coatnet",
    "meshmark.spec.convolutional": "meshmark.models.convolutional",
    "meshmark.spec.hub_config": "meshmark.models.hub_config",
    "meshmark.spec.mixture_spec": "meshmark.models.mixture",
    "meshmark.spec.model_config": "meshmark.models.config",
    "meshmark.spec.model_spec": "meshmark.models.transformer",
    "meshmark.spec.model_text": "meshmark.models.model_text",
    "meshmark.spec.planned_config": "meshmark.models.planned_config",
    "meshmark.spec.planned_model": "meshmark.models.planned_model",
    "meshmark.spec.resnet_spec": "meshmark.models.resnet",
    "meshmark.spec.vision_spec": "meshmark.models.vision_transformer",
    "meshmark.theory.flow": "meshmark.theory.traffic",
    "meshmark.theory.states": "meshmark.theory.memory",
}
"""New name of each module by its old one: those that docs/adapter.md and docs/algorithms.md showed in
version 0.1, and the model families."""


class MovedFinder(MetaPathFinder, Loader):
    """Finds a module by its old name, and warns. Python asks it last, and only for names that it has not imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that has what the old one had.

        The old module's classes must be the new one's, or `isinstance` would tell them apart.
        """
        new = MOVED[spec.name]
        warnings.warn(f"{spec.name} is now part of {new}", DeprecationWarning, stacklevel=2)
        return _Old(importlib.import_module(new), spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has been executed under its new name."""


class _Old(ModuleType):
    """A module under its old name, which takes every attribute from the new one."""

    def __init__(self, new: ModuleType, name: str) -> None:
        super().__init__(name, new.__doc__)
        self.__dict__["_new"] = new

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["_new"], name)


def install() -> None:
    """Let old names be imported."""
    sys.meta_path.append(MovedFinder())
