"""The promises of methods that make models smaller, computed in float64 from the original weights.

Nothing here calls a package that is judged. Shape suffixes: O outputs, I inputs of a linear layer, N rows of inputs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ROUNDINGS = 3
"""Operations in float32 between a weight and its rounded code: the scale, the quotient, the product."""
HALF_ULP = 2.0**-24
"""Relative error of one operation in float32."""
TABLE_ROOM = 2.0**-16
"""bitsandbytes' kernel for CPUs looks up 8-bit codes in a table of 2^16 entries between -1 and 1, so values nearer than
this to the middle of two codes may take the second-nearest."""
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The sixteen values of NormalFloat (arXiv:2305.14314, appendix E)."""


@dataclass(frozen=True, kw_only=True)
class Rounded:
    """Values after rounding to the nearest code, in float64."""

    values: Tensor
    other: Tensor
    """The second-nearest code's value."""
    tie: Tensor
    """True where float32 may take the second-nearest: the value is within rounding of the middle of the two."""

    def following(self, found: Tensor) -> Tensor:
        """Return the values; at ties those that `found` is closer to."""
        found = found.double()
        closer = (found - self.other).abs() < (found - self.values).abs()
        return torch.where(self.tie & closer, self.other, self.values)


def as_is(values: Tensor) -> Rounded:
    """Return values that no rounding changes."""
    values = values.double()
    return Rounded(values=values, other=values, tie=torch.zeros_like(values, dtype=torch.bool))


def int8_scale(x_NI: Tensor) -> Tensor:
    """Return the step of each row's 8-bit grid, [N, 1]."""
    return (x_NI.abs().amax(-1, keepdim=True) / 127.5).clamp(min=torch.finfo(torch.float32).eps)


def round_int8(x_NI: Tensor) -> Rounded:
    """Round each row to its own 8-bit grid: whole multiples of its largest absolute value / 127.5."""
    x_NI = x_NI.double()
    scale_N1 = int8_scale(x_NI)
    steps = x_NI / scale_N1
    code = steps.round().clamp(-128, 127)
    other = (code + torch.where(steps > code, 1.0, -1.0)).clamp(-128, 127)
    tie = ((steps - code).abs() - 0.5).abs() <= ROUNDINGS * HALF_ULP * steps.abs()
    return Rounded(values=code * scale_N1, other=other * scale_N1, tie=tie)


def round_to_codes(values: Tensor, codes: Tensor, block_size: int, room: float = 0.0) -> Rounded:
    """Round each block of `block_size` elements to the nearest of `codes` times the block's largest absolute value.

    A value within `room` of the middle of two codes, after division by the block's largest, may go either way.
    """
    padded, codes = in_blocks(values.double(), block_size), codes.double()
    largest = padded.abs().amax(1, keepdim=True)
    return _nearest(padded / largest.clamp(min=1e-38), largest, codes, values, room)


def in_blocks(x: Tensor, block_size: int) -> Tensor:
    """Return the elements in rows of `block_size`, the last one filled up with zeros."""
    return torch.cat([x.flatten(), x.new_zeros(-x.numel() % block_size)]).view(-1, block_size)


def _nearest(scaled: Tensor, largest: Tensor, codes: Tensor, like: Tensor, room: float = 0.0) -> Rounded:
    middles = (codes[1:] + codes[:-1]) / 2
    index = torch.bucketize(scaled, middles)
    up = (index + 1).clamp(max=len(codes) - 1)
    down = (index - 1).clamp(min=0)
    above = (scaled - codes[up]).abs() < (scaled - codes[down]).abs()
    second = torch.where((above | (down == index)) & (up != index), up, down)
    middle = (codes[index] + codes[second]) / 2
    tie = (scaled - middle).abs() <= ROUNDINGS * HALF_ULP * scaled.abs() + room

    def whole(blocks: Tensor) -> Tensor:
        return blocks.flatten()[: like.numel()].view(like.shape)

    return Rounded(values=whole(codes[index] * largest), other=whole(codes[second] * largest), tie=whole(tie))


def dynamic_codes(signed: bool) -> Tensor:
    """Return the 256 sorted values of 8-bit dynamic quantization (arXiv:2110.02861, section 2.2).

    For each of seven exponents there are fractions: middles of equal intervals between 0.1 and 1. The number of
    intervals doubles with the exponent. 0 and 1 are codes of their own.
    """
    found = [0.0, 1.0]
    for exponent in range(7):
        count = 2**exponent if signed else 2 ** (exponent + 1)
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float32).double()
        middles = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (exponent - 6)).tolist()
        found += middles
        found += [-middle for middle in middles] if signed else []
    return torch.tensor(sorted(found), dtype=torch.float64).float().double()


@dataclass(frozen=True, kw_only=True)
class ExactLayer:
    """A linear layer after compression."""

    stored: Rounded
    """Weight that the layer keeps, [O, I]. Smaller than the original's if channels are removed."""
    bias: Tensor | None
    full: Tensor | None = None
    """Weight of the original shape with zeros, if `stored` is smaller."""
    full_bias: Tensor | None = None


