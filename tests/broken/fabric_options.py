"""Defects of adapters that vary the options of Fabric and FairScale: the option is not heeded, or what it leaves to the
user is not done."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapter.loop import LoopEngine
from meshmark.adapters.fabric import FabricFSDP
from meshmark.adapters.fabric.loop import RawLoop
from meshmark.judge.faults import Fault
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Recompute
from meshmark.spec.precision import Precision
from tests.broken.engine import Broken
from tests.broken.mutant import GPT, Mutant, on

F = Fault
REPLICAS = Layout(dp=2, num_micro_batches=4)
UNCLIPPED = replace(GPT, name="gpt-mini-unclipped", optimizer=replace(GPT.optimizer, clip_norm=None))
TWO, FOUR = Layout(dp=2, zero_stage=3, num_micro_batches=4), Layout(dp=4, zero_stage=3, num_micro_batches=2)
PARTED = Layout(dp=2, zero_stage=2, num_micro_batches=4)
AGAIN = Layout(dp=2, zero_stage=3, num_micro_batches=2, recompute=Recompute.FULL)


class LoadsNothing(Adapter):
    """The raw file is written, and never read."""

    def build(self, case: Case, context: RankContext) -> Engine:
        class Nothing(RawLoop):
            def start(self, fabric: Any, model: Any) -> None:  # noqa: ANN401
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.5)

        return LoopEngine(case, context, Nothing(case, context))


class CountsOneRank(Adapter):
    """The first rank's number of targets is taken for the sum over ranks."""

    def build(self, case: Case, context: RankContext) -> Engine:
        class First(RawLoop):
            def total(self, fabric: Any, own: Any) -> Any:  # noqa: ANN401
                return fabric.all_gather(own)[0] * context.world_size

        return LoopEngine(case, context, First(case, context))


class WidePrecision(Adapter):
    """The strategy's precision is the default, whatever was given."""

    def choices(self, case: Case) -> dict[str, Any]:
        from lightning_fabric.plugins.precision import Precision as Plain

        return {"precision": Plain()}


class ShardsAll(Adapter):
    """Fabric's FSDP by its defaults: FULL_SHARD over all ranks, and nothing is computed again."""

    def build(self, case: Case, context: RankContext) -> Engine:
        class Plain(FabricFSDP):
            def model(self, case: Case, context: RankContext) -> Any:  # noqa: ANN401
                model = super().model(case, context)
                model.recompute = None
                return model

        return Plain().build(case, context)


class LargeBuckets(Adapter):
    """The size of buckets that was given is not heeded: all gradients fit in one."""

    def arguments(self, case: Case, config: dict[str, Any]) -> dict[str, Any]:
        given: dict[str, Any] = super().arguments(case, config)  # type: ignore[misc]
        return {**given, "reduce_bucket_size": case.workload.model.num_parameters}


class ReducesAtOnce(Broken):
    """Every micro-batch is reduced, and `reduce` adds nothing: what the owner has is scaled again each time."""

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        yield

    def finish_gradients(self) -> None:
        pass


class DividesTwice(Broken):
    """The divisors that are set after wrapping are the number of ranks, before and after."""

    module: Any

    def prepare(self) -> None:
        ranks = float(self.case.layout.dp)
        self.module.set_gradient_divide_factors(ranks, ranks, recursive=True)


class NoPassTheLast(Broken):
    """DeepSpeed's engine takes every backward pass for a step's last, and reduces what is reduced already once more, by
    which a mean does not change."""

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        yield


FABRIC_OPTION_MUTANTS: list[Mutant] = [
    *on("fabric-loop-raw", LoadsNothing, F.START, layout=REPLICAS),
    *on("fabric-loop-raw", CountsOneRank, layout=REPLICAS),
    *on("fabric-ddp-precision", WidePrecision, suite="memory", layout=REPLICAS, precision=Precision.BF16),
    *on("fabric-fsdp-shard-grad-op", ShardsAll, suite="communication", layout=TWO),
    *on("fabric-fsdp-hybrid", ShardsAll, suite="communication", layout=FOUR),
    *on("fabric-fsdp-recomputes", ShardsAll, suite="memory", layout=AGAIN),
    *on("fabric-deepspeed-arguments fabric-deepspeed-separate", LargeBuckets, suite="memory", layout=PARTED),
    *on("fabric-deepspeed-zero0", NoPassTheLast, suite="communication", layout=REPLICAS, workload=UNCLIPPED),
    *on("fairscale-fsdp-casts", DividesTwice, F.SCALED, layout=TWO),
    *on("fairscale-oss-by-hand", ReducesAtOnce, layout=PARTED),
]
