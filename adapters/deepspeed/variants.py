"""DeepSpeed's choices that `deepspeed` leaves out: stage 0, and where states live (ZeRO-Offload, arXiv:2101.06840)."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from meshmark.adapter.contract import Feature
from meshmark.adapter.engine import DataParallelEngine, Engine, RankContext
from meshmark.adapters.deepspeed import EARLIER_GAPS, STAGE_3_GAPS, DeepSpeed
from meshmark.adapters.deepspeed.engine import DeepSpeedEngine
from meshmark.adapters.deepspeed.operators import load, missing
from meshmark.adapters.deepspeed.traffic_exceptions import WHOLE_BUCKETS, keeps_whole_gradients, sizes_by_group
from meshmark.errors import AdapterError
from meshmark.models.module import block_classes, parameter_shapes, skeleton
from meshmark.reference.data import Batch
from meshmark.reference.objective import parameter_groups, reference_optimizer
from meshmark.spec.case import Case
from meshmark.spec.known_gap import KnownGap
from meshmark.spec.layout import Offload
from meshmark.spec.precision import Precision
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.model_theory import bucket_elements
from meshmark.theory.partition import reaching_elements
from meshmark.theory.traffic import Flow, OneTimeTraffic, Purpose, TrafficException, by, exceptions_for, step_traffic

WHOLE_REDUCED = "`reduce_scatter: false`: a bucket is all-reduced, and each rank keeps its part"


class DeepSpeedWholeBuckets(DeepSpeed):
    """`reduce_scatter: false`: a bucket's gradients are all-reduced as one tensor, and each rank keeps its part."""

    choices: ClassVar[dict[str, Any]] = {"reduce_scatter": False}
    capabilities: ClassVar = dataclasses.replace(DeepSpeed.capabilities, zero_stages=frozenset({1, 2}))
    known_gaps: ClassVar = EARLIER_GAPS

    def zero_options(self, case: Case, context: RankContext) -> dict[str, Any]:
        return {**super().zero_options(case, context), **self.choices}

    def build(self, case: Case, context: RankContext) -> Engine:
        """Raise `AdapterError` where an option did not come through, which what is measured need not show."""
        engine = super().build(case, context)
        assert isinstance(engine, DeepSpeedEngine)
        found = {name: getattr(engine.module._config.zero_config, name) for name in self.choices}
        if found != self.choices:
            raise AdapterError(f"rank {context.rank}: DeepSpeed has {found}, asked for {self.choices}")
        return engine


class DeepSpeedReduceToRanks(DeepSpeedWholeBuckets):
    """`use_multi_rank_bucket_allreduce: false`: each rank's part of a bucket is reduced to that rank alone."""

    choices: ClassVar[dict[str, Any]] = {"use_multi_rank_bucket_allreduce": False}

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """A bucket is cut where a rank's part of all gradients ends, and each piece is a reduction of its own. In bf16,
        stage 1 is another optimizer, which does not heed the choice."""
        if keeps_whole_gradients(case):
            return super().traffic_exceptions(case, rank)

        def to_ranks(flow: Flow) -> Flow:
            is_reduction = flow.purpose is Purpose.GRADIENTS and flow.kind == "all_reduce"
            return dataclasses.replace(flow, kind="reduce", most=2 * flow.most) if is_reduction else flow

        return tuple(
            dataclasses.replace(
                found,
                sends=tuple(map(to_ranks, found.sends)),
                reason=found.reason.replace(WHOLE_BUCKETS, "each rank's part of a bucket is reduced to that rank"),
            )
            for found in super().traffic_exceptions(case, rank)
        )


