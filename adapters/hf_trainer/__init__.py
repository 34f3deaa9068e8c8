"""`transformers.Trainer` as it is: DDP, FSDP2 and DeepSpeed, each by its own `TrainingArguments`.

The Trainer gets the workload's model, a data set of its rows and `compute_loss_func`, which divides a sum by
`num_items_in_batch`, the number of labels that the Trainer has counted. Loading, accumulation, reduction, clipping, the
optimizer's step, the schedule and checkpoints are its own. These adapters are *as theory says*: the optimizer is
given to it, and rows are read in order. `hf-trainer-recommended` leaves the optimizer to the Trainer's arguments.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from meshmark.adapter.contract import Capabilities, Feature, Requirement, Track
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapter.loop import GREENLET, LOOP_LACKS, LoopEngine
from meshmark.adapters.accelerate import AccelerateFSDP2, UnderAccelerate
from meshmark.adapters.deepspeed import DeepSpeed
from meshmark.adapters.deepspeed.engine import DeepSpeedEngine
from meshmark.adapters.fsdp2 import norm_of_tensors
from meshmark.adapters.hf_trainer.loop import (
    HFDeepSpeedLoop,
    HFFSDP2Loop,
    HFGivenOptimizerLoop,
    HFLoop,
    HFModelLossLoop,
    HFOwnOptimizerLoop,
)
from meshmark.adapters.hf_trainer.rows import no_model_of_transformers, uncountable
from meshmark.models.transformer import Family
from meshmark.spec.case import Case
from meshmark.spec.optimizer import OptimizerKind
from meshmark.spec.precision import Precision
from meshmark.theory.recipe import TrainingRecipe
from meshmark.theory.traffic import Flow, Purpose, Sharding, TrafficException

REQUIRES = (
    Requirement(module="transformers", distribution="transformers"),
    Requirement(module="accelerate", distribution="accelerate"),
    GREENLET,
)
_COUNT_BYTES = 8
"""Bytes of a number of tokens."""


def counts_tokens(case: Case) -> TrafficException:
    """The Trainer brings the ranks' numbers of labels together once a step (`average_tokens_across_devices`)."""
    ranks = tuple(range(case.layout.dp))
    count = Flow(
        kind="all_gather",
        axes="dp",
        ranks=ranks,
        purpose=Purpose.LOSS,
        num_bytes=_COUNT_BYTES * len(ranks),
        fewest=1,
        most=1,
    )
    return TrafficException(sends=(count,), reason="labels are counted over all ranks, once a step")


class HFTrainer(UnderAccelerate):
    """`transformers.Trainer` under PyTorch's DDP, which it uses if it is given nothing else."""

    track: ClassVar = Track.THEORY
    requires: ClassVar[tuple[Requirement, ...]] = REQUIRES
    preload: ClassVar[tuple[str, ...]] = ("transformers.trainer", "deepspeed")
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        families=frozenset(Family),
        lacks=LOOP_LACKS,
    )
    loop: ClassVar[type[HFLoop]] = HFLoop
    broadcasts_buffers: ClassVar[bool] = False
    """The loop asks the Trainer for `ddp_broadcast_buffers=False`."""

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        return uncountable(case) or super().supports(case, device, backend)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        return (*super().traffic_exceptions(case, rank), counts_tokens(case))

    @classmethod
    def arguments(cls, case: Case) -> dict[str, Any]:
        """Return further `TrainingArguments` beyond those that every case has."""
        return {}

    def build(self, case: Case, context: RankContext) -> Engine:
        return LoopEngine(case, context, self.loop(case, context, self.arguments(case)))


class HFTrainerRankMeans(HFTrainer):
    """`average_tokens_across_devices=False`: every rank divides by its own number of tokens."""

    @classmethod
    def arguments(cls, case: Case) -> dict[str, Any]:
        return {"average_tokens_across_devices": False}

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        return super(HFTrainer, cls).traffic_exceptions(case, rank)  # counts nothing


