"""A model with layers as their specification has them: in float64 as the truth, in float32 as the noise."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshmark.compression.specification import int8_scale, linears, round_int8

WAYS = ("plain", "backwards", "halves", "row by row")
"""Orders in which a correct implementation may sum the products of a linear layer."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Weight [O, I] and bias [O] in float64, and whether inputs are rounded to 8 bits."""

    weight: Tensor
    bias: Tensor | None
    rounds_inputs: bool = False

    def __call__(self, x: Tensor, way: str = "plain") -> Tensor:
        """Return the layer's outputs in the precision of `x`, summed in one of WAYS."""
        weight = self.weight.to(x.dtype)
        if self.rounds_inputs:
            x = round_int8(x).values if x.dtype is torch.float64 else _round_narrow(x)
        if way == "backwards":
            y = F.linear(x.flip(-1), weight.flip(-1))
        elif way == "halves":
            middle = x.shape[-1] // 2
            y = F.linear(x[..., :middle], weight[:, :middle]) + F.linear(x[..., middle:], weight[:, middle:])
        elif way == "row by row":
            rows = x.reshape(-1, x.shape[-1])
            y = torch.stack([weight.mv(row) for row in rows]).view(*x.shape[:-1], -1)
        else:
            y = F.linear(x, weight)
        return y if self.bias is None else y + self.bias.to(x.dtype)

    def tie_room(self, x: Tensor) -> Tensor | float:
        """Return how far each output may be off because inputs are at the middle of two codes, [..., O]."""
        if not self.rounds_inputs:
            return 0.0
        rounded = round_int8(x.double())
        room = torch.where(rounded.tie, (rounded.other - rounded.values).abs(), 0.0)
        return F.linear(room, self.weight.abs())


def _round_narrow(x: Tensor) -> Tensor:
    """Round rows to 8 bits in float32, as `round_int8` does in float64."""
    scale = int8_scale(x)
    return (x / scale).round().clamp(-128, 127) * scale


class _Linear(nn.Module):
    def __init__(self, layer: Layer, way: str) -> None:
        super().__init__()
        self.layer, self.way = layer, way

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.way)


def network(model: nn.Module, layers: Mapping[str, Layer], dtype: torch.dtype, way: str = "plain") -> nn.Module:
    """Return a copy of `model` in `dtype` with `layers` in the place of its linear layers."""
    made = copy.deepcopy(model).to(dtype)
    for name in linears(model):
        made.set_submodule(name, _Linear(layers[name], way))
    return made.eval()
