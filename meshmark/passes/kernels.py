"""Formats and kernels that PyTorch leaves to the machine's environment.

They are pinned before anything is built, the same for every framework, and recorded.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshmark.environment import ALLOCATOR, allocator_settings
from meshmark.spec.case import Attention, Matmul, Tuning

VARIABLES = {
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0",  # some container images export 1, which makes "fp32" TF32
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # one that cuBLAS is deterministic with; read when CUDA starts
    # On Hopper, PyTorch otherwise puts cuDNN first at the first attention, whatever order was set before.
    "TORCH_CUDNN_SDPA_PREFERRED": "0",
}
"""Variables of every rank's process.

Deterministic algorithms are not requested, because attention uses other kernels then. A timed pass must compute bit
for bit what was judged.
"""

_NCCL = ("NCCL_", "TORCH_NCCL_", "CUDA_DEVICE_MAX_CONNECTIONS")
"""Starts of the names of variables that choose how GPUs communicate."""

ATTENTION = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.CUDNN_ATTENTION,
)
"""The first that can serves: PyTorch's own order, which an import may change."""


KERNELS = {
    Attention.FLASH: SDPBackend.FLASH_ATTENTION,
    Attention.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
    Attention.MATH: SDPBackend.MATH,
    Attention.CUDNN: SDPBackend.CUDNN_ATTENTION,
}


@contextlib.contextmanager
def pinned(tuning: Tuning) -> Iterator[None]:
    """Set PyTorch's documented defaults, whatever set them before, except what a case tunes.

    A kernel that is asked for comes first, and others stay allowed: the float64 truth needs another.
    """
    torch.set_float32_matmul_precision("high" if tuning.matmul is Matmul.TF32 else "highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = tuning.matmul is not Matmul.WIDE_SUMS
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = tuning.matmul is not Matmul.WIDE_SUMS
    order = [KERNELS[tuning.attention]] if tuning.attention else []
    if tuning.attention is not Attention.MATH:  # which serves all
        order += [kernel for kernel in ATTENTION if kernel not in order]
    with sdpa_kernel(order, set_priority=True):
        yield


def effective_settings() -> dict[str, str]:
    """Return the settings in effect, read back because an adapter's imports come after `pinned`."""
    order = torch._C._get_sdp_priority_order()
    enabled = {
        SDPBackend.FLASH_ATTENTION: torch._C._get_flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: torch._C._get_mem_efficient_sdp_enabled(),
        SDPBackend.MATH: torch._C._get_math_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: torch._C._get_cudnn_sdp_enabled(),
    }
    names = [backend.name.lower() for n in order if enabled.get(backend := SDPBackend(n))]
    reduced = (
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    )
    return _libraries() | {
        "float32 products": torch.get_float32_matmul_precision(),
        "tf32": f"products {torch.backends.cuda.matmul.allow_tf32}, convolutions {torch.backends.cudnn.allow_tf32}",
        "16-bit sums of split products": f"bf16 {reduced[0]}, fp16 {reduced[1]}",
        "attention": ", ".join(names),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
    }


def drivers_cuda(library: str = "libcuda.so.1") -> str:
    """The newest CUDA that the driver runs, asked of itself: PyTorch 2.11 has no binding for it any more."""
    version = ctypes.c_int()
    if status := ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(version)):
        raise OSError(f"cuDriverGetVersion answers {status}")
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _libraries() -> dict[str, str]:
    """Return NCCL's environment variables and, on a GPU, the versions of its libraries and the GPU's id.

    Versions that this build cannot report are left out, so that no pass fails because of them.
    """
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_NCCL)}
    found |= {ALLOCATOR: allocator_settings()} if torch.cuda.is_available() else {}
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return found
    asked: dict[str, Callable[[], object]] = {
        "CUDA": lambda: torch.version.cuda,
        "driver's CUDA": drivers_cuda,
        "cuDNN": lambda: torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "NCCL": lambda: torch.cuda.nccl.version(),  # type: ignore[no-untyped-call]
        "GPU": lambda: torch.cuda.get_device_properties(torch.cuda.current_device()).uuid,
    }
    for name, ask in asked.items():
        with contextlib.suppress(Exception):
            found[name] = str(ask())
    return found
