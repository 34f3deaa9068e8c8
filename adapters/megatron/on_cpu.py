"""megatron-core without CUDA: the few places that take a GPU for granted, and what stands there on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class CudaNamesOnCPU(TorchFunctionMode):
    """megatron-core's clipping works on any device but writes "cuda" into it: scratch tensors are made on "cuda", and
    gradients must be `torch.cuda.FloatTensor`. Within this mode, "cuda" means the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if func is Tensor.type and isinstance(result, str) else result


@contextlib.contextmanager
def _standing_in(module: ModuleType, **functions: Callable[..., object]) -> Iterator[None]:
    """`functions` in place of the module's own for a while, in this rank's process."""
    kept = {name: getattr(module, name) for name in functions}
    vars(module).update(functions)
    try:
        yield
    finally:
        vars(module).update(kept)


def checkpointing_on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Checkpoints wait for CUDA and put a flag on its current device; without CUDA, neither."""
    if device.type == "cuda":
        return contextlib.nullcontext()
    return _standing_in(torch.cuda, synchronize=lambda *_: None, current_device=lambda: "cpu")


def seed(device: torch.device, number: int) -> None:
    """Megatron's random states: one shared by all tensor-parallel ranks, one of each rank's own. They are states of
    CUDA's generator; without CUDA, of the CPU's."""
    from megatron.core.tensor_parallel import random

    if device.type == "cuda":
        random.model_parallel_cuda_manual_seed(number)
        return
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    with _standing_in(torch.cuda, manual_seed=torch.manual_seed, get_rng_state=torch.get_rng_state):
        random.model_parallel_cuda_manual_seed(number)
