"""Defects of the roster's adapters, which `make roster` applies: choices that are not followed, and of the engines that
the core has not got, what goes wrong there alone."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapter.loop import LoopEngine, collate
from meshmark.adapters.accelerate import Accelerate, AccelerateFSDP2
from meshmark.adapters.accelerate.loop import (
    AccelerateScript,
    DispatchedLoop,
    EpochsLoop,
    ShuffledLoop,
    SplitLoop,
    SynchronizedLoop,
    TriggeredLoop,
)
from meshmark.adapters.ddp import DDP
from meshmark.adapters.deepspeed import DeepSpeed
from meshmark.adapters.deepspeed.accumulation import DeepSpeedByHand, DeepSpeedSums
from meshmark.adapters.deepspeed.pipeline import DeepSpeedPipelineOptions
from meshmark.adapters.deepspeed.ulysses import UlyssesAttention
from meshmark.adapters.deepspeed.variants import DeepSpeedDivides
from meshmark.adapters.fabric.loop import FabricLoop
from meshmark.adapters.fairscale import FairScaleFSDP
from meshmark.adapters.fairscale.options import FairScaleFSDPPredivide
from meshmark.adapters.fsdp1 import FSDP1
from meshmark.adapters.fsdp2 import FSDP2, FSDP2HSDP
from meshmark.adapters.pipeline_nd import PipelineFSDP2
from meshmark.adapters.tensor_parallel import TensorParallel
from meshmark.judge.faults import Fault
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Offload, Recompute, Schedule
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload, workload
from meshmark.theory.traffic import Sharding
from tests.broken import experts as e
from tests.broken import gradients as g
from tests.broken import loops as y
from tests.broken import reducing as h
from tests.broken import titan as t
from tests.broken import wrapped as w
from tests.broken.checkpoint_options import CHECKPOINT_OPTION_MUTANTS
from tests.broken.deepspeed_options import DEEPSPEED_OPTION_MUTANTS
from tests.broken.engine import Broken
from tests.broken.fabric_options import FABRIC_OPTION_MUTANTS
from tests.broken.megatron_gpt import MEGATRON_GPT_MUTANTS
from tests.broken.mixed import ReduceDtypeOfAnother
from tests.broken.modules import ForwardScaled
from tests.broken.mutant import DEEP, GPT, MIXTURE, Mutant
from tests.broken.pytorch_options import PYTORCH_OPTION_MUTANTS

F = Fault
PIPELINE = Layout(pp=2, num_micro_batches=4, schedule=Schedule.ONE_F_ONE_B)
CROSSED = Layout(dp=2, tp=2, zero_stage=3, num_micro_batches=4)
INTERLEAVED = Layout(pp=2, num_micro_batches=4, schedule=Schedule.INTERLEAVED, virtual_stages=2)
FOLDED = Layout(pp=2, num_micro_batches=4, schedule=Schedule.INTERLEAVED, virtual_stages=2, folded=True)
TIED_DEEP = replace(DEEP, name="gpt-tied-deep", model=replace(DEEP.model, name="gpt-tied-deep", tied_embeddings=True))
SHARED = Layout(cp=2, zero_stage=3, num_micro_batches=4)
REDUCED = Layout(dp=2, num_micro_batches=4)
TWO, FOUR = Layout(dp=2, zero_stage=3, num_micro_batches=4), Layout(dp=4, zero_stage=3, num_micro_batches=2)

EVEN = replace(GPT, name="gpt-mini-even", masked=False)
"""Every row has as many targets: a mean of means is right."""
NO_DECAY = replace(GPT, name="gpt-mini-no-decay", optimizer=replace(GPT.optimizer, weight_decay=0.0))
"""For loops that choose by themselves what is decayed."""
WARM, LLAMA = workload("gpt-mini-warmup"), workload("llama-mini")
WARM_LLAMA = replace(LLAMA, name="llama-mini-warmup", optimizer=replace(LLAMA.optimizer, warmup_steps=8))
TENSOR = Layout(tp=2, num_micro_batches=4)
PARTED = Layout(dp=2, zero_stage=2, num_micro_batches=4)
AGAIN = replace(TWO, recompute=Recompute.FULL)


class ShardsPlainly(Adapter):
    """FSDP2, whatever was chosen: all weights are given up after every forward pass, in one replica."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return FSDP2().build(case, context)


