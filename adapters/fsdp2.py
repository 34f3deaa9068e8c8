"""PyTorch FSDP2, `fully_shard`: parameters, gradients and optimizer states sharded tensor by tensor (ZeRO stage 3)."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from meshmark.adapter.contract import Adapter, Arithmetic, Capabilities, Casting, Feature, Summing, Track
from meshmark.adapter.engine import AUTOCAST, DataParallelEngine, Engine, RankContext, configure
from meshmark.adapters.checkpoint import load_sharded, save_sharded
from meshmark.errors import AdapterError
from meshmark.models.module import Block, Model, block_of, build_model, initial_value, parameter_shapes
from meshmark.models.transformer import Family
from meshmark.reference.objective import build_optimizer
from meshmark.spec.case import Case, Knob
from meshmark.spec.layout import Offload
from meshmark.spec.precision import Dtype, Precision
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.recipe import StateBytes, TrainingRecipe, eager_recipe
from meshmark.theory.traffic import (
    Flow,
    Padding,
    Purpose,
    Sharding,
    TrafficException,
    exceptions_for,
    neighbours,
    offloaded_recipe,
    sharded_recipe,
    sharding_exceptions,
    step_traffic,
)

if TYPE_CHECKING:  # a second or more, which only ranks should take
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.tensor import DTensor

ROWS = "a tensor's rows are padded to a multiple of the ranks"


class FSDP2Engine(DataParallelEngine):
    """Reduce-scatters gradients after every micro-batch, which is the default of `fully_shard`.

    If the sharding delays the reduction, gradients stay whole on every rank until then.
    """

    sharding: Sharding = Sharding()

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        root = cast("FSDPModule", self.module)
        if not self.sharding.reduces_within:
            root.set_requires_gradient_sync(last)
        if not self.sharding.reduces_among:
            root.set_requires_all_reduce(last)
        yield

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.module(inputs)  # the sharding casts, not autocast
        return logits

    def clip(self, max_norm: float) -> Tensor:
        return cast("DTensor", super().clip(max_norm)).full_tensor()

    def save(self, folder: Path) -> None:
        save_sharded(folder, self.module, self.optimizer, self.schedule)

    def load(self, folder: Path) -> None:
        load_sharded(folder, self.module, self.optimizer, self.schedule)


class FSDP2(Adapter):
    arithmetic: ClassVar = Arithmetic(casting=Casting.WEIGHTS, reduces_each=True, sums=Summing.BLOCKS)
    capabilities: ClassVar = Capabilities(
        dtensors=True,
        degrees=frozenset({"dp"}),
        zero_stages=frozenset({3}),
        precisions=frozenset(Precision.PRESETS.values()),
        families=frozenset(Family),
        tunings=frozenset(Knob),
        unfreezes=True,
        lacks={
            Feature.MATRIX_WISE: "its optimizer is given parts of the parameters, by rows",
            Feature.SCALARS: "`fully_shard` refuses them, for it shards by the first dimension",
        },
    )
    engine: ClassVar[type[FSDP2Engine]] = FSDP2Engine
    sharding: ClassVar = Sharding()

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        return sharded_recipe(
            eager_recipe(case, "eager-fsdp2", casts_weights=True), cls.sharding, case.layout.num_micro_batches
        )

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        return row_extra_memory(case, rank, cls.sharding, cls.recipe(case).states)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        return fsdp2_exceptions(case, rank, cls.sharding)

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        return cls.sharding.invalid_reason(case.layout) or super().supports(case, device, backend)

    def choices(self, case: Case, model: Model) -> dict[str, Any]:
        """Return the further arguments of `fully_shard` that a variant has; under `of_root` those of the root alone.

        `model`: on the meta device.
        """
        return {}

    def build(self, case: Case, context: RankContext) -> Engine:
        with torch.device("meta"):
            model = configure(build_model(case.workload.model), case)
        if case.precision.master is Dtype.FP64:
            model.double()
        shard(model, case, context, self.sharding, self.choices(case, model))
        optimizer = build_optimizer(case.workload.optimizer, model.named_parameters(), case.tuning)
        engine = self.engine(case, context, model, optimizer)
        engine.sharding = self.sharding
        return engine


class FSDP2NoReshard(FSDP2):
    """`reshard_after_forward=False`: weights are gathered once a micro-batch and stay until their backward, in memory
    as ZeRO's stage 2 in between."""

    sharding: ClassVar = Sharding(reshards_blocks=False, reshards_root=False)


class FSDP2Reshard2(FSDP2):
    """`reshard_after_forward=2`: after the forward pass weights are sharded over pairs of ranks, which on a cluster are
    of one node, and gathered again from there."""

    sharding: ClassVar = Sharding(resharded_over=2)


class FSDP2HSDP(FSDP2):
    """A mesh of two axes: two replicas, each sharded over half of the ranks (HSDP)."""

    sharding: ClassVar = Sharding(replicas=2)


