"""ZeRO stage 1 by PyTorch alone: DistributedDataParallel all-reduces gradients as ever, and ZeroRedundancyOptimizer
keeps each parameter's optimizer states on one rank, its owner, which updates and broadcasts it (arXiv:1910.02054)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from torch.nn.parallel import DistributedDataParallel

from meshmark.adapter.contract import Adapter, Capabilities
from meshmark.adapter.engine import Engine, Holdings, RankContext, initial_model, optimizer_state_tensors
from meshmark.adapters.ddp import DDPEngine
from meshmark.models.module import parameter_shapes
from meshmark.reference.objective import parameter_groups, reference_optimizer
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.recipe import TrainingRecipe, eager_recipe
from meshmark.theory.traffic import Purpose, TrafficException, by, exceptions_for, step_traffic

if TYPE_CHECKING:  # a framework is imported by the ranks that need it, in `build`
    from torch.distributed.optim import ZeroRedundancyOptimizer


class MineEngine(DDPEngine):
    """Forward, backward and reduction are DDP's; optimizer states are this rank's alone."""

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


class Mine(Adapter):
    preload: ClassVar = ("torch.distributed.optim",)
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        zero_stages=frozenset({1}),
        precisions=frozenset({Precision.FP64, Precision.FP32, Precision.BF16, Precision.FP16}),
    )

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        return eager_recipe(case, "eager-ddp")

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """Whole tensors have one owner: the largest first, each to the rank that owns least so far."""
        owned = [0] * case.layout.dp
        sizes = [math.prod(shape) for shape in parameter_shapes(case.workload.model).values()]
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
        )

    def build(self, case: Case, context: RankContext) -> Engine:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = initial_model(case, context.device)
        module: DistributedDataParallel = DistributedDataParallel(
            model,
            device_ids=[context.device] if context.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=case.workload.skipped_block is not None,
        )
        spec = case.workload.optimizer
        kind, arguments = reference_optimizer(spec).arguments()
        groups = parameter_groups(spec, model.named_parameters())
        optimizer = ZeroRedundancyOptimizer(groups, optimizer_class=kind, **arguments)
        return MineEngine(case, context, module, optimizer)
