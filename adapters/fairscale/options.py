"""FairScale's FSDP by its other options: tensors not flattened, weights not resharded, inputs of recomputed blocks
offloaded."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshmark.adapter.contract import Feature
from meshmark.adapter.engine import Engine, Gathered, RankContext
from meshmark.adapters.fairscale import FairScaleFSDP, FairScaleOSS, FSDPEngine, OSSEngine, canonical
from meshmark.errors import AdapterError
from meshmark.models.module import parameter_shapes
from meshmark.spec.case import Case
from meshmark.spec.known_gap import KnownGap
from meshmark.spec.layout import Recompute
from meshmark.spec.precision import Precision
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.recipe import TrainingRecipe
from meshmark.theory.traffic import Padding, Sharding, TrafficException, sharding_exceptions


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
            raise AdapterError(f"rank {context.rank}: FairScale offloads no inputs of blocks, though asked to")
        return engine


class FairScaleFSDPCasts(FairScaleFSDPPredivide):
    """`force_input_to_fp32` and `buffer_dtype`, which in float32 change nothing, `clear_autocast_cache`, and divisors
    that are set after wrapping (`set_gradient_divide_factors`): all of the division comes after the reduction."""

    capabilities: ClassVar = dataclasses.replace(
        FairScaleFSDP.capabilities,
        precisions=frozenset({Precision.FP32}),
    )

    def choices(self, case: Case) -> dict[str, Any]:
        return {"force_input_to_fp32": True, "buffer_dtype": torch.float32, "clear_autocast_cache": True}

    def build(self, case: Case, context: RankContext) -> Engine:
        engine = super().build(case, context)
        assert isinstance(engine, FSDPEngine)
        engine.module.set_gradient_divide_factors(1.0, float(case.layout.dp), recursive=True)
        return engine


class ShardFilesEngine(FSDPEngine):
    """Every rank writes its shards with what is needed to put them together; the first, the gathered optimizer."""

    def save(self, folder: Path) -> None:
        shards = {"weights": self.module.local_state_dict(), "metadata": self.module.local_metadata_dict()}
        torch.save(shards, folder / f"shards-{self.context.rank}.pt")
        gathered = self.module.gather_full_optim_state_dict(self.optimizer)
        for state in self.optimizer.state.values():  # adapters/gaps/fairscale_fsdp_gathered_optimizer.py
            if "step" in state:
                state["step"] = torch.as_tensor(float(state["step"]))
        if self.context.rank == 0:
            torch.save({"optimizer": gathered, "schedule": self.schedule_state()}, folder / "optimizer.pt")
        torch.distributed.barrier()

    def load(self, folder: Path) -> None:
        from fairscale.nn.data_parallel import FullyShardedDataParallel

        files = sorted(folder.glob("shards-*.pt"))
        if len(files) == self.context.world_size:
            own = torch.load(folder / f"shards-{self.context.rank}.pt", weights_only=False)
            self.module.state_dict()  # prepares inner wrappers too (adapters/gaps/fairscale_fsdp_local_load.py)
            self.module.load_local_state_dict(own["weights"])
        else:
            shards = [torch.load(file, weights_only=False) for file in files]
            whole = FullyShardedDataParallel.consolidate_shard_weights(
                [each["weights"] for each in shards], [each["metadata"] for each in shards]
            )
            self.module.load_state_dict(whole)
        state = torch.load(folder / "optimizer.pt", weights_only=False)
        self.optimizer.load_state_dict(self.module.get_shard_from_optim_state_dict(state["optimizer"]))
        self.load_schedule(state["schedule"])


class FairScaleFSDPShardFiles(FairScaleFSDP):
    """`local_state_dict` and `gather_full_optim_state_dict`; on another number of ranks `consolidate_shard_weights`."""

    engine: ClassVar = ShardFilesEngine
    known_gaps: ClassVar = (
        *FairScaleFSDP.known_gaps,
        *(
            KnownGap(
                clause=clause,
                symptom="first moments forgotten",
                reason="on a CPU the gathered optimizer has second moments in the place of first ones",
                reproducer="fairscale_fsdp_gathered_moments",
            )
            for clause in ("resume", "reshard", "recovery")
        ),
    )
    capabilities: ClassVar = dataclasses.replace(
        FairScaleFSDP.capabilities,
        lacks={k: why for k, why in FairScaleFSDP.capabilities.lacks.items() if k is not Feature.RESHARD},
    )


class FairScaleFSDPFirstRank(FairScaleFSDP):
    """`state_dict_on_rank_0_only`: the first rank alone gets weights that are whole."""

    def choices(self, case: Case) -> dict[str, Any]:
        return {"state_dict_on_rank_0_only": True}


class ByHandEngine(OSSEngine):
    """Puts every reduction off, and reduces once all gradients are there."""

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        with self.module.no_sync():
            yield

    def finish_gradients(self) -> None:
        self.module.reduce()
        super().finish_gradients()

    def update(self) -> Tensor | None:
        norm = super().update()
        self.module.sync_buffers(blocking=True)
        return norm


class FairScaleOSSByHand(FairScaleOSS):
    """`ShardedDataParallel.reduce` and `sync_buffers`, called by the user; parameters that are frozen stay so
    (`auto_refresh_trainable=False`), and states are collected by FairScale's own broadcast
    (`force_broadcast_object`)."""

    engine: ClassVar[type[OSSEngine]] = ByHandEngine
    optimizer_choices: ClassVar = {"force_broadcast_object": True}
    module_choices: ClassVar = {"auto_refresh_trainable": False}
    capabilities: ClassVar = dataclasses.replace(
        FairScaleOSS.capabilities,
        unfreezes=False,
        lacks={
            **FairScaleOSS.capabilities.lacks,
            Feature.UNFREEZE: "`auto_refresh_trainable=False` leaves that to the user",
            Feature.BUFFERS: "`sync_buffers` sends the first rank's",
            Feature.UNUSED: "`reduce` asserts that every parameter has a gradient",
        },
    )
