"""Pipeline parallelism with PyTorch's torch.distributed.pipelining: the schedules GPipe (arXiv:1811.06965), 1F1B and
interleaved 1F1B (arXiv:2104.04473), each also over replicas of the pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshmark.adapter.contract import Adapter, Arithmetic, Capabilities, Casting, Feature
from meshmark.adapter.engine import Engine, Holdings, RankContext, optimizer_state_tensors, skip_block
from meshmark.adapters.checkpoint import load_sharded, save_sharded
from meshmark.adapters.pipeline_stages import Part, chunk_of, examples, receive_buffers, set_shapes
from meshmark.models.module import Model, drawn_name
from meshmark.models.transformer import Family
from meshmark.reference.data import Batch
from meshmark.reference.objective import build_optimizer, build_schedule, cross_entropy, weighted_cross_entropy
from meshmark.spec.case import Case, Knob
from meshmark.spec.layout import Layout, Schedule
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Loss
from meshmark.theory.memory import ExtraMemory, micro_batch_tokens
from meshmark.theory.recipe import TrainingRecipe
from meshmark.theory.traffic import OneTimeTraffic

if TYPE_CHECKING:  # a second, which only ranks should take
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle


class PipelineEngine(Engine):
    """Pipeline engine: one rank's chunks of layers, one for each virtual stage.

    Replicas of the pipeline, if any, all-reduce each gradient once a step.
    """

    def __init__(self, case: Case, context: RankContext, interleaving: str = "Interleaved1F1B") -> None:
        """`interleaving`: PyTorch's schedule of several stages a rank, by its name."""
        self.case, self.context = case, context
        layout, spec, rank = case.layout, case.workload.model, context.rank
        self.stands = layout.coordinates(rank)
        num_stages = layout.pp * layout.virtual_stages
        own = layout.stages_of(self.stands.pp)
        self.first, self.last = own[0] == 0, own[-1] == num_stages - 1
        self.chunks = [chunk_of(case, spec.stage_layers(num_stages, index), context.device) for index in own]
        parts = [self.make_part(chunk) for chunk in self.chunks]
        self.model = type(self.chunks[0]).join(self.chunks)
        self.optimizer = build_optimizer(case.workload.optimizer, self.model.named_parameters())
        self.learning_rates = build_schedule(case.workload.optimizer, self.optimizer)
        pipelines = layout.all_spanned(("pp",))
        replicated = layout.dp > 1
        self.pipeline = group_of(pipelines, rank) if layout.world_size > layout.pp else None
        self.replicas = group_of(layout.all_spanned(("dp",)), rank) if replicated else None
        split = spec.ties_ends and layout.pp > 1
        self.tied_group = group_of([(ranks[0], ranks[-1]) for ranks in pipelines], rank) if split else None
        self.stages = [self.make_stage(part, index) for index, part in zip(own, parts, strict=True)]
        self.schedule = _schedule(layout, self.stages, self._loss, interleaving, self.choices())
        self.total_weight = 0.0

    def make_stage(self, part: Part, index: int) -> PipelineStage:
        """Return PyTorch's stage, the `index`-th of all, of a part."""
        from torch.distributed.pipelining import PipelineStage

        layout = self.case.layout
        told = examples(self.case, index)
        num_stages = layout.pp * layout.virtual_stages
        return PipelineStage(part, index, num_stages, self.context.device, group=self.pipeline, **told)

    def choices(self) -> dict[str, Any]:
        """Return the further arguments of PyTorch's schedule that a variant has."""
        return {}

    def make_part(self, chunk: Model) -> Part:
        """Return the module that is run for a chunk. Subclasses override it to split the chunk over further axes."""
        return Part(chunk, self.case.precision, self.context.device)

    def _targets(self, shard: Batch) -> Tensor:
        """Return the last stage's input besides its micro-batches, as one tensor, because schedules split no more than
        that.

        It is the targets; rows of a target and its weight, float64 [B, 2]; or the numbers of the rows, if the model
        has its own loss.
        """
        if self.case.workload.loss is Loss.CROSS_ENTROPY:
            return shard.targets
        if self.case.workload.loss is Loss.OWN:
            return self.chunks[-1].stage_inputs(shard)
        return torch.stack((shard.targets.double(), shard.weights.double()), 1)

    def _loss(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        if self.case.workload.loss is Loss.OWN:
            return self.chunks[-1].stage_loss(logits_BTV, targets_BT) / self.total_weight
        if self.case.workload.loss is Loss.WEIGHTED_CROSS_ENTROPY:
            targets_B, weights_B = targets_BT.unbind(1)
            return weighted_cross_entropy(logits_BTV, targets_B.long(), weights_B.float()) / self.total_weight
        return cross_entropy(logits_BTV, targets_BT) / self.total_weight

    def backward(self, batch: Batch) -> Tensor:
        total = self._run(self.schedule.step, batch)
        if self.tied_group is not None:
            dist.all_reduce(self._tied_weight().grad, group=self.tied_group)
        self.reduce_over_replicas()
        return total

    def reduce_over_replicas(self) -> None:
        """Sum gradients over replicas. They are not averaged, because losses are shares of the global mean."""
        for parameter in self.model.parameters():
            if self.replicas is not None and parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self.replicas)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        for chunk in self.chunks:
            chunk.eval()
        total = self._run(self.schedule.eval, batch)
        for chunk in self.chunks:
            chunk.train()
        return total

    def _run(self, pipeline: Callable[..., object], batch: Batch) -> Tensor:
        """Run this pipeline's shard of `batch`, and return this rank's share of the loss.

        `pipeline` is a method of the schedule, `step` or `eval`.
        """
        shard = batch.shard(self.stands.dp, self.case.layout.dp).to(self.context.device)
        self.total_weight = shard.total_weight
        for chunk in self.chunks:
            skip_block(chunk, batch, self.case.workload)
            chunk.hold(shard)
        return self.run_shard(pipeline, shard)

    def run_shard(self, pipeline: Callable[..., object], shard: Batch) -> Tensor:
        losses: list[Tensor] = []
        inputs = (self.chunks[0].stage_inputs(shard),) if self.first else ()
        pipeline(*inputs, target=self._targets(shard) if self.last else None, losses=losses, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).sum() if self.last else torch.zeros(())

    def _tied_weight(self) -> nn.Parameter:
        first = self.model.embedding is not None
        return self.model.get_parameter("embedding.tokens.weight" if first else "head.output.weight")

    def update(self) -> Tensor | None:
        max_norm = self.case.workload.optimizer.clip_norm
        norm = None if max_norm is None else self._clip(max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.learning_rates:
            self.learning_rates.step()
        return norm

    def _clip(self, max_norm: float) -> Tensor:
        """Clip by the norm over all stages, a tied weight counted once; PyTorch leaves this sum to its user."""
        counted = [
            p.grad
            for name, p in self.model.named_parameters()
            if p.grad is not None and drawn_name(self.model.spec, name) == name
        ]
        square = nn.utils.get_total_norm(counted).square()
        dist.all_reduce(square, group=self.pipeline)
        norm = square.sqrt()
        nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, norm)
        return norm

    def parameters(self) -> Mapping[str, Tensor]:
        return {drawn_name(self.model.spec, name): p.detach() for name, p in self.model.named_parameters()}

    def buffers(self) -> Mapping[str, Tensor]:
        return {name: buffer.detach() for name, buffer in self.model.named_buffers()}

    def gradients(self) -> Mapping[str, Tensor]:
        return {
            drawn_name(self.model.spec, name): p.grad for name, p in self.model.named_parameters() if p.grad is not None
        }

    def save(self, folder: Path) -> None:
        save_sharded(folder, self.model, self.optimizer, self.learning_rates)

    def load(self, folder: Path) -> None:
        load_sharded(folder, self.model, self.optimizer, self.learning_rates)

    def enter_fake_world(self) -> None:
        """Set the shapes that stages would receive from their neighbours before the first step."""
        set_shapes(self.case, self.stages)

    def holdings(self) -> Holdings:
        parameters = list(self.model.parameters())
        return Holdings(
            parameters=[p.detach() for p in parameters],
            gradients=[p.grad for p in parameters if p.grad is not None],
            optimizer_states=optimizer_state_tensors(self.optimizer),
            communication=receive_buffers(self.stages),
        )