class FSDP2NoSync(FSDP2):
    """`set_requires_gradient_sync(False)` until the last micro-batch: gradients are reduced once a step, and are whole
    on every rank until then."""

    sharding: ClassVar = Sharding(reduces_within=False)
    arithmetic: ClassVar = dataclasses.replace(FSDP2.arithmetic, reduces_each=False)


class FSDP2HSDPNoAllReduce(FSDP2HSDP):
    """`set_requires_all_reduce(False)` until the last micro-batch: every micro-batch's gradients are reduced within a
    replica, and their sum among replicas."""

    sharding: ClassVar = Sharding(replicas=2, reduces_among=False)


class FSDP2SumsEngine(FSDP2Engine):
    """Losses are not multiplied by the number of ranks, so that gradients add up."""

    def differentiate(self, loss: Tensor) -> None:
        super().differentiate(loss / self.case.layout.dp)


class FSDP2Sums(FSDP2):
    """`set_gradient_divide_factor(1)` and `set_force_sum_reduction_for_comms(True)`: gradients are summed over ranks,
    not averaged."""

    engine: ClassVar[type[FSDP2Engine]] = FSDP2SumsEngine
    arithmetic: ClassVar = dataclasses.replace(FSDP2.arithmetic, averages=False)

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        """Return the recipe. With one rank, dividing gradients makes one more copy, so the peak is not planned."""
        using = super().recipe(case)
        return dataclasses.replace(using, peak_known=using.peak_known and case.layout.dp > 1)

    def build(self, case: Case, context: RankContext) -> Engine:
        engine = super().build(case, context)
        for unit in sharded_units(engine):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        return engine


class FSDP2Columns(FSDP2):
    """`shard_placement_fn`: matrices are sharded by their second dimension, all else by the first."""

    def choices(self, case: Case, model: Model) -> dict[str, Any]:
        from torch.distributed.tensor import Shard

        return {"shard_placement_fn": lambda parameter: Shard(1) if parameter.dim() > 1 else None}

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        """Gathered columns are copied to where rows lie. How much of that is there at the peak is not planned."""
        return dataclasses.replace(super().recipe(case), peak_known=False)

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        shapes = parameter_shapes(case.workload.model).values()
        if any(len(shape) > 1 and shape[1] % case.layout.dp for shape in shapes):
            return f"{case.adapter} does not support dimensions that the ranks do not divide (FSDP2 refuses them)"
        return super().supports(case, device, backend)


class FSDP2Offload(FSDP2):
    """`CPUOffloadPolicy`: shards of weights, gradients and moments are in the host's memory, and the host updates them;
    the device has gathered weights and activations alone."""

    capabilities: ClassVar = dataclasses.replace(
        FSDP2.capabilities,
        offloads=frozenset({Offload.CPU}),
        devices=frozenset({"cpu"}),  # of a GPU not tried
    )

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        return offloaded_recipe(super().recipe(case))

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        return row_extra_memory(case, rank, cls.sharding, super().recipe(case).states)

    def build(self, case: Case, context: RankContext) -> Engine:
        """Build the engine, and check that the policy is in effect, which no measurement on a CPU would show."""
        engine = super().build(case, context)
        units = sharded_units(engine)
        if not units or not all(p.offload_to_cpu for unit in units for p in _sharded_parameters(unit)):
            raise AdapterError(f"rank {context.rank}: fully_shard does not offload all parameters, though asked to")
        return engine


class FSDP2Recommended(FSDP2):
    """PyTorch's tutorial: `fully_shard(block)` and `fully_shard(model)` without further arguments.

    Parameters outside of blocks stay whole from their forward to their backward pass.
    """

    track: ClassVar = Track.AUTHORS
    sharding: ClassVar = Sharding(reshards_root=False)


def row_extra_memory(case: Case, rank: int, sharding: Sharding, states: StateBytes) -> tuple[ExtraMemory, ...]:
    """Return the extra memory of shards that `sharding` makes over the data-parallel ranks."""
    shards = case.layout.dp // sharding.replicas
    shapes = parameter_shapes(case.workload.model)
    dealt = dealt_rows(shapes, shards, case.layout.coordinates(rank).dp % shards, states)
    return (*dealt, mesh_extra_memory(case))


def mesh_extra_memory(case: Case) -> ExtraMemory:
    """Return the memory of PyTorch's device mesh, which matters with thousands of ranks."""
    return ExtraMemory(category="steady", num_bytes=4.0 * case.world_size, reason="a device mesh lists all ranks")


