"""ZeRO-R (arXiv:1910.02054 section 6): blocks are computed again by DeepSpeed's own checkpointing, which keeps their
inputs as a rank's part, in buffers made once and in the host's memory."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor, nn

from meshmark.adapter.contract import Feature
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.deepspeed import DeepSpeed
from meshmark.errors import AdapterError
from meshmark.models.module import Model, parameter_shapes, sizes_by_block
from meshmark.spec.case import Case
from meshmark.spec.layout import Recompute
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.traffic import Purpose, TrafficException, besides, step_traffic


def recompute(block: nn.Module, x: Tensor) -> Tensor:
    """DeepSpeed's `checkpoint`, in the place of PyTorch's."""
    import deepspeed

    y: Tensor = deepspeed.checkpointing.checkpoint(block, x)
    return y


class DeepSpeedCheckpointing(DeepSpeed):
    """DeepSpeed with its own activation checkpointing.

    With one rank for each tensor, its part is all of it: `partition_activations` copies it, and contiguous buffers and
    offload take the copy. On a CPU the host's memory is the device's.
    """

    capabilities: ClassVar = dataclasses.replace(
        DeepSpeed.capabilities,
        lacks={
            **DeepSpeed.capabilities.lacks,
            Feature.FROZEN: "blocks behind a frozen embedding get no gradient by it",
        },
    )

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        found = super().extra_memory(case, rank)
        if case.layout.recompute is not Recompute.FULL:
            return found
        state = float(torch.get_rng_state().nbytes * case.workload.model.num_layers)
        reason = "each block's state of random numbers is kept twice: the host's, and the device's"
        return (*found, ExtraMemory(category="activations", num_bytes=state, reason=reason))

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        kept = dataclasses.replace(case, layout=dataclasses.replace(case.layout, recompute=Recompute.NONE))
        found = super().traffic_exceptions(kept, rank)
        if case.layout.recompute is not Recompute.FULL or case.layout.zero_stage < 3:
            return found
        units, dp = parameter_shapes(case.workload.model), case.layout.dp
        again = [n + -n % dp for block, sizes in sizes_by_block(case.workload.model).items() if block for n in sizes]
        share = Fraction(sum(again), 2 * sum(map(math.prod, units.values())))
        reason = "a block's weights are gathered once more: to compute it again, and then for its backward"
        return (*found, *besides(step_traffic(case, rank), Purpose.WEIGHTS, share, reason))

    def model(self, case: Case, context: RankContext) -> Model:
        model = super().model(case, context)
        if model.recompute:
            model.recompute = recompute
        return model

    def build(self, case: Case, context: RankContext) -> Engine:
        """Build the engine. Raises `AdapterError` if DeepSpeed's checkpointing is not set as requested.

        Losses would not show that.
        """
        engine = super().build(case, context)
        if case.layout.recompute is not Recompute.FULL:
            return engine
        from deepspeed.runtime.activation_checkpointing import checkpointing

        checkpointing.configure(
            None,
            partition_activations=True,
            contiguous_checkpointing=True,
            num_checkpoints=case.workload.model.num_layers,
            checkpoint_in_cpu=True,
        )
        if not (checkpointing.PARTITION_ACTIVATIONS and checkpointing.CONTIGUOUS_CHECKPOINTING):
            raise AdapterError(f"rank {context.rank}: DeepSpeed neither partitions activations nor has buffers of them")
        return engine