class DeepSpeedDivides(DeepSpeed):
    """Gradients are divided around their reduction: by `gradient_predivide_factor` before it, multiplied after.

    DeepSpeed takes the factor with `reduce_scatter: false` alone. At stage 3 it must not be the number of ranks
    (adapters/gaps/deepspeed_zero3_predivide.py).
    """

    whole: ClassVar[dict[str, Any]] = {"reduce_scatter": False}

    def zero_options(self, case: Case, context: RankContext) -> dict[str, Any]:
        return {**super().zero_options(case, context), **self.whole}

    def config(self, case: Case, context: RankContext) -> dict[str, Any]:
        return {**super().config(case, context), **self.scaling(case)}

    @classmethod
    def scaling(cls, case: Case) -> dict[str, Any]:
        """Return the options that say when gradients are divided."""
        return {"gradient_predivide_factor": 2.0 * case.layout.dp}

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """At stage 3 a bucket is all-reduced, without padding."""
        found = super().traffic_exceptions(case, rank)
        if case.layout.zero_stage < 3:
            return found
        padding = [each for each in found if any(flow.purpose is Purpose.GRADIENTS for flow in each.sends)]
        whole = exceptions_for(step_traffic(case, rank), Purpose.GRADIENTS, WHOLE_REDUCED, by("all_reduce"))
        return (*(each for each in found if each not in padding), *whole)

    def build(self, case: Case, context: RankContext) -> Engine:
        """Raise `AdapterError` where an option did not come through, which what is measured need not show."""
        engine = super().build(case, context)
        assert isinstance(engine, DeepSpeedEngine)
        config, wanted = engine.module._config, {**self.whole, **self.scaling(case)}
        found = {name: getattr(config, name, getattr(config.zero_config, name, None)) for name in wanted}
        if found != wanted:
            raise AdapterError(f"rank {context.rank}: DeepSpeed has {found}, asked for {wanted}")
        return engine


class DeepSpeedPrescales(DeepSpeedDivides):
    """`prescale_gradients`: gradients are divided by the number of ranks before they are reduced."""

    @classmethod
    def scaling(cls, case: Case) -> dict[str, Any]:
        return {"prescale_gradients": True}


class DeepSpeedSeparateGradients(DeepSpeed):
    """`contiguous_gradients: false`: gradients are reduced from where they are, not from a buffer."""

    capabilities: ClassVar = dataclasses.replace(DeepSpeed.capabilities, zero_stages=frozenset({1, 2}))
    known_gaps: ClassVar = EARLIER_GAPS

    def zero_options(self, case: Case, context: RankContext) -> dict[str, Any]:
        return {**super().zero_options(case, context), "contiguous_gradients": False}

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """At the peak of stage 1 is otherwise the buffer of the last backward pass."""
        found = super().extra_memory(case, rank)
        if case.layout.zero_stage == 2 or case.precision.is_mixed:
            return found
        num_bytes = -4.0 * bucket_elements(case.workload.model)
        return (*found, ExtraMemory(category="peak", num_bytes=num_bytes, reason="gradients pass through no buffer"))


class RoundRobinEngine(DeepSpeedEngine):
    """Reads weights and gradients from where tensors are after they were reordered. DeepSpeed's own look-up takes the
    place before (adapters/gaps/deepspeed_round_robin_full_gradient.py)."""

    def parameters(self) -> Mapping[str, Tensor]:
        return DataParallelEngine.parameters(self)

    def gradients(self) -> Mapping[str, Tensor]:
        """Return every group's partitions, joined over ranks and cut into its tensors."""
        names = {parameter: name for name, parameter in self.named_parameters()}
        found, zero = {}, self.zero
        for index, tensors in enumerate(zero.round_robin_bit16_groups):
            own = zero.bit16_groups_flat[index].new_zeros(int(zero.partition_size[index]))
            parts = torch.cat([part.flatten() for part in zero.averaged_gradients[index]])
            own[: len(parts)] = parts
            whole = own.new_empty(own.numel() * self.case.layout.dp)
            torch.distributed.all_gather_into_tensor(whole, own)
            for tensor, start in zip(tensors, zero.round_robin_bit16_offsets[index], strict=True):
                found[names[tensor]] = whole[start : start + tensor.numel()].view_as(tensor)
        return found


