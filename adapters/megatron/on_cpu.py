"""megatron-core without CUDA: the few places that take a GPU for granted, and what stands there on a CPU."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class CudaNamesOnCPU(TorchFunctionMode):
    """megatron-core works on any device but writes "cuda" into what it does: masks and scratch tensors are made on
    "cuda", `.cuda()` moves what is there already, and gradients must be `torch.cuda.FloatTensor`. Within this mode,
    "cuda" means the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        if func is Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if func is Tensor.type and isinstance(result, str) else result


@contextlib.contextmanager
def _replaced(module: ModuleType, **functions: Callable[..., object]) -> Iterator[None]:
    """`functions` in place of the module's own for a while, in this rank's process."""
    kept = {name: getattr(module, name) for name in functions}
    vars(module).update(functions)
    try:
        yield
    finally:
        vars(module).update(kept)


@contextlib.contextmanager
def cuda_is(device: torch.device) -> Iterator[None]:
    """Make megatron-core compute on `device` within the context."""
    if device.type == "cuda":
        yield
        return
    cuda = _replaced(torch.cuda, synchronize=lambda *_: None, current_device=lambda: "cpu")
    backward = _replaced(torch.autograd, _engine_run_backward=_within(torch.autograd._engine_run_backward))  # type: ignore[attr-defined]
    with CudaNamesOnCPU(), cuda, backward:
        yield


@contextlib.contextmanager
def without_streams(device: torch.device) -> Iterator[None]:
    """Give megatron-core no streams within the context where there are none, for what makes one and never uses it."""
    with contextlib.nullcontext() if device.type == "cuda" else _replaced(torch.cuda, Stream=lambda **_: None):
        yield


def _within(run: Callable[..., object]) -> Callable[..., object]:
    """Return `run` wrapped in `CudaNamesOnCPU`.

    PyTorch disables such modes during a backward pass, in which checkpoints make masks.
    """

    def running(*args: object, **kwargs: object) -> object:
        with CudaNamesOnCPU():
            return run(*args, **kwargs)

    return running


class MarkedNorm:
    """megatron-core's norm with PyTorch's kernels, usable under sequence parallelism.

    Under sequence parallelism each rank normalises different tokens, and ranks sum the gradients of parameters that are
    marked. megatron-core's fused norm, which needs CUDA, marks its parameters. The norm with PyTorch's kernels refuses
    sequence parallelism instead, so this class builds it without and marks the parameters.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5) -> nn.Module:  # type: ignore[misc] # noqa: ANN401
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        plain = copy.copy(config)
        plain.sequence_parallel = False
        made: nn.Module = WrappedTorchNorm(plain, hidden_size, eps)
        for parameter in made.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return made


def norms_marked() -> contextlib.AbstractContextManager[object]:
    """Return a context in which megatron-core's last norm is a `MarkedNorm` too. No specification sets it."""
    from megatron.core.transformer import transformer_block

    return _replaced(transformer_block, LayerNormImpl=MarkedNorm)


def route_without_transformer_engine() -> None:
    """Let megatron-core's gates compute by PyTorch where Transformer Engine is not installed: they ask whether its
    product is None, and the name is not defined (adapters/gaps/megatron_gate_without_transformer_engine.py)."""
    from megatron.core.transformer.moe import moe_utils

    if not moe_utils.HAVE_TE:
        vars(moe_utils).setdefault("te_general_gemm", None)


def checkpointing_on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which megatron-core's checkpoints run without CUDA.

    They call `torch.cuda.synchronize`, and create a tensor on the current CUDA device.
    """
    if device.type == "cuda":
        return contextlib.nullcontext()
    return _replaced(torch.cuda, synchronize=lambda *_: None, current_device=lambda: "cpu")


def seed(device: torch.device, number: int) -> None:
    """Seed Megatron's random states: one that all tensor-parallel ranks share, and one for each rank.

    They are states of CUDA's generator, or of the CPU's without CUDA.
    """
    from megatron.core.tensor_parallel import random

    if device.type == "cuda":
        random.model_parallel_cuda_manual_seed(number)
        return
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    with _replaced(torch.cuda, manual_seed=torch.manual_seed, get_rng_state=torch.get_rng_state):
        random.model_parallel_cuda_manual_seed(number)
