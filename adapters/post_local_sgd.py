"""PyTorch's post-local SGD: replicas that step alone after a synchronous warm-up, and are averaged now and then
(arXiv:1808.07217).

DistributedDataParallel's hook reduces gradients in the warm-up alone; `PostLocalSGDOptimizer` averages parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from torch.nn.parallel import DistributedDataParallel

from meshmark.adapter.contract import Capabilities, Feature
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.checkpoint import load_local, save_local
from meshmark.adapters.ddp import DDP, DDPEngine
from meshmark.algorithms.local_sgd import LocalSGD
from meshmark.models.transformer import Family
from meshmark.reference.objective import Schedule, build_schedule
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision

if TYPE_CHECKING:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
    from torch.distributed.optim import PostLocalSGDOptimizer


class PostLocalSGDEngine(DDPEngine):
    optimizer: PostLocalSGDOptimizer

    def __init__(
        self,
        case: Case,
        context: RankContext,
        module: DistributedDataParallel,
        optimizer: PostLocalSGDOptimizer,
        hook_state: PostLocalSGDState,
    ) -> None:
        self.hook_state = hook_state
        super().__init__(case, context, module, optimizer)

    def make_schedule(self) -> Schedule | None:
        """Return a schedule of the local optimizer. The one around it is never initialised as an optimizer."""
        return build_schedule(self.case.workload.optimizer, self.optimizer.optim)

    def save(self, folder: Path) -> None:
        """Every rank holds a replica of its own."""
        save_local(folder, self.state() | {"reduced_steps": self.hook_state.iter})

    def load(self, folder: Path) -> None:
        state = load_local(folder)
        self.hook_state.iter = state["reduced_steps"]
        self.load_state(state)


class PostLocalSGD(DDP):
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        families=frozenset(Family),
        precisions=frozenset({Precision.FP64, Precision.FP32, Precision.BF16}),
        algorithms=frozenset({LocalSGD.kind}),
        lacks={
            Precision.BF16_REDUCE_BF16: "the rounding of averaged parameters is not in the noise that judges it",
            Precision.FP16: "a replica that skips an overflowing step does not join the averaging, and all hang",
            Feature.UNUSED: "PyTorch's averager leaves out parameters that have no gradient in the step",
            Feature.DROPOUT: "its masks are judged by gradients that are reduced over ranks",
            Feature.RESHARD: "the replicas of another world size are other ones",
        },
    )

    def build(self, case: Case, context: RankContext) -> Engine:
        # Here, for importing them takes time and warns.
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        synchronous, algorithm = super().build(case, context), case.workload.algorithm_as(LocalSGD)
        assert isinstance(synchronous, DDPEngine)
        module, warmup = synchronous.module, algorithm.warmup_steps
        state = PostLocalSGDState(  # type: ignore[no-untyped-call]
            process_group=None, subgroup=None, start_localSGD_iter=warmup, post_local_gradient_allreduce=False
        )
        module.register_comm_hook(state, post_localSGD_hook)
        averager = PeriodicModelAverager(period=algorithm.period, warmup_steps=warmup)
        return PostLocalSGDEngine(case, context, module, PostLocalSGDOptimizer(synchronous.optimizer, averager), state)
