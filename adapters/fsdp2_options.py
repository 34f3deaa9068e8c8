"""FSDP2 by its other options: collectives of a user's own, parameters that it ignores, wide outputs, and checkpoints of
whole tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshmark.adapter.contract import PYTORCH_2_13, Feature
from meshmark.adapter.engine import AUTOCAST, Engine, RankContext
from meshmark.adapters.checkpoint import load_converted, load_whole, save_in_background, save_whole
from meshmark.adapters.fsdp2 import FSDP2, FSDP2HSDP, FSDP2Engine, sharded_units
from meshmark.adapters.ignored import average_gradients, held_whole, sent_whole
from meshmark.errors import AdapterError
from meshmark.models.module import Model, block_of, initial_value, parameter_shapes
from meshmark.reference.data import make_batch
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.recipe import TrainingRecipe
from meshmark.theory.traffic import Purpose, TrafficException, besides, step_traffic

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


_INPUT_BUFFERS = 2
"""Blocks whose gradients may be in reduction at a time."""


class CollectivesEngine(FSDP2Engine):
    """Gathers the root before it is called, and not before the backward pass of the micro-batch."""

    def forward(self, inputs: Tensor) -> Tensor:
        root: Any = self.module
        root.unshard(async_op=True)
        return super().forward(inputs)


class FSDP2Collectives(FSDP2):
    """`set_custom_all_gather` and `set_custom_reduce_scatter`: collectives of the user's, who also gathers the root by
    `unshard`, and switches by `set_reshard_after_forward`. Unused parameters are reduced as zeros, over two buffers.
    """

    requires: ClassVar = (PYTORCH_2_13,)
    engine: ClassVar[type[FSDP2Engine]] = CollectivesEngine
    capabilities: ClassVar = dataclasses.replace(
        FSDP2.capabilities,
        lacks={
            **FSDP2.capabilities.lacks,
            Feature.UNUSED: "`set_reduce_scatter_unused_params` gives them gradients of zero",
        },
    )

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        using = super().recipe(case)
        backward = dataclasses.replace(using.backward, num_reductions=_INPUT_BUFFERS)
        return dataclasses.replace(using, backward=backward)

    def build(self, case: Case, context: RankContext) -> Engine:
        engine = super().build(case, context)
        for unit in sharded_units(engine):
            set_collectives(unit)
            unit.set_reshard_after_forward(False, recurse=False)
            unit.set_reshard_after_forward(True, recurse=False)
            unit.set_reduce_scatter_unused_params(True, recurse=False)
            unit.set_reduce_scatter_max_input_buffers(_INPUT_BUFFERS, recurse=False)
        return engine


def _allocate(self: object, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(*size, dtype=dtype, device=device)


def set_collectives(unit: FSDPModule) -> None:
    """Give a unit collectives as a user writes them, which reduce by a sum."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

    class Gathers(AllGather):
        allocate = _allocate

        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
        ) -> dist.Work | None:
            return cast(
                "dist.Work | None",
                dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op),
            )

    class Reduces(ReduceScatter):
        allocate = _allocate

        def __call__(
            self,
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: dist.ProcessGroup,
            op: Any,  # noqa: ANN401
            async_op: bool = False,
        ) -> dist.Work | None:
            return cast(
                "dist.Work | None",
                dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op),
            )

    unit.set_custom_all_gather(Gathers())
    unit.set_custom_reduce_scatter(Reduces())


class FSDP2Recovered(FSDP2):
    """`reset_iter_state`: before the first step a forward pass fails in the last block."""

    def build(self, case: Case, context: RankContext) -> Engine:
        engine = super().build(case, context)
        root: Any = sharded_units(engine)[0]

        def fails(*_: object) -> None:
            raise _OutOfMemory

        assert isinstance(engine, FSDP2Engine)
        handle = list(root.blocks.values())[-1].register_forward_hook(fails)
        shard = engine.part(make_batch(case.workload, 0)).to(context.device)
        try:
            engine.forward(shard.inputs)
        except _OutOfMemory:
            self.recover(root)
        else:
            raise AdapterError(f"rank {context.rank}: a forward pass that was to fail came to its end")
        handle.remove()
        return engine

    def recover(self, root: FSDPModule) -> None:
        root.reset_iter_state()


class _OutOfMemory(Exception):
    """Error that ends a forward pass."""


class FSDP2ReplicasByHook(FSDP2HSDP):
    """`set_all_reduce_hook`: FSDP2 knows the shards alone, and a hook of the user's reduces among replicas."""

    def choices(self, case: Case, model: Model) -> dict[str, Any]:
        return {"mesh": self.mesh["shards"]}

    def build(self, case: Case, context: RankContext) -> Engine:
        from torch.distributed.device_mesh import init_device_mesh

        replicas = self.sharding.replicas
        sizes = replicas, case.layout.dp // replicas
        self.mesh = init_device_mesh(context.device.type, sizes, mesh_dim_names=("replicas", "shards"))
        engine = super().build(case, context)
        group = self.mesh.get_group("replicas")
        for unit in sharded_units(engine):
            unit.set_all_reduce_hook(lambda gradient: self.reduce(gradient, group))
        return engine

    def reduce(self, gradient: Tensor, group: dist.ProcessGroup) -> None:
        dist.all_reduce(gradient, group=group)
        gradient /= self.sharding.replicas


