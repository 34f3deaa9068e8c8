"""DeepSpeed's other ways to accumulate gradients, and to bring those of ranks together."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor

from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.deepspeed import EARLIER_GAPS, STAGE_3_GAPS, DeepSpeed
from meshmark.adapters.deepspeed.engine import DeepSpeedEngine
from meshmark.errors import AdapterError
from meshmark.reference.data import Batch
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from meshmark.theory.recipe import TrainingRecipe
from meshmark.theory.traffic import Flow, Purpose, TrafficException, exceptions_for, step_traffic


class ByHandEngine(DeepSpeedEngine):
    """Calls `step` once a step, and PyTorch's own `backward` of a loss that DeepSpeed has scaled."""

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        yield

    def differentiate(self, loss: Tensor) -> None:
        self.module.scale(loss).backward()


class DeepSpeedByHand(DeepSpeed):
    """`managed_gradient_accumulation: false`: DeepSpeed counts no micro-batches, and updates at every `step`.

    Stages 1 and 2 are left out, for they then finish gradients inside `step`, where nobody can look at them before the
    update.
    """

    engine: ClassVar = ByHandEngine
    capabilities: ClassVar = dataclasses.replace(DeepSpeed.capabilities, zero_stages=frozenset({3}))
    known_gaps: ClassVar = STAGE_3_GAPS

    def config(self, case: Case, context: RankContext) -> dict[str, Any]:
        """A backward pass of PyTorch's is divided by the number of micro-batches that DeepSpeed is told, here one."""
        return {**super().config(case, context), **_one_micro_batch(case), "managed_gradient_accumulation": False}


class CoalescedEngine(DeepSpeedEngine):
    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        yield

    def backward(self, batch: Batch) -> Tensor:
        with self.module.coalesce_grad_reduction():
            return super().backward(batch)


class DeepSpeedCoalesced(DeepSpeed):
    """`coalesce_grad_reduction`: several calls of `backward` leave whole gradients behind, which are reduced once."""

    engine: ClassVar = CoalescedEngine
    capabilities: ClassVar = dataclasses.replace(
        DeepSpeed.capabilities,
        precisions=frozenset({Precision.FP32}),
        lacks={
            **DeepSpeed.capabilities.lacks,
            Precision.BF16: "several gradients of one step are summed in the weights' format, which is bf16",
            Precision.FP16: "several gradients of one step are summed in the weights' format, which is fp16",
        },
    )

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        """Up to stage 2 the bucket is made when activations are gone already: which of the two is the peak is not
        planned."""
        using = super().recipe(case)
        return using if case.layout.zero_stage == 3 else dataclasses.replace(using, peak_known=False)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """Once a step, where stages 2 and 3 reduce after every micro-batch."""
        layout, rounds = case.layout, case.layout.num_micro_batches
        if layout.zero_stage < 3:
            return super().traffic_exceptions(
                dataclasses.replace(case, layout=dataclasses.replace(layout, zero_stage=1)), rank
            )
        found = super().traffic_exceptions(case, rank)

        def once(flow: Flow) -> Flow:
            fewest, most = min(flow.fewest, 1), -(-flow.most // rounds)
            return dataclasses.replace(flow, num_bytes=flow.num_bytes // rounds, fewest=fewest, most=most)

        flows, padded = step_traffic(case, rank), []
        for each in found:
            if any(flow.purpose is Purpose.GRADIENTS for flow in each.sends):
                each = dataclasses.replace(each, sends=tuple(map(once, each.sends)))
            padded.append(each)
        reason = "gradients of all micro-batches are reduced once"
        return (*padded, *exceptions_for(flows, Purpose.GRADIENTS, reason, once))

    def config(self, case: Case, context: RankContext) -> dict[str, Any]:
        """One step is one micro-batch to DeepSpeed's own count."""
        return {**super().config(case, context), **_one_micro_batch(case)}


class SumsEngine(DeepSpeedEngine):
    """Losses are not multiplied by the number of ranks, so that gradients add up."""

    def differentiate(self, loss: Tensor) -> None:
        super().differentiate(loss / self.case.layout.dp)


class DeepSpeedSums(DeepSpeed):
    """`gradient_allreduce_op: sum`: gradients are summed over ranks, not averaged.

    DeepSpeed is told of one micro-batch at first, and by `set_train_batch_size` of the others, as where the batch grows
    while a model trains.
    """

    engine: ClassVar = SumsEngine
    arithmetic: ClassVar = dataclasses.replace(DeepSpeed.arithmetic, averages=False)
    capabilities: ClassVar = dataclasses.replace(DeepSpeed.capabilities, zero_stages=frozenset({1, 2}))
    known_gaps: ClassVar = EARLIER_GAPS

    def config(self, case: Case, context: RankContext) -> dict[str, Any]:
        first = {
            "train_batch_size": case.layout.dp,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
        }
        return {**super().config(case, context), **first, "gradient_allreduce_op": "sum"}

    def build(self, case: Case, context: RankContext) -> Engine:
        """Raise `AdapterError` where DeepSpeed counts other micro-batches than the layout has."""
        engine = super().build(case, context)
        assert isinstance(engine, DeepSpeedEngine)
        layout, module = case.layout, engine.module
        module.set_train_micro_batch_size(case.workload.global_batch // (layout.dp * layout.num_micro_batches))
        module.set_train_batch_size(case.workload.global_batch)
        if (found := module.gradient_accumulation_steps()) != layout.num_micro_batches:
            raise AdapterError(
                f"rank {context.rank}: DeepSpeed accumulates {found} micro-batches, expected {layout.num_micro_batches}"
            )
        return engine


def _one_micro_batch(case: Case) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": case.workload.global_batch // case.layout.dp,
        "gradient_accumulation_steps": 1,
    }
