"""bitsandbytes: 4-bit NormalFloat weights, and AdamW with 8-bit moments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from meshmark.adapter.contract import Requirement
from meshmark.compression.contract import CompressionAdapter, Moment, OptimizerAdapter
from meshmark.compression.specification import NF4Blocks, NF4DoubleBlocks, linears


class BitsAndBytesNF4(CompressionAdapter):
    """`LinearNF4` in the place of every linear layer."""

    requirement = Requirement(module="bitsandbytes", distribution="bitsandbytes")
    specification = NF4Blocks()
    compress_statistics = False

    def compress(self, model: nn.Module, example: Tensor) -> nn.Module:
        import bitsandbytes

        for name, layer in linears(model).items():
            new = bitsandbytes.nn.LinearNF4(
                layer.in_features,
                layer.out_features,
                bias=layer.bias is not None,
                compute_dtype=torch.float32,
                compress_statistics=self.compress_statistics,
            )
            new.load_state_dict(layer.state_dict())
            model.set_submodule(name, new.to("cpu"))  # `to` is what quantizes
        return model

    def finish(self, model: nn.Module) -> nn.Module:
        """Leave the layers in training mode: in evaluation mode they compute in bfloat16 (docs/compression.md)."""
        for layer in linears(model.eval()).values():
            layer.train()
        return model

    def weight(self, layer: nn.Linear) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit

        weight: Any = layer.weight
        dequantized: Tensor = dequantize_4bit(weight.data, weight.quant_state)
        return dequantized


class BitsAndBytesNF4Double(BitsAndBytesNF4):
    """With quantized block maxima, as QLoRA has them and bitsandbytes by default."""

    specification = NF4DoubleBlocks()
    compress_statistics = True


class BitsAndBytesAdamW8bit(OptimizerAdapter):
    """`AdamW8bit` with its defaults: tensors of fewer than 4096 elements keep float32 moments."""

    requirement = Requirement(module="bitsandbytes", distribution="bitsandbytes")

    def build(self, parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:  # noqa: ANN401
        from bitsandbytes.optim import AdamW8bit

        optimizer: torch.optim.Optimizer = AdamW8bit(parameters, **options)
        return optimizer

    def moments(self, state: dict[str, Any]) -> tuple[Moment, Moment]:
        first, second = (Moment(values=state[f"state{n}"], largest=state.get(f"absmax{n}")) for n in (1, 2))
        return first, second
