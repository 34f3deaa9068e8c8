"""DeepSpeed's PipelineModule, a 1F1B pipeline of its own, over replicas too, with ZeRO's stage 1. Without ZeRO it clips
by the norm of the first stage's gradients alone (adapters/gaps/deepspeed_pipeline_gradient_norm.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from meshmark.adapter.contract import Feature
from meshmark.adapter.engine import Engine, Holdings, RankContext, configure
from meshmark.adapters.deepspeed import DeepSpeed
from meshmark.adapters.deepspeed.config import ds_config, prepare
from meshmark.adapters.deepspeed.engine import DeepSpeedEngine
from meshmark.adapters.deepspeed.traffic_exceptions import zero_exceptions
from meshmark.models.transformer import TEXT_FAMILIES, Family
from meshmark.models.transformer.module import Transformer
from meshmark.reference.data import Batch
from meshmark.reference.objective import build_optimizer, build_schedule, cross_entropy
from meshmark.spec.case import Case
from meshmark.spec.known_gap import KnownGap
from meshmark.spec.layout import Axis, Recompute, Schedule
from meshmark.spec.precision import Precision
from meshmark.theory.memory import ExtraMemory, micro_batch_tokens
from meshmark.theory.partition import reaching_elements
from meshmark.theory.recipe import TrainingRecipe, eager_recipe
from meshmark.theory.traffic import Flow, OneTimeTraffic, Purpose, TrafficException, step_traffic

_SHAPE_BYTES = 4 * 256
"""A buffer of 256 numbers, which describes activations to the next stage."""


class EndLayer(Transformer):
    """Embedding or head; pipelines are cut by the number of `InnerLayer`s."""

    def __init__(self, case: Case, device: torch.device, layer: int) -> None:
        with device:
            super().__init__(case.workload.transformer, [layer])
        self.initialize(case.workload.seed)
        configure(self, case)


class InnerLayer(EndLayer):
    """A block."""


class PipelineModuleEngine(DeepSpeedEngine):
    """`module` is DeepSpeed's PipelineEngine. Its `train_batch` is one whole step: the last instruction of its
    schedule, the optimizer's, is put off until `update`."""

    losses: list[Tensor]
    total_weight: float

    def put_off_the_update(self) -> None:
        from deepspeed.runtime.pipe.schedule import OptimizerStep

        self.losses, self.total_weight = [], 1.0
        self._take_step = self.module._INSTRUCTION_MAP[OptimizerStep]
        self.module._INSTRUCTION_MAP = {**self.module._INSTRUCTION_MAP, OptimizerStep: lambda *_, **__: None}
        self.module.module.loss_fn = self._loss

    def _loss(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the loss share times the micro-batches and replicas, by which DeepSpeed divides.

        Shares add up to the global mean.
        """
        share = cross_entropy(logits_BTV, targets_BT) / self.total_weight
        self.losses.append(share.detach())
        layout = self.case.layout
        return share * (layout.num_micro_batches * layout.dp)

    def backward(self, batch: Batch) -> Tensor:
        self.module.train_batch(self._feed(batch))
        return self._summed_loss()

    def evaluate(self, batch: Batch) -> Tensor:
        self.module.eval_batch(self._feed(batch))
        self.module.train()
        return self._summed_loss()

    def _feed(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        layout = self.case.layout
        shard = batch.shard(self.dp_rank, layout.dp)
        self.losses, self.total_weight = [], shard.total_weight
        return ((micro.inputs, micro.targets) for micro in shard.micro_batches(layout.num_micro_batches))

    def _summed_loss(self) -> Tensor:
        return torch.stack(self.losses).sum() if self.losses else torch.zeros(())

    def update(self) -> Tensor | None:
        self._take_step(self.module)
        norm = self.module.get_global_grad_norm()
        return None if norm is None else torch.as_tensor(norm)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the layers without the prefix by which DeepSpeed numbers each layer."""
        for name, parameter in self.inner().named_parameters():
            yield name.partition(".")[2], parameter

    def enter_fake_world(self) -> None:
        """Set the shape of the activations, which DeepSpeed would receive from the stage before."""
        model, layout = self.case.workload.transformer, self.case.layout
        rows = self.case.workload.global_batch // (layout.dp * layout.num_micro_batches)
        shape = [rows, model.seq_len, model.hidden]
        self.module._recv_tensor_meta = lambda stage: self.module._allocate_or_extend_buffers(0, shape, torch.float32)

    def holdings(self) -> Holdings:
        held = super().holdings()
        received = [getattr(self.module, name) for name in ("pipe_recv_buf", "grad_layer")]
        return dataclasses.replace(
            held, communication=[*held.communication, *(t for t in received if isinstance(t, Tensor))]
        )


class DeepSpeedPipeline(DeepSpeed):
    capabilities: ClassVar = dataclasses.replace(
        DeepSpeed.capabilities,
        degrees=frozenset({"pp", "dp"}),
        schedules=frozenset({Schedule.ONE_F_ONE_B}),
        zero_stages=frozenset({1}),
        recomputes=frozenset({Recompute.NONE}),
        families=TEXT_FAMILIES,
        precisions=frozenset({Precision.FP32}),
        lacks={
            **DeepSpeed.capabilities.lacks,
            Family.OWN: "its stages pass targets to the loss, and no weights",
            Family.IMAGES: "its stages pass targets to the loss, and no weights",
            Family.MIXTURE: "its stages are layers of a dense model",
            Precision.BF16: "not tried",
            Precision.FP16: "not tried",
            Feature.TIED_EMBEDDINGS: "its TiedLayerSpec is not mapped",
            Feature.RECOMPUTE: "its interval of checkpoints is not mapped",
            Feature.UNUSED: "its layers are a chain",
            Feature.SAVE: "its files by layer are not read back here",
            Feature.RESHARD: "its files by layer are not read back here",
        },
    )
    known_gaps: ClassVar[tuple[KnownGap, ...]] = ()

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        layout = case.layout
        if layout.pp == 1:
            return f"a PipelineModule takes several stages, got {layout.id}"
        if layout.num_micro_batches < layout.pp:
            return f"1F1B takes a micro-batch a stage, got {layout.num_micro_batches} on {layout.pp}"
        return super().supports(case, device, backend)

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        """It keeps other inputs and outputs than PyTorch's pipelines, for whose order peaks are planned."""
        using = eager_recipe(case, "eager-deepspeed-1", casts_weights=True)
        return dataclasses.replace(using, activations_known=False, receive_buffers=False)

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """Gradients as ZeRO's stage 1 keeps them, of the stage's tensors; a buffer to receive into; and on the last
        stage what hangs on the logits of its two buffers, which it does not let go."""
        layout, model, stands = case.layout, case.workload.transformer, case.layout.coordinates(rank)
        sizes = [parameter.numel() for parameter in _meta_stage(case, stands.pp)]
        kept = reaching_elements(sizes, layout.dp, stands.dp) - sum(sizes) / layout.dp
        reason = "a rank keeps its partition's gradients alone, and tensors that reach over its ends whole"
        stream = 4 * micro_batch_tokens(case) * model.hidden
        steady = [(stream, "one buffer to receive into from either side (`_allocate_or_extend_buffers`)")]
        if stands.pp == layout.pp - 1:
            held = 2 * (4 * micro_batch_tokens(case) * model.vocab_size + 2 * stream)
            steady.append((held, "the last stage keeps two micro-batches' logits, and their inputs with gradients"))
        return (
            ExtraMemory(category="gradients", num_bytes=4 * kept, reason=reason),
            *(ExtraMemory(category="steady", num_bytes=num_bytes, reason=reason) for num_bytes, reason in steady),
        )

    @classmethod
    def one_time_traffic(cls, case: Case, rank: int) -> tuple[OneTimeTraffic, ...]:
        """Before its first activations, a stage describes them to the next, in a buffer of 256 numbers."""
        reason = "shapes of activations are told to the next stage before the first of them"
        told = (
            OneTimeTraffic(kind=kind, steps=(0,), most_bytes=_SHAPE_BYTES, most_calls=1, reason=reason)
            for kind in ("send", "recv")
        )
        return (*super().one_time_traffic(case, rank), *told)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """Return exceptions: the last stage sends the loss to its pipeline, and the norm is summed along each axis."""
        layout = case.layout

        def scalar(axis: Axis, purpose: Purpose, kind: str = "all_reduce", num_bytes: int = 4) -> list[Flow]:
            ranks = layout.group(axis, rank)
            flow = Flow(kind=kind, axes=axis, ranks=ranks, purpose=purpose, num_bytes=num_bytes, fewest=1, most=1)
            return [flow] if len(ranks) > 1 else []

        told = scalar("pp", Purpose.LOSS, "broadcast", 8)
        told += scalar("dp", Purpose.LOSS) if layout.coordinates(rank).pp == layout.pp - 1 else []
        norms = [flow for flow in step_traffic(case, rank) or () if flow.purpose is Purpose.NORM]
        summed = (*scalar("dp", Purpose.NORM), *scalar("pp", Purpose.NORM))
        reduced = (
            exception
            for exception in zero_exceptions(case, rank)
            if not any(flow.purpose is Purpose.NORM for flow in (*exception.sends, *exception.instead_of))
        )
        return (
            *reduced,
            TrafficException(
                sends=summed, instead_of=tuple(norms), reason="the norm is summed along one axis after the other"
            ),
            TrafficException(sends=tuple(told), reason="the loss is averaged, and told to all stages"),
        )

    def config(self, case: Case, context: RankContext) -> dict[str, Any]:
        return ds_config(case)

    def module_options(self, case: Case) -> dict[str, Any]:
        """Return the further arguments of the `PipelineModule`."""
        return {"num_stages": case.layout.pp}

    def build(self, case: Case, context: RankContext) -> Engine:
        prepare(context)
        import deepspeed
        from deepspeed.pipe import LayerSpec, PipelineModule

        deepspeed.init_distributed(dist_backend=context.backend, auto_mpi_discovery=False)
        last = case.workload.model.num_layers + 1
        kinds = [EndLayer, *[InnerLayer] * (last - 1), EndLayer]
        layers = [LayerSpec(kind, case, context.device, layer) for layer, kind in enumerate(kinds)]
        model = PipelineModule(
            layers, partition_method="type:InnerLayer", loss_fn=cross_entropy, **self.module_options(case)
        )
        spec = case.workload.optimizer
        named = [(name.partition(".")[2], parameter) for name, parameter in model.named_parameters()]
        optimizer = build_optimizer(spec, named)
        config = self.config(case, context)
        module, _, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=build_schedule(spec, optimizer), config=config
        )
        engine = PipelineModuleEngine(case, context, module, optimizer)
        engine.put_off_the_update()
        return engine