def group_of(groups: Sequence[tuple[int, ...]], rank: int) -> dist.ProcessGroup | None:
    """Return the group that contains `rank`. Each of `groups` is made once. Every rank must call this with the same
    groups.
    """
    own: dist.ProcessGroup | None = None
    for ranks in dict.fromkeys(groups):
        made = dist.new_group(list(ranks))
        own = made if rank in ranks else own
    return own


def _schedule(
    layout: Layout,
    stages: list[PipelineStage],
    loss: Callable[[Tensor, Tensor], Tensor],
    interleaving: str,
    choices: dict[str, Any],
) -> PipelineScheduleSingle | PipelineScheduleMulti:
    """Return PyTorch's schedule. A single stage uses 1F1B, because holding all micro-batches would gain nothing."""
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
    from torch.distributed.pipelining.schedules import get_schedule_class

    # scale_grads divides by the number of micro-batches, which is wrong for a loss that is a share already.
    common: dict[str, Any] = {"loss_fn": loss, "scale_grads": False, **choices}
    if layout.virtual_stages > 1:
        several = cast("type[PipelineScheduleMulti]", get_schedule_class(interleaving))
        return several([*stages], layout.num_micro_batches, **common)
    all_first = layout.schedule is Schedule.GPIPE and layout.pp > 1
    kind = ScheduleGPipe if all_first else Schedule1F1B
    return kind(stages[0], layout.num_micro_batches, **common)


