"""Defects of adapters that vary PyTorch's options: the option is not heeded, or what the user must do beside it is not
done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import DataParallelEngine, Engine, RankContext
from meshmark.adapters.ddp import DDP
from meshmark.adapters.fsdp1 import FSDP1Engine
from meshmark.adapters.fsdp2 import FSDP2Engine, sharded_units
from meshmark.judge.faults import Fault
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Schedule
from meshmark.spec.precision import Precision
from tests.broken.engine import Broken
from tests.broken.mixed import ReduceDtypeForgotten
from tests.broken.mutant import Mutant, on

F = Fault
REPLICAS = Layout(dp=2, num_micro_batches=4)
STAGES = Layout(pp=2, num_micro_batches=4, schedule=Schedule.ONE_F_ONE_B)
TWO, FOUR = Layout(dp=2, zero_stage=3, num_micro_batches=4), Layout(dp=4, zero_stage=3, num_micro_batches=2)


class PlainDDP(Adapter):
    """DDP, whatever its options were to be."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return DDP().build(case, context)


class ReducesNothing(Adapter):
    """The user's reduce-scatter leaves every rank its part of its own gradients."""

    def build(self, case: Case, context: RankContext) -> Engine:
        from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

        class Own(ReduceScatter):
            def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
                return torch.empty(*size, dtype=dtype, device=device)

            def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *_: Any, **__: Any) -> None:  # noqa: ANN401
                output_tensor.copy_(input_tensor.chunk(context.world_size)[context.rank])

        engine = super().build(case, context)  # type: ignore[safe-super]
        for unit in sharded_units(engine):
            unit.set_custom_reduce_scatter(Own())
        return engine


class ReshardsAlone(Adapter):
    """A forward pass has failed, after which shards are put back, and half of the blocks think that they still run."""

    def recover(self, root: Any) -> None:  # noqa: ANN401
        for part in root.modules():
            if hasattr(part, "reshard"):
                part.reshard()


class ReplicasSum(Adapter):
    """The user's hook sums over replicas, and does not divide."""

    def reduce(self, gradient: Tensor, group: dist.ProcessGroup) -> None:
        dist.all_reduce(gradient, group=group)


class HookForgotten(Adapter):
    """No hook reduces among replicas."""

    def reduce(self, gradient: Tensor, group: dist.ProcessGroup) -> None:
        pass


class IgnoredNotReduced(Broken):
    """Nobody reduces the gradients of what FSDP2 ignores."""

    def finish_gradients(self) -> None:
        FSDP2Engine.finish_gradients(self)  # type: ignore[arg-type]


class OwnGradientsOfIgnored(Broken):
    """Nobody reduces the gradients of what FSDP1 ignores."""

    def finish_gradients(self) -> None:
        DataParallelEngine.finish_gradients(self)  # type: ignore[arg-type]


class HookDividesNot(Broken):
    """The hook's state is that of a world of one rank, so that it divides by nothing."""

    def prepare(self) -> None:
        assert isinstance(self, FSDP1Engine)
        for part in self.module.modules():
            if (state := getattr(part, "_comm_hook_state", None)) is not None:
                state.gradient_predivide_factor = state.gradient_postdivide_factor = 1.0


class DrawnInPlace(Adapter):
    """Tensors on the meta device are allocated, but not initialised."""

    def draw(self, part: nn.Module) -> None:
        part.to_empty(device="cpu", recurse=False)
        for parameter in part.parameters(recurse=False):
            nn.init.constant_(parameter, 0.01)


class TracedCopies(Broken):
    """The trace computes with copies of the parameters that the optimizer has."""

    def prepare(self) -> None:
        for stage in self.stages:  # type: ignore[attr-defined]
            for part in stage.submod.modules():
                for name, parameter in part.named_parameters(recurse=False):
                    part._parameters[name] = nn.Parameter(parameter.detach().clone())


class SplitsElsewhere(Broken):
    """Micro-batches of tokens come in another order than those of targets."""

    def prepare(self) -> None:
        split = self.schedule._split_inputs  # type: ignore[attr-defined]

        def rolled(args: Any, kwargs: Any = None) -> Any:  # noqa: ANN401
            of_args, of_kwargs = split(args, kwargs)
            return [*of_args[1:], of_args[0]], of_kwargs

        self.schedule._split_inputs = rolled  # type: ignore[attr-defined]


PYTORCH_OPTION_MUTANTS: list[Mutant] = [
    *on("ddp-bucket-list ddp-skips-unused", PlainDDP, suite="communication", layout=REPLICAS),
    *on("fsdp2-collectives", ReducesNothing, F.NOT_REDUCED, layout=TWO),
    *on("fsdp2-recovered", ReshardsAlone, suite="communication", layout=TWO),
    *on("fsdp2-replicas-by-hook", ReplicasSum, F.SCALED, layout=FOUR),
    *on("fsdp2-replicas-by-hook", HookForgotten, F.NOT_REDUCED, F.DRIFT, layout=FOUR),
    *on("fsdp2-ignores", IgnoredNotReduced, F.NOT_REDUCED, F.DRIFT, layout=TWO),
    *on("fsdp1-ignores accelerate-fsdp1-ignores", OwnGradientsOfIgnored, F.NOT_REDUCED, F.DRIFT, layout=TWO),
    *on(
        "fsdp2-wide-outputs fsdp1-casts",
        ReduceDtypeForgotten,
        suite="communication",
        layout=TWO,
        precision=Precision.BF16_REDUCE_BF16,
    ),
    *on("pipeline-traced", TracedCopies, F.MISSING, layout=STAGES),
    *on("pipeline-split", SplitsElsewhere, layout=STAGES),
    *on("fsdp1-materialized", HookDividesNot, F.SCALED, layout=TWO),
    *on("fsdp1-materialized", DrawnInPlace, F.START, layout=TWO),
]
