"""FairScale's FSDP on a CPU: it takes CUDA for granted."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _NoStream:
    """Replacement for FairScale's CUDA streams on a device that has none."""

    def wait_stream(self, other: _NoStream) -> None:
        pass


_NO_STREAM = _NoStream()


class _TorchWithoutStreams(types.ModuleType):
    """`torch`, with as much of `torch.cuda` as FairScale's FSDP takes for granted, doing nothing."""

    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        Stream=lambda: _NO_STREAM,
        current_stream=lambda: _NO_STREAM,
        stream=lambda stream: contextlib.nullcontext(),
        synchronize=lambda: None,
    )

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(torch, name)


class StayOnCPU(TorchFunctionMode):
    """Within this mode `Tensor.cuda` leaves a tensor where it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        return args[0] if func is Tensor.cuda else func(*args, **(kwargs or {}))


def run_without_cuda() -> None:
    """Let FairScale's FSDP run on the CPU, whose work is in order as if on one stream. Two patches, both without effect
    on values: the `torch` that its module sees, and `record_stream`, which CPU tensors do not implement."""
    from fairscale.nn.data_parallel import fully_sharded_data_parallel

    fully_sharded_data_parallel.torch = _TorchWithoutStreams("torch")
    Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign,assignment]
