"""Defects of megatron-core's own GPTModel: what its pipelines, norms, checkpoints and optimizers alone get wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.megatron import gpt_model
from meshmark.adapters.megatron.gpt_model import MegatronGPT, MegatronGPTDistributedOptimizer
from meshmark.judge.faults import Fault
from meshmark.reference.data import Batch
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout, Recompute, Schedule
from meshmark.spec.precision import Precision
from tests.broken.engine import Broken
from tests.broken.mutant import DEEP, GPT, Mutant, against, on
from tests.broken.options import FreezesMore, TrainsFrozen

F = Fault
PIPELINE = Layout(pp=2, num_micro_batches=4, schedule=Schedule.ONE_F_ONE_B)
SHARDED = Layout(dp=2, zero_stage=1, num_micro_batches=4)
REPLICATED = Layout(dp=2, num_micro_batches=4)
FOUR = Layout(dp=4, zero_stage=1, num_micro_batches=2)
FOLDED = Layout(dp=2, pp=2, zero_stage=1, num_micro_batches=4, schedule=Schedule.INTERLEAVED, virtual_stages=2)
THREE = replace(GPT, name="gpt-three", model=replace(GPT.model, name="gpt-three", num_layers=3))
"""Workload whose layers two stages do not divide."""
AGAIN = Layout(tp=2, num_micro_batches=4, recompute=Recompute.FULL)


class OfModel(Broken):
    chunks: list[Any]

    def layers(self) -> Iterator[nn.Module]:
        for chunk in self.chunks:
            yield from chunk.module.decoder.layers


class CountsTokensTwice(Broken):
    """Megatron is told of twice as many tokens as there are, by which it divides gradients."""

    def _loss(self, micro: Batch, loss_BT: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total, count, told = super()._loss(micro, loss_BT)  # type: ignore[misc]
        return total, 2 * count, told


class ReducedAsEver(Adapter):
    """Megatron's distributed optimizer, whose gradients are reduced and scattered."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return MegatronGPTDistributedOptimizer().build(case, context)


class TellsNoShapes(Adapter):
    """Megatron's GPTModel as it is."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return MegatronGPT().build(case, context)


class NotUndone(Broken):
    """Megatron divides the loss by the number of micro-batches, of which shares are sums."""

    def _loss(self, micro: Batch, loss_BT: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss, told = super()._loss(micro, loss_BT)  # type: ignore[misc]
        return loss / self.case.layout.num_micro_batches, told


class NormsNotSummed(OfModel):
    """Under sequence parallelism every rank norms other tokens, and nobody sums the norms' gradients."""

    def prepare(self) -> None:
        def finish(chunks: list[Any], *_: object, **__: object) -> None:
            for chunk in chunks:
                chunk.finish_grad_sync()

        self.chunks[0].config.finalize_model_grads_func = finish


class StatesNotShared(Adapter):
    """The distributed optimizer was asked for, and every replica keeps all states."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return MegatronGPT().build(replace(case, layout=replace(case.layout, zero_stage=0)), context)


class KeepsAll(Adapter):
    """Recomputation was asked for, and nothing is computed again."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return MegatronGPT().build(replace(case, layout=replace(case.layout, recompute=Recompute.NONE)), context)


class RecomputesLatest(OfModel):
    """A layer is computed again of the input that it has had last, which in a pipeline is a later micro-batch's."""

    def prepare(self) -> None:
        for layer in self.layers():
            layer.register_forward_pre_hook(_of_latest(), with_kwargs=True)


def _of_latest() -> Any:  # noqa: ANN401
    latest: list[Tensor] = []

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = kwargs["hidden_states"]
        if torch.is_grad_enabled():
            return args, kwargs | {"hidden_states": given + (latest[0] - given).detach()}
        latest[:] = [given.detach().clone()]
        return args, kwargs

    return enter


class RecomputesUnmasked(OfModel):
    """Attention is computed again without the mask, so that every token sees those after it."""

    def prepare(self) -> None:
        for layer in self.layers():
            softmax = layer.self_attention.core_attention.scale_mask_softmax  # type: ignore[union-attr]
            softmax.forward = _unmasked(softmax.forward)


