"""PyTorch's tensor parallelism, `parallelize_module`: linear layers by columns and rows, embedding and head by
vocabulary, the loss parallel in it (`loss_parallel`) or not; with or without `SequenceParallel`, over replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshmark.adapter.contract import Adapter, Capabilities, Feature
from meshmark.adapter.engine import DataParallelEngine, Engine, RankContext, configure, initial_model
from meshmark.adapters.checkpoint import load_sharded, save_sharded
from meshmark.adapters.fsdp2 import fill_shards, mesh_extra_memory
from meshmark.models.module import Model, initial_value
from meshmark.models.transformer import TEXT_FAMILIES, Family
from meshmark.models.transformer.module import Transformer
from meshmark.reference.data import Batch
from meshmark.reference.objective import build_optimizer
from meshmark.reference.tensor_plan import parallelize_by
from meshmark.spec.case import Case
from meshmark.spec.own_model import OwnModelConfig
from meshmark.spec.precision import Dtype, Precision
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.model_theory import local_parameters
from meshmark.theory.recipe import TrainingRecipe, eager_recipe
from meshmark.theory.traffic import Flow, Purpose, TrafficException, besides, exceptions_for, step_traffic, stream_bytes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh  # some seconds, which only ranks should take

NORMS = "every split tensor's norm is reduced by itself"
_WHOLE = "the gradient of an embedding that is split by rows is whole on every rank"
_SUMMED = "the first block's input is the embedding's sum over ranks, where the collective has put it: communication"


class TensorParallelEngine(DataParallelEngine):
    """Every tensor-parallel rank computes the same loss of its replica's rows; the first one returns it. Replicas, if
    any, reduce their gradients by an all-reduce of each, once a step."""

    replicas: dist.ProcessGroup | None = None
    """The ranks that hold the same parts."""

    def __init__(self, case: Case, context: RankContext, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(case, context, module, optimizer)
        self.first = case.layout.coordinates(context.rank).tp == 0

    def backward(self, batch: Batch) -> Tensor:
        return self._once_per_group(super().backward(batch))

    def evaluate(self, batch: Batch) -> Tensor:
        return self._once_per_group(super().evaluate(batch))

    def _once_per_group(self, share: Tensor) -> Tensor:
        return share if self.first else torch.zeros_like(share)

    def loss_share(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the loss share of logits that are split over the vocabulary."""
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.parallel import loss_parallel

        with loss_parallel():
            share = super().loss_share(outputs, batch)
        return share.to_local() if isinstance(share, DTensor) else share

    def differentiate(self, loss: Tensor) -> None:
        from torch.distributed.tensor.parallel import loss_parallel

        with loss_parallel():
            super().differentiate(loss)

    def finish_gradients(self) -> None:
        """Average gradients over replicas. The loss is scaled for that."""
        for gradient in self._local_gradients():
            if self.replicas is not None:
                dist.all_reduce(gradient, group=self.replicas)
                gradient /= self.case.layout.dp
        super().finish_gradients()

    def _local_gradients(self) -> Iterator[Tensor]:
        from torch.distributed.tensor import DTensor

        for parameter in self.module.parameters():
            if parameter.grad is not None:
                gradient = parameter.grad
                yield gradient.to_local() if isinstance(gradient, DTensor) else gradient

    def clip(self, max_norm: float) -> Tensor:
        """Clip by the norm over tensors of all meshes, which PyTorch does not mix."""
        from torch.distributed.tensor import DTensor

        by_mesh = _by_mesh((p, p.grad) for p in self.module.parameters() if p.grad is not None)
        norms = [nn.utils.get_total_norm([cast(Tensor, p.grad) for p in group]) for group in by_mesh]
        whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        total: Tensor = torch.linalg.vector_norm(torch.stack(whole))
        for group in by_mesh:
            nn.utils.clip_grads_with_norm_(group, max_norm, total)
        return total

    def save(self, folder: Path) -> None:
        save_sharded(folder, self.module, self.optimizer, self.schedule)

    def load(self, folder: Path) -> None:
        load_sharded(folder, self.module, self.optimizer, self.schedule)


def _by_mesh(tensors: Iterable[tuple[nn.Parameter, Tensor]]) -> list[list[nn.Parameter]]:
    """Group parameters by how their tensors are sharded, because PyTorch's list functions need equal sharding."""
    from torch.distributed.tensor import DTensor

    found: dict[object, list[nn.Parameter]] = {}
    for parameter, tensor in tensors:
        key = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        found.setdefault(key, []).append(parameter)
    return list(found.values())


