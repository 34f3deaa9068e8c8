"""FairScale: OSS with ShardedDDP (ZeRO stage 2), and FullyShardedDataParallel (stage 3)."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from meshmark.adapter.contract import Adapter, Arithmetic, Capabilities, Casting, Feature, Requirement
from meshmark.adapter.engine import (
    DataParallelEngine,
    Engine,
    Gathered,
    Holdings,
    RankContext,
    initial_model,
    optimizer_state_tensors,
)
from meshmark.adapters.fairscale.on_cpu import StayOnCPU, run_without_cuda
from meshmark.models.module import parameter_shapes, sizes_by_block
from meshmark.models.transformer import Family
from meshmark.reference.objective import build_optimizer, parameter_groups, reference_optimizer
from meshmark.spec.case import Case
from meshmark.spec.known_gap import KnownGap
from meshmark.spec.precision import Precision
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.recipe import TrainingRecipe, eager_recipe
from meshmark.theory.traffic import (
    Padding,
    Purpose,
    Sharding,
    TrafficException,
    by,
    exceptions_for,
    sharded_recipe,
    sharding_exceptions,
    step_traffic,
)

_FAIRSCALE = (Requirement(module="fairscale", distribution="fairscale"),)
_NO_SCALER = "FairScale's ShardedGradScaler is CUDA's, off on a CPU; on a GPU it has never been run here"


class OSSEngine(DataParallelEngine):
    """Every parameter's optimizer states and reduced gradient live on one rank, its owner; parameters on all."""

    module: Any
    optimizer: Any

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        # ShardedDDP would scale what the owner has accumulated again with every reduction: reduce once, at the end.
        with contextlib.nullcontext() if last else self.module.no_sync():
            yield

    def clip(self, max_norm: float) -> Tensor:
        norm: Tensor = self.optimizer.clip_grad_norm(max_norm)
        return norm

    def unfreeze(self) -> None:
        """OSS holds them; ShardedDataParallel sees by itself what requires a gradient now."""
        for _, parameter in self.named_parameters():
            parameter.requires_grad_()

    def inner(self) -> nn.Module:
        inner: nn.Module = self.module.module
        return inner

    def save(self, folder: Path) -> None:
        self.optimizer.consolidate_state_dict(recipient_rank=0)
        super().save(folder)

    def gradients(self) -> Mapping[str, Tensor]:
        """Each owner sends its gradients to all; unused parameters have none anywhere."""
        owners = self.optimizer._param_to_rank
        trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        held = [owners[p] == self.dp_rank and p.grad is not None for p in trained.values()]
        torch.distributed.all_reduce(there := torch.tensor(held, device=self.context.device).int())
        told = zip(there.tolist(), trained.items(), strict=True)
        return Gathered(([name], partial(self._sent, p, owners[p])) for present, (name, p) in told if present)

    def _sent(self, parameter: nn.Parameter, owner: int) -> list[Tensor]:
        full: Any = parameter.grad if owner == self.dp_rank else torch.empty_like(parameter)
        torch.distributed.broadcast(full, owner)
        return [full]

    def holdings(self) -> Holdings:
        parameters = list(self.module.parameters())
        return Holdings(
            parameters=[p.detach() for p in parameters],
            gradients=[p.grad for p in parameters if p.grad is not None],
            optimizer_states=optimizer_state_tensors(self.optimizer.optim),
        )