class DeepSpeedRoundRobin(DeepSpeedWholeBuckets):
    """`round_robin_gradients`: tensors that follow each other are laid out in parts of different ranks. They begin at
    multiples of 16 bytes, and one without a gradient is an error. What is not clipped has no norm computed."""

    engine: ClassVar = RoundRobinEngine
    choices: ClassVar = {
        "round_robin_gradients": True,
        "parameter_alignment": True,
        "ignore_unused_parameters": False,
    }
    capabilities: ClassVar = dataclasses.replace(
        DeepSpeedWholeBuckets.capabilities,
        precisions=frozenset({Precision.FP32}),
        lacks={
            **DeepSpeed.capabilities.lacks,
            Precision.BF16: "masters cannot be told apart (`safe_get_full_fp32_param` takes the place before)",
            Feature.UNUSED: "it is asked to refuse them (`ignore_unused_parameters: false`)",
            Feature.RESHARD: "its conversion takes tensors in the order of the model",
        },
    )
    known_gaps: ClassVar = ()

    @classmethod
    def partitioned_sizes(cls, case: Case) -> list[list[int]]:
        dp = case.layout.dp
        groups = super().partitioned_sizes(case)
        return [[size for first in range(dp) for size in sizes[first::dp]] for sizes in groups]

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        found = super().traffic_exceptions(case, rank)
        if case.workload.optimizer.clip_norm is not None:
            return found
        return tuple(each for each in found if not any(flow.purpose is Purpose.NORM for flow in each.sends))

    def zero_options(self, case: Case, context: RankContext) -> dict[str, Any]:
        clips = case.workload.optimizer.clip_norm is not None
        return {**super().zero_options(case, context), "compute_grad_norm": clips}


class DeepSpeedLeafModules(DeepSpeed):
    """`leaf_module`: stage 3 gathers a block as a whole, and not each of its modules.

    Besides, each tensor is gathered by a call of its own (`allgather_sequential`), PyTorch's linear layers stay as they
    are (`memory_efficient_linear: false`), and so does `Module.apply`.
    """

    capabilities: ClassVar = dataclasses.replace(DeepSpeed.capabilities, zero_stages=frozenset({3}))
    known_gaps: ClassVar = STAGE_3_GAPS

    def zero_options(self, case: Case, context: RankContext) -> dict[str, Any]:
        classes = sorted(kind.__name__ for kind in block_classes(case.workload.model))
        return {
            **super().zero_options(case, context),
            "leaf_module": {"classes": classes},
            "allgather_sequential": True,
            "memory_efficient_linear": False,
            "override_module_apply": False,
        }

    @classmethod
    def last_module_bytes(cls, case: Case) -> int:
        """Return the bytes of the weights of the module that runs last, padded to shards."""
        shapes = parameter_shapes(case.workload.model)
        last = next(reversed(shapes)).rpartition(".")[0]
        sizes = [math.prod(shape) for name, shape in shapes.items() if name.rpartition(".")[0] == last]
        return sum(size + -size % case.layout.dp for size in sizes) * case.precision.weights.itemsize

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """With `allgather_sequential` DeepSpeed looks ahead by one element: the last module's weights, which are used
        again at once, are not given up."""
        kept = cls.last_module_bytes(case) * case.layout.num_micro_batches
        own = (flow for flow in step_traffic(case, rank) or [] if flow.purpose is Purpose.WEIGHTS)
        less = tuple(dataclasses.replace(flow, num_bytes=-kept, fewest=0, most=0) for flow in own)
        reason = "the last module's weights stay from its forward to its backward pass"
        found = super().traffic_exceptions(case, rank)
        return (*found, TrafficException(sends=less, reason=reason)) if less else found

    @classmethod
    def one_time_traffic(cls, case: Case, rank: int) -> tuple[OneTimeTraffic, ...]:
        again = OneTimeTraffic(
            kind="all_gather",
            steps=(0, 1) if case.layout.num_micro_batches == 1 else (0,),
            most_bytes=2 * cls.last_module_bytes(case),
            most_calls=2 * len(parameter_shapes(case.workload.model)),
            reason="DeepSpeed looks ahead once it has recorded the order of modules",
        )
        return (*super().one_time_traffic(case, rank), again)


