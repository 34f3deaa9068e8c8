"""Correct paged engines that differ from the one in adapters/: the inference suite must accuse none of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from meshmark.adapters.paged import Paged
from meshmark.adapters.paged.engine import PagedEngine, Sample
from meshmark.adapters.paged.model import PagedLlama
from meshmark.inference.contract import Emitted, Engine, EngineOptions, Request


class _SplitModel(PagedLlama):
    """Splits the sums of linear layers by the tokens of a batch, as kernels of GPUs do, and adds the parts."""

    def _linear(self, x: Tensor, name: str) -> Tensor:
        weight = self.weight(name)
        parts = (1, 2, 4)[len(x) % 3]
        pieces = zip(x.chunk(parts, -1), weight.chunk(parts, -1), strict=True)
        return torch.stack([functional.linear(a, b) for a, b in pieces]).sum(0)


class _SplitEngine(PagedEngine):
    model_type = _SplitModel


class RoundsByBatch(Paged):
    """Rounds in another way for each size of a batch, so that drawn tokens part where they are near another."""

    precisions = ("fp32", "bf16")

    def build(self, model: Path, options: EngineOptions) -> Engine:
        return _SplitEngine(model, options)


class InverseCdfEngine(_SplitEngine):
    """Draws by one random number for each token, which tokens divide in the order of their ids."""

    def choose(self, sample: Sample, row: Tensor) -> int:
        if sample.draws is None:
            return int(row.argmax())
        ends = (row.double() / sample.request.temperature).softmax(-1).cumsum(-1)
        drawn = torch.rand(1, generator=sample.draws, dtype=torch.float64) * ends[-1]
        return int(torch.searchsorted(ends, drawn, right=True).clamp(max=len(row) - 1))


class RoundsByBatchInverseCdf(RoundsByBatch):
    """The same, with another way to draw."""

    def build(self, model: Path, options: EngineOptions) -> Engine:
        return InverseCdfEngine(model, options)


class ReservingEngine(PagedEngine):
    """Begins a request when all blocks that it can need are free, and never evicts."""

    def _reserve(self, sample: Sample, count: int) -> bool:
        request = sample.request
        if sample not in self._running:
            most = self._blocks_for(min(len(request.prompt) + request.max_new_tokens - 1, self.options.context_limit))
            held = sum(
                self._blocks_for(len(one.request.prompt) + one.request.max_new_tokens - 1) for one in self._running
            )
            if held + request.num_sequences * most > self.options.num_blocks:
                return False
        return super()._reserve(sample, count)


class EndsRefusedEngine(PagedEngine):
    """Takes every request, and ends those that it refuses with the finish "error"."""

    def submit(self, request: Request) -> None:
        try:
            super().submit(request)
        except ValueError:
            self._refused = [*getattr(self, "_refused", []), request]

    def step(self, emit: Callable[[Emitted], None]) -> None:
        refused, self._refused = getattr(self, "_refused", []), []
        for request in refused:
            emit(Emitted(request=request.name, copy=0, finish="error"))
        if super().is_busy():
            super().step(emit)

    def is_busy(self) -> bool:
        return bool(getattr(self, "_refused", [])) or super().is_busy()
