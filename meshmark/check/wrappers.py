"""Find the wrappers of a module, such as DDP, and whether a script calls past them."""

from __future__ import annotations

import gc
from collections.abc import Iterable

from torch import nn

from meshmark.check.pieces import layers, unwrapped

NAMES = {
    "DistributedDataParallel": "DDP",
    "FullyShardedDataParallel": "FSDP1",
    "FSDPModule": "FSDP2",
    "DeepSpeedEngine": "DeepSpeed",
}
"""Classes of wrappers that can be judged, and what they are called in a verdict."""
REFUSED = {
    "PipelineStage": "a pipeline: ranks hold different parts of the model",
    "PipelineEngine": "a pipeline: ranks hold different parts of the model",
    "DataParallel": "torch.nn.DataParallel, whose replicas live inside one process",
}
"""Classes of wrappers that cannot be judged, and what they are."""
_HOMES = ("torch.distributed", "torch.nn.parallel", "deepspeed")
_AROUND = ("DistributedDataParallel", "DeepSpeedEngine")
"""Wrappers that do their work in their own forward pass, and hold the module as it is."""


def wrappers_in(module: nn.Module) -> list[str]:
    """Return the names of the wrapper classes around the user's module or mixed into it."""
    classes = (cls for inner in module.modules() for cls in type(inner).__mro__)
    found = [c.__name__ for c in classes if c.__module__.startswith(_HOMES)]
    return [name for name in dict.fromkeys(found) if name in NAMES or name in REFUSED]


def wrapper_around(module: nn.Module) -> nn.Module | None:
    """Return a wrapper that holds `module`, or a module that `module` is a part of; None if there is none.

    A module does not know what holds it, so that all objects of the process are searched.
    """
    if unwrapped(module) is not module:
        return None
    found = [x for x in gc.get_objects() if type(x).__name__ in _AROUND and isinstance(x, nn.Module)]
    holders = [x for x in found if any(inner is module for inner in unwrapped(x).modules())]
    return min(holders, key=lambda x: len(list(layers(x))), default=None)


def communication_hooks(modules: Iterable[nn.Module]) -> list[str]:
    """Return the names of the hooks through which DDP wrappers among `modules` send their gradients."""
    found = [hook for module in modules for inner in module.modules() for hook, _ in getattr(inner, "_comm_hooks", [])]
    return list(dict.fromkeys(getattr(hook, "__name__", type(hook).__name__) for hook in found))