def dealt_rows(
    shapes: Mapping[str, tuple[int, ...]], shards: int, index: int, states: StateBytes
) -> tuple[ExtraMemory, ...]:
    """Return the memory of one shard beyond an even share of the tensors.

    Each shard gets ceil(rows / shards) whole rows until none are left. Parameters and gradients are padded to as many
    on all shards. This matters with a thousand ranks, which divide the rows of few tensors.
    """
    padded = dealt = 0.0
    for rows, *row in shapes.values():
        most = -(-rows // shards)
        padded += (most - rows / shards) * math.prod(row)
        dealt += (min(max(rows - index * most, 0), most) - rows / shards) * math.prod(row)
    found = {
        "parameters": states.weight_bytes * padded,
        "gradients": states.gradient_bytes * padded,
        "optimizer_states": states.moment_bytes * dealt,
    }
    return tuple(ExtraMemory(category=name, num_bytes=more, reason=ROWS) for name, more in found.items() if more)


def fsdp2_exceptions(case: Case, rank: int, sharding: Sharding) -> tuple[TrafficException, ...]:
    flows, shapes = step_traffic(case, rank), parameter_shapes(case.workload.model)
    shards = case.layout.dp // sharding.replicas
    padding = {name: -rows % shards * math.prod(row) for name, (rows, *row) in shapes.items()}
    of_root = sum(elements for name, elements in padding.items() if not block_of(case.workload.model, name))
    of_blocks = sum(padding.values()) - of_root
    norms = "every tensor's norm is reduced by itself"

    def by_tensor(norm: Flow) -> Flow:
        own = neighbours(norm, sharding.replicas, rank)
        return dataclasses.replace(norm, num_bytes=norm.num_bytes * len(shapes), ranks=own)

    return (
        *exceptions_for(flows, Purpose.NORM, norms, by_tensor),
        *sharding_exceptions(case, rank, sharding, Padding(root=of_root, blocks=of_blocks, reason=ROWS)),
    )


def norm_of_tensors(case: Case) -> TrafficException:
    """Return FSDP2's reduction of the norms of all tensors."""
    norm = Flow(
        kind="all_reduce",
        axes="dp",
        ranks=tuple(range(case.layout.dp)),
        purpose=Purpose.NORM,
        num_bytes=4 * len(parameter_shapes(case.workload.model)),
        fewest=1,
        most=1,
    )
    return TrafficException(sends=(norm,), reason="the norm is computed, to be logged, where there is nothing to clip")


def shard(
    model: Model, case: Case, context: RankContext, sharding: Sharding, arguments: Mapping[str, Any] | None = None
) -> None:
    """Shard a model on the meta device over all ranks, block by block, and fill the shards with initial values.

    `arguments`: of `fully_shard`, in the place of those that the case and the sharding ask for; under `of_root` those
    of the root alone.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    shards = case.layout.dp // sharding.replicas
    sizes, names = ((sharding.replicas, shards), ("replicas", "shards")) if sharding.replicas > 1 else ((shards,), None)
    mesh = init_device_mesh(context.device.type, sizes, mesh_dim_names=names)
    home = CPUOffloadPolicy(pin_memory=False) if case.layout.offload is Offload.CPU else OffloadPolicy()
    after = sharding.resharded_over or sharding.reshards_blocks
    given: dict[str, Any] = {"mesh": mesh, "mp_policy": mixed_precision_policy(case), "offload_policy": home}
    given.update(arguments or {})
    of_root = given.pop("of_root", {})
    for block in model.blocks.values():
        fully_shard(block, reshard_after_forward=after, **given)
    # PyTorch's default leaves the root whole between forward and backward, which is not quite ZeRO-3.
    fully_shard(model, reshard_after_forward=sharding.reshards_root, **{**given, **of_root})
    model.to_empty(device=context.device)
    fill_shards(model, case)
    model.initialize_buffers()


def mixed_precision_policy(case: Case) -> MixedPrecisionPolicy:
    """Return FSDP2's policy for the case's precision: weights and inputs are cast, and gradients reduced as it says."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    low = AUTOCAST.get(case.precision.compute)
    if low is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=low, reduce_dtype=getattr(torch, case.precision.reduction))


def sharded_units(engine: Engine) -> list[FSDPModule]:
    """Return every module that `fully_shard` was called on, the root first."""
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(engine, FSDP2Engine)
    return [part for part in engine.module.modules() if isinstance(part, FSDPModule)]


def _sharded_parameters(unit: FSDPModule) -> list[FSDPParam]:
    group = unit._get_fsdp_state()._fsdp_param_group
    return group.fsdp_params if group else []


def fill_shards(model: Model, case: Case) -> None:
    """Fill every sharded parameter of `model` with its initial values, each rank its own part alone."""
    fill_named(model.named_parameters(), case)


@torch.no_grad()
def fill_named(parameters: Iterable[tuple[str, nn.Parameter]], case: Case) -> None:
    """Fill sharded parameters, by canonical name, with their initial values, each rank its own part alone."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for name, parameter in parameters:
        if not isinstance(parameter, DTensor):
            continue
        sharded = cast("DTensor", parameter)
        shape, offset = compute_local_shape_and_global_offset(parameter.shape, sharded.device_mesh, sharded.placements)
        sharded.to_local().copy_(
            initial_value(
                case.workload.model,
                name,
                parameter.shape,
                seed=case.workload.seed,
                block=Block(shape=shape, offset=offset),
                device=sharded.to_local().device,
            )
        )
