"""The dtypes in which FSDP's units and DeepSpeed's engines compute, and how to compute in them without a wrapper."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshmark.check.deepspeed_engine import engine_in, weights_dtype
from meshmark.check.pieces import bare_modules, unwrapped
from meshmark.check.tree import with_tensors

_ATTRIBUTE = "_meshmark_casts"


@dataclass(frozen=True, kw_only=True)
class Casts:
    """Dtypes to which a unit casts floating-point tensors. None leaves them as they are."""

    weights: torch.dtype | None
    inputs: torch.dtype | None = None
    outputs: torch.dtype | None = None
    buffers: torch.dtype | None = None


def note_casts(root: nn.Module, shell_of: Callable[[nn.Module], nn.Module]) -> None:
    """Note the casts of every FSDP unit of `root` on its copy, which `shell_of` returns.

    A DeepSpeed engine has cast the module itself. Its copy gets fp32 parameters, for the master weights.
    """
    engine = engine_in(root)
    if engine is not None and (dtype := weights_dtype(engine)) is not None:
        shell = shell_of(engine)
        shell.__dict__[_ATTRIBUTE] = Casts(weights=dtype)
        for parameter in shell.parameters():
            parameter.data = parameter.data.float()
    for module, outermost in _units(root, True):
        shell_of(module).__dict__[_ATTRIBUTE] = _casts(module, outermost)


def _units(module: nn.Module, outermost: bool) -> Iterator[tuple[nn.Module, bool]]:
    """Yield the FSDP units, and whether no other is around them."""
    if _policy(module) is not None:
        yield module, outermost
        outermost = False
    for child in module.children():
        yield from _units(child, outermost)


def _policy(module: nn.Module) -> Any:  # noqa: ANN401
    if type(module).__name__ == "FullyShardedDataParallel":
        return getattr(module, "mixed_precision", None)
    if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
        return getattr(module._get_fsdp_state(), "_mp_policy", None)  # type: ignore[operator]
    return None


def _casts(module: nn.Module, outermost: bool) -> Casts:
    policy = _policy(module)
    if hasattr(policy, "output_dtype"):  # of FSDP2
        inputs = policy.param_dtype if policy.cast_forward_inputs else None
        return Casts(weights=policy.param_dtype, inputs=inputs, outputs=policy.output_dtype)
    casts = policy.cast_forward_inputs or (outermost and policy.cast_root_forward_inputs)
    return Casts(weights=policy.param_dtype, inputs=policy.param_dtype if casts else None, buffers=policy.buffer_dtype)


def cast_as_noted(model: nn.Module) -> dict[int, torch.dtype]:
    """Make `model` cast inputs and outputs as its units do. Return the dtypes of parameters and buffers, by id.

    A parameter belongs to the innermost unit around it.
    """
    dtypes: dict[int, torch.dtype] = {}
    units = [(name, module, casts) for name, module in bare_modules(model) if (casts := _noted(module))]
    for prefix, module in bare_modules(model):
        around = [c for name, _, c in units if not name or prefix == name or prefix.startswith(f"{name}.")]
        for tensors, kind in ((module._parameters, "weights"), (module._buffers, "buffers")):
            dtype = getattr(around[-1], kind) if around else None
            if dtype is not None:
                dtypes |= {id(t): dtype for t in tensors.values() if t is not None and t.is_floating_point()}
    for _, module, casts in units:
        if casts.inputs is not None:
            module.register_forward_pre_hook(_casting(casts.inputs), with_kwargs=True)
        if casts.outputs is not None:
            outputs = casts.outputs
            module.register_forward_hook(lambda _, __, found, dtype=outputs: _cast(found, dtype))
    return dtypes


def _noted(module: nn.Module) -> Casts | None:
    casts: Casts | None = unwrapped(module).__dict__.get(_ATTRIBUTE)
    return casts


def _casting(dtype: torch.dtype) -> Callable[[nn.Module, Any, Any], Any]:
    return lambda _, args, kwargs: (_cast(args, dtype), _cast(kwargs, dtype))


def _cast(tree: Any, dtype: torch.dtype) -> Any:  # noqa: ANN401
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return with_tensors(tree, cast)