class DeepSpeedGranularity(DeepSpeed):
    """`stage3_module_granularity_threshold`: modules whose parts are small on average are gathered as a whole."""

    capabilities: ClassVar = dataclasses.replace(DeepSpeed.capabilities, zero_stages=frozenset({3}))
    known_gaps: ClassVar = STAGE_3_GAPS

    def zero_options(self, case: Case, context: RankContext) -> dict[str, Any]:
        """Return a threshold that blocks are under, and the model is not: the parameters of a block for each of its
        modules that have any."""
        block = next(iter(skeleton(case.workload.model).blocks.values()))
        modules = sum(1 for part in block.modules() if [*part.parameters()])
        threshold = sum(parameter.numel() for parameter in block.parameters()) // modules
        return {**super().zero_options(case, context), "stage3_module_granularity_threshold": threshold}


class DeepSpeedFetchesByReduction(DeepSpeed):
    """`stage3_use_all_reduce_for_fetch_params`: weights come together as a sum of buffers that hold one shard each."""

    capabilities: ClassVar = dataclasses.replace(DeepSpeed.capabilities, zero_stages=frozenset({3}))
    known_gaps: ClassVar = STAGE_3_GAPS

    def zero_options(self, case: Case, context: RankContext) -> dict[str, Any]:
        return {**super().zero_options(case, context), "stage3_use_all_reduce_for_fetch_params": True}

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """Return the padded all-reduces that gather weights. A module with a single parameter is gathered as usual."""
        found, shards = super().traffic_exceptions(case, rank), case.layout.dp
        modules = defaultdict(list)
        for name, shape in parameter_shapes(case.workload.model).items():
            modules[name.rpartition(".")[0]].append(math.prod(shape))
        several = [sizes for sizes in modules.values() if len(sizes) > 1]
        elements = sum(map(sum, several))
        padded = elements + sum(-size % shards for sizes in several for size in sizes)
        times = 2 * case.layout.num_micro_batches * case.precision.weights.itemsize
        own = next((f for f in step_traffic(case, rank) or [] if f.purpose is Purpose.WEIGHTS), None)
        if own is None or not several:
            return found
        calls = len(several) * 2 * case.layout.num_micro_batches
        all_gone = len(several) == len(modules)  # no call gathers
        fewer = (-own.fewest, -own.most) if all_gone else (0, 0)
        less = dataclasses.replace(own, num_bytes=-times * padded, fewest=fewer[0], most=fewer[1])
        summed = dataclasses.replace(own, kind="all_reduce", num_bytes=times * padded, fewest=calls, most=calls)
        reason = "weights of a module with several come together by all-reduce"
        return (*found, TrafficException(sends=(less, summed), reason=reason))


class OffloadedBetweenEngine(DeepSpeedEngine):
    """States leave the device after an update, and come back before the next step."""

    def backward(self, batch: Batch) -> Tensor:
        self.module.reload_states()
        return super().backward(batch)

    def update(self) -> Tensor | None:
        norm = super().update()
        self.module.offload_states(pin_memory=False)
        return norm

    def parameters(self) -> Mapping[str, Tensor]:
        """Return masters once they are back: those that are away read as zeros
        (adapters/gaps/deepspeed_offloaded_master.py)."""
        self.module.reload_states()
        return super().parameters()


class DeepSpeedOffloadsBetween(DeepSpeed):
    """`offload_states` and `reload_states`: masters, weights and moments are in the host's memory between steps, as
    where a model generates text between them. Stage 3 moves moments of its own CUDA optimizer alone."""

    engine: ClassVar = OffloadedBetweenEngine
    capabilities: ClassVar = dataclasses.replace(
        DeepSpeed.capabilities,
        zero_stages=frozenset({1, 2}),
        devices=frozenset({"cpu"}),  # where the host's memory is the device's: of a GPU it is not planned
    )
    known_gaps: ClassVar = EARLIER_GAPS

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if keeps_whole_gradients(case):
            return f"{case.adapter} does not support stage 1 in bf16 (BF16_Optimizer has no `offload_states`)"
        return super().supports(case, device, backend)