class FairScaleOSS(Adapter):
    """Data parallelism with sharded gradients and optimizer states."""

    requires: ClassVar = _FAIRSCALE
    engine: ClassVar[type[OSSEngine]] = OSSEngine
    optimizer_choices: ClassVar[dict[str, Any]] = {}
    """Further arguments of OSS."""
    module_choices: ClassVar[dict[str, Any]] = {}
    """Further arguments of ShardedDataParallel."""
    arithmetic: ClassVar = Arithmetic(casting=Casting.AUTOCAST)
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        zero_stages=frozenset({2}),
        families=frozenset(Family),
        precisions=frozenset({Precision.FP32, Precision.BF16}),
        unfreezes=True,
        lacks={
            Precision.FP64: "OSS computes the gradient norm in float32",
            Precision.FP16: _NO_SCALER,
            Feature.MATRIX_WISE: "its shares are planned for states of the parameters' shapes",
            Precision.BF16_REDUCE_BF16: "ShardedDataParallel reduces in float32, or in fp16 (`reduce_fp16`)",
        },
    )

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """OSS gives whole tensors away, each to the rank that owns least so far."""
        owned = [0] * case.layout.dp
        shapes, spec = parameter_shapes(case.workload.model), case.workload.optimizer
        by_group = sorted(shapes, key=lambda name: not spec.decays(name))  # a stable sort: the second group comes last
        for shape in map(shapes.__getitem__, by_group):
            owned[owned.index(min(owned))] += math.prod(shape)
        beyond = owned[case.layout.coordinates(rank).dp] - sum(owned) / case.layout.dp
        reason, moments = "whole tensors have one owner, so shares are uneven", cls.recipe(case).states.moment_bytes
        return (
            ExtraMemory(category="gradients", num_bytes=4 * beyond, reason=reason),
            ExtraMemory(category="optimizer_states", num_bytes=moments * beyond, reason=reason),
        )

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        flows = step_traffic(case, rank)
        return (
            *exceptions_for(flows, Purpose.GRADIENTS, "each gradient is reduced to its owner", by("reduce")),
            *exceptions_for(flows, Purpose.WEIGHTS, "owners broadcast what they have updated", by("broadcast")),
        )

    def build(self, case: Case, context: RankContext) -> Engine:
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim import OSS

        model, spec = initial_model(case, context.device), case.workload.optimizer
        cls, arguments = reference_optimizer(spec).arguments()
        # Of what is unfrozen later as well: ShardedDataParallel sees no groups that OSS is given after it was made
        # (adapters/gaps/fairscale_oss_later_group.py).
        later = [p for p in model.parameters() if not p.requires_grad] if case.workload.unfreeze_step else []
        for parameter in later:
            parameter.requires_grad_()
        groups = parameter_groups(spec, model.named_parameters())
        for parameter in later:
            parameter.requires_grad_(False)
        optimizer = OSS(groups, optim=cls, **{**self.optimizer_choices, **arguments})
        module = ShardedDataParallel(
            model,
            optimizer,
            sync_models_at_startup=False,
            broadcast_buffers=False,  # otherwise the first rank's statistics, at every micro-batch
            # Gradients in its buckets are kept by every rank, which would be stage 1, and after the first
            # `optimizer.zero_grad()`, which cuts them out of their bucket, are no longer reduced at all.
            reduce_buffer_size=0,
            **self.module_choices,
        )
        return self.engine(case, context, module, optimizer)


class FSDPEngine(DataParallelEngine):
    """Each wrapper keeps this rank's part of one flat parameter, padded to a multiple of the number of ranks. Gradients
    are reduced after every micro-batch, so that they stay sharded."""

    module: Any

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.module(inputs)  # FSDP casts the weights itself, so no autocast
        return logits

    def clip(self, max_norm: float) -> Tensor:
        """FairScale takes `torch.norm` of each flat shard, which PyTorch sums naively in fp32 on a CPU: the norm is off
        by 1e-5 at a million elements a shard and 4e-4 at ten million."""
        with StayOnCPU() if self.context.device.type == "cpu" else contextlib.nullcontext():
            norm: Tensor = self.module.clip_grad_norm_(max_norm)
        return norm

    def parameters(self) -> Mapping[str, Tensor]:
        return self._full(lambda flat: flat.detach())

    def gradients(self) -> Mapping[str, Tensor]:
        return self._full(lambda flat: flat.grad)

    def buffers(self) -> Mapping[str, Tensor]:
        return {canonical(name): buffer for name, buffer in super().buffers().items()}

    def save(self, folder: Path) -> None:
        """Whole parameters in one file, every rank's part of the optimizer states in another."""
        model = self.module.state_dict()  # a collective call
        if self.context.rank == 0:
            torch.save(model, folder / "model.pt")
        state = {"optimizer": self.optimizer.state_dict(), "schedule": self.schedule_state()}
        torch.save(state, folder / f"optimizer-{self.context.rank}.pt")
        torch.distributed.barrier()

    def load(self, folder: Path) -> None:
        self.module.load_state_dict(torch.load(folder / "model.pt", map_location=self.context.device))
        state = torch.load(folder / f"optimizer-{self.context.rank}.pt", map_location="cpu")
        self.optimizer.load_state_dict(state["optimizer"])
        self.load_schedule(state["schedule"])

    def _full(self, shard_of: Callable[[Any], Tensor]) -> Gathered:
        """Return the pieces of every flat parameter or its gradient by canonical name, gathered from all ranks."""
        flats = [(path, flat, partial(_pieces, flat, shard_of(flat))) for path, flat in _flats(self.module)]
        return Gathered(([canonical(f"{path}.{n}") for n in flat.metadata()[0]], whole) for path, flat, whole in flats)


def _pieces(flat: Any, shard: Tensor) -> list[Tensor]:  # noqa: ANN401
    whole = shard.new_empty(shard.numel() * torch.distributed.get_world_size())
    torch.distributed.all_gather_into_tensor(whole, shard)
    return list(flat.get_param_views(whole[: sum(flat.metadata()[2])]))


