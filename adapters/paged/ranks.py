"""Run the paged engine's model on several tensor-parallel ranks: rank 0 is the engine's own process."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from meshmark.adapters.paged.model import Batch, PagedLlama
from meshmark.inference.contract import EngineOptions
from meshmark.serial import decode, encode


class Ranks:
    """All ranks of a model."""

    def __init__(self, model: type[PagedLlama], folder: Path, options: EngineOptions) -> None:
        self._tp = options.tp
        if self._tp > 1:
            self._folder = tempfile.TemporaryDirectory(prefix="meshmark-paged-")
            address = str(Path(self._folder.name) / "store")
            context = multiprocessing.get_context("spawn")
            for rank in range(1, self._tp):
                arguments = (model, folder, options, rank, address)
                context.Process(target=_serve, args=arguments, daemon=True).start()
            _join(address, 0, self._tp)
        self.model = model(folder, options)
        self.cache_bytes = _bytes_by_rank(self.model, self._tp)

    def logprobs(self, batch: Batch) -> list[Tensor]:
        """Compute a batch on all ranks. Returns log probabilities for each span."""
        if self._tp > 1:
            _send(batch)
        return self.model.logprobs(batch)

    def close(self) -> None:
        """End the other ranks."""
        if self._tp > 1:
            _send(None)
            dist.destroy_process_group()
            self._folder.cleanup()


def _join(address: str, rank: int, tp: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=tp)


def _bytes_by_rank(model: PagedLlama, tp: int) -> tuple[int, ...]:
    own = torch.tensor([model.cache.untyped_storage().nbytes()])
    every = [own.clone() for _ in range(tp)]
    if tp > 1:
        dist.all_gather(every, own)
    return tuple(int(each) for each in every)


def _send(batch: Batch | None) -> None:
    """Send a batch from rank 0 to all others, as JSON: whoever unpickles runs what the sender wants."""
    text = torch.frombuffer(bytearray(json.dumps(encode(batch)).encode()), dtype=torch.uint8)
    dist.broadcast(torch.tensor([len(text)]), 0)
    dist.broadcast(text, 0)


def _receive() -> Batch | None:
    size = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(size, 0)
    text = torch.zeros(int(size), dtype=torch.uint8)
    dist.broadcast(text, 0)
    batch: Batch | None = decode(Batch | None, json.loads(bytes(text.tolist())))
    return batch


def _serve(kind: type[PagedLlama], folder: Path, options: EngineOptions, rank: int, address: str) -> None:
    """Compute what rank 0 sends, until it sends None."""
    _join(address, rank, options.tp)
    model = kind(folder, options, rank)
    _bytes_by_rank(model, options.tp)
    while batch := _receive():
        model.logprobs(batch)
