"""PyTorch FSDP1, `FullyShardedDataParallel`: every unit's parameters are one flat tensor, a part on each rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshmark.adapter.contract import Adapter, Arithmetic, Capabilities, Casting, Feature
from meshmark.adapter.engine import (
    AUTOCAST,
    DataParallelEngine,
    Engine,
    Gathered,
    RankContext,
    configure,
    initial_model,
)
from meshmark.adapters.checkpoint import load_sharded, save_sharded
from meshmark.models.module import Model, build_model, initial_value, sizes_by_block
from meshmark.models.transformer import Family
from meshmark.reference.objective import build_optimizer
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from meshmark.theory.recipe import TrainingRecipe, eager_recipe
from meshmark.theory.traffic import (
    Padding,
    Purpose,
    Sharding,
    TrafficException,
    exceptions_for,
    neighbours,
    reduced_each,
    sharded_recipe,
    sharding_exceptions,
    step_traffic,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel  # some seconds, which only ranks should take

_ALIGNED_BYTES = 16
"""Alignment of every parameter's address in its flat tensor (`_get_aligned_numel` of PyTorch's
fsdp/_flat_param.py).
"""


_MIXED = (Precision.BF16, Precision.FP16, Precision.BF16_REDUCE_BF16)


class FSDP1Engine(DataParallelEngine):
    """Gradients are reduce-scattered after every micro-batch, so that they stay sharded, unless the sharding puts it
    off by `no_sync`.
    """

    module: FullyShardedDataParallel
    sharding: Sharding = Sharding()

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        puts_off = not (last or self.sharding.reduces_within)
        with self.module.no_sync() if puts_off else contextlib.nullcontext():
            yield

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.module(inputs)  # the sharding casts, not autocast
        return logits

    def clip(self, max_norm: float) -> Tensor:
        return self.module.clip_grad_norm_(max_norm)

    def parameters(self) -> Mapping[str, Tensor]:
        return self._full(lambda handle: handle.flat_param.detach())

    def gradients(self) -> Mapping[str, Tensor]:
        """Of a flat parameter's frozen parts FSDP computes gradients too, and gives them to nobody."""
        return self._full(lambda handle: handle.sharded_grad, _trained)

    def buffers(self) -> Mapping[str, Tensor]:
        return {canonical(name): buffer.detach() for name, buffer in self.module.named_buffers()}

    def _full(
        self, shard_of: Callable[[Any], Tensor | None], chosen: Callable[[Any], list[int]] | None = None
    ) -> Gathered:
        """Return the pieces of every flat parameter or its gradient by canonical name, gathered from all its
        shards. `chosen` returns the places of the pieces that are wanted, all by default.
        """
        return Gathered(
            (
                [canonical(f"{path}.{handle.flat_param._fqns[place]}") for place in places],
                partial(_pieces, handle, shard, places),
            )
            for path, handle in _handles(self.module)
            if (shard := shard_of(handle)) is not None
            for places in [chosen(handle) if chosen else range(len(handle.flat_param._fqns))]
        )

    def save(self, folder: Path) -> None:
        save_sharded(folder, self.module, self.optimizer, self.schedule)

    def load(self, folder: Path) -> None:
        load_sharded(folder, self.module, self.optimizer, self.schedule)


def _trained(handle: Any) -> list[int]:  # noqa: ANN401
    """Return the places of the pieces of a flat parameter that are trained."""
    pieces = handle.flat_param._params
    return [place for place in range(len(handle.flat_param._fqns)) if pieces is None or pieces[place].requires_grad]


def _pieces(handle: Any, shard: Tensor, places: Sequence[int]) -> list[Tensor]:  # noqa: ANN401
    """Return the whole tensors at some places of one unit."""
    whole = shard.new_empty(shard.numel() * handle.world_size)
    dist.all_gather_into_tensor(whole, shard.contiguous(), group=handle.process_group)
    unpadded = whole[: sum(handle.flat_param._numels_with_padding)]
    whole_pieces = [piece.detach() for piece in handle._get_unflat_views(unpadded)]
    return [whole_pieces[place] for place in places]


