"""Lightning Fabric's `DeepSpeedStrategy`, by DeepSpeed's configuration of the adapter `deepspeed`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshmark.adapter.contract import Feature, Requirement
from meshmark.adapter.engine import Engine, RankContext, initial_model
from meshmark.adapters.deepspeed import DeepSpeed
from meshmark.adapters.deepspeed.config import prepare
from meshmark.adapters.deepspeed.engine import DeepSpeedEngine, initialize, is_deepspeed
from meshmark.adapters.fabric import FABRIC, ON_CPU, ThroughFabric, launched
from meshmark.errors import AdapterError
from meshmark.reference.objective import Schedule, build_optimizer, build_schedule
from meshmark.spec.case import Case
from meshmark.spec.precision import Dtype, Precision


class FabricDeepSpeedEngine(ThroughFabric, DeepSpeedEngine):
    """Fabric's `step` calls ZeRO's optimizer, not the engine (adapters/gaps/fabric_deepspeed_step.py). The engine
    therefore counts no micro-batches and steps no schedule. This engine marks the last micro-batch of a step by
    `set_gradient_accumulation_boundary`, and steps the user's schedule, as Fabric's documentation does."""

    def make_schedule(self) -> Schedule | None:
        return build_schedule(self.case.workload.optimizer, self.zero.optimizer)

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        self.module.set_gradient_accumulation_boundary(last)
        yield

    def update(self) -> Tensor | None:
        """Clipped by the configuration's norm: Fabric's `clip_gradients` refuses DeepSpeed."""
        self.prepared.step()
        self.prepared.zero_grad()
        self.advance_schedule()
        norm = self.zero._global_grad_norm
        return None if norm is None else torch.as_tensor(norm)


class FabricDeepSpeed(DeepSpeed):
    """Fabric takes DeepSpeed for CUDA's alone: it asks for the accelerator by type, and for every device's index. A
    subclass that asks for neither runs on a CPU."""

    through: ClassVar[type[FabricDeepSpeedEngine]] = FabricDeepSpeedEngine
    requires: ClassVar = (*FABRIC, Requirement(module="deepspeed", distribution="deepspeed"))
    capabilities: ClassVar = dataclasses.replace(
        DeepSpeed.capabilities,
        devices=ON_CPU,
        precisions=frozenset({Precision.FP32, Precision.BF16}),
        lacks={
            **DeepSpeed.capabilities.lacks,
            Precision.FP16: "DeepSpeed runs it on CUDA alone, which this adapter has not been tried on",
            Feature.RESHARD: "Fabric's load reads no universal checkpoints of DeepSpeed",
        },
    )

    def config(self, case: Case, context: RankContext) -> dict[str, Any]:
        """A backward pass counts as a step, so that its loss is not divided."""
        config = super().config(case, context)
        del config["train_batch_size"]
        return {**config, "gradient_accumulation_steps": 1}

    def strategy(self, case: Case, context: RankContext) -> Any:  # noqa: ANN401
        """Return Fabric's strategy."""
        return on_cpu()(config=self.config(case, context))

    def build(self, case: Case, context: RankContext) -> Engine:
        prepare(context)
        precision = "bf16-true" if case.precision.compute is Dtype.BF16 else "32-true"
        fabric = launched(context, self.strategy(case, context), precision)
        model = initial_model(case, context.device)
        wrapped, prepared = fabric.setup(model, build_optimizer(case.workload.optimizer, model.named_parameters()))
        module = wrapped._forward_module
        if not is_deepspeed(module) or module.zero_optimization_stage() != case.layout.zero_stage:
            raise AdapterError(
                f"rank {context.rank}: Fabric runs a {type(module).__name__} where DeepSpeed's ZeRO stage "
                f"{case.layout.zero_stage} was asked for"
            )
        engine = self.through(case, context, fabric, wrapped, prepared)
        engine.restore_masters()
        return engine


def on_cpu() -> type[Any]:
    """Return Fabric's strategy, but for what it asks of CUDA."""
    from lightning_fabric.strategies import DDPStrategy, DeepSpeedStrategy

    class Strategy(DeepSpeedStrategy):  # type: ignore[misc]
        def setup_environment(self) -> None:
            DDPStrategy.setup_environment(self)

        def _setup_distributed(self) -> None:
            self._set_world_ranks()
            self._init_deepspeed_distributed()
            self._format_config()
            self._config_initialized = True

        def _initialize_engine(self, model: Any, optimizer: Any = None, scheduler: Any = None) -> tuple[Any, ...]:  # noqa: ANN401
            return initialize(model, optimizer, scheduler, self.config)

    return Strategy
