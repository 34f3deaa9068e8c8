"""DeepSpeed's ZeRO stages 1, 2 and 3 over data-parallel ranks (arXiv:1910.02054).

DeepSpeed casts the whole model to bf16 or fp16 and keeps fp32 masters, fp32 moments and, as asked for here, fp32
gradients, accumulated and reduced in fp32.
"""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import nn

from meshmark.adapter.contract import Adapter, Arithmetic, Capabilities, Casting, Feature, Requirement, Summing
from meshmark.adapter.engine import Engine, RankContext, initial_model
from meshmark.adapters.deepspeed.config import closed_form_options, ds_config, prepare
from meshmark.adapters.deepspeed.engine import DeepSpeedEngine
from meshmark.adapters.deepspeed.traffic_exceptions import (
    compared_orders,
    keeps_whole_gradients,
    sizes_by_group,
    state_shards,
    zero_exceptions,
)
from meshmark.models.module import Model, parameter_shapes
from meshmark.models.transformer import Family
from meshmark.reference.objective import build_optimizer, build_schedule
from meshmark.spec.case import Case
from meshmark.spec.known_gap import KnownGap
from meshmark.spec.layout import Recompute
from meshmark.spec.precision import Dtype, Precision
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.model_theory import bucket_elements, local_parameters
from meshmark.theory.partition import reaching_elements
from meshmark.theory.recipe import TrainingRecipe, eager_recipe
from meshmark.theory.traffic import OneTimeTraffic, TrafficException