def _handles(module: FullyShardedDataParallel) -> Iterator[tuple[str, Any]]:
    """Yield the path of every unit, and the handle of its flat parameter."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for path, part in module.named_modules():
        if isinstance(part, FullyShardedDataParallel) and part._handle:
            yield path, part._handle


def canonical(name: str) -> str:
    """Return a parameter's name without the names of wrapper modules."""
    wrappers = ("", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
    return ".".join(part for part in name.split(".") if part not in wrappers)


class FSDP1(Adapter):
    """FULL_SHARD, with one unit for every block and one for the rest of the model.

    FSDP1 keeps the rest whole from its forward to its backward pass.
    """

    arithmetic: ClassVar = Arithmetic(casting=Casting.WEIGHTS, reduces_each=True)
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        zero_stages=frozenset({3}),
        families=frozenset(Family),
        precisions=frozenset(Precision.PRESETS.values()) - {Precision.FP64},
        unfreezes=True,
        lacks={
            Precision.FP64: "its clip_grad_norm_ computes the norm in float32, and raises",
            Feature.MATRIX_WISE: "its optimizer is given flat parts of the parameters",
            Feature.SCALARS: "it refuses them, and asks for a dimension of one",
        },
    )
    engine: ClassVar[type[FSDP1Engine]] = FSDP1Engine
    strategy: ClassVar = "FULL_SHARD"
    sharding: ClassVar = Sharding(reshards_root=False)

    def choices(self, case: Case) -> dict[str, Any]:
        """Return the further arguments that a variant gives every unit."""
        return {}

    def model(self, case: Case, context: RankContext) -> Model:
        """Return the model that is wrapped."""
        return initial_model(case, context.device)

    @classmethod
    def unit_sizes(cls, case: Case) -> dict[str, list[int]]:
        """Return the sizes of the tensors of every unit, in order; the root's name is empty."""
        return sizes_by_block(case.workload.model)

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        return sharded_recipe(
            eager_recipe(case, "eager-fsdp1", casts_weights=True), cls.sharding, case.layout.num_micro_batches
        )

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """Return exceptions: the norm over all replicas is that over the shards of one replica."""
        flows, replicas = step_traffic(case, rank), cls.sharding.replicas
        within = "a replica's ranks hold all gradients among them"
        return (
            *exceptions_for(
                flows if replicas > 1 else None,
                Purpose.NORM,
                within,
                lambda norm: replace(norm, ranks=neighbours(norm, replicas, rank)),
            ),
            *sharding_exceptions(case, rank, cls.sharding, padding_of_units(case, cls.sharding, cls.unit_sizes(case))),
        )

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if invalid := cls.sharding.invalid_reason(case.layout):
            return invalid
        if cls.strategy != "NO_SHARD" and case.layout.dp == 1:
            return f"{case.adapter} takes several ranks: on one, FSDP1 turns {cls.strategy} into NO_SHARD"
        return super().supports(case, device, backend)

    def build(self, case: Case, context: RankContext) -> Engine:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

        replicas = self.sharding.replicas
        low, reduced = AUTOCAST.get(case.precision.compute), getattr(torch, case.precision.reduction)
        arguments: dict[str, Any] = {
            "sharding_strategy": ShardingStrategy[self.strategy],
            "device_id": context.device,
            "use_orig_params": True,
            "mixed_precision": MixedPrecision(param_dtype=low, reduce_dtype=reduced) if low else None,
        }
        if replicas > 1:
            sizes = replicas, case.layout.dp // replicas
            mesh = init_device_mesh(context.device.type, sizes, mesh_dim_names=("replicas", "shards"))
            arguments["device_mesh"] = mesh
        model = self.model(case, context)
        arguments.update(self.choices(case))
        for key, block in model.blocks.items():
            model.blocks[key] = FullyShardedDataParallel(block, **arguments)
        module = FullyShardedDataParallel(model, **arguments)
        named = [(canonical(name), parameter) for name, parameter in module.named_parameters()]
        engine = self.engine(case, context, module, build_optimizer(case.workload.optimizer, named))
        engine.sharding = self.sharding
        if engine.scaler.is_enabled():
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            engine.scaler = ShardedGradScaler(device=context.device.type)
        return engine


class FSDP1ShardGradOp(FSDP1):
    """SHARD_GRAD_OP: weights are gathered once a micro-batch and stay until their backward."""

    strategy: ClassVar = "SHARD_GRAD_OP"
    sharding: ClassVar = Sharding(reshards_blocks=False, reshards_root=False)


class FSDP1NoShard(FSDP1):
    """NO_SHARD: every rank keeps whole flat parameters, whose gradients are all-reduced after every micro-batch."""

    strategy: ClassVar = "NO_SHARD"
    capabilities: ClassVar = replace(FSDP1.capabilities, zero_stages=frozenset({0}))

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        return eager_recipe(case, "eager-fsdp1", casts_weights=True)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        return reduced_each(case, rank)


class FSDP1NoSync(FSDP1):
    """`no_sync` until the last micro-batch: gradients are reduced once a step, and are whole until then."""

    sharding: ClassVar = Sharding(reshards_root=False, reduces_within=False)
    capabilities: ClassVar = replace(
        FSDP1.capabilities,
        precisions=frozenset({Precision.FP32}),
        lacks={
            **FSDP1.capabilities.lacks,
            # adapters/gaps/fsdp1_no_sync_bf16.py
            **dict.fromkeys(
                _MIXED, "under `no_sync` it accumulates gradients in 16 bits, whatever reduction is asked for"
            ),
        },
    )