class IgnoringEngine(FSDP2Engine):
    """Every rank has the ignored tensors whole, and reduces their gradients once a step."""

    def finish_gradients(self) -> None:
        average_gradients(self.ignored(), self.case.layout.dp)
        super().finish_gradients()

    def ignored(self) -> Iterator[nn.Parameter]:
        names = set(ignored_names(self.case))
        return (parameter for name, parameter in self.named_parameters() if name in names)

    def clip(self, max_norm: float) -> Tensor:
        """By the norm of shards and of whole tensors, which PyTorch does not mix."""
        whole = list(self.ignored())
        apart = {id(p) for p in whole}
        sharded = [p for p in self.module.parameters() if id(p) not in apart]
        norms: list[Any] = [_norm(sharded), _norm(whole)]
        total: Tensor = torch.linalg.vector_norm(torch.stack([norms[0].full_tensor(), norms[1]]))
        for parameters in (sharded, whole):
            nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        return total


def _norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def ignored_names(case: Case) -> list[str]:
    """Return the vectors that are in no block: the last norm's."""
    shapes = parameter_shapes(case.workload.model)
    return [n for n, shape in shapes.items() if len(shape) == 1 and not block_of(case.workload.model, n)]


_IGNORED = "ignored parameters are whole on every rank, and their gradients all-reduced once a step"


class FSDP2Ignores(FSDP2):
    """`ignored_params`: the last norm is not sharded, and its gradients are the user's to reduce."""

    engine: ClassVar[type[FSDP2Engine]] = IgnoringEngine
    capabilities: ClassVar = dataclasses.replace(FSDP2.capabilities, precisions=frozenset({Precision.FP32}))

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        names = ignored_names(case)
        if not names or not all(map(case.workload.trains, names)):
            return f"{case.adapter} takes models with a trained vector in no block, which is what it ignores"
        return super().supports(case, device, backend)

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        whole = held_whole(case, cls.recipe(case), _ignored_elements(case), _IGNORED)
        return (*super().extra_memory(case, rank), *whole)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        flows, elements = step_traffic(case, rank), _ignored_elements(case)
        less = Fraction(-elements, case.workload.model.num_parameters)
        count = len(ignored_names(case))
        return (
            *super().traffic_exceptions(case, rank),
            *besides(flows, Purpose.GRADIENTS, less, _IGNORED),
            *besides(flows, Purpose.WEIGHTS, less, _IGNORED),
            *besides(flows, Purpose.NORM, Fraction(-count), _IGNORED),
            *sent_whole(case, flows, elements, count, _IGNORED),
        )

    def choices(self, case: Case, model: Model) -> dict[str, Any]:
        names = set(ignored_names(case))
        return {"ignored_params": {parameter for name, parameter in model.named_parameters() if name in names}}

    def build(self, case: Case, context: RankContext) -> Engine:
        engine = super().build(case, context)
        assert isinstance(engine, IgnoringEngine)
        for name, parameter in engine.named_parameters():
            if name in ignored_names(case):
                value = initial_value(case.workload.model, name, parameter.shape, seed=case.workload.seed)
                with torch.no_grad():
                    parameter.copy_(value)
        return engine


def _ignored_elements(case: Case) -> int:
    shapes = parameter_shapes(case.workload.model)
    return sum(math.prod(shapes[name]) for name in ignored_names(case))


class FSDP2WideOutputs(FSDP2):
    """`MixedPrecisionPolicy(output_dtype=torch.float32, cast_forward_inputs=False)` of the root: it casts no inputs,
    and logits are wide."""

    capabilities: ClassVar = dataclasses.replace(
        FSDP2.capabilities, precisions=frozenset({Precision.BF16, Precision.BF16_REDUCE_BF16})
    )

    def choices(self, case: Case, model: Model) -> dict[str, Any]:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        policy = MixedPrecisionPolicy(
            param_dtype=AUTOCAST[case.precision.compute],
            reduce_dtype=getattr(torch, case.precision.reduction),
            output_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        return {"of_root": {"mp_policy": policy}}


class WholeCheckpointEngine(FSDP2Engine):
    def save(self, folder: Path) -> None:
        save_whole(folder, self.module, self.optimizer, self.schedule)

    def load(self, folder: Path) -> None:
        load_whole(folder, self.module, self.optimizer, self.schedule)


class FSDP2WholeCheckpoint(FSDP2):
    """`StateDictOptions(full_state_dict, cpu_offload, broadcast_from_rank0)`: the first rank writes and reads whole
    tensors, and leaves out frozen ones (`ignore_frozen_params`)."""

    engine: ClassVar[type[FSDP2Engine]] = WholeCheckpointEngine


class ConvertedCheckpointEngine(FSDP2Engine):
    def save(self, folder: Path) -> None:
        save_in_background(folder, self.module, self.optimizer, self.schedule)

    def load(self, folder: Path) -> None:
        load_converted(folder, self.module, self.optimizer, self.schedule)


class FSDP2ConvertedCheckpoint(FSDP2):
    """`async_save` writes shards while training could go on, and `dcp_to_torch_save` makes one file of them."""

    engine: ClassVar[type[FSDP2Engine]] = ConvertedCheckpointEngine
