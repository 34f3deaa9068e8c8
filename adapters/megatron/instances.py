"""megatron-core's distributed optimizer in several instances: groups of replicas that each share out all states."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.megatron.gpt_engine import GPTModelEngine
from meshmark.adapters.megatron.gpt_model import MegatronGPTDistributedOptimizer
from meshmark.adapters.megatron.on_cpu import without_streams
from meshmark.errors import AdapterError
from meshmark.spec.case import Case
from meshmark.theory.recipe import TrainingRecipe
from meshmark.theory.traffic import Flow, Purpose, Sharding, TrafficException, across, neighbours, step_traffic

_REASON = "each of {} instances of the optimizer shares out all states, and gradients are also summed among instances"


class MegatronGPTInstances(MegatronGPTDistributedOptimizer):
    """`num_distributed_optimizer_instances`: two groups of replicas, each of which shares out all states. Gradients are
    reduce-scattered within a group, and then all-reduced among groups."""

    instances: ClassVar = 2
    capabilities: ClassVar = dataclasses.replace(
        MegatronGPTDistributedOptimizer.capabilities, degrees=frozenset({"dp"}), sequence_parallel=False
    )

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        shards = Sharding(replicas=cls.instances)
        return shards.invalid_reason(case.layout) or super().supports(case, device, backend)

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        return dataclasses.replace(super().recipe(case), replicas=cls.instances)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """A shard is summed among the ranks that also have it; the norm is that of one instance's shards."""
        padded = super().traffic_exceptions(case, rank)
        reason = _REASON.format(cls.instances)
        kinds = (Purpose.GRADIENTS, Purpose.WEIGHTS, Purpose.NORM)
        planned = [flow for flow in step_traffic(case, rank) or () if flow.purpose in kinds]
        return (
            *(dataclasses.replace(each, sends=cls._of_instance(each.sends, rank)) for each in padded),
            *(
                TrafficException(sends=cls._of_instance((flow,), rank), instead_of=(flow,), reason=reason)
                for flow in planned
            ),
        )

    @classmethod
    def _of_instance(cls, flows: tuple[Flow, ...], rank: int) -> tuple[Flow, ...]:
        found = list[Flow]()
        for flow in flows:
            within = neighbours(flow, cls.instances, rank)
            found.append(dataclasses.replace(flow, ranks=within))
            if flow.purpose is Purpose.GRADIENTS:
                among, own = across(flow, cls.instances, rank), flow.num_bytes // len(within)
                found.append(dataclasses.replace(flow, kind="all_reduce", ranks=among, num_bytes=own))
        return tuple(found)

    def build(self, case: Case, context: RankContext) -> Engine:
        """Build the engine. Megatron makes a stream for reductions that overlap, which these do not."""
        with without_streams(context.device):
            engine = super().build(case, context)
        assert isinstance(engine, GPTModelEngine)
        groups = [group for chunk in engine.chunks for group in chunk.bucket_groups]
        [size] = {group.intra_distributed_optimizer_instance_size for group in groups}
        if size != case.layout.dp // self.instances:
            raise AdapterError(
                f"rank {context.rank}: Megatron shares states out over {size} ranks, got {case.layout.id}"
            )
        return engine
