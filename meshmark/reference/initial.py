"""Initial values of parameters, drawn per name from a counter-based generator.

Element i of a parameter depends on (seed, name, i) alone, so any shard can be filled without the whole, and every
framework, layout and device starts from the same bits. The generator is SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)
on the element's index; a value is the centred sum of the four 16-bit fields of its 64 bits, a bell-shaped
(Irwin-Hall) variable. All of it is integer arithmetic up to one exact conversion and one multiplication, hence
the same on CPU and GPU.
"""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshmark.spec.model_config import ModelConfig

_AT_ONCE = 2**16
"""Elements that are drawn at once."""
# The sum of four uniform integers in [0, 65535]: its mean, and its standard deviation sqrt(4 (65536^2 - 1) / 12).
_MEAN = 2 * 65535
_STD = math.sqrt((65536**2 - 1) / 3)


def _signed(value: int) -> int:
    """The 64-bit pattern `value` as the signed integer that torch's int64 holds."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical (not arithmetic) right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _splitmix64(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 on int64 counters (any shape), with wrap-around multiplication."""
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _index(full_shape: Sequence[int], shape: Sequence[int], offset: Sequence[int], device: torch.device) -> Tensor:
    """Row-major indices into a tensor of `full_shape` of the block of `shape` at `offset`. int64, shape `shape`."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for full, size, start in reversed(list(zip(full_shape, shape, offset, strict=True))):
        position = (torch.arange(size, device=device) + start) * stride
        index = position.view(-1, *([1] * index.dim())) + index
        stride *= full
    return index.reshape(tuple(shape))


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of a tensor: a rank's shard, say."""

    shape: Sequence[int]
    offset: Sequence[int]
    """Of its first element, by dim."""


def random_bits(
    name: str,
    full_shape: Sequence[int],
    *,
    seed: int,
    block: Block | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """64 random bits for every element of a block of a tensor of `full_shape` (default: all of it), by (seed, name,
    element) alone. int64, the block's shape."""
    part = block or Block(shape=full_shape, offset=[0] * len(full_shape))
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")
    golden = _signed(0x9E3779B97F4A7C15)
    index = _index(full_shape, part.shape, part.offset, device or torch.device("cpu"))
    return _splitmix64(index * golden + _signed(key))


def row_blocks(block: Block) -> list[Block]:
    """A block by some of its rows at once, few enough that the generator's wide integers stay in the cache."""
    if not block.shape:
        return [block]
    rows = max(_AT_ONCE // max(math.prod(block.shape[1:]), 1), 1)
    return [
        Block(
            shape=[min(rows, block.shape[0] - i), *block.shape[1:]],
            offset=[block.offset[0] + i, *block.offset[1:]],
        )
        for i in range(0, max(block.shape[0], 1), rows)
    ]


def _bell(bits: Tensor) -> Tensor:
    """Random bits (int64) to values of mean 0 and standard deviation 1, bounded by 3.5. float32, same shape."""
    total = (bits & 0xFFFF) + ((bits >> 16) & 0xFFFF) + ((bits >> 32) & 0xFFFF) + ((bits >> 48) & 0xFFFF)
    return (total - _MEAN).to(torch.float32) * (1.0 / _STD)


def initial_value(
    model: ModelConfig,
    name: str,
    full_shape: Sequence[int],
    *,
    seed: int,
    block: Block | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Return the initial value of the parameter with canonical `name`, or of one block of it: float32, of that shape.

    The model's family says how values are made.
    """
    where, _, function = model.initial_values.partition(":")
    values: Callable[..., Tensor] = getattr(importlib.import_module(where), function)
    return values(model, name, full_shape, seed=seed, block=block, device=device)


def drawn_value(
    model: ModelConfig,
    name: str,
    full_shape: Sequence[int],
    *,
    seed: int,
    block: Block | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """The initial value of the parameter with canonical `name` (or of one block of it), float32, the block's shape.

    Norm weights are one and biases zero; every other weight is bell-shaped with standard deviation `init_std`,
    residual projections with init_std / sqrt(2 num_layers) (Radford et al. 2019, section 2.3).
    """
    size = tuple(block.shape if block else full_shape)
    if name.endswith("bias"):
        return torch.zeros(size, device=device)
    if "norm." in name:
        return torch.ones(size, device=device)
    if len(parts := row_blocks(block or Block(shape=size, offset=[0] * len(size)))) > 1:
        every = [drawn_value(model, name, full_shape, seed=seed, block=part, device=device) for part in parts]
        return torch.cat(every)
    std = model.init_std
    if name.endswith(("attention.out.weight", ".down.weight")):
        std /= math.sqrt(2 * model.num_layers)
    return _bell(random_bits(name, full_shape, seed=seed, block=block, device=device)) * std