def _separate_meshes(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Split the groups of `optimizer` by how parameters are split: on a GPU it updates each group by lists."""
    groups = optimizer.param_groups
    groups[:] = [{**group, "params": part} for group in groups for part in _by_mesh((p, p) for p in group["params"])]
    return optimizer


def summed_embedding(case: Case) -> tuple[ExtraMemory, ...]:
    """Return the extra memory of an embedding that is split by rows.

    If positions are added, or the first norm takes its input in float32, the sum over ranks is another tensor.
    """
    if case.workload.model.family is not Family.LLAMA or case.precision.is_mixed:
        return ()
    summed = stream_bytes(case) / case.layout.num_micro_batches
    there = {"activations": -summed, "peak": summed}
    return tuple(ExtraMemory(category=name, num_bytes=num_bytes, reason=_SUMMED) for name, num_bytes in there.items())


class TensorParallel(Adapter):
    """PyTorch's tensor parallelism, `parallelize_module`, over replicas too.

    Input projections of attention and feed-forward are Colwise, output projections Rowwise.
    """

    engine: ClassVar[type[TensorParallelEngine]] = TensorParallelEngine
    capabilities: ClassVar = Capabilities(
        dtensors=True,
        degrees=frozenset({"tp", "dp"}),
        families=TEXT_FAMILIES | {Family.OWN},
        precisions=frozenset({Precision.FP64, Precision.FP32}),
        sequence_parallel=True,
        unfreezes=True,
        lacks={
            Family.IMAGES: "embedding and loss are parallel in a vocabulary; convolutions are not split",
            Family.MIXTURE: "a gate and its experts are not split",
            Precision.BF16: "autocast, whose copies DTensor does not plan; not tried",
            Precision.FP16: "PyTorch's GradScaler does not tell other tensor-parallel ranks of an overflow",
            Precision.BF16_REDUCE_BF16: "replicas' gradients are reduced as they are held, in float32",
            Feature.MATRIX_WISE: "its optimizer is given tensor-parallel parts of the parameters",
            Feature.DROPOUT: "ranks draw the same masks for their own heads, which the single process does not",
        },
    )

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        """`loss_parallel` makes one more tensor of the logits' size."""
        using = eager_recipe(case)
        return replace(using, backward=replace(using.backward, loss_tensors=3.0))

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        more = _unsplit(case) * case.precision.accumulation.itemsize
        whole = [ExtraMemory(category=name, num_bytes=more, reason=_WHOLE) for name in ("gradients", "peak") if more]
        return (*whole, *summed_embedding(case), mesh_extra_memory(case))

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """DTensor's norms: a scalar of every tensor that is split, those by rows and those by columns together."""
        flows = step_traffic(case, rank)
        share = Fraction(_unsplit(case), local_parameters(case.workload.model, case.layout, rank) or 1)
        reduced = num_split(case)

        def by_tensor(norm: Flow) -> Flow:
            calls = sum(map(bool, reduced))
            return replace(norm, num_bytes=norm.num_bytes * sum(reduced), fewest=calls, most=calls)

        return (
            *exceptions_for(flows, Purpose.NORM, NORMS, by_tensor),
            *besides(flows, Purpose.GRADIENTS, share, _WHOLE),
        )

    def build(self, case: Case, context: RankContext) -> Engine:
        from torch.distributed.device_mesh import init_device_mesh

        layout = case.layout
        mesh = init_device_mesh(context.device.type, (layout.dp, layout.tp), mesh_dim_names=("dp", "tp"))
        model = self.parallel_model(case, context, mesh)
        optimizer = _separate_meshes(build_optimizer(case.workload.optimizer, model.named_parameters()))
        engine = self.engine(case, context, model, optimizer)
        if layout.dp > 1 and not layout.zero_stage:
            engine.replicas = mesh["dp"].get_group()
        return engine

    def parallel_model(self, case: Case, context: RankContext, mesh: DeviceMesh) -> Model:
        """Return a rank's part of the model, with its initial values."""
        layout = case.layout
        if case.workload.model.brings_plan:
            whole = initial_model(case, context.device)
            split(whole, mesh["tp"], case)
            self.shard(whole, mesh["dp"], case)
            return whole
        with torch.device("meta"):
            model = configure(Transformer(case.workload.transformer), case)
        if case.precision.master is Dtype.FP64:
            model.double()
        parallelize(
            model, mesh["tp"], sequence_parallel=layout.sequence_parallel, whole_logits=self.recipe(case).whole_logits
        )
        self.shard(model, mesh["dp"], case)
        model.to_empty(device=context.device)
        fill(model, case)
        return model

    def shard(self, model: Model, mesh: DeviceMesh, case: Case) -> None:
        """Do nothing, because replicas share nothing. Subclasses shard the model over data-parallel ranks here."""


class TensorParallelWholeLoss(TensorParallel):
    """Without `loss_parallel`: logits are gathered, and every rank computes the loss over the whole vocabulary. No rank
    sends its weights to the others (`src_data_rank=None`), and the last norm's output is a plain tensor."""

    capabilities: ClassVar = replace(
        TensorParallel.capabilities,
        families=TEXT_FAMILIES,
        lacks={**TensorParallel.capabilities.lacks, Family.OWN: "its plan says what its loss is given; take tp"},
    )

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        return replace(eager_recipe(case), whole_logits=True)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """Return exceptions for one gather in place of three scalars for each token."""
        vocab = case.workload.transformer.vocab_size

        def gathered(flow: Flow) -> Flow:
            calls = flow.most // 3
            num_bytes = flow.num_bytes // 3 * vocab
            return replace(flow, kind="all_gather", num_bytes=num_bytes, fewest=calls, most=calls)

        reason = "logits are gathered for a loss that is not parallel in the vocabulary"
        return (
            *super().traffic_exceptions(case, rank),
            *exceptions_for(step_traffic(case, rank), Purpose.LOSS, reason, gathered),
        )


def num_split(case: Case) -> tuple[int, int]:
    """Return how many tensors tensor parallelism splits along their first and along their second dimension.

    Only tensors whose norms are reduced count. The embedding is left out, because its gradient is whole.
    """
    model = case.workload.model
    if isinstance(model, OwnModelConfig):
        split = model.split
        return (len(split.by_rows) - split.num_looked_up, len(split.by_columns)) if split else (0, 0)
    by_columns = 8 if model.family is Family.GPT else 5
    return 1 + model.num_layers * by_columns, 2 * model.num_layers


def _unsplit(case: Case) -> int:
    """Elements of embeddings' gradients beyond a rank's share."""
    model, tp = case.workload.model, case.layout.tp
    if isinstance(model, OwnModelConfig):
        looked_up = model.split.looked_up if model.split else 0
    else:
        looked_up = case.workload.transformer.vocab_size * case.workload.transformer.hidden
    return looked_up // tp * (tp - 1)


def split(model: Model, mesh: DeviceMesh, case: Case) -> None:
    """Split a model over tensor-parallel ranks, by the model's own plan if it has one."""
    if not case.workload.model.brings_plan:
        parallelize(cast(Transformer, model), mesh, sequence_parallel=case.layout.sequence_parallel)
    elif case.layout.tp > 1:
        parallelize_by(model.get_submodule("model"), mesh, model.tensor_parallel_plan())


def parallelize(model: Transformer, mesh: DeviceMesh, *, sequence_parallel: bool, whole_logits: bool = False) -> None:
    """Parallelize a model, or a stage's part of it, in place by PyTorch's `parallelize_module` and styles.

    Between parallel regions the residual stream is whole on every rank. With `sequence_parallel` it is split by tokens.
    With `whole_logits` logits are gathered, for a loss that is not parallel.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    stream = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, object] = {}
    if model.embedding is not None:
        plan["embedding.tokens"] = RowwiseParallel(input_layouts=Replicate())
    if model.head is not None:
        outputs = Replicate() if whole_logits else Shard(-1)
        plan["head.output"] = ColwiseParallel(
            input_layouts=stream, output_layouts=outputs, use_local_output=whole_logits
        )
    for block in (f"blocks.{index}" for index in model.blocks):
        for part, outer in (("attention", "out"), ("feed_forward", "down")):
            if sequence_parallel:
                plan[f"{block}.{part}_norm"] = SequenceParallel()
            # Once for all products that read it, whose gradients are then summed before they are reduced.
            plan[f"{block}.{part}"] = PrepareModuleInput(input_layouts=stream, desired_input_layouts=Replicate())
            plan[f"{block}.{part}.{outer}"] = RowwiseParallel(output_layouts=stream)
        inner = ["attention.q", "attention.k", "attention.v", "feed_forward.up"]
        inner += ["feed_forward.gate"] if model.spec.family is Family.LLAMA else []
        plan |= {f"{block}.{name}": ColwiseParallel() for name in inner}
    if sequence_parallel:  # positions are added to all tokens before
        plan["embedding"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=stream)
        plan["head.norm"] = SequenceParallel(use_local_output=whole_logits)
    # None: no rank's weights are sent to the others, which draw their own.
    parallelize_module(model, mesh, plan, src_data_rank=None if whole_logits else 0)  # type: ignore[arg-type]
    if model.spec.tied_embeddings and model.head is not None and model.embedding is not None:
        # parallelize_module replaces parameters module by module, which unties them
        model.head.output.weight = model.embedding.tokens.weight


@torch.no_grad()
def fill(model: Transformer, case: Case) -> None:
    """Fill `model` with its initial values. Each rank fills only its part of sharded parameters."""
    from torch.distributed.tensor import DTensor

    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            parameter.copy_(initial_value(model.spec, name, parameter.shape, seed=case.workload.seed))
    fill_shards(model, case)
    model.initialize_buffers()
