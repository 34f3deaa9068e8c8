"""ZeRO-Infinity (arXiv:2104.07857): stage 3 with optimizer states and weight shards in files, loaded when needed.

Files are in the case's scratch folder, so the user chooses the NVMe disk by the place of the results.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from meshmark.adapter.contract import Feature
from meshmark.adapter.engine import Engine, Holdings, RankContext
from meshmark.adapters.deepspeed import STAGE_3_GAPS
from meshmark.adapters.deepspeed.engine import DeepSpeedEngine
from meshmark.adapters.deepspeed.operators import load, missing
from meshmark.adapters.deepspeed.variants import DeepSpeedOffload
from meshmark.errors import AdapterError
from meshmark.models.module import Model, parameter_shapes
from meshmark.spec.case import Case
from meshmark.spec.layout import Offload
from meshmark.spec.precision import Precision
from meshmark.theory.memory import ExtraMemory

OPERATORS = ("cpu_adam", "pin_memory", "async_io")
SMALLEST = 1024**2
"""Bytes: what is smaller, of a rank's share of a tensor or of all states of a group, stays in memory
(`MIN_SWAPPABLE_BYTES`)."""
_ALIGNED = 1024
"""Bytes: files are written in multiples of it (`AIO_ALIGNED_BYTES`)."""

_SECTOR = 512
"""Bytes (`O_DIRECT_ALIGNMENT`)."""


class InfinityEngine(DeepSpeedEngine):
    def files(self) -> Iterator[tuple[Path, int]]:
        """Yield every file that this rank has swapped out, and its number of elements."""
        swapper = self.zero.optimizer_swapper
        for info in swapper.swap_params_info.values():
            yield from ((Path(path), info.numel()) for path in info.get_swap_paths())
        for parameter in self.swapped():
            yield Path(parameter.nvme_swapper.get_path(parameter, must_exist=True)), parameter.ds_tensor.ds_numel

    def swapped(self) -> list[Any]:
        """Parameters whose shard is in a file."""
        parameters: list[Any] = [parameter for _, parameter in self.named_parameters()]
        return [p for p in parameters if p.ds_tensor.final_location == "nvme"]

    def prove(self) -> None:
        """Raise `AdapterError` unless the states of all large enough groups and tensors are in files of their size.

        No other measurement on a CPU would show whether they are.
        """
        rank, found = self.context.rank, {path: numel for path, numel in self.files()}
        expected = sum(num_bytes >= SMALLEST for num_bytes in shard_bytes(self.case))
        swapped, groups = len(self.swapped()), len(self.zero.optimizer_swapper.swap_params_info)
        if swapped != expected or not groups:
            raise AdapterError(
                f"rank {rank}: DeepSpeed swaps shards of {swapped} tensors, expected {expected}, and states of "
                f"{groups} groups, expected 1 or more"
            )
        for path, numel in found.items():
            if not path.is_file() or path.stat().st_size < numel * self.case.precision.weights.itemsize:
                raise AdapterError(f"rank {rank}: DeepSpeed has written no whole {path.name}")

    def holdings(self) -> Holdings:
        """Return the holdings, without swapped-out tensors, which have no storage."""
        held = super().holdings()
        return dataclasses.replace(held, parameters=_in_memory(held.parameters))


def _in_memory(tensors: list[Tensor]) -> list[Tensor]:
    return [t for t in tensors if t.dim()]


class DeepSpeedInfinity(DeepSpeedOffload):
    engine: ClassVar = InfinityEngine
    capabilities: ClassVar = dataclasses.replace(
        DeepSpeedOffload.capabilities,
        zero_stages=frozenset({3}),
        offloads=frozenset({Offload.NVME}),
        devices=frozenset({"cpu"}),  # where the host's memory is the device's: of a GPU it is not planned
        precisions=frozenset({Precision.FP32}),
        lacks={
            **DeepSpeedOffload.capabilities.lacks,
            Precision.BF16: "not tried",
            Precision.FP16: "not tried",
            Feature.RESHARD: "a checkpoint's states are files of one rank's share",
        },
    )
    known_gaps: ClassVar = STAGE_3_GAPS

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        """Return why the case is not supported, such as that DeepSpeed would swap nothing, or None."""
        if reason := super(DeepSpeedOffload, cls).supports(case, device, backend) or missing(*OPERATORS):
            return reason
        largest = max(shard_bytes(case))
        if largest < SMALLEST:
            return (
                f"DeepSpeed swaps nothing under {SMALLEST:,} bytes, and a rank's share of the largest tensor of "
                f"{case.workload.model.name} is {largest:,.0f}"
            )
        return _at_odd_addresses(case)

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        gone = -sum(num_bytes for num_bytes in shard_bytes(case) if num_bytes >= SMALLEST)
        return (ExtraMemory(category="parameters", num_bytes=gone, reason="shards of 1 MiB and more are in files"),)

    def zero_options(self, case: Case, context: RankContext) -> dict[str, Any]:
        home = {"device": "nvme", "nvme_path": str(context.scratch / "infinity"), "pin_memory": False}
        largest = int(max(shard_bytes(case))) // case.precision.weights.itemsize
        return {
            **super().zero_options(case, context),
            "offload_optimizer": home,
            "offload_param": {**home, "buffer_size": largest + -largest % _ALIGNED, "max_in_cpu": 0},
        }

    def model(self, case: Case, context: RankContext) -> Model:
        """Build the model within `zero.Init`, as in ZeRO-Infinity's tutorial.

        The files that DeepSpeed itself makes of a whole model are in bf16 if the device does not support fp16
        (adapters/gaps/deepspeed_nvme_dtype.py).
        """
        import deepspeed

        deepspeed.init_distributed(dist_backend=context.backend, auto_mpi_discovery=False)
        model = super().model(case, context)
        deepspeed.zero.Init(
            module=model, config_dict_or_path=self.config(case, context), remote_device="nvme", pin_memory=False
        )
        return model

    def build(self, case: Case, context: RankContext) -> Engine:
        load(*OPERATORS)
        engine = super().build(case, context)
        assert isinstance(engine, InfinityEngine)
        engine.prove()
        return engine


def _at_odd_addresses(case: Case) -> str | None:
    """Return why gradients cannot be read back, or None (adapters/gaps/deepspeed_async_io_alignment.py).

    Each gradient is read to its place among those of its group, which must be at a multiple of a disk's sectors.
    """
    names, starts = [*parameter_shapes(case.workload.model)], dict.fromkeys((False, True), 0.0)
    for name, num_bytes in zip(names, shard_bytes(case), strict=True):
        if not case.workload.trains(name):
            continue
        group = case.workload.optimizer.decays(name)
        if num_bytes >= SMALLEST and starts[group] % _SECTOR:
            return (
                f"DeepSpeed reads a gradient back to a multiple of {_SECTOR} bytes alone, and that of {name} is at none"
            )
        starts[group] += num_bytes
    return None


def shard_bytes(case: Case) -> list[float]:
    """Return the bytes of a rank's padded share of the weights of every tensor."""
    sizes, dp = map(math.prod, parameter_shapes(case.workload.model).values()), case.layout.dp
    return [(n + -n % dp) // dp * case.precision.weights.itemsize for n in sizes]
