"""The update of one replica by an engine's own optimizer, in the engine's own precision, as algorithms ask for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from meshmark.adapter.single import SingleEngine
from meshmark.algorithms.contract import Tensors
from meshmark.judge.trace import host_copies


class EngineRule:
    """An `UpdateRule`."""

    def __init__(self, engine: SingleEngine) -> None:
        self.engine = engine
        self.norm: float | None = None
        """Of the gradients of the last step, as the engine told it."""

    def step(self, parameters: Tensors, gradients: Tensors) -> Tensors:
        put(self.engine.parameters(), parameters)
        put(self.engine.gradients(), gradients)
        norm = self.engine.update()
        self.norm = None if norm is None else float(norm)
        return host_copies(self.engine.parameters())


@torch.no_grad()
def put(tensors: Mapping[str, Tensor], values: Tensors) -> None:
    for name, tensor in tensors.items():
        tensor.copy_(torch.from_numpy(values[name]))
