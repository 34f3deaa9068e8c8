"""How replicas tell one another compressed tensors: one collective a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshmark.adapters.compressed.codecs import Codec, Message, check, codec_of, joined
from meshmark.algorithms.compressed.compressor import Compressor, CompressorKind
from meshmark.algorithms.compressed.compressors import Draw

Named = Mapping[str, Tensor]


class Received(Protocol):
    """Contents of a step's messages."""

    def local(self) -> dict[str, Tensor]:
        """Return what all replicas receive of this replica's tensors."""

    def mean(self) -> dict[str, Tensor]:
        """Return the mean over all replicas of what is received of each."""


class Exchange(Protocol):
    def meet(self, tensors: Named, step: int) -> Received:
        """A collective call."""


class Messages:
    """Every replica's; read one at a time, for whole tensors are large."""

    def __init__(self, codec: Codec, contents: Sequence[Tensor], like: Named) -> None:
        self.codec, self.contents = codec, contents
        self.shapes = {name: x.shape for name, x in like.items()}
        self.dtype = next(iter(like.values())).dtype

    def local(self) -> dict[str, Tensor]:
        return dict(self.read(self.contents[dist.get_rank()]))

    def mean(self) -> dict[str, Tensor]:
        total = self.total()
        torch._foreach_div_(list(total.values()), len(self.contents))
        return total

    def total(self) -> dict[str, Tensor]:
        first, *others = self.contents
        total = dict(self.read(first))
        for content in others:
            for name, x in self.read(content):
                total[name].add_(x)
        return total

    def read(self, content: Tensor) -> Iterator[tuple[str, Tensor]]:
        message = Message(content)
        for name, shape in self.shapes.items():
            yield name, self.codec.unpack(message, shape.numel(), self.dtype).view(shape)


class Gathered:
    """Every replica's message to all."""

    def __init__(self, codec: Codec, seed: int) -> None:
        self.codec, self.seed = codec, seed

    def meet(self, tensors: Named, step: int) -> Messages:
        own = self.message(tensors, step)
        every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(every, own)
        return Messages(self.codec, every, tensors)

    def message(self, tensors: Named, step: int) -> Tensor:
        return joined([part for name, x in tensors.items() for part in self.packed(name, x, step)])

    def packed(self, name: str, x: Tensor, step: int) -> list[Tensor]:
        check(name, x)
        return self.codec.pack(x.reshape(-1), self.draw(name, step))

    def draw(self, name: str, step: int) -> Draw:
        return Draw(seed=self.seed, step=step, replica=dist.get_rank(), name=name)


class Elements:
    """The same places of all replicas' tensors."""

    def __init__(self, places: Named, values: Sequence[Tensor], means: Sequence[Tensor], like: Named) -> None:
        self.places, self.values, self.means, self.like = places, values, means, like

    def local(self) -> dict[str, Tensor]:
        return self.spread(self.values)

    def mean(self) -> dict[str, Tensor]:
        return self.spread(self.means)

    def spread(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        found = {}
        for (name, x), part in zip(self.like.items(), values, strict=True):
            found[name] = torch.zeros_like(x).view(-1).scatter_(0, self.places[name], part).view_as(x)
        return found


class Summed:
    """Elements that all draw alike are summed where they stand."""

    def __init__(self, compressor: Compressor, seed: int) -> None:
        self.compressor, self.seed = compressor, seed

    def meet(self, tensors: Named, step: int) -> Elements:
        places = {name: self.places(name, x, step) for name, x in tensors.items()}
        own = [x.reshape(-1)[places[name]] for name, x in tensors.items()]
        total = torch.cat(own)
        dist.all_reduce(total)
        means = torch.split(total.div_(dist.get_world_size()), [len(part) for part in own])
        return Elements(places, own, means, tensors)

    def places(self, name: str, x: Tensor, step: int) -> Tensor:
        check(name, x)
        drawn = torch.from_numpy(Draw(seed=self.seed, step=step, replica=0, name=name).bits(x.numel(), shared=True))
        return drawn.argsort(stable=True)[: self.compressor.kept(x.numel())].to(x.device)


def exchange_of(compressor: Compressor, seed: int) -> Exchange:
    if compressor.kind is CompressorKind.RANDOM_K:
        return Summed(compressor, seed)
    return Gathered(codec_of(compressor), seed)
