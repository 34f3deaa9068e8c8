"""Pipelines by the other ways in which PyTorch cuts a model and a batch: stages that are traced, and arguments that are
split along other dimensions than the first."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from meshmark.adapter.contract import PYTORCH_2_13, Feature
from meshmark.adapter.engine import RankContext, initial_model
from meshmark.adapters.pipeline import NO_IMAGES, Pipeline, PipelineEngine
from meshmark.adapters.pipeline_stages import Part
from meshmark.models.module import Model
from meshmark.models.transformer import TEXT_FAMILIES, Family
from meshmark.reference.data import Batch
from meshmark.spec.case import Case
from meshmark.spec.layout import Recompute
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Loss

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

_TEXTS = {**NO_IMAGES, Family.OWN: "its inputs are its own; take pipeline"}


class TracedEngine(PipelineEngine):
    """`torch.export` traces the whole model on every rank, and `pipeline` cuts the trace. A stage's parameters are the
    chunk's."""

    def make_stage(self, part: Part, index: int) -> PipelineStage:
        from torch.distributed.pipelining import SplitPoint, pipeline

        case, model = self.case, self.case.workload.model
        num_stages = case.layout.pp * case.layout.virtual_stages
        whole = initial_model(case, self.context.device)
        rows = case.workload.global_batch // (case.layout.dp * case.layout.num_micro_batches)
        tokens = torch.zeros(rows, case.workload.transformer.seq_len, dtype=torch.int64, device=self.context.device)
        starts = [model.stage_layers(num_stages, stage)[0] for stage in range(1, num_stages)]
        cuts = {_name_of(whole, layer): SplitPoint.BEGINNING for layer in starts}
        traced = pipeline(whole, (tokens,), split_spec=cuts)
        cut = traced.get_stage_module(index)
        for name, parameter in part.layers.named_parameters():
            path, _, leaf = name.rpartition(".")
            parameter.data = cut.get_parameter(name).data  # a trace keeps the tensors that it was made from
            cut.get_submodule(path)._parameters[leaf] = parameter
        stage: Any = traced.build_stage(index, self.context.device, self.pipeline)
        # Otherwise it keeps the whole model (adapters/gaps/pipelining_traced_whole_model.py).
        stage.pipe_info.graph.owning_module = None
        return cast("PipelineStage", stage)

    def __init__(self, case: Case, context: RankContext, interleaving: str = "Interleaved1F1B") -> None:
        super().__init__(case, context, interleaving)
        gc.collect()  # what is left of the trace is in cycles


def _name_of(model: Model, layer: int) -> str:
    """Return the name of the module at which a layer begins; the embedding is layer 0."""
    blocks = list(model.blocks)
    return f"blocks.{blocks[layer - 1]}" if layer <= len(blocks) else "head"


class PipelineTraced(Pipeline):
    """`pipeline`: stages are cut from a trace of the whole model, at the names of modules (`split_spec`)."""

    engine: ClassVar[type[PipelineEngine]] = TracedEngine
    capabilities: ClassVar = dataclasses.replace(
        Pipeline.capabilities,
        families=TEXT_FAMILIES,
        precisions=frozenset({Precision.FP64, Precision.FP32}),
        recomputes=frozenset({Recompute.NONE}),
        lacks={
            **Pipeline.capabilities.lacks,
            **_TEXTS,
            Precision.BF16: "stages are traced in the precision of their weights",
            Family.MIXTURE: "a trace takes one path through the experts",
            Feature.DROPOUT: "a trace is of training, and drops in evaluation too",
            Feature.UNUSED: "a trace has one path",
            Feature.RECOMPUTE: "a trace has no checkpoints",
            Feature.TIED_EMBEDDINGS: "its tracer puts a shared weight into one stage, and sends it to the other",
        },
    )


class SequenceFirst(Part):
    """A part whose first stage can take tokens as [T, B], depending on a flag."""

    def forward(self, x: Tensor, *, sequence_first: bool = False) -> Tensor:
        return super().forward(x.T if sequence_first and self.layers.embedding is not None else x)


class SplitEngine(PipelineEngine):
    """Specifies along which dimension PyTorch splits each argument, and merges the outputs of evaluation."""

    def make_part(self, chunk: Model) -> Part:
        return SequenceFirst(chunk, self.case.precision, self.context.device)

    def choices(self) -> dict[str, Any]:
        from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

        along: Any = TensorChunkSpec
        specs = {
            "args_chunk_spec": (along(1),) if self.first else (),
            "kwargs_chunk_spec": {"sequence_first": _Replicate()},
            "output_merge_spec": along(0),
        }
        return {**specs, "defer_pp_recv": True} if self.case.layout.virtual_stages > 1 else specs

    def make_stage(self, part: Part, index: int) -> PipelineStage:
        """Return a stage with given shapes of inputs, outputs and gradients, so that PyTorch need not exchange them."""
        from torch.distributed.pipelining import PipelineStage

        case, layout = self.case, self.case.layout
        model, num_stages = case.workload.transformer, layout.pp * layout.virtual_stages
        rows = case.workload.global_batch // (layout.dp * layout.num_micro_batches)
        wide: torch.dtype = getattr(torch, case.precision.wide)
        compute: torch.dtype = getattr(torch, case.precision.compute)
        tokens = torch.empty(model.seq_len, rows, dtype=torch.int64, device="meta")
        stream = torch.empty(rows, model.seq_len, model.hidden, dtype=wide, device="meta", requires_grad=True)
        logits = torch.empty(rows, model.seq_len, model.vocab_size, dtype=compute, device="meta", requires_grad=True)
        first, last = index == 0, index == num_stages - 1
        return PipelineStage(
            part,
            index,
            num_stages,
            self.context.device,
            input_args=tokens if first else stream,
            output_args=logits if last else stream,
            input_grads=None if first else stream.detach(),
            output_grads=None if last else stream.detach(),
            group=self.pipeline,
        )

    def run_shard(self, pipeline: Callable[..., object], shard: Batch) -> Tensor:
        inputs = (self.chunks[0].stage_inputs(shard).T,) if self.first else ()
        targets, losses = self._targets(shard) if self.last else None, list[Tensor]()
        told: dict[str, Any] = {"target": targets, "losses": losses, "sequence_first": True}
        if torch.is_grad_enabled():
            pipeline(*inputs, return_outputs=False, **told)
            return torch.stack([loss.detach() for loss in losses]).sum() if self.last else torch.zeros(())
        outputs = pipeline(*inputs, **told)
        return self._loss(cast("Tensor", outputs), cast("Tensor", targets)) if self.last else torch.zeros(())


class PipelineSplit(Pipeline):
    """`args_chunk_spec`, `kwargs_chunk_spec` and `output_merge_spec`: tokens come sequence first, and are split along
    the second dimension; a flag is not split; and the loss of evaluation is that of the merged outputs. Stages are told
    all shapes."""

    requires: ClassVar = (PYTORCH_2_13,)
    engine: ClassVar[type[PipelineEngine]] = SplitEngine
    capabilities: ClassVar = dataclasses.replace(
        Pipeline.capabilities,
        families=TEXT_FAMILIES - {Family.MIXTURE},
        lacks={**Pipeline.capabilities.lacks, **_TEXTS, Family.MIXTURE: "not tried"},
    )

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if case.workload.loss is not Loss.CROSS_ENTROPY:
            return f"{case.adapter} takes tokens and their cross-entropy alone"
        return super().supports(case, device, backend)
