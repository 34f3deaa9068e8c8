"""PyTorch's ZeroRedundancyOptimizer under DistributedDataParallel: ZeRO's stage 1, every tensor with one owner."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from meshmark.adapter.contract import Capabilities, Feature
from meshmark.adapter.engine import Engine, Holdings, RankContext, optimizer_state_tensors
from meshmark.adapters.ddp import DDP, DDPEngine
from meshmark.models.module import parameter_shapes
from meshmark.models.transformer import Family
from meshmark.reference.objective import parameter_groups, reference_optimizer
from meshmark.spec.case import Case
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.traffic import Purpose, TrafficException, by, exceptions_for, step_traffic

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer


class ZeroRedundancyEngine(DDPEngine):
    optimizer: ZeroRedundancyOptimizer

    def holdings(self) -> Holdings:
        parameters = list(self.module.parameters())
        return Holdings(
            parameters=[p.detach() for p in parameters],
            gradients=[p.grad for p in parameters if p.grad is not None],
            optimizer_states=optimizer_state_tensors(self.optimizer.optim),
        )

    def save(self, folder: Path) -> None:
        """The first rank collects the states of all, and writes one file that any number of ranks can load."""
        self.optimizer.consolidate_state_dict(to=0)
        super().save(folder)


class DDPZero1(DDP):
    preload: ClassVar[tuple[str, ...]] = ("torch.distributed.optim",)
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        zero_stages=frozenset({1}),
        families=frozenset(Family),
        precisions=DDP.capabilities.precisions,
        unfreezes=True,
        lacks={Feature.MATRIX_WISE: "its shares are planned for states of the parameters' shapes"},
    )

    parameters_are_views: ClassVar[bool] = False
    """Whether weights lie in one flat tensor for each owner."""

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """Group by group whole tensors have one owner: the largest first, each to the rank that owns least so far."""
        sizes = [math.prod(shape) for shape in parameter_shapes(case.workload.model).values()]
        owned = [0] * case.layout.dp
        for size in sorted(sizes, reverse=True):
            owned[owned.index(min(owned))] += size
        beyond = owned[case.layout.coordinates(rank).dp] - sum(sizes) / case.layout.dp
        num_bytes = cls.recipe(case).states.moment_bytes * beyond
        return (ExtraMemory(category="optimizer_states", num_bytes=num_bytes, reason="whole tensors have one owner"),)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        flows = step_traffic(case, rank)
        return (
            *exceptions_for(flows, Purpose.GRADIENTS, "DDP gives every rank the whole gradient", by("all_reduce")),
            *exceptions_for(flows, Purpose.WEIGHTS, "owners broadcast what they have updated", by("broadcast")),
            *exceptions_for(flows, Purpose.NORM, "every rank has the whole gradient, and its norm"),
            *exceptions_for(flows, Purpose.OVERFLOW, "every rank has the whole gradient and sees its overflow"),
        )

    def build(self, case: Case, context: RankContext) -> Engine:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        module, spec = self.wrap(case, context), case.workload.optimizer
        kind, arguments = reference_optimizer(spec).arguments()
        groups = parameter_groups(spec, module.module.named_parameters())
        optimizer = ZeroRedundancyOptimizer(
            groups, optimizer_class=kind, parameters_as_bucket_view=self.parameters_are_views, **arguments
        )
        return ZeroRedundancyEngine(case, context, module, optimizer)


class DDPZero1Views(DDPZero1):
    """`parameters_as_bucket_view`: an owner's weights lie in one flat tensor, which is broadcast as a whole."""

    parameters_are_views: ClassVar = True
