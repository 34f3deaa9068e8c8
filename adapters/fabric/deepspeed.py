"""Lightning Fabric's `DeepSpeedStrategy`, by DeepSpeed's configuration of the adapter `deepspeed`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from meshmark.adapter.arithmetic import Arithmetic, Casting
from meshmark.adapter.capabilities import Feature, Requirement
from meshmark.adapter.data_parallel import initial_model
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapters.deepspeed import DeepSpeed
from meshmark.adapters.deepspeed.config import prepare
from meshmark.adapters.deepspeed.engine import DeepSpeedEngine, is_deepspeed
from meshmark.adapters.fabric import FABRIC, ON_CPU, ThroughFabric, launched
from meshmark.errors import AdapterError
from meshmark.reference.objective import build_optimizer, build_schedule
from meshmark.spec.case import Case
from meshmark.spec.precision import Dtype, Precision


class FabricDeepSpeedEngine(ThroughFabric, DeepSpeedEngine):
    """Steps after every micro-batch, as Fabric's documentation has it: DeepSpeed counts them."""

    def make_schedule(self) -> None:
        """DeepSpeed steps the one that it was given."""

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        yield
        if not last:
            self.prepared.step()

    def differentiate(self, loss: Tensor) -> None:
        """DeepSpeed divides the loss by the number of micro-batches, which Fabric does not let it be told not to."""
        self.fabric.backward(loss * self.case.layout.num_micro_batches)

    def update(self) -> Tensor | None:
        """Clipped by the configuration's norm: Fabric's `clip_gradients` refuses DeepSpeed."""
        self.prepared.step()
        norm = self.module.get_global_grad_norm()
        return None if norm is None else torch.as_tensor(norm)

    def save(self, folder: Path) -> None:
        self.fabric.save(folder / "checkpoint", {"model": self.wrapped, "optimizer": self.prepared})

    def load(self, folder: Path) -> None:
        self.fabric.load(folder / "checkpoint", {"model": self.wrapped, "optimizer": self.prepared})


class FabricDeepSpeed(DeepSpeed):
    """Fabric takes DeepSpeed for CUDA's alone: it asks for the accelerator by type, and for every device's index. A
    subclass that asks for neither runs on a CPU."""

    requires: ClassVar = (*FABRIC, Requirement(module="deepspeed", distribution="deepspeed"))
    arithmetic: ClassVar = Arithmetic(casting=Casting.WEIGHTS, divides=True)
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

    def build(self, case: Case, context: RankContext) -> Engine:
        prepare(context)
        from lightning_fabric.strategies import DDPStrategy, DeepSpeedStrategy

        class Strategy(DeepSpeedStrategy):  # type: ignore[misc]
            def setup_environment(self) -> None:
                super(DDPStrategy, self).setup_environment()
                self._set_world_ranks()
                self._init_deepspeed_distributed()
                self._format_config()
                self._config_initialized = True

        precision = "bf16-mixed" if case.precision.compute is Dtype.BF16 else "32-true"
        fabric = launched(context, Strategy(config=self.config(case, context)), precision)
        model, spec = initial_model(case, context.device), case.workload.optimizer
        optimizer = build_optimizer(spec, model.named_parameters())
        wrapped, prepared, *_ = fabric.setup(model, optimizer, scheduler=build_schedule(spec, optimizer))
        module = wrapped._forward_module
        if not is_deepspeed(module) or module.zero_optimization_stage() != case.layout.zero_stage:
            raise AdapterError(
                f"rank {context.rank}: Fabric runs a {type(module).__name__} where DeepSpeed's ZeRO stage "
                f"{case.layout.zero_stage} was asked for"
            )
        engine = FabricDeepSpeedEngine(case, context, fabric, wrapped, prepared)
        engine.restore_masters()
        return engine
