"""DeepSpeed and Accelerate, which own reduction, clipping and accumulation: told the wrong thing, or nothing where
their defaults are not what was asked for."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

from torch import Tensor

from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import Engine, RankContext
from meshmark.reference.data import Batch
from meshmark.spec.case import Case
from tests.broken.engine import ONE_NORM, Broken


class ByMicroBatches(Broken):
    """DeepSpeed divides by the number of micro-batches what is a share already."""

    def differentiate(self, loss: Tensor) -> None:
        self.module.backward(loss)


class AccelerateDivides(Broken):
    """Accelerate does, and nobody multiplies by it first."""

    def differentiate(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)


class AcceleratesDefault(Adapter):
    """Accelerate without `split_batches`: every rank's batch counts for a step of the schedule."""

    def build(self, case: Case, context: RankContext) -> Engine:
        modules = [importlib.import_module(f"meshmark.adapters.accelerate{name}") for name in ("", ".prepare")]
        configuration = type(modules[0].whole_batches())
        with contextlib.ExitStack() as stack:
            for module in modules:  # whichever makes the Accelerator
                stack.enter_context(
                    mock.patch.object(module, "whole_batches", lambda: configuration(split_batches=False))
                )
            engine: Any = super().build(case, context)  # type: ignore[safe-super]
        assert not engine.accelerator.split_batches, "it would be no mutant"
        return engine  # type: ignore[no-any-return]


class DeepSpeedsDefault(Adapter):
    """DeepSpeed's defaults in bf16: gradients are accumulated and reduced in bf16."""

    def build(self, case: Case, context: RankContext) -> Engine:
        import meshmark.adapters.deepspeed as module

        real = module.ds_config

        def config(case: Case, zero: Mapping[str, Any]) -> dict[str, Any]:
            left = real(case, zero)
            del left["communication_data_type"], left["data_types"]
            return left

        with mock.patch.object(module, "ds_config", config):
            return super().build(case, context)  # type: ignore[safe-super]


class HookedScale(Broken):
    """A hook scales one norm's gradient before anything is reduced."""

    def prepare(self) -> None:
        for name, parameter in self.named():
            if name == ONE_NORM:
                parameter.register_hook(lambda grad: grad * (1 + 1e-5))


class ZeroNotReduced(Broken):
    """DeepSpeed's gradients are not summed over ranks."""

    def prepare(self) -> None:
        from deepspeed.runtime.zero import stage_1_and_2

        self.real, self.place = stage_1_and_2.dist, stage_1_and_2

    def backward(self, batch: Batch) -> Tensor:
        self.place.dist = _Some(self.real, lambda tensor: tensor.numel() == 1)
        loss = super().backward(batch)
        self.place.dist = self.real
        return loss


class _Some:
    """Collectives, less those all-reduces of which `kept` says no."""

    def __init__(self, real: Any, kept: Callable[[Tensor], bool]) -> None:  # noqa: ANN401
        self.real, self.kept = real, kept

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self.real, name)

    def all_reduce(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return self.real.all_reduce(tensor, *args, **kwargs) if self.kept(tensor) else None


class ClipsByOwnNorm(Broken):
    """DeepSpeed: each rank clips by the norm of its own partition (DeepSpeed#1801)."""

    def prepare(self) -> None:
        from deepspeed.runtime.zero import stage3, stage_1_and_2

        for module in (stage_1_and_2, stage3):
            module.dist = _Some(module.dist, lambda tensor: tensor.numel() > 1)
