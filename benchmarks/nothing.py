"""An adapter that trains nothing: what remains of a pass is its launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from meshmark.adapter.contract import Adapter, Capabilities
from meshmark.adapter.engine import Engine, Holdings, RankContext
from meshmark.reference.data import Batch
from meshmark.spec.case import Case


class NothingEngine(Engine):
    def backward(self, batch: Batch) -> Tensor:
        return torch.zeros(())

    def update(self) -> None:
        return None

    def parameters(self) -> Mapping[str, Tensor]:
        return {}

    def gradients(self) -> Mapping[str, Tensor]:
        return {}

    def holdings(self) -> Holdings:
        return Holdings()


class Nothing(Adapter):
    capabilities: ClassVar = Capabilities(degrees=frozenset({"dp"}))

    def build(self, case: Case, context: RankContext) -> Engine:
        return NothingEngine()
