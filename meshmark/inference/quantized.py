"""Checkpoints with integer weights: whole numbers of few bits, packed into int32, and their scales.

The layout is "pack-quantized" of compressed-tensors 0.17, which vLLM reads. Of a linear layer, `weight_packed` has
32 / bits numbers in each int32, along the inputs and the lowest bits first, each plus 2^(bits - 1); `weight_scale` is
of shape (outputs, groups of inputs); `weight_shape` has the weight's own. Scales are bfloat16 numbers kept in float32,
so that a number times its scale is exact in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def quantize(weights: Mapping[str, Tensor], bits: int, group_size: int) -> dict[str, Tensor]:
    """Return a checkpoint with integers for the weights of linear layers in blocks.

    Weights of 8 bits have a scale for each output, those of 4 bits one for each group of inputs.
    """
    found = dict[str, Tensor]()
    for name, weight in weights.items():
        path, _, kind = name.rpartition(".")
        if kind == "weight" and path.endswith(_LINEAR):
            codes, scale = round_weight(weight, bits, group_size if bits == 4 else weight.shape[1])
            found |= {
                f"{path}.weight_packed": pack(codes, bits),
                f"{path}.weight_scale": scale,
                f"{path}.weight_shape": torch.tensor(weight.shape),
            }
        else:
            found[name] = weight
    return found


def round_weight(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Return codes of shape (outputs, inputs) and scales of shape (outputs, groups)."""
    groups = weight.float().view(len(weight), -1, group_size)
    most = 2 ** (bits - 1)
    scale = (groups.abs().amax(-1, keepdim=True) / (most - 0.5)).bfloat16().float()  # the lowest code is used too
    codes = (groups / scale).round().clamp(-most, most - 1)
    return codes.view(weight.shape).int(), scale[..., 0].contiguous()


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes of shape (outputs, inputs) as int32 of shape (outputs, inputs x bits / 32)."""
    each = (codes.long() + 2 ** (bits - 1)).view(len(codes), -1, 32 // bits)
    packed = (each << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the codes in `packed`."""
    each: Tensor = (packed.long()[..., None] >> torch.arange(0, 32, bits)) & (2**bits - 1)
    codes: Tensor = each.flatten(-2) - 2 ** (bits - 1)
    return codes


def dequantize(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights that a checkpoint stands for, exactly, in float32."""
    found = {}
    for name, weight in weights.items():
        path, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            scale, shape = weights[f"{path}.weight_scale"], weights[f"{path}.weight_shape"].tolist()
            codes = unpack(weight, 32 * weight.shape[1] // shape[1])
            groups = codes.view(shape[0], scale.shape[1], -1) * scale[..., None]
            found[f"{path}.weight"] = groups.view(shape)
        elif kind not in ("weight_scale", "weight_shape"):
            found[name] = weight
    return found


def config(bits: int, group_size: int) -> dict[str, Any]:
    """Return `quantization_config` of a checkpoint."""
    strategy = {"strategy": "group", "group_size": group_size} if bits == 4 else {"strategy": "channel"}
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, **strategy}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
            }
        },
    }