class DeepSpeed(Adapter):
    engine: ClassVar[type[DeepSpeedEngine]] = DeepSpeedEngine
    requires: ClassVar[tuple[Requirement, ...]] = (Requirement(module="deepspeed", distribution="deepspeed"),)
    preload: ClassVar[tuple[str, ...]] = ("deepspeed.runtime.zero.muon.muon_optimizer",)
    """Modules that DeepSpeed imports while it builds. This one decorates functions with `torch.compile`, which takes
    seconds.
    """
    arithmetic: ClassVar = Arithmetic(
        casting=Casting.WEIGHTS, sums=Summing.MODULES, adds_biases_apart_at=frozenset({3})
    )
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        families=frozenset(Family),
        zero_stages=frozenset({1, 2, 3}),
        precisions=frozenset({Precision.FP32, Precision.BF16, Precision.FP16}),
        lacks={
            Precision.FP64: "ZeRO's masters are float32",
            Feature.MATRIX_WISE: "its optimizer is given flat parts of the parameters, whose shapes are lost",
            Precision.BF16_REDUCE_BF16: "its configuration here asks for reduction in float32 alone",
            Feature.UNFREEZE: "ZeRO never trains them, and says nothing: adapters/gaps/deepspeed_zero_unfrozen.py",
        },
    )
    known_gaps: ClassVar[tuple[KnownGap, ...]] = (
        KnownGap(
            clause="unused",
            zero_stages=(1, 2),
            symptom="as if unused parameters had a gradient of zero",
            reason="a parameter without a gradient counts as one with a gradient of zero: its moments decay, and "
            "momentum and weight decay move it",
            reproducer="deepspeed_unused_momentum",
        ),
        KnownGap(
            clause="unused",
            zero_stages=(3,),
            symptom="stale gradient",
            reason="a parameter that a step does not use is updated again with the gradient of the last step that did: "
            "stage3.py never clears grad_partitions_flat_buffer, whose parts the first micro-batch overwrites only "
            "where it brings a gradient",
            reproducer="deepspeed_zero3_unused_stale_gradient",
        ),
    )

    @classmethod
    def environment(cls, device: str) -> dict[str, str]:
        """Return the variables that name the accelerator, so that DeepSpeed does not search for one and log it."""
        return {"DS_ACCELERATOR": device}

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        """DeepSpeed runs fp16 on no CPU without AVX512-FP16, takes no scalars, and has no masters of frozen weights."""
        if case.workload.model.has_scalars:
            why = "it narrows the first dimension" if case.layout.zero_stage == 3 else "it broadcasts them as bytes"
            return f"{case.adapter} does not support {Feature.SCALARS} at stage {case.layout.zero_stage} ({why})"
        if case.precision.is_mixed and (case.workload.frozen or getattr(case.workload.model, "has_frozen", False)):
            return (
                f"{case.adapter} does not support {Feature.FROZEN} in {case.precision} (it keeps them in 16 bits, "
                "so that their values are rounded when it is set up)"
            )
        if case.precision.compute is Dtype.FP16 and device == "cpu":
            return f"{case.adapter} runs precision fp16 on CUDA alone"
        return super().supports(case, device, backend)

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        """Return the recipe.

        Weights and masters are two copies even in float32. At stage 3 they are two shards: DeepSpeed intends to share
        them, but compares a `torch.device` with a string. In bf16, stage 1 is another optimizer, `BF16_Optimizer`. It
        permanently keeps the whole float32 gradient and the bf16 gradient. If autograd keeps views of weights that
        stage 3 gathers for every run of a module, the number of copies is unknown. So is what its linear layers save of
        weights that are computed. A module that is given one tensor twice is given two by stage 3: `MultiheadAttention`
        then takes parts of its packed weight, and keeps them.
        """
        using = eager_recipe(case, f"eager-deepspeed-{case.layout.zero_stage}", casts_weights=True)
        model = case.workload.model
        copies_differ = model.indexed and model.runs > 1
        if case.layout.zero_stage == 3 and (model.computes_weights or model.repeats_arguments or copies_differ):
            using = dataclasses.replace(using, activations_known=False)
        if not case.precision.is_mixed:
            return using
        states = using.states
        if keeps_whole_gradients(case):
            states = dataclasses.replace(states, gradient_bytes=6, gradient_stage=2)
        return dataclasses.replace(using, states=dataclasses.replace(states, weight_bytes=2))

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """Return the memory beyond ZeRO's closed form, which may be negative.

        Stage 1 does not keep reduced gradients of other ranks either.
        """
        return (*cls._states_beyond(case, rank), *cls._padding(case, rank), *_kept_weights(case, rank))

    @classmethod
    def _padding(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """Return what padding takes: stages 1 and 2 pad their flat buffers so that every rank's part has an even number
        of elements, stage 3 every tensor so that all parts are alike.
        """
        shards, _ = state_shards(case.layout, rank)
        stage, precision, optimizer = case.layout.zero_stage, case.precision, case.workload.optimizer
        if stage == 3:
            padding = sum(-size % shards for size in cls.held_sizes(case))
            reason = "tensors are padded to a multiple of the ranks"
        else:
            padding = sum(-sum(sizes) % (2 * shards) for sizes in cls.partitioned_sizes(case))
            reason = "flat buffers are padded to an even number of elements per rank"
        if not padding:
            return ()
        weights = precision.weights.itemsize / (shards if stage == 3 else 1)
        gradients = precision.master.itemsize / (1 if keeps_whole_gradients(case) else shards)
        moments = 0 if optimizer.is_matrix_wise else optimizer.states_per_parameter
        found = {
            "parameters": weights + precision.master.itemsize / shards,
            "gradients": 0.0 if stage < 3 and not precision.is_mixed else gradients,  # else in `kept_gradients`
            "optimizer_states": precision.states.itemsize * moments / shards,
        }
        return tuple(ExtraMemory(category=c, num_bytes=padding * each, reason=reason) for c, each in found.items())

    @classmethod
    def _states_beyond(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        layout, count = case.layout, local_parameters(case.workload.model, case.layout, rank) or 0
        shards, _ = state_shards(layout, rank)
        planned = count / shards
        if layout.zero_stage < 3 and not case.precision.is_mixed:
            kept = cls.kept_gradients(case, rank)
            reason = "a rank keeps its partition's gradients alone, and tensors that reach over its ends whole"
        elif layout.zero_stage == 1 and case.precision.compute is Dtype.FP16:
            others = shards > 1  # without gradients of their parts nothing keeps the bucket
            kept = count / shards + bucket_elements(case.workload.model) * others
            reason = "a rank keeps its partition's gradients alone, and the bucket that was reduced last"
        elif layout.zero_stage == 1 and case.precision.compute is Dtype.BF16:
            reason = "BF16_Optimizer keeps the whole float32 gradient for life"
            return (ExtraMemory(category="steady", num_bytes=4 * count, reason=reason),)
        else:
            return ()
        return (ExtraMemory(category="gradients", num_bytes=4 * (kept - planned), reason=reason),)

    @classmethod
    def kept_gradients(cls, case: Case, rank: int) -> float:
        """Return the elements of the tensors that overlap a rank's partitions: it keeps the gradients of these."""
        shards, own = state_shards(case.layout, rank)
        return float(sum(reaching_elements(sizes, shards, own) for sizes in cls.partitioned_sizes(case)))

    @classmethod
    def partitioned_sizes(cls, case: Case) -> list[list[int]]:
        """Return the sizes of each group's tensors in the order in which they are laid out to be partitioned."""
        return sizes_by_group(case, cls.held_sizes(case))

    @classmethod
    def held_sizes(cls, case: Case) -> list[int]:
        """Elements of the tensors that a rank computes with, in order."""
        return [math.prod(shape) for shape in parameter_shapes(case.workload.model).values()]

    @classmethod
    def plans_traffic(cls, case: Case) -> bool:
        """Stage 3 gathers for each module. How often for one that runs again, or for a parameter that is used outside
        its module, is its prefetcher's choice.
        """
        model = case.workload.model
        return not (case.layout.zero_stage == 3 and (model.runs > 1 or model.reads_elsewhere))

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        return zero_exceptions(case, rank)

    @classmethod
    def one_time_traffic(cls, case: Case, rank: int) -> tuple[OneTimeTraffic, ...]:
        return compared_orders(case)

    def build(self, case: Case, context: RankContext) -> Engine:
        prepare(context)
        import deepspeed

        model = self.model(case, context)
        spec = case.workload.optimizer
        optimizer = self.optimizer(case, model)
        module, _, _, _ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=build_schedule(spec, optimizer),
            config=self.config(case, context),
            mpu=self.groups(case, context),
        )
        engine = self.engine(case, context, module, optimizer)
        engine.restore_masters()
        return engine

    def model(self, case: Case, context: RankContext) -> Model:
        """Return the model that DeepSpeed is given, with its initial values."""
        return initial_model(case, context.device)

    def groups(self, case: Case, context: RankContext) -> ModuleType | None:
        """Return a module that gives DeepSpeed other groups than all ranks, or None."""
        return None

    def config(self, case: Case, context: RankContext) -> dict[str, Any]:
        """Return DeepSpeed's configuration."""
        return ds_config(case, self.zero_options(case, context))

    def zero_options(self, case: Case, context: RankContext) -> dict[str, Any]:
        """Return the options of the section `zero_optimization`."""
        return closed_form_options(case)

    def optimizer(self, case: Case, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer that DeepSpeed wraps."""
        return build_optimizer(case.workload.optimizer, model.named_parameters())


STAGE_3_GAPS = tuple(gap for gap in DeepSpeed.known_gaps if 3 in gap.zero_stages)
EARLIER_GAPS = tuple(gap for gap in DeepSpeed.known_gaps if 3 not in gap.zero_stages)
"""Known gaps of the other stages."""


def _kept_weights(case: Case, rank: int) -> tuple[ExtraMemory, ...]:
    """Weights that stage 3 gathers and does not free before the backward pass (tests/gaps/test_deepspeed.py)."""
    model, (shards, _) = case.workload.model, state_shards(case.layout, rank)
    indexed = model.indexed - (model.indexed_in_blocks if case.layout.recompute is Recompute.FULL else 0)
    if case.layout.zero_stage < 3 or shards == 1 or not indexed:
        return ()
    reason = "a gathered weight stays while autograd keeps a view of it, such as one expert's part or a GRU's transpose"
    num_bytes = case.precision.weights.itemsize * indexed
    return (ExtraMemory(category="activations", num_bytes=num_bytes, reason=reason),)