_NO_SCALER = "torch.distributed.pipelining scales no loss, and PyTorch's GradScaler tells no other stage of an overflow"
NO_IMAGES: dict[Feature | Precision | Family | Knob, str] = {
    Family.IMAGES: "images are cut into stages under GPipe and 1F1B alone"
}
"""Reasons of pipelines in other orders, or crossed with other axes."""


_DESCRIPTION_BYTES = 512
"""Bytes of the description that a stage sends of its tensors: 178 bytes as torch 2.12 pickles it."""


class Pipeline(Adapter):
    """1F1B and interleaved 1F1B, over replicas too."""

    preload: ClassVar[tuple[str, ...]] = ("torch.distributed.pipelining",)
    arithmetic: ClassVar = Arithmetic(casting=Casting.AUTOCAST, averages=False)
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"pp", "dp"}),
        schedules=frozenset({Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED}),
        virtual_stages=frozenset({1, 2}),
        families=frozenset(Family),
        precisions=frozenset({Precision.FP64, Precision.FP32, Precision.BF16}),
        lacks={
            Precision.FP16: _NO_SCALER,
            Precision.BF16_REDUCE_BF16: "replicas of a pipeline reduce their gradients as they are held, in float32",
        },
    )

    interleaving: ClassVar[str] = "Interleaved1F1B"
    """PyTorch's schedule of several stages a rank."""
    engine: ClassVar[type[PipelineEngine]] = PipelineEngine

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        """Return why the case is not supported, or None.

        PyTorch's 1F1B needs at least one micro-batch per stage. If the number of micro-batches is not a multiple of the
        ranks, PyTorch interleaves them in other rounds than the paper.
        """
        layout = case.layout
        if refusal := case.workload.model.stage_refusal:
            return refusal
        if layout.pp > 1 and layout.schedule is Schedule.ONE_F_ONE_B and layout.num_micro_batches < layout.pp:
            return f"1F1B over {layout.pp} stages takes at least as many micro-batches, got {layout.num_micro_batches}"
        if layout.virtual_stages > 1 and (layout.pp == 1 or layout.num_micro_batches % layout.pp):
            return (
                f"interleaving takes two ranks and a multiple of them of micro-batches, got pp {layout.pp} and "
                f"{layout.num_micro_batches}"
            )
        return super().supports(case, device, backend)

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        """Return the recipe. No peak is planned for another order of chunks, which a subclass may run."""
        using = super().recipe(case)
        return dataclasses.replace(using, backward=dataclasses.replace(using.backward, interleaves=cls is Pipeline))

    @classmethod
    def one_time_traffic(cls, case: Case, rank: int) -> tuple[OneTimeTraffic, ...]:
        """Return the traffic by which stages learn the shapes of activations and gradients in the first step.

        Stages vote on whether shapes are known. Then a number, and a pickled description with its size, cross each
        boundary between two stages in both directions.
        """
        boundaries = 2 * case.layout.virtual_stages - 1
        return tuple(
            OneTimeTraffic(
                kind=kind,
                steps=(0,),
                most_bytes=_DESCRIPTION_BYTES * boundaries,
                most_calls=3 * boundaries,
                reason="stages tell each other the shapes of what they will send, in the first step",
            )
            for kind in ("send", "recv")
        )

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """Return the memory of the logits, which the last stage keeps until their backward pass.

        The other stages also keep their outputs, but as messages.
        """
        layout = case.layout
        if layout.coordinates(rank).pp < layout.pp - 1:
            return ()
        width = case.precision.compute.itemsize
        model = case.workload.model
        logits = micro_batch_tokens(case) // model.seq_len * model.outputs_per_row * width
        count = layout.num_micro_batches if layout.schedule is Schedule.GPIPE and layout.pp > 1 else 1
        reason = "the last stage keeps the logits of every micro-batch until its backward pass"
        return (ExtraMemory(category="activations", num_bytes=count * logits, reason=reason),)

    def build(self, case: Case, context: RankContext) -> Engine:
        return self.engine(case, context, self.interleaving)


class GPipe(Pipeline):
    capabilities: ClassVar = dataclasses.replace(
        Pipeline.capabilities,
        degrees=frozenset({"pp"}),
        schedules=frozenset({Schedule.GPIPE}),
        virtual_stages=frozenset({1}),
    )
