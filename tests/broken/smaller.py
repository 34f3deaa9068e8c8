"""DDP that trains smaller models wrongly: QLoRA's 4-bit base, its adapters, or a distillation's teacher.

tests/test_compression.py launches them through the suites, on examples/workloads/qlora.py and distillation.py.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshmark.adapter.engine import RankContext
from meshmark.adapters import ddp
from meshmark.adapters.ddp import DDP, DDPEngine
from meshmark.reference.data import Batch
from meshmark.spec.case import Case


def _quantized(module: nn.Module) -> list[Any]:
    return [part for part in module.modules() if hasattr(part, "packed")]


class NextMaxima(DDP):
    """Dequantizes each block of the 4-bit base by the next block's largest value."""

    def wrap(self, case: Case, context: RankContext) -> DistributedDataParallel:
        wrapped = super().wrap(case, context)
        for layer in _quantized(wrapped):
            layer.base = functools.partial(self.base, layer)
        return wrapped

    @staticmethod
    def base(layer: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        given = layer.largest
        layer.largest = given.roll(1)
        weight = layer.dequantized().to(x.dtype)
        layer.largest = given
        return F.linear(x, weight)


class SwappedCodes(NextMaxima):
    """Takes the two 4-bit codes of each byte in the wrong order."""

    @staticmethod
    def base(layer: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        weight = layer.dequantized().to(x.dtype)
        return F.linear(x, weight.view(len(weight), -1, 2).flip(-1).view(weight.shape))


class AdaptersNotReduced(DDP):
    """Leaves the gradients of the first block's adapters as each rank has them."""

    def wrap(self, case: Case, context: RankContext) -> DistributedDataParallel:
        initial = ddp.initial_model

        def ignoring(case: Case, device: torch.device) -> Any:  # noqa: ANN401
            model = initial(case, device)
            names = [name for name, _ in model.named_parameters() if name.endswith(("up.a.weight", "up.b.weight"))]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
            return model

        ddp.initial_model = ignoring
        try:
            return super().wrap(case, context)
        finally:
            ddp.initial_model = initial


class KeepsDequantized(DDP):
    """Keeps what each 4-bit layer is dequantized to, in float32 beside it."""

    def wrap(self, case: Case, context: RankContext) -> DistributedDataParallel:
        wrapped = super().wrap(case, context)
        for layer in _quantized(wrapped):
            layer.kept = layer.dequantized().float()
        return wrapped


class _MovesTeacher(DDPEngine):
    def backward(self, batch: Batch) -> Tensor:
        loss = super().backward(batch)
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                if ".teacher." in name:
                    parameter.mul_(1 - 1e-6)
        return loss


class TeacherMoves(DDP):
    """Shrinks the frozen teacher by a millionth of each value in every step, as a stray weight decay does."""

    engine: ClassVar = _MovesTeacher