class KeepsWeights(Adapter):
    """FSDP2, and no weights are given up before the backward pass is over."""

    def build(self, case: Case, context: RankContext) -> Engine:
        class Keeping(FSDP2):
            sharding = Sharding(reshards_blocks=False, reshards_root=False)

        return Keeping().build(case, context)


class FSDP2ReducesEach(Adapter):
    """HSDP whose replicas reduce every micro-batch, though once a step was asked for."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return FSDP2HSDP().build(case, context)


class FullShard(Adapter):
    """FSDP1, whatever strategy was chosen."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return FSDP1().build(case, context)


class LossInParallel(Adapter):
    """Logits stay split, though a loss over the whole vocabulary was asked for."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return TensorParallel().build(case, context)


class ShardsOverAll(Adapter):
    """Accelerate without the `ParallelismConfig` that was asked for: one replica, sharded over all ranks."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return AccelerateFSDP2().build(case, context)


class ForgetsPartialSums(Broken):
    """Sums within a replica, reduced before the last micro-batch, never reach the other replicas."""

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        with super().micro_batch(last):
            yield
        for part in self.module.modules():  # type: ignore[attr-defined]
            state = getattr(part, "_get_fsdp_state", lambda: None)()
            for group in getattr(state, "_fsdp_param_groups", ()):
                group._partial_reduce_output = None


class ReplicasAlone(Broken):
    """Replicas of tensor-parallel ranks are never reduced."""

    replicas: object

    def prepare(self) -> None:
        self.replicas = None


class StageNotScaled(Broken):
    """DeepSpeed divides the loss by the number of micro-batches, of which shares are sums."""

    def prepare(self) -> None:
        self.module.module.loss_fn = self._loss  # type: ignore[attr-defined]

    def _loss(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        loss: Tensor = super()._loss(logits_BTV, targets_BT)  # type: ignore[misc]
        return loss / self.case.layout.num_micro_batches


class StagesNotSharded(Adapter):
    """A pipeline over replicas, whose stages FSDP2 was to shard."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return PipelineFSDP2().build(replace(case, layout=replace(case.layout, zero_stage=0)), context)


class DividesByRounds(Adapter):
    """DeepSpeed is told of the layout's micro-batches, by which it divides a backward pass of PyTorch's."""

    def build(self, case: Case, context: RankContext) -> Engine:
        class Divides(DeepSpeedByHand):
            def config(self, case: Case, context: RankContext) -> dict[str, Any]:
                return {**DeepSpeed().config(case, context), "managed_gradient_accumulation": False}

        return Divides().build(case, context)


class AveragesThoughSumsWereAsked(Adapter):
    """Losses that add up, whose gradients are averaged over ranks."""

    def build(self, case: Case, context: RankContext) -> Engine:
        class Averages(DeepSpeedSums):
            def config(self, case: Case, context: RankContext) -> dict[str, Any]:
                return {**super().config(case, context), "gradient_allreduce_op": "mean"}

        return Averages().build(case, context)


class MomentsStayAway(Broken):
    """Moments are not there any more when states have come back."""

    def update(self) -> Tensor | None:
        norm = super().update()
        for moment in self.moments():
            moment.zero_()
        return norm


class KeepsTheFirstUpdate(Broken):
    """The update with gradients of zero counts as Adam's first."""

    def prepare(self) -> None:
        for state in self.inner_optimizer().state.values():
            state["step"] += 1


class TellsShapesOnce(Adapter):
    """A pipeline of DeepSpeed's without `dynamic_shape`, whose blocks are computed again."""

    def build(self, case: Case, context: RankContext) -> Engine:
        class Once(DeepSpeedPipelineOptions):
            def module_options(self, case: Case) -> dict[str, Any]:
                return {**super().module_options(case), "dynamic_shape": False}

        return Once().build(case, context)


class AsTheorySays(Adapter):
    """DeepSpeed without its authors' defaults: all is sharded, and gathered twice a micro-batch."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return DeepSpeed().build(case, context)


class BucketsNotReduced(Broken):
    """Every rank keeps its part of its own gradients, as if the bucket had been reduced."""

    zero: Any

    def prepare(self) -> None:
        self.zero.gradient_reduction_w_predivide = lambda tensor, dtype: tensor


class DividesByRanksBefore(Adapter):
    """The factor is the number of ranks, of which DeepSpeed's stage 3 divides twice and multiplies not at all."""

    def build(self, case: Case, context: RankContext) -> Engine:
        class ByRanks(DeepSpeedDivides):
            @classmethod
            def scaling(cls, case: Case) -> dict[str, Any]:
                return {"gradient_predivide_factor": float(case.layout.dp)}

        return ByRanks().build(case, context)


class WeightsInBf16(Broken):
    """Weights are rounded to bf16 as well, where autocast keeps them wide."""

    def update(self) -> Tensor | None:
        norm = super().update()
        with torch.no_grad():
            for _, weight in self.named():
                weight.copy_(weight.bfloat16())
        return norm


class ShufflesAlone(Adapter):
    """Every process shuffles by a seed of its own."""

    def build(self, case: Case, context: RankContext) -> Engine:
        class Alone(ShuffledLoop):
            def arguments(self) -> dict[str, Any]:
                from accelerate import DataLoaderConfiguration

                own = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=self.seed + context.rank)
                return {**super().arguments(), "dataloader_config": own}

        return LoopEngine(case, context, Alone(case, context))


