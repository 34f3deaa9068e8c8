"""Lightning Fabric: its DDP and FSDP strategies, each set up in both ways that its documentation has.

`fabric-ddp` and `fabric-fsdp` call `setup(module, optimizer)`; the adapters ending in `-separate` call `setup_module`,
build the optimizer over what that returns, and call `setup_optimizers`. Everything goes through Fabric's own
`no_backward_sync`, `backward`, `clip_gradients`, `save` and `load`.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from meshmark.adapter.contract import Adapter, Arithmetic, Capabilities, Casting, Requirement
from meshmark.adapter.engine import AUTOCAST, DataParallelEngine, Engine, RankContext, initial_model
from meshmark.adapters.ddp import DDPEngine
from meshmark.adapters.fsdp1 import FSDP1, FSDP1Engine
from meshmark.errors import AdapterError
from meshmark.models.module import block_classes, block_of, buffer_shapes, parameter_shapes
from meshmark.models.transformer import Family
from meshmark.reference.objective import build_optimizer
from meshmark.spec.case import Case
from meshmark.spec.layout import Recompute
from meshmark.spec.precision import Dtype, Precision
from meshmark.theory.recipe import TrainingRecipe, eager_recipe
from meshmark.theory.traffic import Purpose, TrafficException, besides, step_traffic

FABRIC = (Requirement(module="lightning_fabric", distribution="lightning-fabric"),)
ON_CPU = frozenset({"cpu"})
"""Devices on which the adapters have been tested."""
_NO_SCALER = "on a CPU Fabric's 16-mixed makes no gradient scaler"


class ThroughFabric(DataParallelEngine):
    """`wrapped` and `prepared`: what Fabric made of module and optimizer. Of the former, `self.module` is the
    strategy's own wrapper; `self.optimizer` is PyTorch's."""

    def __init__(self, case: Case, context: RankContext, fabric: Any, wrapped: Any, prepared: Any) -> None:  # noqa: ANN401
        super().__init__(case, context, wrapped._forward_module, prepared.optimizer)
        self.fabric, self.wrapped, self.prepared = fabric, wrapped, prepared

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.wrapped(inputs)  # Fabric's precision wraps autocast around it, or the sharding casts
        return logits

    def differentiate(self, loss: Tensor) -> None:
        self.fabric.backward(loss)

    def finish_gradients(self) -> None:
        """Reduced within `backward`, and never scaled."""

    def update(self) -> Tensor | None:
        max_norm = self.case.workload.optimizer.clip_norm
        norm = None if max_norm is None else self.clip(max_norm)
        self.prepared.step()
        self.prepared.zero_grad()
        self.advance_schedule()
        return norm

    def clip(self, max_norm: float) -> Tensor:
        norm: Tensor = self.fabric.clip_gradients(self.wrapped, self.prepared, max_norm=max_norm)
        return norm

    def save(self, folder: Path) -> None:
        state = {"model": self.wrapped, "optimizer": self.prepared, "schedule": self.schedule_state()}
        self.fabric.save(folder / "checkpoint", state)
        self.fabric.barrier()

    def load(self, folder: Path) -> None:
        state = {"model": self.wrapped, "optimizer": self.prepared, "schedule": None}
        self.fabric.load(folder / "checkpoint", state)
        self.load_schedule(state["schedule"])


class FabricDDPEngine(ThroughFabric, DDPEngine):
    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        with self.fabric.no_backward_sync(self.wrapped, enabled=not last):
            yield


class FabricFSDPEngine(ThroughFabric, FSDP1Engine):
    """Reduces after every micro-batch: `no_backward_sync` would keep whole gradients."""


def launched(context: RankContext, strategy: Any, precision: str) -> Any:  # noqa: ANN401
    """Return a `Fabric` for processes that already run, as under torchrun.

    Raises `AdapterError` if it has another strategy.
    """
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment

    on_node = int(os.environ["LOCAL_WORLD_SIZE"])
    fabric = Fabric(
        accelerator=context.device.type,
        devices=on_node,
        num_nodes=context.world_size // on_node,
        strategy=strategy,
        precision=precision,
        plugins=[TorchElasticEnvironment()],
    )
    fabric.launch()
    if fabric.strategy is not strategy or fabric.world_size != context.world_size:
        raise AdapterError(f"Fabric runs {fabric.strategy} over {fabric.world_size} ranks, which was not asked for")
    return fabric


def set_up(fabric: Any, case: Case, model: nn.Module, together: bool) -> tuple[Any, Any]:  # noqa: ANN401
    """Return the model and the optimizer as wrapped by Fabric.

    The names behind the optimizer's groups are canonical.
    """
    spec = case.workload.optimizer
    if together:
        wrapped, prepared = fabric.setup(model, build_optimizer(spec, model.named_parameters()))
        return wrapped, prepared
    wrapped = fabric.setup_module(model)
    named = ((canonical(name), parameter) for name, parameter in wrapped.named_parameters())
    return wrapped, fabric.setup_optimizers(build_optimizer(spec, named))


def canonical(name: str) -> str:
    """Return a parameter's name without the wrappers of Fabric, DDP and FSDP1 on its way."""
    wrappers = ("_forward_module", "_original_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
    return ".".join(part for part in name.split(".") if part not in wrappers).removeprefix("module.")


class FabricDDP(Adapter):
    """Fabric's `DDPStrategy`; model and optimizer are set up together by `setup`."""

    requires: ClassVar = FABRIC
    together: ClassVar = True
    """`setup(module, optimizer)`, the first of the two documented ways."""
    arithmetic: ClassVar = Arithmetic(casting=Casting.AUTOCAST)
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}),
        families=frozenset(Family),
        devices=ON_CPU,
        precisions=frozenset({Precision.FP32, Precision.BF16}),
        lacks={
            Precision.FP16: _NO_SCALER,
            # adapters/gaps/fabric_double_outputs.py
            Precision.FP64: "Fabric's 64-true rounds what the model returns to float32",
            Precision.BF16_REDUCE_BF16: "its comm hook would be PyTorch's own, which DDP lets run on NCCL alone",
        },
    )

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        return eager_recipe(case, "eager-ddp")

    def choices(self, case: Case) -> dict[str, Any]:
        """Return the further arguments of Fabric's strategy that a variant has."""
        return {}

    def build(self, case: Case, context: RankContext) -> Engine:
        from lightning_fabric.strategies import DDPStrategy

        strategy = DDPStrategy(
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # each replica keeps its own statistics, as the workload defines them
            find_unused_parameters=case.workload.leaves_unused,
            **self.choices(case),
        )
        precision = "bf16-mixed" if case.precision.compute is Dtype.BF16 else "32-true"
        fabric = launched(context, strategy, precision)
        wrapped, prepared = set_up(fabric, case, initial_model(case, context.device), self.together)
        return FabricDDPEngine(case, context, fabric, wrapped, prepared)