class FSDP1Hybrid(FSDP1):
    """HYBRID_SHARD: two replicas, each sharded over half of the ranks."""

    strategy: ClassVar = "HYBRID_SHARD"
    sharding: ClassVar = Sharding(reshards_root=False, replicas=2)


class SummonedEngine(FSDP1Engine):
    """Reads weights and gradients by `summon_full_params`."""

    def parameters(self) -> Mapping[str, Tensor]:
        with self._whole():
            return {canonical(name): p.detach().clone() for name, p in self.module.named_parameters()}

    def gradients(self) -> Mapping[str, Tensor]:
        with self._whole(with_grads=True):
            named = [(canonical(name), p.grad) for name, p in self.module.named_parameters()]
            return {name: gradient.clone() for name, gradient in named if gradient is not None}

    def _whole(self, **options: bool) -> contextlib.AbstractContextManager[None]:
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel.summon_full_params(self.module, writeback=False, **options)


class FSDP1Materialized(FSDP1):
    """`param_init_fn`: the model is on the meta device until a unit is wrapped, and drawn there. A user's hook reduces
    (`register_comm_hook`), and weights are read by `summon_full_params`."""

    engine: ClassVar[type[FSDP1Engine]] = SummonedEngine
    capabilities: ClassVar = replace(
        FSDP1.capabilities,
        precisions=frozenset({Precision.FP32}),
        lacks={
            **FSDP1.capabilities.lacks,
            **dict.fromkeys(_MIXED, "its hook would reduce in the format of the weights"),
            Feature.TIED_EMBEDDINGS: "a shared weight would be drawn for each module that has it",
        },
    )

    def choices(self, case: Case) -> dict[str, Any]:
        return {"param_init_fn": self.draw}

    def model(self, case: Case, context: RankContext) -> Model:
        with torch.device("meta"):
            model = configure(build_model(case.workload.model), case)
        self.case, self.device = case, context.device
        self.paths = {part: f"{path}." if path else "" for path, part in model.named_modules()}
        return model

    @torch.no_grad()
    def draw(self, part: nn.Module) -> None:
        """Give the parameters of one module their initial values; its buffers are computed."""
        part.to_empty(device=self.device, recurse=False)
        for name, parameter in part.named_parameters(recurse=False):
            path = self.paths[part] + name
            parameter.copy_(
                initial_value(self.case.workload.model, path, parameter.shape, seed=self.case.workload.seed)
            )

    def build(self, case: Case, context: RankContext) -> Engine:
        from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState, reduce_scatter_hook

        engine = super().build(case, context)
        assert isinstance(engine, SummonedEngine)
        assert (group := dist.group.WORLD) is not None
        cast("Model", engine.module.module).initialize_buffers()
        engine.module.register_comm_hook(DefaultState(group), reduce_scatter_hook)
        return engine


class FSDP1Casts(FSDP1):
    """`MixedPrecision(cast_forward_inputs=True, cast_root_forward_inputs=False)`: every unit casts its own inputs."""

    capabilities: ClassVar = replace(
        FSDP1.capabilities, precisions=frozenset({Precision.FP32, Precision.BF16, Precision.BF16_REDUCE_BF16})
    )

    def choices(self, case: Case) -> dict[str, Any]:
        from torch.distributed.fsdp import MixedPrecision

        policy = MixedPrecision(
            param_dtype=AUTOCAST.get(case.precision.compute, torch.float32),
            reduce_dtype=getattr(torch, case.precision.reduction),
            cast_forward_inputs=True,
            cast_root_forward_inputs=False,
        )
        return {"mixed_precision": policy}


def padding_of_units(case: Case, sharding: Sharding, units: dict[str, list[int]]) -> Padding:
    """Return the padding of flat tensors: up to the aligned address of each parameter, and to a multiple of shards."""
    shards = case.layout.dp // sharding.replicas
    aligned = _ALIGNED_BYTES // case.precision.compute.itemsize

    def beyond(sizes: list[int]) -> int:
        if not sizes:  # of a root whose only block is the model
            return 0
        filled = sum(size + -size % aligned for size in sizes[:-1]) + sizes[-1]
        return filled + -filled % shards - sum(sizes)

    reason = "flat tensors are padded to addresses and to a multiple of the ranks"
    of_root = beyond(units[""])
    return Padding(root=of_root, blocks=sum(map(beyond, units.values())) - of_root, reason=reason)
