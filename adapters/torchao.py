"""torchao: 8-bit weights, with inputs in float32 or rounded to 8 bits as they come."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from meshmark.adapter.contract import Requirement
from meshmark.compression.contract import CompressionAdapter
from meshmark.compression.specification import Int8Rows, Int8RowsAndInputs


class TorchAOInt8(CompressionAdapter):
    """`Int8WeightOnlyConfig` with its defaults."""

    requirement = Requirement(module="torchao", distribution="torchao")
    specification = Int8Rows()
    config = "Int8WeightOnlyConfig"

    def compress(self, model: nn.Module, example: Tensor) -> nn.Module:
        from torchao import quantization

        # The setter would change the precision of every matrix product in this process.
        quantization.quantize_(model, getattr(quantization, self.config)(set_inductor_config=False))
        return model

    def weight(self, layer: nn.Linear) -> Tensor:
        weight: Any = layer.weight
        dequantized: Tensor = weight.dequantize()
        return dequantized


class TorchAOInt8Dynamic(TorchAOInt8):
    """`Int8DynamicActivationInt8WeightConfig` with its defaults."""

    specification = Int8RowsAndInputs()
    config = "Int8DynamicActivationInt8WeightConfig"
