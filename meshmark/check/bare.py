"""Copy a model without wrappers, framework hooks and shards: the model that one process would train."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from meshmark.check.mixed_precision import note_casts
from meshmark.check.pieces import bare_modules, local, unwrapped, whole_shape

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_FRAMEWORKS = ("torch.distributed", "torch.nn.parallel", "accelerate", "deepspeed", "lightning", "torch._composable")
_STATE_OF_WRAPPERS = "__composable_api"
"""State that `fully_shard` and `replicate` leave in a module. It contains sharded modules, which cannot be copied."""
_MIXINS = {"FSDPModule", "ReplicateModule", "DDPModule"}


def bare_copy(root: nn.Module) -> nn.Module:
    """Return the user's model with empty parameters of full shape, and buffers as they are, on the CPU.

    It notes the dtypes in which FSDP computes; see `mixed_precision`.
    """
    flat = flat_parameters(root)
    wrapped, root = root, unwrapped(root)
    memo: dict[int, Any] = {}
    shells: dict[int, tuple[nn.Module, nn.Module]] = {}
    for _, module in bare_modules(root):
        if id(module) not in shells:
            own = plain_class(type(module))
            shell: nn.Module = object.__new__(own)
            shells[id(module)] = module, shell
            memo[id(module)] = shell
    for _, module in _all(root):
        memo.setdefault(id(module), memo[id(unwrapped(module))])
    for module, _ in list(shells.values()):
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                memo[id(parameter)] = _empty(parameter)
        for buffer in module._buffers.values():
            if buffer is not None and id(buffer) not in memo:
                memo[id(buffer)] = local(buffer).cpu().clone()
    for module, shell in shells.values():
        own_flat = flat.get(id(module), {})
        for key, value in vars(module).items():
            if not key.startswith(_STATE_OF_WRAPPERS) and key not in own_flat:
                shell.__dict__[key] = _copied(key, value, memo)
        shell._parameters.pop("_flat_param", None)  # FSDP1 registers it inside the module that it wraps
        shell._parameters.update(own_flat)
        original = shell.__dict__.pop("_original_forward", None)
        if original is not None:  # Accelerate's autocast is around it
            shell.__dict__.pop("forward", None)
            if getattr(original, "__func__", None) is not type(shell).forward:  # replaced before, as TRL does
                shell.__dict__["forward"] = original
        redirect_forward(shell)
        if "_trainer" in vars(shell):  # a LightningModule's, which is in no loop when it is computed again
            shell.__dict__["log"] = shell.__dict__["log_dict"] = _log_nothing
    note_casts(wrapped, lambda module: memo[id(unwrapped(module))])
    return memo[id(root)]  # type: ignore[no-any-return]


class Redirected:
    """A forward pass that calls another method of `module`, in which the class's own forward pass is back."""

    def __init__(self, module: nn.Module, method: str) -> None:
        self.module, self.method = module, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        del self.module.__dict__["forward"]
        try:
            return getattr(self.module, self.method)(*args, **kwargs)
        finally:
            self.module.__dict__["forward"] = self


def redirect_forward(shell: nn.Module) -> None:
    """Make a copy of a module that Lightning has redirected call its own method, such as `training_step`.

    Lightning puts a function in the place of `forward` while a wrapper such as DDP is called. The function calls the
    method of the original module, not of the copy.
    """
    if method := redirected_to(shell):
        shell.__dict__["forward"] = Redirected(shell, method)


def redirected_to(module: nn.Module) -> str | None:
    """Return the name of the method that Lightning has put in the place of `forward`, or None."""
    forward = vars(module).get("forward")
    code = getattr(forward, "__code__", None)
    if forward is None or code is None or not {"method_name", "original_module"} <= set(code.co_freevars):
        return None
    held = dict(zip(code.co_freevars, forward.__closure__, strict=True))
    return str(held["method_name"].cell_contents)


def _log_nothing(*_: object, **__: object) -> None:
    """Stand in for `LightningModule.log`."""


def flat_parameters(root: nn.Module) -> dict[int, dict[str, nn.Parameter]]:
    """Return empty parameters, by name, for each module (by id) whose own FSDP1 keeps in a flat parameter alone.

    That is FSDP1's default, `use_orig_params=False`: the modules then hold views, which are no parameters.
    """
    found: dict[int, dict[str, nn.Parameter]] = {}
    for module in root.modules():
        handle: Any = getattr(module, "_handle", None)
        flat = getattr(handle, "flat_param", None)
        if flat is None or handle._use_orig_params:
            continue
        for info, shape in zip(flat._param_infos, flat._shapes, strict=True):
            parameter = nn.Parameter(torch.zeros(shape, dtype=flat.dtype), requires_grad=flat.requires_grad)
            found.setdefault(id(unwrapped(info.module)), {})[info.param_name] = parameter
        for shared in flat._shared_param_infos:
            first = found[id(unwrapped(shared.prim_module))][shared.prim_param_name]
            found.setdefault(id(unwrapped(shared.module)), {})[shared.param_name] = first
    return found


def plain_class(cls: type) -> type:
    """Return the class that `cls` was before `fully_shard` derived another class from it."""
    if any(base.__name__ in _MIXINS for base in cls.__bases__):
        return next(base for base in cls.__bases__ if base.__name__ not in _MIXINS)
    return cls


def _all(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(module.named_modules(remove_duplicate=True))


def _empty(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(
        torch.zeros(whole_shape(parameter), dtype=parameter.dtype), requires_grad=parameter.requires_grad
    )


def _copied(key: str, value: Any, memo: dict[int, Any]) -> Any:  # noqa: ANN401
    if key in ("_parameters", "_buffers", "_modules"):
        return {name: None if x is None else memo[id(x)] for name, x in value.items()}
    if key in _HOOKS:
        return OrderedDict((k, _copied("", hook, memo)) for k, hook in value.items() if not _of_framework(hook))
    if key == "_compiled_call_impl":
        return None
    if key == "_trainer":
        return value
    if isinstance(value, dict | list | tuple) and key not in _HOOKS:
        try:
            return copy.deepcopy(value, memo)
        except Exception:  # an attribute that cannot be copied, such as a process group, is shared
            return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        return value


def _of_framework(hook: Any) -> bool:  # noqa: ANN401
    function = getattr(hook, "func", hook)
    module = getattr(function, "__module__", None) or type(hook).__module__
    owner = getattr(function, "__self__", None)
    return any(str(m).startswith(_FRAMEWORKS) for m in (module, type(owner).__module__))