class HFTrainerModelLoss(HFTrainer):
    """The model computes its own loss, as in most scripts; models of Transformers alone (`--workload hf:FILE.json`)."""

    loop: ClassVar = HFModelLossLoop

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        return no_model_of_transformers(case) or super().supports(case, device, backend)


class HFTrainerRecommended(HFTrainer):
    """The optimizer that the Trainer makes of its arguments, which decays no norm and no bias."""

    track: ClassVar = Track.AUTHORS
    loop: ClassVar = HFOwnOptimizerLoop

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if case.workload.optimizer.kind is not OptimizerKind.ADAMW:
            return f"{case.adapter} does not support {case.workload.optimizer.kind} (adamw is what it is asked for)"
        if case.workload.optimizer.no_decay:
            return f"{case.adapter} does not support weight-decay groups of your own (the Trainer makes its own)"
        return super().supports(case, device, backend)


class HFTrainerFSDP2(AccelerateFSDP2):
    """`transformers.Trainer` with `fsdp=True`. Every block is sharded on its own, and the rest with the model.

    Gradients are reduced in every micro-batch.
    """

    requires: ClassVar[tuple[Requirement, ...]] = REQUIRES
    preload: ClassVar[tuple[str, ...]] = HFTrainer.preload
    capabilities: ClassVar = dataclasses.replace(
        HFTrainer.capabilities,
        zero_stages=frozenset({3}),
        lacks={**AccelerateFSDP2.capabilities.lacks, **LOOP_LACKS},
    )
    loop: ClassVar[type[HFLoop]] = HFFSDP2Loop

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        return uncountable(case) or super().supports(case, device, backend)

    @classmethod
    def sharding_of(cls, case: Case) -> Sharding:
        """Return how a case is sharded: the Trainer reduces every micro-batch, also where it is alone."""
        return cls.sharding

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """The norm is computed where there is nothing to clip too, to be logged."""
        norm = () if case.workload.optimizer.clip_norm is not None else (norm_of_tensors(case),)
        return (*super().traffic_exceptions(case, rank), counts_tokens(case), *norm)

    def build(self, case: Case, context: RankContext) -> Engine:
        return LoopEngine(case, context, self.loop(case, context, {}))


class HFTrainerDeepSpeed(DeepSpeed):
    """`deepspeed=`: the configuration of the adapter `deepspeed`."""

    requires: ClassVar[tuple[Requirement, ...]] = (*REQUIRES, *DeepSpeed.requires)
    preload: ClassVar[tuple[str, ...]] = (*HFTrainer.preload, *DeepSpeed.preload)
    capabilities: ClassVar = dataclasses.replace(
        DeepSpeed.capabilities,
        precisions=frozenset({Precision.FP32}),
        lacks={
            **DeepSpeed.capabilities.lacks,
            **LOOP_LACKS,
            Feature.RESHARD: "the Trainer reads no universal checkpoints of DeepSpeed",
        },
    )
    loop: ClassVar[type[HFLoop]] = HFDeepSpeedLoop

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        return uncountable(case) or super().supports(case, device, backend)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        return (*super().traffic_exceptions(case, rank), counts_tokens(case))

    def build(self, case: Case, context: RankContext) -> Engine:
        return LoopDeepSpeedEngine(case, context, self.loop(case, context, {}))


class LoopDeepSpeedEngine(LoopEngine, DeepSpeedEngine):
    """A loop that has made a `deepspeed.DeepSpeedEngine` of the model."""


class HFTrainerDeepSpeedGiven(HFTrainerDeepSpeed):
    """`Trainer(optimizers=...)` under DeepSpeed, which drops the optimizer that it is given."""

    loop: ClassVar[type[HFLoop]] = HFGivenOptimizerLoop

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        """Return the recipe of `HFTrainerDeepSpeed`, but for the peak of stage 2.

        With few rows in a micro-batch, the peak is then 24 kB above the plan (one rank, gpt-mini, four micro-batches).
        What these bytes are is not known. Other peaks are as planned.
        """
        using = super().recipe(case)
        return dataclasses.replace(using, peak_known=False) if case.layout.zero_stage == 2 else using
