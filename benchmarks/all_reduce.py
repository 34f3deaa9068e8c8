"""An adapter that only all-reduces the residual stream of its workload, as tensor parallelism does in a layer."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.nothing import NothingEngine
from meshmark.adapter.contract import Adapter, Capabilities
from meshmark.adapter.engine import Engine, RankContext
from meshmark.reference.data import Batch
from meshmark.spec.case import Case

REDUCTIONS_PER_STEP = 20


class AllReduceEngine(NothingEngine):
    def __init__(self, case: Case) -> None:
        model = case.workload.model
        rows = case.workload.global_batch // case.layout.num_micro_batches
        self.stream_BTC = torch.zeros(rows, model.seq_len, model.hidden)

    def backward(self, batch: Batch) -> Tensor:
        for _ in range(REDUCTIONS_PER_STEP):
            torch.distributed.all_reduce(self.stream_BTC)
        return torch.zeros(())


class AllReduce(Adapter):
    capabilities: ClassVar = Capabilities(degrees=frozenset({"tp"}))

    def build(self, case: Case, context: RankContext) -> Engine:
        return AllReduceEngine(case)
