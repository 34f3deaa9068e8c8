"""Stages of a pipeline: what layers each is made of, what PyTorch is told of their shapes, what they receive into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor, nn

from meshmark.adapter.engine import AUTOCAST, configure
from meshmark.errors import AdapterError
from meshmark.models.config import Dataset
from meshmark.models.module import Model, build_model
from meshmark.reference.data import make_batch
from meshmark.spec.case import Case
from meshmark.spec.precision import Dtype, Precision

if TYPE_CHECKING:  # a second, which only ranks should take
    from torch.distributed.pipelining import PipelineStage


class Part(nn.Module):
    """Layers of one stage under the case's precision. Between stages the residual stream stays in the wide format."""

    def __init__(self, layers: Model, precision: Precision, device: torch.device) -> None:
        super().__init__()
        self.layers, self.dtype, self.device_type = layers, AUTOCAST.get(precision.compute), device.type
        self.wide: torch.dtype = getattr(torch, precision.wide)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device_type, dtype=self.dtype, enabled=self.dtype is not None):
            out: Tensor = self.layers(x)
        return out if self.layers.head is not None else out.to(self.wide).contiguous()  # messages are


def chunk_of(case: Case, layers: Sequence[int], device: torch.device) -> Model:
    """Some of the model's layers with their initial values."""
    with device:
        chunk = build_model(case.workload.model, layers)
    chunk.initialize(case.workload.seed)
    return configure(chunk.double() if case.precision.master is Dtype.FP64 else chunk, case)


class _Examples(TypedDict, total=False):
    """Arguments of `PipelineStage`."""

    input_args: Tensor
    output_args: Tensor


def examples(case: Case, stage: int) -> _Examples:
    """Return examples of a stage's inputs and outputs for a micro-batch, from which PyTorch takes their shapes.

    Without them PyTorch runs every stage once to find out, in training mode and on uninitialised memory. Batch norms
    would keep that in their statistics (adapters/gaps/pipelining_batch_norm.py). It would also receive gradients with
    the memory layout of that run, which for images is not the order of messages. Other models need no examples.
    """
    layout, model = case.layout, case.workload.model
    num_stages, found = layout.pp * layout.virtual_stages, []
    rows = case.workload.global_batch // (layout.dp * layout.num_micro_batches)
    if model.row_shape(0) is not None:
        layers = model.stage_layers(num_stages, stage)
        given = _example(case, rows, layers[0] - 1) if stage else torch.arange(rows, device="meta")
        return {"input_args": given, "output_args": _example(case, rows, layers[-1])}
    if case.workload.dataset is not Dataset.DIGITS:
        return {}
    x = make_batch(case.workload, 0).inputs[:1].expand(rows, -1, -1, -1).to("meta")
    for index in range(stage + 1):
        found.append(x)
        with torch.device("meta"):
            x = build_model(model, model.stage_layers(num_stages, index))(x)
        x = x.to(getattr(torch, case.precision.wide if index < num_stages - 1 else case.precision.compute))
        x = x.detach().contiguous().requires_grad_()
    return {"input_args": found[-1], "output_args": x}


def _example(case: Case, rows: int, layer: int) -> Tensor:
    """Return a tensor like those behind a layer, without values."""
    shape = case.workload.model.row_shape(layer)
    assert shape is not None
    wide: torch.dtype = getattr(torch, case.precision.wide)
    return torch.empty(rows, *shape, dtype=wide, device="meta", requires_grad=True)


def set_shapes(case: Case, stages: Sequence[PipelineStage]) -> None:
    """Set the shapes that text stages take and return for a micro-batch, and let them assume that all stages know them.

    For images, `examples` does the same.
    """
    try:
        from torch.distributed.pipelining._utils import _StageMeta, extract_tensor_metas
    except ImportError:
        raise AdapterError(f"stages are told shapes by PyTorch 2.13 and later; this is {torch.__version__}") from None

    layout = case.layout
    rows = case.workload.global_batch // (layout.dp * layout.num_micro_batches)
    wide: torch.dtype = getattr(torch, case.precision.wide)
    for stage in stages:
        if case.workload.dataset is not Dataset.DIGITS and case.workload.model.row_shape(0) is None:
            model = case.workload.transformer
            stream = torch.empty(rows, model.seq_len, model.hidden, dtype=wide, requires_grad=True)
            tokens = torch.empty(rows, model.seq_len, dtype=torch.int64)
            stage._user_meta = _StageMeta(
                inputs=extract_tensor_metas((tokens if stage.is_first else stream,)),
                outputs=extract_tensor_metas((stream,)),
            )
        stage._warmup_forward_vote = stage._warmup_backward_result = _all_know  # type: ignore[method-assign]


def _all_know(*_: object, **__: object) -> Tensor:
    """The vote of all stages that shapes are known."""
    return torch.ones(1, dtype=torch.int32)


def receive_buffers(stages: Sequence[PipelineStage]) -> list[Tensor]:
    """Return the buffers in which stages receive activations and their gradients. They are allocated once for each
    micro-batch.
    """
    found: list[Tensor] = []
    for stage in stages:
        for buffers in (stage.args_recv_info, getattr(stage, "grad_recv_info", {})):
            for infos in buffers.values():
                received = [getattr(info, "buffer", None) for info in infos]
                found += [buffer for buffer in received if isinstance(buffer, Tensor)]
    return found