def _flats(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every FSDP wrapper's path, and its flat parameter."""
    from fairscale.nn.data_parallel import FullyShardedDataParallel

    for path, part in module.named_modules():
        if isinstance(part, FullyShardedDataParallel) and part.module.flat_params:  # none where all is in blocks
            yield path, part.module.flat_param


def canonical(name: str) -> str:
    """Return a parameter's name without the names of wrapper modules."""
    return ".".join(part for part in name.split(".") if part and part not in ("_fsdp_wrapped_module", "_fpw_module"))


class FairScaleFSDP(Adapter):
    """FairScale's FullyShardedDataParallel. Every block is wrapped on its own, and embedding and head with the model.

    In bf16, weights are gathered in bf16 from fp32 shards, and gradients are reduced in the precision that the case
    asks for.
    """

    requires: ClassVar = _FAIRSCALE
    arithmetic: ClassVar = Arithmetic(casting=Casting.WEIGHTS, reduces_each=True)
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        zero_stages=frozenset({3}),
        families=frozenset(Family),
        precisions=frozenset({Precision.FP32, Precision.BF16, Precision.BF16_REDUCE_BF16}),
        lacks={
            Precision.FP64: "FSDP takes float32 parameters alone",
            Precision.FP16: _NO_SCALER,
            Feature.MATRIX_WISE: "its optimizer is given flat parts of the parameters, whose shapes are lost",
            Feature.DECAY_GROUPS: "the parameters of a wrapper are one flat tensor, which is in one group",
            Feature.FROZEN: "the parameters of a wrapper are one flat tensor, frozen whole or not at all",
            Feature.RESHARD: "gather_full_optim_state_dict, which it takes, breaks the optimizer that it reads: "
            "facebookresearch/fairscale#1083",
        },
    )
    known_gaps: ClassVar[tuple[KnownGap, ...]] = (
        KnownGap(
            clause="unused",
            symptom="expected to be in states",
            reason="a wrapper that takes no part in a backward pass makes the step raise: its state is unexpected",
            link="https://github.com/facebookresearch/fairseq/issues/3353",
            reproducer="fairscale_fsdp_unused_wrapper",
        ),
    )
    engine: ClassVar[type[FSDPEngine]] = FSDPEngine
    sharding: ClassVar = Sharding()
    offloads_inputs: ClassVar = False
    """Whether the inputs of recomputed blocks are offloaded to the host."""

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        """The outermost wrapper casts float32 inputs to fp16, in bf16 too (gaps/fairscale_fsdp_bf16_inputs.py)."""
        if case.layout.dp == 1:
            return f"{case.adapter} takes several ranks: on one, FairScale shards nothing"
        if case.precision.is_mixed and case.workload.model.has_float_inputs:
            return f"{case.adapter} does not support floating-point inputs in {case.precision} (it casts them to fp16)"
        return super().supports(case, device, backend)

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        using = sharded_recipe(
            eager_recipe(case, "eager-fsdp2", casts_weights=True), cls.sharding, case.layout.num_micro_batches
        )
        return dataclasses.replace(using, backward=dataclasses.replace(using.backward, prefetches=False))

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        units, dp = sizes_by_block(case.workload.model), case.layout.dp
        root = -sum(units.pop("")) % dp
        blocks = sum(-sum(sizes) % dp for sizes in units.values())
        reason = "flat parameters are padded to a multiple of the ranks"
        return sharding_exceptions(case, rank, cls.sharding, Padding(root=root, blocks=blocks, reason=reason))

    def build(self, case: Case, context: RankContext) -> Engine:
        from fairscale.nn import checkpoint_wrapper
        from fairscale.nn.data_parallel import FullyShardedDataParallel

        if context.device.type == "cpu":
            run_without_cuda()
        arguments = {**_arguments(case, context), **self.choices(case)}
        model = initial_model(case, context.device)
        recomputes, model.recompute = model.recompute is not None, None
        for key, block in model.blocks.items():
            # Recomputation must come inside a wrapper: FairScale's own, which keeps the block's names.
            inner = checkpoint_wrapper(block, offload_to_cpu=self.offloads_inputs) if recomputes else block
            model.blocks[key] = FullyShardedDataParallel(inner, **arguments)
        module = FullyShardedDataParallel(model, **arguments)
        named = [(canonical(name), parameter) for name, parameter in module.named_parameters()]
        return self.engine(case, context, module, build_optimizer(case.workload.optimizer, named))

    def choices(self, case: Case) -> dict[str, Any]:
        """Return the further arguments that a variant gives every wrapper."""
        return {}


def _arguments(case: Case, context: RankContext) -> dict[str, Any]:
    mixed = case.precision.is_mixed
    return {
        "compute_device": context.device,
        "mixed_precision": mixed,
        "fp32_reduce_scatter": mixed and not case.precision.narrows_reduction,
        "compute_dtype": torch.bfloat16 if mixed else torch.float32,
        "disable_reshard_on_root": False,  # otherwise embedding and head stay whole from forward to backward
        "bucket_cap_mb": 0,  # a wrapper's gradient is one flat tensor already
    }
