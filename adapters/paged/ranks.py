"""Run the paged engine's model on several tensor-parallel ranks: rank 0 is the engine's own process."""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from meshmark.adapters.paged.model import Batch, PagedLlama
from meshmark.inference.contract import EngineOptions


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
            dist.broadcast_object_list([batch])
        return self.model.logprobs(batch)

    def close(self) -> None:
        """End the other ranks."""
        if self._tp > 1:
            dist.broadcast_object_list([None])
            dist.destroy_process_group()
            self._folder.cleanup()


def _join(address: str, rank: int, tp: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=tp)


def _bytes_by_rank(model: PagedLlama, tp: int) -> tuple[int, ...]:
    num_bytes = [model.cache.untyped_storage().nbytes()] * tp
    if tp > 1:
        dist.all_gather_object(num_bytes, model.cache.untyped_storage().nbytes())
    return tuple(num_bytes)


def _serve(kind: type[PagedLlama], folder: Path, options: EngineOptions, rank: int, address: str) -> None:
    """Compute what rank 0 sends, until it sends None."""
    _join(address, rank, options.tp)
    model = kind(folder, options, rank)
    _bytes_by_rank(model, options.tp)
    said: list[Batch | None] = [None]
    while True:
        dist.broadcast_object_list(said)
        if said[0] is None:
            return
        model.logprobs(said[0])
