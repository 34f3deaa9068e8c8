"""Fabric's strategies by their other arguments: a precision of the strategy's own, FSDP's sharding, recomputation and
whole checkpoints, and DeepSpeed without a configuration file."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor

from meshmark.adapter.contract import Feature
from meshmark.adapter.engine import RankContext, initial_model
from meshmark.adapters.deepspeed.replicated import DeepSpeedZero0, ReplicatedEngine
from meshmark.adapters.deepspeed.variants import DeepSpeedOffloadParams, DeepSpeedSeparateGradients
from meshmark.adapters.fabric import FabricDDP, FabricFSDP
from meshmark.adapters.fabric.deepspeed import FabricDeepSpeed, FabricDeepSpeedEngine, on_cpu
from meshmark.adapters.fsdp1 import FSDP1Hybrid, FSDP1ShardGradOp
from meshmark.models.module import Model, block_classes
from meshmark.reference.objective import Schedule, build_schedule
from meshmark.spec.case import Case
from meshmark.spec.known_gap import KnownGap
from meshmark.spec.layout import Recompute
from meshmark.spec.precision import Dtype, Precision


class FabricDDPPrecision(FabricDDP):
    """`DDPStrategy(precision=...)`: a plugin, where `Fabric(precision=...)` takes its name."""

    capabilities: ClassVar = dataclasses.replace(FabricDDP.capabilities, precisions=frozenset({Precision.BF16}))

    def choices(self, case: Case) -> dict[str, Any]:
        from lightning_fabric.plugins.precision import MixedPrecision

        return {"precision": MixedPrecision("bf16-mixed", device="cpu")}


class FabricFSDPShardGradOp(FabricFSDP):
    """`sharding_strategy="SHARD_GRAD_OP"` and `state_dict_type="full"`: the first rank writes the checkpoint."""

    strategy: ClassVar = FSDP1ShardGradOp.strategy
    sharding: ClassVar = FSDP1ShardGradOp.sharding
    known_gaps: ClassVar = tuple(
        KnownGap(
            clause=clause,
            symptom=symptom,
            reason="PyTorch's whole state dict crashes if it is offloaded to the CPU, where the weights are already",
            reproducer="fsdp1_full_state_dict_on_cpu",
        )
        for clause, symptom in {
            "resume": "SIGSEGV",
            "reshard": "SIGSEGV",
            "recovery": "does not point to a valid checkpoint",
        }.items()
    )

    def choices(self, case: Case) -> dict[str, Any]:
        from lightning_fabric.plugins.precision import FSDPPrecision

        return {"state_dict_type": "full", "precision": FSDPPrecision("32-true")}


class FabricFSDPHybrid(FabricFSDP):
    """`sharding_strategy="HYBRID_SHARD"` over a `device_mesh`: two replicas, each sharded."""

    strategy: ClassVar = FSDP1Hybrid.strategy
    sharding: ClassVar = FSDP1Hybrid.sharding

    def choices(self, case: Case) -> dict[str, Any]:
        from torch.distributed.device_mesh import init_device_mesh

        replicas = self.sharding.replicas
        sizes = replicas, case.layout.dp // replicas
        return {"device_mesh": init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards"))}


class FabricFSDPRecomputes(FabricFSDP):
    """`activation_checkpointing_policy`: blocks are computed again, by PyTorch's wrapper inside FSDP's."""

    capabilities: ClassVar = dataclasses.replace(
        FabricFSDP.capabilities,
        recomputes=frozenset({Recompute.NONE, Recompute.FULL}),
        precisions=frozenset({Precision.FP32}),
    )

    def choices(self, case: Case) -> dict[str, Any]:
        if case.layout.recompute is Recompute.NONE:
            return {}
        return {"activation_checkpointing_policy": block_classes(case.workload.model)}

    def model(self, case: Case, context: RankContext) -> Model:
        plain = dataclasses.replace(case, layout=dataclasses.replace(case.layout, recompute=Recompute.NONE))
        return initial_model(plain, context.device)


class FabricDeepSpeedArguments(FabricDeepSpeed):
    """`DeepSpeedStrategy` by its arguments, in the place of a configuration."""

    def arguments(self, case: Case, config: dict[str, Any]) -> dict[str, Any]:
        """Return arguments that say what the configuration does."""
        from lightning_fabric.plugins.precision import DeepSpeedPrecision

        bucket = config["zero_optimization"]["reduce_bucket_size"]
        return {
            "stage": case.layout.zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "overlap_comm": False,
            "sub_group_size": 2 * bucket,
            "exclude_frozen_parameters": True,
            "logging_batch_size_per_gpu": config["train_micro_batch_size_per_gpu"],
            "precision": DeepSpeedPrecision("bf16-true" if case.precision.compute is Dtype.BF16 else "32-true"),
        }

    def strategy(self, case: Case, context: RankContext) -> Any:  # noqa: ANN401
        """Return the strategy. Options without an argument are set in the configuration that Fabric makes."""
        config = self.config(case, context)
        strategy = on_cpu()(**self.arguments(case, config))
        made = strategy.config
        for name, value in config.pop("zero_optimization").items():
            made["zero_optimization"].setdefault(name, value)
        del config["bf16"], config["fp16"]  # which the precision says
        strategy.config = {**config, **made}
        return strategy


class FabricDeepSpeedOffloads(DeepSpeedOffloadParams, FabricDeepSpeedArguments):
    """`offload_optimizer` and `offload_parameters`, with the sizes of their buffers."""

    requires: ClassVar = FabricDeepSpeed.requires
    capabilities: ClassVar = dataclasses.replace(
        DeepSpeedOffloadParams.capabilities,
        precisions=FabricDeepSpeed.capabilities.precisions,
        lacks={**DeepSpeedOffloadParams.capabilities.lacks, **FabricDeepSpeed.capabilities.lacks},
    )

    def arguments(self, case: Case, config: dict[str, Any]) -> dict[str, Any]:
        offloads = {
            "offload_optimizer": True,
            "offload_parameters": True,
            "params_buffer_count": 4,
            "params_buffer_size": 2**20,
            "optimizer_buffer_count": 3,
            "max_in_cpu": 2**20,
        }
        return {**super().arguments(case, config), **offloads}


class FabricDeepSpeedSeparate(DeepSpeedSeparateGradients, FabricDeepSpeedArguments):
    """`contiguous_gradients=False` and `reduce_scatter=False`: gradients are all-reduced from where they are."""

    requires: ClassVar = FabricDeepSpeed.requires
    capabilities: ClassVar = dataclasses.replace(
        FabricDeepSpeed.capabilities, zero_stages=DeepSpeedSeparateGradients.capabilities.zero_stages
    )

    def arguments(self, case: Case, config: dict[str, Any]) -> dict[str, Any]:
        return {**super().arguments(case, config), "contiguous_gradients": False, "reduce_scatter": False}


class FabricReplicatedEngine(ReplicatedEngine, FabricDeepSpeedEngine):
    """Nothing is sharded, so that DeepSpeed wraps no optimizer."""

    def make_schedule(self) -> Schedule | None:
        return build_schedule(self.case.workload.optimizer, self.optimizer)

    def update(self) -> Tensor | None:
        self.prepared.step()
        self.prepared.zero_grad()
        self.advance_schedule()
        return None


class FabricDeepSpeedZero0(DeepSpeedZero0, FabricDeepSpeedArguments):
    """`zero_optimization=False`: every rank has all states, and DeepSpeed's engine reduces gradients."""

    through: ClassVar = FabricReplicatedEngine
    requires: ClassVar = FabricDeepSpeed.requires
    capabilities: ClassVar = dataclasses.replace(
        DeepSpeedZero0.capabilities,
        devices=FabricDeepSpeed.capabilities.devices,
        lacks={
            **{k: why for k, why in FabricDeepSpeed.capabilities.lacks.items() if k is not Feature.UNFREEZE},
            **DeepSpeedZero0.capabilities.lacks,
        },
    )

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if case.workload.optimizer.clip_norm is not None:
            # adapters/gaps/fabric_deepspeed_step.py
            why = "without ZeRO the engine's own step clips, which Fabric passes by"
            return f"{case.adapter} does not support clipping ({why})"
        return super().supports(case, device, backend)

    def strategy(self, case: Case, context: RankContext) -> Any:  # noqa: ANN401
        config = self.config(case, context)
        strategy = on_cpu()(
            zero_optimization=False, logging_batch_size_per_gpu=config["train_micro_batch_size_per_gpu"]
        )
        for name in ("zero_optimization", "bf16", "fp16"):
            del config[name]
        strategy.config = {**config, **strategy.config}
        return strategy