class Specification(ABC):
    """The effect of a method on the linear layers of a model."""

    rounds_inputs = False
    """True if each row of a layer's inputs is rounded as by `round_int8`."""

    @abstractmethod
    def layers(self, model: nn.Module) -> dict[str, ExactLayer]:
        """Return every linear layer of `model`, by its name, after compression."""

    @abstractmethod
    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes that keep a weight of which `shape` [O, I] is left."""


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers by name, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def _bias(layer: nn.Linear) -> Tensor | None:
    return None if layer.bias is None else layer.bias.detach().double()


class Int8Rows(Specification):
    """8-bit weights: one float32 scale for each output, and an 8-bit zero point, which is 0."""

    def layers(self, model: nn.Module) -> dict[str, ExactLayer]:
        return {
            name: ExactLayer(stored=round_int8(layer.weight.detach()), bias=_bias(layer))
            for name, layer in linears(model).items()
        }

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        outputs, inputs = shape
        return outputs * inputs + outputs * (4 + 1)


class Int8RowsAndInputs(Int8Rows):
    """The same, and inputs are rounded to 8 bits row by row as they come."""

    rounds_inputs = True


class NF4Blocks(Specification):
    """4-bit NormalFloat codes, two a byte; one float32 for every 64 weights, and the table of 16 codes."""

    block_size = 64

    def layers(self, model: nn.Module) -> dict[str, ExactLayer]:
        codes = torch.tensor(NF4)
        return {
            name: ExactLayer(stored=round_to_codes(layer.weight.detach(), codes, self.block_size), bias=_bias(layer))
            for name, layer in linears(model).items()
        }

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        elements = math.prod(shape)
        return math.ceil(elements / 2) + 4 * math.ceil(elements / self.block_size) + 4 * len(NF4)


class NF4DoubleBlocks(NF4Blocks):
    """The same with 8-bit block maxima: dynamic codes of their distance from their mean, in blocks of 256.

    Beside these it keeps a float32 for each such block, the table of 256 codes, and the mean.
    """

    def layers(self, model: nn.Module) -> dict[str, ExactLayer]:
        found = {}
        for name, layer in linears(model).items():
            weight = layer.weight.detach().double()
            blocks = weight.flatten().view(-1, self.block_size)
            largest = blocks.abs().amax(1, keepdim=True)
            mean = largest.mean()
            kept = round_to_codes(largest - mean, dynamic_codes(signed=True), 256, TABLE_ROOM)
            rounded = _nearest(blocks / largest, largest, torch.tensor(NF4).double(), weight)  # by the exact maxima

            def ratio(maxima: Tensor, largest: Tensor = largest, like: Tensor = weight) -> Tensor:
                return (maxima / largest).expand(-1, self.block_size).reshape(like.shape)

            value = rounded.values * ratio(kept.values + mean)
            exact = Rounded(
                values=value,
                other=torch.where(
                    rounded.tie, rounded.other * ratio(kept.values + mean), rounded.values * ratio(kept.other + mean)
                ),
                tie=rounded.tie | (ratio(kept.tie * largest) > 0),
            )
            found[name] = ExactLayer(stored=exact, bias=_bias(layer))
        return found

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        blocks = math.ceil(math.prod(shape) / self.block_size)
        return math.ceil(math.prod(shape) / 2) + blocks + 4 * (math.ceil(blocks / 256) + 256 + 1 + len(NF4))


@dataclass(frozen=True, kw_only=True)
class SmallestZeroed(Specification):
    """The part `share` of each weight with the smallest absolute values is zero; original and mask both stay."""

    share: float = 0.5

    def layers(self, model: nn.Module) -> dict[str, ExactLayer]:
        found = {}
        for name, layer in linears(model).items():
            weight = layer.weight.detach().double()
            order = weight.abs().flatten().argsort()
            mask = torch.ones(weight.numel(), dtype=torch.float64)
            mask[order[: round(self.share * weight.numel())]] = 0
            found[name] = ExactLayer(stored=as_is(weight * mask.view(weight.shape)), bias=_bias(layer))
        return found

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        return 3 * 4 * math.prod(shape)  # original, mask, and their product


@dataclass(frozen=True, kw_only=True)
class ChannelsRemoved(Specification):
    """The part `share` of each feed-forward network's channels is removed: smallest sums of |weight| in `up`."""

    share: float = 0.5

    def layers(self, model: nn.Module) -> dict[str, ExactLayer]:
        kept = self.kept(model)
        found = {}
        for name, layer in linears(model).items():
            weight, bias = layer.weight.detach().double(), _bias(layer)
            block, _, part = name.rpartition(".")
            if block not in kept or part not in ("up", "down"):
                found[name] = ExactLayer(stored=as_is(weight), bias=bias)
                continue
            channels, full = kept[block], torch.zeros_like(weight)
            if part == "up":
                full[channels] = weight[channels]
                full_bias = None if bias is None else torch.zeros_like(bias)
                if full_bias is not None and bias is not None:
                    full_bias[channels] = bias[channels]
                left = as_is(weight[channels])
                small_bias = None if bias is None else bias[channels]
                found[name] = ExactLayer(stored=left, bias=small_bias, full=full, full_bias=full_bias)
            else:
                full[:, channels] = weight[:, channels]
                found[name] = ExactLayer(stored=as_is(weight[:, channels]), bias=bias, full=full, full_bias=bias)
        return found

    def kept(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return, by feed-forward network, the channels that stay, in order."""
        found = {}
        for name, layer in linears(model).items():
            if name.endswith(".up"):
                order = layer.weight.detach().double().abs().sum(1).argsort()
                found[name.removesuffix(".up")] = order[round(self.share * len(order)) :].sort().values
        return found

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        return 4 * math.prod(shape)