class StepsForEachProcess(Adapter):
    """A batch of all processes, and a schedule that is stepped once for each of them."""

    def build(self, case: Case, context: RankContext) -> Engine:
        class ForEach(SplitLoop):
            def ready(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
                self.schedule.split_batches = False
                super().ready(module, optimizer)

        return LoopEngine(case, context, ForEach(case, context))


class AveragesAsEver(Broken):
    """Gradients are averaged over ranks, of losses that add up."""

    def prepare(self) -> None:
        from torch.distributed.fsdp import FSDPModule

        for part in self.root().modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(float(self.case.layout.dp))


class OwnersTellNobody(Broken):
    """Owners update what they own, and no other rank hears of it."""

    def prepare(self) -> None:
        self.optimizer._sync_params = lambda: None


class RowsOfColumns(Broken):
    """The gathered columns of a matrix are read as if they were rows: its halves come one above the other."""

    def prepare(self) -> None:
        from torch.distributed.tensor import DTensor

        for _, weight in self.named():
            if isinstance(weight, DTensor) and weight.placements[0].is_shard(1) and weight.shape[0] == weight.shape[1]:
                local = weight.to_local()
                with torch.no_grad():
                    local.copy_(local.reshape(local.shape[1], local.shape[0]).T.clone())


class OneBucket(Adapter):
    """DDP, whatever size of buckets was asked for."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return DDP().build(case, context)


class EveryRankReadsAll(Adapter):
    """Fabric is told to deal no rows: every rank reads the same."""

    def build(self, case: Case, context: RankContext) -> Engine:
        class Same(FabricLoop):
            def loader(self, fabric: Any) -> DataLoader[Any]:  # noqa: ANN401
                plain = DataLoader(self.rows, batch_size=self.rows_per_micro_batch, collate_fn=collate)
                same: DataLoader[Any] = fabric.setup_dataloaders(plain, use_distributed_sampler=False)
                return same

        return LoopEngine(case, context, Same(case, context))


class SumsOverReplicas(Broken):
    """Gradients were not scaled, for the reduction was to average, and it sums."""

    def prepare(self) -> None:
        for chunk in self.chunks:  # type: ignore[attr-defined]
            for buffers in (chunk.buffers, chunk.expert_parallel_buffers):
                for buffer in buffers:
                    for group in buffer.bucket_groups if hasattr(buffer, "bucket_groups") else ():
                        group.ddp_config.average_in_collective = False
            chunk.ddp_config.average_in_collective = False


class DividesBeforeAndAfter(Adapter):
    """The factor exceeds the number of ranks, and FairScale does not multiply after the reduction."""

    def build(self, case: Case, context: RankContext) -> Engine:
        class Twice(FairScaleFSDPPredivide):
            def choices(self, case: Case) -> dict[str, Any]:
                return {"gradient_predivide_factor": 2.0 * case.layout.dp}

        return Twice().build(case, context)


class SynchronizesNothing(Adapter):
    """Every process shuffles by its own generator."""

    def build(self, case: Case, context: RankContext) -> Engine:
        class Alone(SynchronizedLoop):
            def ready(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
                self.prepared.rng_types = None
                super().ready(module, optimizer)

        return LoopEngine(case, context, Alone(case, context))


class NeverTriggered(Adapter):
    """The last backward pass of a step reduces nothing either."""

    def build(self, case: Case, context: RankContext) -> Engine:
        class Never(TriggeredLoop):
            def ready(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
                self.accelerator.trigger_sync_in_backward = self.accelerator.no_sync
                super().ready(module, optimizer)

        return LoopEngine(case, context, Never(case, context))


class JoinsNobody(Adapter):
    """The guide's loop as it is."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return AccelerateScript().build(case, context)


def _first_part(data: Any, place: slice, **_: Any) -> Any:  # noqa: ANN401
    from accelerate.utils.operations import slice_tensors

    return slice_tensors(data, slice(0, place.stop - place.start))


class EveryProcessGetsTheFirstPart(Adapter):
    """Every process takes the rows that are the first one's."""

    def build(self, case: Case, context: RankContext) -> Engine:
        class Whole(DispatchedLoop):
            def ready(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
                self.prepared.slice_fn = _first_part
                super().ready(module, optimizer)

        return LoopEngine(case, context, Whole(case, context))


class SynchronizesWithEpochs(Adapter):
    """An epoch's last micro-batch ends a step."""

    def build(self, case: Case, context: RankContext) -> Engine:
        class With(EpochsLoop):
            def arguments(self) -> dict[str, Any]:
                found = super().arguments()
                found["gradient_accumulation_plugin"].sync_with_dataloader = True
                return found

        return LoopEngine(case, context, With(case, context))


class PlainDDP(Adapter):
    """Accelerate's DDP without what was asked of it."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return Accelerate().build(case, context)


class ClipsLower(Broken):
    """The limit of values is one that gradients exceed."""

    limit = 1e-6


class SyncsOnce(Adapter):
    """Accelerate reduces once a step, whatever `sync_each_batch` says."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return Accelerate().build(case, context)


class NeverDivided(Broken):
    """Gradients are summed over ranks, and not divided before."""

    zero: Any

    def prepare(self) -> None:
        self.zero.sequence_parallel_size = self.case.layout.dp


class StepsEachMicroBatch(Broken):
    """DeepSpeed's scheduler is stepped after every micro-batch, and once more with the optimizer."""

    module: Any

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        with super().micro_batch(last):
            yield
        self.module.lr_scheduler.step()


class AveragedOverTokens(Broken):
    """The ranks that share a sequence average their gradients, of losses that add up."""

    def differentiate(self, loss: Tensor) -> None:
        super().differentiate(loss / self.case.layout.cp)


class PositionsFromZero(Broken):
    """Every rank counts its tokens from the first of its own, not of the sequence."""

    def prepare(self) -> None:
        self.inner().embedding.positions._forward_pre_hooks.clear()  # type: ignore[attr-defined]


class TokensOfItsOwn(Broken):
    """Every rank attends to its own tokens alone: nothing is exchanged."""

    def prepare(self) -> None:
        for part in self.inner().modules():  # type: ignore[attr-defined]
            if isinstance(part, UlyssesAttention):
                part.exchanged = part.of_heads


class InputsNotSummed(Broken):
    """Products by columns leave the gradients of their input as each rank has them."""

    def prepare(self) -> None:
        from deepspeed.module_inject.layers import ColumnParallel

        ColumnParallel.backward = staticmethod(lambda _, gradient: (None, gradient))


class NoPassTheLast(Broken):
    """DeepSpeed's engine is not told which backward pass is a step's last, as Fabric's users do not tell it."""

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        yield


class ClippedByNobody(Adapter):
    """Fabric refuses to clip under DeepSpeed, and the configuration does not say to."""

    def config(self, case: Case, context: RankContext) -> dict[str, Any]:
        config: dict[str, Any] = super().config(case, context)  # type: ignore[misc]
        return {**config, "gradient_clipping": 0.0}


class NeverSharded(Adapter):
    """Tensor parallelism over replicas, where FSDP2 was to shard them."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return TensorParallel().build(replace(case, layout=replace(case.layout, zero_stage=0)), context)


class SecondShardsStay(Broken):
    """A node's own shards of the weights outlive the update that they are older than."""

    def prepare(self) -> None:
        self.zero.invalidate_secondary_tensor = lambda: None  # type: ignore[attr-defined]


class GathersFromAll(Adapter):
    """hpZ was asked for, and all weights are gathered from all ranks."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return DeepSpeed().build(case, context)


class ByPyTorch(Adapter):
    """PyTorch's checkpoint, where DeepSpeed's was asked for."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return DeepSpeed().build(case, context)


class ReshardsAll(Adapter):
    """FairScale's FSDP gives up all weights after their forward pass, though it was told to keep them."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return FairScaleFSDP().build(case, context)


class LateWeightsForgotten(Broken):
    """The gradients of weights that a zero-bubble pipeline computes late are left out, of its second micro-batch."""

    def prepare(self) -> None:
        for stage in self.stages:
            stage.backward_weight_one_chunk = functools.partial(
                self._forget, stage.submod.parameters, stage.backward_weight_one_chunk
            )

    def _forget(
        self,
        parameters: Callable[[], Iterable[Tensor]],
        compute: Callable[..., None],
        micro_batch: int,
        **arguments: object,
    ) -> None:
        kept = [None if p.grad is None else p.grad.clone() for p in parameters()]
        compute(micro_batch, **arguments)
        for parameter, grad in zip(parameters(), kept, strict=True):
            parameter.grad = grad if micro_batch == 1 else parameter.grad


def _on(
    adapters: str,
    defect: type[Broken] | type[Adapter],
    *faults: Fault,
    suite: str = "equivalence",
    layout: Layout,
    problem: Workload = GPT,
    precision: Precision = Precision.FP32,
) -> Iterator[Mutant]:
    for adapter in adapters.split():
        yield Mutant(
            adapter=adapter,
            defect=defect,
            suite=suite,
            faults=frozenset(faults),
            workload=DEEP if layout.folded else problem,
            layout=layout,
            precision=precision,
        )


ROSTER_MUTANTS: list[Mutant] = [
    *_on("fsdp2-noreshard fsdp2-recommended", ShardsPlainly, suite="communication", layout=TWO),
    *_on("fsdp2-hsdp fsdp2-reshard2", ShardsPlainly, suite="communication", layout=FOUR),
    *_on("fsdp2-recommended", KeepsWeights, suite="communication", layout=TWO),
    *_on("fsdp2-hsdp", g.AveragedTwice, F.SCALED, layout=FOUR),
    *_on("deepspeed-whole-buckets", BucketsNotReduced, F.NOT_REDUCED, layout=PARTED),
    *_on("deepspeed-reduce-to-ranks", AsTheorySays, suite="communication", layout=PARTED),
    *_on("deepspeed-by-hand", DividesByRounds, F.SCALED, layout=TWO),
    *_on("deepspeed-coalesced", AsTheorySays, suite="communication", layout=PARTED),
    *_on("deepspeed-sums", AveragesThoughSumsWereAsked, F.SCALED, layout=PARTED),
    *_on("deepspeed-round-robin", w.ZeroNotReduced, F.NOT_REDUCED, layout=PARTED),
    *_on("deepspeed-leaf-modules", AsTheorySays, suite="communication", layout=TWO),
    *_on("deepspeed-granularity", g.OverMicroBatches, F.SCALED, layout=TWO),
    *_on("deepspeed-offload-between", MomentsStayAway, F.UPDATE, layout=PARTED),
    *_on("deepspeed-bf16", g.OverMicroBatches, F.SCALED, layout=PARTED, precision=Precision.BF16),
    *_on(
        "deepspeed-zero0-bf16",
        KeepsTheFirstUpdate,
        F.UPDATE,
        layout=Layout(dp=2),
        precision=Precision.BF16_REDUCE_BF16,
    ),
    *_on(
        "deepspeed-pipeline-options",
        TellsShapesOnce,
        suite="communication",
        layout=replace(PIPELINE, zero_stage=1, recompute=Recompute.FULL),
    ),
    *_on("ddp-buckets", OneBucket, suite="communication", layout=REDUCED),
    *_on("fabric-loop", EveryRankReadsAll, layout=REDUCED),
    *_on("megatron-gpt-average", SumsOverReplicas, F.SCALED, layout=REDUCED),
    *_on("accelerate-loop-shuffled", ShufflesAlone, layout=REDUCED),
    *_on("accelerate-loop-split", StepsForEachProcess, F.UPDATE, layout=REDUCED, problem=WARM),
    *_on("deepspeed-predivide", DividesByRanksBefore, F.SCALED, layout=TWO),
    *_on("deepspeed-prescale", NeverDivided, F.SCALED, layout=PARTED),
    *_on("deepspeed-separate-gradients", AsTheorySays, suite="memory", layout=replace(PARTED, zero_stage=1)),
    *_on(
        "deepspeed-autocast", WeightsInBf16, F.PRECISION, layout=replace(PARTED, zero_stage=0), precision=Precision.BF16
    ),
    *_on("deepspeed-fetch-by-reduction", AsTheorySays, suite="communication", layout=TWO),
    *_on(
        "deepspeed-configured deepspeed-range-test deepspeed-one-cycle",
        StepsEachMicroBatch,
        F.UPDATE,
        layout=PARTED,
        problem=WARM,
    ),
    *_on("fsdp2-sums", AveragesAsEver, F.SCALED, layout=TWO),
    *_on("fsdp2-columns", RowsOfColumns, layout=TWO),
    *_on("fsdp1-no-shard", FullShard, suite="communication", layout=replace(TWO, zero_stage=0)),
    *_on("ddp-zero1-views", OwnersTellNobody, F.DRIFT, layout=replace(TWO, zero_stage=1)),
    *_on("fsdp1-nosync", FullShard, suite="communication", layout=TWO),
    *_on("fsdp2-nosync", ShardsPlainly, suite="communication", layout=TWO),
    *_on("fsdp2-hsdp-noallreduce", FSDP2ReducesEach, suite="communication", layout=FOUR),
    *_on("fsdp2-hsdp-noallreduce", ForgetsPartialSums, layout=FOUR),
    *_on("fsdp1-shard-grad-op", FullShard, suite="communication", layout=TWO),
    *_on("fsdp1-hybrid", FullShard, suite="communication", layout=FOUR),
    *_on("fsdp1 fsdp1-shard-grad-op", g.OverMicroBatches, F.SCALED, layout=TWO),
    *_on("fsdp1-hybrid", g.AveragedTwice, F.SCALED, layout=FOUR),
    *_on("fsdp1", g.MeanOfRanks, F.UNEVEN, layout=TWO),
    *_on("fsdp1", g.DropsLast, F.DROPPED, layout=TWO),
    *_on("ddp-static ddp-recommended", g.AveragedTwice, F.SCALED, layout=replace(TWO, zero_stage=0)),
    *_on("ddp-zero1", g.AveragedTwice, F.SCALED, layout=replace(TWO, zero_stage=1)),
    *_on("tp", g.OverMicroBatches, F.SCALED, layout=Layout(tp=2, num_micro_batches=4)),
    *_on("tp", ReplicasAlone, F.NOT_REDUCED, layout=Layout(dp=2, tp=2, num_micro_batches=4)),
    *_on("tp-whole-loss", LossInParallel, suite="communication", layout=Layout(tp=2, num_micro_batches=4)),
    *_on("accelerate-sync-each", SyncsOnce, suite="communication", layout=REDUCED),
    *_on("accelerate-fsdp2-nosync", ShardsOverAll, suite="communication", layout=TWO),
    *_on("accelerate-loop-synchronized", SynchronizesNothing, layout=REDUCED),
    *_on("accelerate-loop-triggered", NeverTriggered, F.NOT_REDUCED, layout=REDUCED),
    *_on("accelerate-loop-joined", JoinsNobody, suite="communication", layout=REDUCED),
    *_on("accelerate-loop-dispatched", EveryProcessGetsTheFirstPart, layout=REDUCED),
    *_on("accelerate-loop-epochs", SynchronizesWithEpochs, layout=REDUCED),
    *_on("accelerate-buckets accelerate-static", PlainDDP, suite="communication", layout=REDUCED),
    *_on("accelerate-captured", g.OverMicroBatches, F.SCALED, layout=REDUCED),
    *_on("accelerate-clips-values", ClipsLower, F.CLIPPING, F.UPDATE, layout=REDUCED),
    *_on("accelerate-fsdp1-by-size", g.OverMicroBatches, F.SCALED, layout=TWO),
    *_on("accelerate-deepspeed-auto", g.OverMicroBatches, F.SCALED, layout=TWO),
    *_on("accelerate-hsdp", ShardsOverAll, suite="communication", layout=FOUR),
    *_on("fabric-tp-fsdp2", g.OverMicroBatches, F.SCALED, layout=CROSSED),
    *_on("deepspeed-pipeline", StageNotScaled, F.SCALED, layout=replace(PIPELINE, zero_stage=1)),
    *_on("pipeline-zbv pipeline-dualpipev", g.ScalesGrads, F.SCALED, layout=FOLDED),
    *_on("pipeline-zero-bubble pipeline-looped-bfs", g.ScalesGrads, F.SCALED, layout=INTERLEAVED, problem=DEEP),
    *_on("pipeline-zero-bubble", g.TiedNotReduced, F.DRIFT, layout=INTERLEAVED, problem=TIED_DEEP),
    *_on("pipeline-zero-bubble", LateWeightsForgotten, F.DROPPED, layout=INTERLEAVED, problem=DEEP),
    *_on("pipeline-tp", g.ScalesGrads, F.SCALED, layout=replace(PIPELINE, tp=2)),
    *_on("pipeline-fsdp2", StagesNotSharded, suite="memory", layout=replace(PIPELINE, dp=2, zero_stage=3)),
    *_on("deepspeed-recommended", AsTheorySays, suite="communication", layout=TWO),
    *_on("deepspeed-recommended", g.OverMicroBatches, F.SCALED, layout=TWO),
    *_on("deepspeed-ulysses", AveragedOverTokens, F.SCALED, layout=SHARED),
    *_on("deepspeed-ulysses", PositionsFromZero, layout=replace(SHARED, zero_stage=1)),
    *_on("deepspeed-ulysses", TokensOfItsOwn, layout=replace(SHARED, zero_stage=1)),
    *_on("deepspeed-autotp", g.OverMicroBatches, F.SCALED, layout=replace(CROSSED, zero_stage=1)),
    *_on("deepspeed-autotp", InputsNotSummed, layout=replace(CROSSED, zero_stage=1)),
    *_on("fabric-deepspeed", NoPassTheLast, F.DROPPED, layout=replace(TWO, zero_stage=2)),
    *_on("fabric-deepspeed", ClippedByNobody, F.CLIPPING, layout=replace(TWO, zero_stage=1)),
    *_on("accelerate-fsdp1", g.OverMicroBatches, F.SCALED, layout=TWO),
    *_on("deepspeed-experts", e.DrawsTheSecondExpert, layout=PARTED, problem=MIXTURE),
    *_on("deepspeed-experts", e.DropsBeyondCapacity, layout=PARTED, problem=MIXTURE),
    *_on("megatron-gpt-experts", e.SoftmaxBeforeChoice, layout=REDUCED, problem=MIXTURE),
    *_on("megatron-gpt-experts", e.ExpertsScaledByReplicas, F.SCALED, layout=REDUCED, problem=MIXTURE),
    *_on("deepspeed-hpz", SecondShardsStay, F.STALE_WEIGHTS, layout=FOUR),
    *_on("deepspeed-hpz", GathersFromAll, suite="communication", layout=FOUR),
    *_on("deepspeed-checkpointing", ByPyTorch, suite="communication", layout=AGAIN),
    *_on("deepspeed-checkpointing", g.OverMicroBatches, F.SCALED, layout=AGAIN),
    *_on("fairscale-fsdp-nosync", ReshardsAll, suite="communication", layout=TWO),
    *_on("fairscale-fsdp-predivide", DividesBeforeAndAfter, F.SCALED, layout=TWO),
    *_on("fairscale-fsdp-noreshard", ReshardsAll, suite="communication", layout=TWO),
    *_on("fairscale-fsdp-unflattened", g.OverMicroBatches, F.SCALED, layout=TWO),
    *_on("fairscale-checkpoint-offload", g.MeanOfRanks, F.UNEVEN, layout=AGAIN),
    *_on("simple-fsdp", g.OverMicroBatches, F.SCALED, layout=TWO),
    *_on("simple-fsdp", ShardsPlainly, suite="communication", layout=TWO),
    *_on("tp-fsdp2", NeverSharded, suite="memory", layout=CROSSED),
    *_on("tp-fsdp2", ReduceDtypeOfAnother, suite="communication", layout=CROSSED, precision=Precision.BF16),
    *_on("tp-fsdp2", g.OverMicroBatches, F.SCALED, layout=CROSSED, precision=Precision.BF16),
    *_on("horovod horovod-recommended", h.SumsAsked, F.SCALED, layout=REDUCED),
    *_on("horovod", h.OwnPartsAlone, F.NOT_REDUCED, layout=REDUCED),
    *_on("horovod", h.OneIsNotHooked, F.DRIFT, F.NOT_REDUCED, layout=REDUCED),
    *_on("horovod", h.ReducesEveryMicroBatch, suite="communication", layout=REDUCED),
    *_on("horovod", h.ClippedBeforeItIsReduced, layout=REDUCED),
    *_on("horovod", h.SynchronizesTwice, suite="communication", layout=REDUCED),
    *_on("horovod", h.CompressedUnasked, suite="communication", layout=REDUCED),
    *_on("horovod", h.FusesUnasked, suite="memory", layout=REDUCED),
    *_on("horovod", g.MeanOfRanks, F.UNEVEN, layout=REDUCED),
    *_on("horovod-recommended", h.BroadcastsNoState, F.START, F.UPDATE, layout=REDUCED),
    *_on("torchtitan", t.CountsOwnTargets, F.UNEVEN, layout=TWO, problem=LLAMA),
    *_on("torchtitan", t.DividesByShards, F.SCALED, layout=TWO, problem=LLAMA),
    *_on("torchtitan-pp", t.ClipsByStage, F.CLIPPING, layout=PIPELINE, problem=LLAMA),
    *_on("torchtitan-tp", t.StepsScheduleTwice, F.UPDATE, layout=TENSOR, problem=WARM_LLAMA),
    *_on("single", ForwardScaled, layout=Layout(num_micro_batches=4)),
    *_on("plain-loop", ForwardScaled, layout=Layout(num_micro_batches=4)),
    *_on("accelerate-deepspeed", g.OverMicroBatches, F.SCALED, layout=PARTED),
    *_on("accelerate-deepspeed-file", g.OverMicroBatches, F.SCALED, layout=replace(PARTED, offload=Offload.CPU)),
    *_on("accelerate-fsdp2-launched", g.OverMicroBatches, F.SCALED, layout=TWO),
    *_on("accelerate-loop-recommended", y.ForgetsNumProcesses, F.SCALED, layout=REDUCED, problem=EVEN),
    *_on("fsdp2-offload", g.OverMicroBatches, F.SCALED, layout=replace(TWO, offload=Offload.CPU)),
    *_on("hf-trainer-rank-means", y.ClipsTwice, F.CLIPPING, layout=REDUCED, problem=EVEN),
    *_on("hf-trainer-recommended", y.ClipsTwice, F.CLIPPING, layout=REDUCED, problem=NO_DECAY),
    *_on("hf-trainer-deepspeed-given", ForwardScaled, layout=PARTED),
    *_on("lightning-trainer-fsdp lightning-trainer-fsdp2", y.DividesByMicroBatches, F.SCALED, layout=TWO),
    *_on("lightning-trainer-recommended", y.DividesByMicroBatches, F.SCALED, layout=REDUCED, problem=EVEN),
    *MEGATRON_GPT_MUTANTS,
    *CHECKPOINT_OPTION_MUTANTS,
    *PYTORCH_OPTION_MUTANTS,
    *FABRIC_OPTION_MUTANTS,
    *DEEPSPEED_OPTION_MUTANTS,
]