class DeepSpeedOffload(DeepSpeed):
    """Masters, moments and the gradients that they are updated with live in the host's memory, and the host updates
    them: AdamW by DeepSpeed's own `DeepSpeedCPUAdam`, other optimizers by PyTorch's."""

    capabilities: ClassVar = dataclasses.replace(DeepSpeed.capabilities, offloads=frozenset({Offload.CPU}))

    known_gaps: ClassVar[tuple[KnownGap, ...]] = (
        KnownGap(
            clause="unused",
            symptom="stale gradient",
            reason="a parameter that a step does not use is updated again with the gradient of the last step that did: "
            "the host's flat gradient is there for life, and a tensor's part of it is overwritten only where a "
            "gradient comes",
            reproducer="deepspeed_offload_unused_stale_gradient",
        ),
    )

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        return super().supports(case, device, backend) or missing("cpu_adam")

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """Up to stage 2 gradients pass through the device; what the host keeps beside its share of them, and what they,
        and updated weights, pass through. Stage 3 is as without offload."""
        layout, model, width = case.layout, case.workload.model, case.precision.weights.itemsize
        if layout.zero_stage == 3:
            return ()
        sizes = [math.prod(shape) for shape in parameter_shapes(model).values()]
        between = width * (model.num_parameters / layout.dp + 2 * max(sizes))
        passing = "updated weights in the model's format, and the largest tensor's gradient twice, pass through buffers"
        return (*_kept_gradients(case, rank), ExtraMemory(category="steady", num_bytes=between, reason=passing))

    def zero_options(self, case: Case, context: RankContext) -> dict[str, Any]:
        home = {"device": "cpu", "pin_memory": context.device.type == "cuda"}
        return {**super().zero_options(case, context), "offload_optimizer": home}

    def optimizer(self, case: Case, model: nn.Module) -> torch.optim.Optimizer:
        spec = case.workload.optimizer
        cls, arguments = reference_optimizer(spec).arguments()
        if cls is not torch.optim.AdamW:
            return super().optimizer(case, model)
        load("cpu_adam")
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        made: torch.optim.Optimizer = DeepSpeedCPUAdam(parameter_groups(spec, model.named_parameters()), **arguments)
        return made


class DeepSpeedOffloadParams(DeepSpeedOffload):
    """Stage 3 with the shards of the weights in the host's memory too, from where every module fetches its own."""

    capabilities: ClassVar = dataclasses.replace(
        DeepSpeedOffload.capabilities,
        zero_stages=frozenset({3}),
        devices=frozenset({"cpu"}),  # where the host's memory is the device's: of a GPU it is not planned
    )
    known_gaps: ClassVar = STAGE_3_GAPS

    def zero_options(self, case: Case, context: RankContext) -> dict[str, Any]:
        return {**super().zero_options(case, context), "offload_param": {"device": "cpu", "pin_memory": False}}

    def build(self, case: Case, context: RankContext) -> Engine:
        """On a CPU nothing that is measured would tell whether the option was heeded."""
        engine = super().build(case, context)
        if not (isinstance(engine, DeepSpeedEngine) and engine.zero.offload_param):
            raise AdapterError(f"rank {context.rank}: DeepSpeed offloads no parameters, though asked to")
        return engine


def _kept_gradients(case: Case, rank: int) -> tuple[ExtraMemory, ...]:
    """Beside the host's share of them, which is in the plan, and otherwise than a share on the device."""
    layout, model = case.layout, case.workload.model
    if case.precision.is_mixed:
        if layout.zero_stage == 2 or layout.dp == 1:  # no gradient of another rank's part, whose bucket would stay
            return ()
        reason = "a rank keeps its partition's gradients alone, and the bucket that was reduced last"
        return (ExtraMemory(category="gradients", num_bytes=4.0 * bucket_elements(model), reason=reason),)
    gone = -4 * model.num_parameters / layout.dp
    found = (ExtraMemory(category="gradients", num_bytes=gone, reason="no gradient stays on the device"),)
    if layout.zero_stage == 1 or layout.num_micro_batches == 1:
        return found
    sizes = [math.prod(shape) for shape in parameter_shapes(model).values()]
    part = layout.coordinates(rank).dp
    kept = 4.0 * sum(reaching_elements(group, layout.dp, part) for group in sizes_by_group(case, sizes))
    reason = "the host accumulates, as whole tensors and for life, those that reach into a rank's part"
    both = (ExtraMemory(category=category, num_bytes=kept, reason=reason) for category in ("gradients", "steady"))
    return (*found, *both)
