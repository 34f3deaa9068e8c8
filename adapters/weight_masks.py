"""PyTorch's torch.nn.utils.prune: weights are multiplied by a mask."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.utils import prune

from meshmark.compression.contract import CompressionAdapter
from meshmark.compression.specification import SmallestZeroed, linears


class WeightMasks(CompressionAdapter):
    """`l1_unstructured` of every linear layer."""

    specification = SmallestZeroed()

    def compress(self, model: nn.Module, example: Tensor) -> nn.Module:
        for layer in linears(model).values():
            prune.l1_unstructured(layer, "weight", amount=self.specification.share)  # type: ignore[no-untyped-call]
        return model

    def weight(self, layer: nn.Linear) -> Tensor:
        return layer.weight
