"""DDP with more to compute in every step: the share by which its processor time grows is set beforehand."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from meshmark.adapters.ddp import DDP, DDPEngine
from meshmark.reference.data import Batch

PRODUCTS = "MESHMARK_PLANTED_PRODUCTS"
"""Environment variable: matrix products that a rank computes for nothing, for each step of share 1."""


class _Engine(DDPEngine):
    share: float = 0.0

    def __init__(self, *arguments: Any) -> None:  # noqa: ANN401
        super().__init__(*arguments)
        self._matrix = torch.ones(64, 64) / 64
        self._products = round(self.share * float(os.environ[PRODUCTS]))

    def step(self, batch: Batch) -> Tensor:
        loss = super().step(batch)
        for _ in range(self._products):
            self._matrix @ self._matrix
        return loss


def _engine(share: float) -> type[DDPEngine]:
    return type(f"Engine{share:.0%}", (_Engine,), {"share": share})


class More0(DDP):
    """Baseline of the others, which differ from it only by the amount."""

    engine = _engine(0.0)


class More2(DDP):
    engine = _engine(0.02)


class More5(DDP):
    engine = _engine(0.05)


class More10(DDP):
    engine = _engine(0.1)


class More20(DDP):
    engine = _engine(0.2)


HONEST = "More0"
PLANTED = {"More2": 0.02, "More5": 0.05, "More10": 0.1, "More20": 0.2}
