"""FairScale's FSDP by its other options: tensors not flattened, weights not resharded, inputs of recomputed blocks
offloaded."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshmark.adapter.capabilities import Feature
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapter.gathered import Gathered
from meshmark.adapters.fairscale import FairScaleFSDP, FSDPEngine, canonical
from meshmark.errors import AdapterError
from meshmark.reference.build import parameter_shapes
from meshmark.spec.case import Case
from meshmark.spec.layout import Recompute
from meshmark.spec.precision import Precision
from meshmark.theory.flow import TrafficException
from meshmark.theory.recipe import TrainingRecipe
from meshmark.theory.sharding import Padding, Sharding, sharding_exceptions
from meshmark.theory.states import ExtraMemory


class FairScaleFSDPNoReshard(FairScaleFSDP):
    """`reshard_after_forward=False`: weights are gathered once a micro-batch, and stay until their backward."""

    sharding: ClassVar = Sharding(reshards_blocks=False, reshards_root=False)

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        kept = float(case.precision.compute.itemsize * case.workload.model.num_parameters)
        reason = "kept weights are where the collective has put them, and count as communication"
        there = {"activations": -kept, "peak": kept}
        return tuple(ExtraMemory(category=name, num_bytes=more, reason=reason) for name, more in there.items())

    def choices(self, case: Case) -> dict[str, Any]:
        return {"reshard_after_forward": False}


class NoSyncEngine(FSDPEngine):
    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        with contextlib.nullcontext() if last else self.module.no_sync():
            yield


class FairScaleFSDPNoSync(FairScaleFSDP):
    """`no_sync` until the last micro-batch: gradients are reduced once a step, and are whole until then."""

    engine: ClassVar = NoSyncEngine
    sharding: ClassVar = Sharding(reduces_within=False)
    capabilities: ClassVar = dataclasses.replace(
        FairScaleFSDP.capabilities,
        precisions=frozenset({Precision.FP32}),
        lacks={
            **FairScaleFSDP.capabilities.lacks,
            # adapters/gaps/fairscale_fsdp_no_sync_bf16.py
            **dict.fromkeys(
                (Precision.BF16, Precision.BF16_REDUCE_BF16),
                "under `no_sync` it accumulates gradients in 16 bits, whatever reduction is asked for",
            ),
        },
    )


class FairScaleFSDPPredivide(FairScaleFSDP):
    """`gradient_predivide_factor=1`: gradients are divided after the reduction alone, by default partly before.

    It must not exceed the number of ranks (adapters/gaps/fairscale_fsdp_predivide.py).
    """

    def choices(self, case: Case) -> dict[str, Any]:
        return {"gradient_predivide_factor": 1.0}


class UnflattenedEngine(FSDPEngine):
    """Every tensor is flat, padded and sharded by itself."""

    def _full(self, shard_of: Callable[[Any], Tensor]) -> Gathered:
        from fairscale.nn.data_parallel import FullyShardedDataParallel

        units = [
            (path, part) for path, part in self.module.named_modules() if isinstance(part, FullyShardedDataParallel)
        ]
        return Gathered(
            ([canonical(f"{path}.{name}")], partial(_whole, parameter, shard_of(parameter)))
            for path, unit in units
            for (name,), parameter in zip(unit._param_name_groups, unit.params, strict=True)
        )


def _whole(parameter: Any, shard: Tensor) -> list[Tensor]:  # noqa: ANN401
    whole = shard.new_empty(shard.numel() * torch.distributed.get_world_size())
    torch.distributed.all_gather_into_tensor(whole, shard)
    shape = parameter._orig_size
    return [whole[: shape.numel()].view(shape)]


class FairScaleFSDPUnflattened(FairScaleFSDP):
    """`flatten_parameters=False`."""

    engine: ClassVar = UnflattenedEngine
    capabilities: ClassVar = dataclasses.replace(
        FairScaleFSDP.capabilities,
        lacks={
            **{k: why for k, why in FairScaleFSDP.capabilities.lacks.items() if k is not Feature.DECAY_GROUPS},
            Feature.FROZEN: "after a backward pass a frozen tensor is whole, where a shard is read",
            Feature.RESHARD: "its optimizer's states are gathered of flat parameters alone",
        },
    )

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        """A unit's tensors are gathered, reduced and freed one by one: of that no peak is planned."""
        return dataclasses.replace(super().recipe(case), activations_known=False)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        dp = case.layout.dp
        padding = {name: -math.prod(shape) % dp for name, shape in parameter_shapes(case.workload.model).items()}
        of_root = sum(elements for name, elements in padding.items() if not name.startswith("blocks."))
        reason = "every tensor is padded to a multiple of the ranks"
        padded = Padding(root=of_root, blocks=sum(padding.values()) - of_root, reason=reason)
        return sharding_exceptions(case, rank, cls.sharding, padded)

    def choices(self, case: Case) -> dict[str, Any]:
        return {"flatten_parameters": False}


class FairScaleCheckpointOffload(FairScaleFSDP):
    """`checkpoint_wrapper(offload_to_cpu=True)`: of a block that is computed again, the host keeps the input."""

    offloads_inputs: ClassVar = True

    def build(self, case: Case, context: RankContext) -> Engine:
        """On a CPU nothing that is measured would tell whether the option was heeded."""
        engine = super().build(case, context)
        assert isinstance(engine, FSDPEngine)
        found = [forward.args[2] for part in engine.module.modules() if (forward := vars(part).get("forward"))]
        if case.layout.recompute is Recompute.FULL and not (found and all(found)):
            raise AdapterError(f"rank {context.rank}: FairScale offloads no inputs of blocks, which it was asked for")
        return engine
