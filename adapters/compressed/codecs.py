"""Codecs: which part of a tensor is sent, as tensors that are joined into one message, and how it is decoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from meshmark.algorithms.compressed.compressor import Compressor, CompressorKind
from meshmark.algorithms.compressed.compressors import Draw
from meshmark.errors import InputError

_PLACES = (128, 64, 32, 16, 8, 4, 2, 1)
"""Place values of the eight signs in a byte."""


class Codec(ABC):
    def __init__(self, compressor: Compressor | None) -> None:
        self.compressor = compressor

    @abstractmethod
    def pack(self, x: Tensor, draw: Draw) -> list[Tensor]:
        """Return the tensors that encode the flat tensor `x`."""

    @abstractmethod
    def unpack(self, message: Message, size: int, dtype: torch.dtype) -> Tensor:
        """Return the flat tensor that `message` describes, and advance the message past it."""


class Message:
    """Bytes of one replica, read from the first to the last."""

    def __init__(self, content: Tensor) -> None:
        self.content, self.place = content, 0

    def read(self, count: int, dtype: torch.dtype) -> Tensor:
        end = self.place + count * dtype.itemsize
        part = self.content[self.place : end].clone().view(dtype)
        self.place = end
        return part


def joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.contiguous().view(torch.uint8).reshape(-1) for part in parts])


def check(name: str, x: Tensor) -> None:
    """Raise `InputError` if `x` is empty or not of floating point."""
    if not x.numel():
        raise InputError(f"{name!r} is empty, so it cannot be compressed; leave it out of the optimizer")
    if not x.is_floating_point():
        raise InputError(f"{name!r} holds {x.dtype}; gradients are compressed as floating-point numbers")


class TopK(Codec):
    """Sends the largest values with their indices."""

    def pack(self, x: Tensor, draw: Draw) -> list[Tensor]:
        assert self.compressor is not None
        count = self.compressor.kept(x.numel())
        # Not torch.topk, which takes any of equal ones.
        places = torch.sort(x.abs(), descending=True, stable=True).indices[:count]
        return [x[places], places.int()]

    def unpack(self, message: Message, size: int, dtype: torch.dtype) -> Tensor:
        assert self.compressor is not None
        count = self.compressor.kept(size)
        values, places = message.read(count, dtype), message.read(count, torch.int32)
        return torch.zeros(size, dtype=dtype, device=values.device).scatter_(0, places.long(), values)


class Votes(Codec):
    """Sends one sign bit per element."""

    def pack(self, x: Tensor, draw: Draw) -> list[Tensor]:
        bits = torch.nn.functional.pad((x >= 0).to(torch.uint8), (0, -x.numel() % 8)).view(-1, 8)
        return [(bits * torch.tensor(_PLACES, dtype=torch.uint8, device=x.device)).sum(1, dtype=torch.uint8)]

    def unpack(self, message: Message, size: int, dtype: torch.dtype) -> Tensor:
        packed = message.read(-(-size // 8), torch.uint8)
        places = torch.tensor(_PLACES, dtype=torch.uint8, device=packed.device)
        bits = (packed[:, None] & places) != 0
        return bits.reshape(-1)[:size].to(dtype) * 2 - 1


class Sign(Votes):
    """Sends one sign bit per element and the mean magnitude."""

    def pack(self, x: Tensor, draw: Draw) -> list[Tensor]:
        return [*super().pack(x, draw), self.scale(x)]

    def scale(self, x: Tensor) -> Tensor:
        return x.abs().mean(dtype=torch.float64).float().reshape(1)

    def unpack(self, message: Message, size: int, dtype: torch.dtype) -> Tensor:
        return super().unpack(message, size, dtype) * message.read(1, torch.float32).to(dtype)


class QSGD(Codec):
    """Sends one signed level per element and the norm."""

    def pack(self, x: Tensor, draw: Draw) -> list[Tensor]:
        assert self.compressor is not None
        levels, norm = self.compressor.levels, torch.linalg.vector_norm(x, dtype=torch.float64).float().reshape(1)
        if not norm:
            return [torch.zeros_like(x, dtype=torch.int8), norm]
        places = x.abs().div_(norm.to(x.dtype)).mul_(levels)
        below = places.floor()
        up = self.drawn(draw, x.numel()).to(x.device) < places.sub_(below)
        return [below.add_(up).clamp_(max=levels).copysign_(x).to(torch.int8), norm]

    def drawn(self, draw: Draw, size: int) -> Tensor:
        return torch.from_numpy(draw.uniform(size))

    def unpack(self, message: Message, size: int, dtype: torch.dtype) -> Tensor:
        assert self.compressor is not None
        levels, norm = message.read(size, torch.int8), message.read(1, torch.float32)
        return levels.to(dtype) * (norm.to(dtype) / self.compressor.levels)


class Rounds(Codec):
    """Codec that encodes what remains of the tensor again, with the same inner codec."""

    def __init__(self, compressor: Compressor, codec: Codec) -> None:
        super().__init__(compressor)
        self.codec, self.count = codec, compressor.rounds

    def pack(self, x: Tensor, draw: Draw) -> list[Tensor]:
        parts, told = self.codec.pack(x, draw), torch.zeros_like(x)
        found = parts
        for _ in range(1, self.count):
            told = told + self.codec.unpack(Message(joined(parts)), x.numel(), x.dtype)
            parts = self.codec.pack(x - told, draw)
            found = found + parts
        return found

    def unpack(self, message: Message, size: int, dtype: torch.dtype) -> Tensor:
        found = self.codec.unpack(message, size, dtype)
        for _ in range(1, self.count):
            found += self.codec.unpack(message, size, dtype)
        return found


CODECS: dict[CompressorKind, type[Codec]] = {
    CompressorKind.TOP_K: TopK,
    CompressorKind.SIGN: Sign,
    CompressorKind.QSGD: QSGD,
}


def codec_of(compressor: Compressor) -> Codec:
    codec = CODECS[compressor.kind](compressor)
    return Rounds(compressor, codec) if compressor.rounds > 1 else codec
