"""What stands in for CUDA in torchtitan 0.3.0, and for a PyTorch after 2.13.

It takes CUDA where PyTorch finds no accelerator, and looks once, when it is first imported: this module must be
imported before.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn


def _import_for_cpu() -> None:
    """Import torchtitan where it looks for an accelerator, and let it find the CPU."""
    found = torch._utils._get_available_device_type
    torch._utils._get_available_device_type = lambda: "cpu"
    try:
        import torchtitan.tools.utils  # noqa: F401
    finally:
        torch._utils._get_available_device_type = found


_import_for_cpu()


class NoDeviceMemory:
    """Torchtitan's monitor of a device's memory, of a device that keeps no statistics."""

    device_name = "cpu"

    def get_peak_stats(self) -> Any:  # noqa: ANN401
        from torchtitan.components.metrics import DeviceMemStats

        return DeviceMemStats(*[0] * len(DeviceMemStats._fields))

    def reset_peak_stats(self) -> None:
        """Nothing is counted."""


def stand_in_for_cuda() -> None:
    """Replace the two functions of torchtitan that know no CPU."""
    from torchtitan.components import metrics
    from torchtitan.distributed import utils

    metrics.build_device_memory_monitor = NoDeviceMemory
    # It begins with a barrier that names CUDA's device, which gloo refuses. Time limits stay those of Meshmark.
    utils.set_pg_timeouts = lambda *args, **kwargs: None


def sum_gradients(model: nn.Module) -> nn.Module:
    """Have FSDP2 add gradients up by a plain sum, after torchtitan has set its divisor to one.

    It would otherwise use NCCL's sum of products, which gloo lacks.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def take_micro_batches(schedule: Any) -> None:  # noqa: ANN401
    """Let `schedule.step` take a list of micro-batches, as torchtitan calls it and PyTorch 2.13 does not have it.

    What runs is the same: PyTorch's `step` splits a batch, and calls what this calls.
    """
    if "arg_mbs" in inspect.signature(schedule.step).parameters:
        return

    def step(
        *,
        arg_mbs: list[Any] | None,
        kwarg_mbs: list[Any],
        target_mbs: list[Tensor] | None,
        losses: list[Tensor] | None,
        loss_kwargs: dict[str, Any],
        return_outputs: bool,
    ) -> None:
        schedule._stage.has_backward = True
        schedule._stage.clear_runtime_states()
        schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs)

    schedule.step = step