def _unmasked(forward: Any) -> Any:  # noqa: ANN401
    def run(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        probabilities: Tensor = (
            torch.softmax(scores, -1) if torch.is_grad_enabled() else forward(scores, *args, **kwargs)
        )
        return probabilities

    return run


class SwapsShards(OfModel):
    """Tensor-parallel ranks load each other's part of the feed-forward layers."""

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        super().load(folder)
        for layer in self.layers():
            own = layer.mlp.linear_fc1.weight  # type: ignore[union-attr]
            shards = [torch.empty_like(own) for _ in range(self.context.world_size)]
            torch.distributed.all_gather(shards, own.detach().contiguous())
            own.copy_(shards[self.context.rank - 1])


class ForgetsCount(OfModel):
    """Adam's moments are loaded, and not how many steps they are of."""

    def load(self, folder: Path) -> None:
        super().load(folder)
        for optimizer in self.pytorchs_optimizers():  # type: ignore[attr-defined]
            for state in optimizer.state.values():
                state["step"] = torch.zeros_like(state["step"])


class NotOverlapped(Adapter):
    """Overlap was asked for, and all gradients are reduced together, after the backward pass."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return MegatronGPT().build(case, context)


class BucketNotReduced(OfModel):
    """The first bucket that is ready is never sent."""

    def prepare(self) -> None:
        bucket_group = self.chunks[0].bucket_groups[0]
        bucket_group.start_grad_sync = bucket_group.finish_grad_sync = lambda *_, **__: None


class SumsInBf16(OfModel):
    """Gradients are sums over micro-batches in bf16, not in float32 as asked for (`grad_reduce_in_fp32`)."""

    def backward(self, batch: Batch) -> Tensor:
        loss = super().backward(batch)
        for chunk in self.chunks:
            for buffer in chunk.buffers:
                buffer.grad_data.copy_(buffer.grad_data.bfloat16())
        return loss


class WeightsNotGathered(OfModel):
    """A rank steps its own part of the weights, and never gets the others'."""

    def prepare(self) -> None:
        self.chunks[0].disable_forward_pre_hook(param_sync=False)


class CutsElsewhere(Adapter):
    """The last stage has the layer more that was asked for of the first."""

    def model_options(self, case: Case) -> dict[str, Any]:
        return {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 2}

    def build(self, case: Case, context: RankContext) -> Engine:
        with mock.patch.object(gpt_model, "stage_blocks", lambda _, place: [[0], [1, 2]][place]):
            return super().build(case, context)  # type: ignore[safe-super]


class InstancesApart(OfModel):
    """Gradients are summed within each instance of the optimizer, and never among instances."""

    def prepare(self) -> None:
        for chunk in self.chunks:
            for group in chunk.bucket_groups:
                group.ddp_config = replace(group.ddp_config, num_distributed_optimizer_instances=1)


class OneInstance(Adapter):
    """All replicas share out the states of one optimizer."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return MegatronGPTDistributedOptimizer().build(case, context)


class GathersBeforeTheUpdate(OfModel):
    """The first chunk's weights are gathered as they are before its update."""

    def prepare(self) -> None:
        first, optimizer = self.chunks[0], self.optimizer
        start, step = first.start_param_sync, optimizer.step_with_ready_grads  # type: ignore[attr-defined]

        def early() -> bool:
            start(force_dispatch=True)
            for group in first.bucket_groups:
                group.param_gather_handle.wait()
            done: bool = step()
            return done

        first.start_param_sync = lambda **_: None
        optimizer.step_with_ready_grads = early  # type: ignore[attr-defined]


MEGATRON_GPT_MUTANTS: list[Mutant] = [
    *on("megatron-gpt", NotUndone, F.SCALED, layout=PIPELINE),
    *on("megatron-gpt", NormsNotSummed, layout=Layout(tp=2, sequence_parallel=True, num_micro_batches=4)),
    *on("megatron-gpt-zero1", StatesNotShared, suite="memory", layout=SHARDED),
    *on("megatron-gpt", KeepsAll, suite="communication", layout=AGAIN),
    *on("megatron-gpt", RecomputesLatest, layout=replace(PIPELINE, recompute=Recompute.FULL)),
    *on("megatron-gpt", RecomputesUnmasked, layout=replace(AGAIN, recompute=Recompute.SELECTIVE)),
    *on("megatron-gpt-overlap", NotOverlapped, suite="communication", layout=REPLICATED),
    *on("megatron-gpt-overlap", BucketNotReduced, F.NOT_REDUCED, layout=REPLICATED),
    *on("megatron-gpt", SumsInBf16, layout=PIPELINE, precision=Precision.BF16),
    *on("megatron-gpt-recommended", WeightsNotGathered, layout=SHARDED),
    *on("megatron-gpt-per-token", CountsTokensTwice, F.SCALED, layout=REPLICATED),
    *on("megatron-gpt-pipeline-options", TellsNoShapes, suite="communication", layout=PIPELINE),
    *on("megatron-gpt-aligned", WeightsNotGathered, layout=replace(PIPELINE, dp=2, zero_stage=1)),
    *on("megatron-gpt-exchanged-sums", ReducedAsEver, suite="communication", layout=SHARDED),
    *on("megatron-gpt-fp16", NotUndone, F.SCALED, layout=PIPELINE, precision=Precision.FP16),
    *on("megatron-gpt-fp16-constant", NotUndone, F.SCALED, layout=PIPELINE, precision=Precision.FP16),
    *on("megatron-gpt-uneven", CutsElsewhere, suite="memory", layout=PIPELINE, workload=THREE),
    *on("megatron-gpt-instances", InstancesApart, F.NOT_REDUCED, F.DRIFT, layout=FOUR),
    *on("megatron-gpt-instances", OneInstance, suite="memory", layout=FOUR),
    *on("megatron-gpt-gathers-early", GathersBeforeTheUpdate, layout=FOLDED, workload=DEEP),
    *against("frozen", "megatron-gpt", TrainsFrozen, F.UPDATE, layout=Layout(tp=2)),
    *against("frozen", "megatron-gpt", FreezesMore, F.MISSING, F.NEVER_UPDATED, layout=Layout(tp=2)),
    *against("resume", "megatron-gpt", SwapsShards, layout=Layout(tp=2)),
    *against("resume", "megatron-gpt", ForgetsCount, F.UPDATE, layout=Layout(tp=2)),
]