class DeepSpeedPipelineOptions(DeepSpeedPipeline):
    """Stages by a `topology`, layers seeded each by itself, shapes told with every micro-batch (`dynamic_shape`), and
    blocks computed again (`activation_checkpoint_interval`) by DeepSpeed's checkpoints that are not reentrant."""

    capabilities: ClassVar = dataclasses.replace(
        DeepSpeedPipeline.capabilities,
        recomputes=frozenset({Recompute.NONE, Recompute.FULL}),
        lacks={
            feature: why
            for feature, why in DeepSpeedPipeline.capabilities.lacks.items()
            if feature is not Feature.RECOMPUTE
        },
    )
    known_gaps: ClassVar = (
        KnownGap(
            clause="recomputed dropout",
            zero_stages=(0, 1),
            symptom="from that without recomputation",
            reason="layers of a stage share their seed where each is checkpointed: they are numbered from 0 in every "
            "range, so that all draw the same masks",
            reproducer="deepspeed_pipeline_layer_seeds",
        ),
    )

    @classmethod
    def one_time_traffic(cls, case: Case, rank: int) -> tuple[OneTimeTraffic, ...]:
        return super(DeepSpeedPipeline, cls).one_time_traffic(case, rank)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        layout, count = case.layout, case.layout.num_micro_batches
        stages, stage = layout.group("pp", rank), layout.coordinates(rank).pp

        def told(kind: str, *ranks: int) -> Flow:
            return Flow(
                kind=kind,
                axes="pp",
                ranks=ranks,
                purpose=Purpose.ACTIVATIONS,
                num_bytes=_SHAPE_BYTES * count,
                fewest=count,
                most=count,
            )

        sends = [told("send", *stages[stage : stage + 2])] if stage + 1 < len(stages) else []
        sends += [told("recv", *stages[stage - 1 : stage + 1])] if stage else []
        reason = "shapes of activations are told to the next stage with every micro-batch"
        return (*super().traffic_exceptions(case, rank), TrafficException(sends=tuple(sends), reason=reason))

    def config(self, case: Case, context: RankContext) -> dict[str, Any]:
        section = {"activation_checkpoint_interval": self.interval(case), "use_reentrant": False}
        return {**super().config(case, context), "pipeline": section}

    def interval(self, case: Case) -> int:
        """Return of how many layers each is computed again as a whole; 0 is none."""
        return 0 if case.layout.recompute is Recompute.NONE else 1

    def module_options(self, case: Case) -> dict[str, Any]:
        from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
        from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

        return {
            "topology": PipeDataParallelTopology(num_pp=case.layout.pp, num_dp=case.layout.dp),
            "seed_layers": True,
            "seed_fn": torch.manual_seed,
            "base_seed": case.workload.seed + 1,  # not 0 (adapters/gaps/deepspeed_pipeline_base_seed.py)
            "activation_checkpoint_interval": self.interval(case),
            "activation_checkpoint_func": non_reentrant_checkpoint,
            "checkpointable_layers": [InnerLayer.__name__],
            "dynamic_shape": True,
        }


def _meta_stage(case: Case, stage: int) -> list[nn.Parameter]:
    """The parameters of one stage, without their values."""
    with torch.device("meta"):
        return [
            *Transformer(
                case.workload.transformer, case.workload.transformer.stage_layers(case.layout.pp, stage)
            ).parameters()
        ]