class FabricDDPSeparate(FabricDDP):
    """Fabric's `DDPStrategy`; model and optimizer are set up by `setup_module` and `setup_optimizers`."""

    together: ClassVar = False


class FabricFSDP(FSDP1):
    """Fabric's `FSDPStrategy` with an `auto_wrap_policy` for blocks; model and optimizer are set up together.

    Fabric refuses the strategy on a CPU, but not a subclass of it. The subclass here names the device, which Fabric
    leaves out if it has no index.
    """

    requires: ClassVar = FABRIC
    together: ClassVar = True
    capabilities: ClassVar = Capabilities(
        degrees=FSDP1.capabilities.degrees,
        zero_stages=FSDP1.capabilities.zero_stages,
        families=FSDP1.capabilities.families,
        devices=ON_CPU,
        recomputes=frozenset({Recompute.NONE}),
        precisions=frozenset({Precision.FP32, Precision.BF16, Precision.BF16_REDUCE_BF16}),
        lacks={**FSDP1.capabilities.lacks, Precision.FP16: _NO_SCALER},
    )

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if case.workload.couples_rows and case.precision.is_mixed:
            return "PyTorch keeps batch norms apart and in float32 under a policy of wrapping: not planned"
        return super().supports(case, device, backend)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """PyTorch makes units of their own of batch norms where it is given a precision beside a policy of wrapping, as
        it is by Fabric in float32 too."""
        norms = _batch_norms(case).items()
        outside = sum(math.prod(shape) for name, shape in norms if not block_of(case.workload.model, name))
        share = Fraction(outside, 2 * case.workload.model.num_parameters)
        reason = "a batch norm in no block is a unit of its own, gathered again for its backward"
        again = besides(step_traffic(case, rank), Purpose.WEIGHTS, share, reason)
        return (*super().traffic_exceptions(case, rank), *again)

    def build(self, case: Case, context: RankContext) -> Engine:
        from lightning_fabric.strategies import FSDPStrategy
        from lightning_fabric.strategies.fsdp import _setup_activation_checkpointing
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

        class Strategy(FSDPStrategy):  # type: ignore[misc]
            def setup_module(self, module: nn.Module) -> nn.Module:
                made: nn.Module = FullyShardedDataParallel(
                    module,
                    mixed_precision=self.mixed_precision_config,
                    sharding_strategy=self.sharding_strategy,
                    device_id=context.device,
                    cpu_offload=self.cpu_offload,
                    **self._fsdp_kwargs,
                )
                _setup_activation_checkpointing(made, self._activation_checkpointing_kwargs)
                return made

        low, reduced = AUTOCAST.get(case.precision.compute), getattr(torch, case.precision.reduction)
        arguments: dict[str, Any] = {
            "auto_wrap_policy": block_classes(case.workload.model),
            "sharding_strategy": self.strategy,
            "mixed_precision": MixedPrecision(param_dtype=low, reduce_dtype=reduced) if low else None,
            "state_dict_type": "sharded",
        }
        fabric = launched(context, Strategy(**{**arguments, **self.choices(case)}), "32-true")
        wrapped, prepared = set_up(fabric, case, self.model(case, context), self.together)
        return FabricFSDPEngine(case, context, fabric, wrapped, prepared)


def _batch_norms(case: Case) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of modules that keep running statistics."""
    buffers = (name.rpartition(".") for name in buffer_shapes(case.workload.model))
    keeping = {module for module, _, name in buffers if name == "running_mean"}  # others keep tables, of positions say
    shapes = parameter_shapes(case.workload.model)
    return {name: shape for name, shape in shapes.items() if name.rpartition(".")[0] in keeping}


class FabricFSDPSeparate(FabricFSDP):
    """Fabric's `FSDPStrategy`; model and optimizer are set up by `setup_module` and `setup_optimizers`."""

    together: ClassVar = False
