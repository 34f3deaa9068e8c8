"""Recomputes recorded calls in one process: vector-Jacobian products of a copy of the model, in float64 or with the
script's own rounding.

No loss function is needed: the gradients that entered the model's outputs were recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshmark.check.attributes import set_attributes
from meshmark.check.bare import bare_copy
from meshmark.check.deepspeed_engine import keeping_activations
from meshmark.check.host_random import set_host_random
from meshmark.check.mixed_precision import cast_as_noted
from meshmark.check.pieces import CannotTellError, bare_modules
from meshmark.check.recorder import sketch
from meshmark.check.recording import Call
from meshmark.check.tree import tensors_in, with_tensors
from meshmark.text import describe_error

REPEATS = 1e-9
"""Relative difference up to which two computations in float64 are the same."""
_DRAWS = {torch.randn, torch.rand, torch.randn_like, torch.rand_like, torch.normal}
_DRAWS_INTO = {"normal_", "uniform_", "exponential_", "log_normal_", "cauchy_"}
_COMMUNICATES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
)


class CommunicatesError(CannotTellError):
    """The model itself communicates between ranks in its forward pass, which one process cannot recompute."""


class _Doubles(TorchFunctionMode):
    """Mode in which a model that requests float32 gets float64. Random numbers are still drawn in float32.

    A model may also hold float32 tensors that are no buffers, such as a projection in an attribute. They become float64
    where they meet such a tensor, because products take no two dtypes.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        kwargs = dict(kwargs or {})
        if function in _DRAWS:
            return self._drawn(function, args, kwargs)
        name = getattr(function, "__name__", "")
        if name in _DRAWS_INTO and isinstance(args[0], Tensor) and args[0].dtype is torch.float64:
            return args[0].copy_(function(args[0].float(), *args[1:], **kwargs))
        if function is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        if not _writes(name, kwargs) and {torch.float32, torch.float64} <= {
            t.dtype for t in tensors_in((args, kwargs))
        }:
            args, kwargs = with_tensors((args, kwargs), _as_double)
        return function(*args, **kwargs)

    @staticmethod
    def _drawn(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        if kwargs.get("dtype") in (None, torch.float64, torch.float32):
            kwargs["dtype"] = torch.float32
            if function is torch.normal:
                kwargs.pop("dtype")
                return function(*[a.float() if isinstance(a, Tensor) else a for a in args], **kwargs).double()
            return function(*args, **kwargs).double()
        return function(*args, **kwargs)


def _writes(name: str, kwargs: Mapping[str, object]) -> bool:
    """Return whether a function writes into a tensor that it is given, so that the tensor cannot be another one."""
    if name.startswith("__"):
        return name in ("__set__", "__setitem__") or (name.startswith("__i") and name != "__invert__")
    return name.endswith("_") or "out" in kwargs


def _as_double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype is torch.float32 else tensor


@dataclass(frozen=True, kw_only=True)
class Product:
    """The result of recomputing one call."""

    gradients: dict[str, Tensor]
    """Gradients by parameter name, in float64. Parameters that had no part in the call are absent."""
    outputs: list[Tensor]
    """Sketches of the outputs, in the form that `Call` stores them."""


class Recomputer:
    """Copies of the models that a script called, and their parameters' names."""

    def __init__(self, copies: Mapping[int, nn.Module], aliases: Mapping[str, str]) -> None:
        """`aliases`: names of parameters that a model shares with an earlier one, and what they are called there."""
        self.own, self.aliases = dict(copies), aliases
        self.exact: dict[int, nn.Module] = {}
        self.recomputes = False
        """Whether the script computes activations again, by `torch.utils.checkpoint`."""
        for root, module in copies.items():
            exact = bare_copy(module)  # not `deepcopy`: some attributes cannot be copied
            for tensor in (*exact.parameters(), *exact.buffers()):
                if tensor.is_floating_point():
                    tensor.data = tensor.data.double()
            self.exact[root] = exact
        both = [*self.own.values(), *self.exact.values()]
        self.trains = {id(p): p.requires_grad for module in both for p in module.parameters()}
        self.recorded = {id(p): p.dtype for module in self.own.values() for p in module.parameters()}
        self.dtypes: dict[int, dict[int, torch.dtype]] = {
            root: cast_as_noted(module) for root, module in self.own.items()
        }

    @property
    def low(self) -> set[torch.dtype]:
        """Dtypes to which wrappers cast parameters and buffers."""
        return {dtype for dtypes in self.dtypes.values() for dtype in dtypes.values()}

    def repeats(self, call: Call, values: Mapping[str, Tensor]) -> bool:
        """Return whether a model computes the same from the same inputs, parameters and attributes twice."""
        first, second = self.product(call, values), self.product(call, values)
        pairs = zip(first.outputs, second.outputs, strict=True)
        return all(own.shape == x.shape and torch.allclose(own, x, rtol=REPEATS, atol=0.0) for own, x in pairs)

    def _note_recomputation(self) -> None:
        self.recomputes = True

    def product(
        self,
        call: Call,
        values: Mapping[str, Tensor],
        *,
        nudges: torch.Generator | None = None,
        recompute: bool = False,
    ) -> Product:
        """Return the gradients of all parameters from one call, with the parameters set to `values`.

        They are computed in float64. With `nudges` they are computed in the script's precision instead, after the last
        bits of parameters and inputs have been changed. Activations are kept, so that a checkpoint of the script's that
        draws other random numbers is an error; with `recompute` they are computed again as by the script.
        """
        exact = nudges is None
        model = (self.exact if exact else self.own)[call.root]
        prefix = "" if call.root == 0 else f"root{call.root}."
        parameters, dtypes = dict(_unique_parameters(model)), self.dtypes[call.root]
        recorded = {name: self.aliases.get(prefix + name, prefix + name) for name in parameters}

        def nudged(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor.clone()
            if exact:
                return tensor.double()
            signs = torch.randint(-1, 2, tensor.shape, generator=nudges).to(tensor.dtype)
            return tensor * (1 + signs * torch.finfo(tensor.dtype).eps)

        for name, parameter in parameters.items():
            value = values.get(recorded[name])
            if value is None:
                raise CannotTellError(f"no rank recorded parameter {recorded[name]}")
            value = nudged(value.detach().to(torch.float64 if exact else self.recorded[id(parameter)]))
            parameter.data = value if exact else value.to(dtypes.get(id(parameter), value.dtype))
            parameter.requires_grad_(call.refrozen.get(name, self.trains[id(parameter)]))
        for (_, module), training in zip(bare_modules(model), call.training, strict=True):
            module.training = training
        buffers = {name: b for name, b in _named_buffers(model) if b is not None}
        for name, value in call.buffers.items():
            if name in buffers:
                dtype = torch.float64 if exact else dtypes.get(id(buffers[name]), value.dtype)
                buffers[name].data = value.to(dtype, copy=True) if value.is_floating_point() else value.clone()
        set_attributes(model, call.attributes, torch.float64 if exact else None)
        args, kwargs = with_tensors(call.inputs, nudged)
        torch.set_rng_state(call.random_state)
        set_host_random(call.host_random)
        keeping = contextlib.nullcontext() if recompute else _without_recomputation(self._note_recomputation)
        with _surroundings(exact, call.autocast), keeping, keeping_activations():
            outputs = _called(model, args, kwargs, exact)
        found = [t for t in tensors_in(outputs) if t.requires_grad and t.grad_fn is not None]
        if len(found) != len(call.gradients):
            raise CannotTellError(
                f"the copy of the model has {len(found)} outputs with a gradient, "
                f"the script's has {len(call.gradients)}"
            )
        sketches = [sketch(output) for output in found]
        wanted = [(name, p) for name, p in parameters.items() if p.requires_grad]
        used = [(found[n], g.to(found[n].dtype)) for n, g in call.used_gradients]
        if call.nested:
            used = _without_each_other(used)
        if not used:
            return Product(gradients={}, outputs=sketches)
        gradients = torch.autograd.grad(
            [o for o, _ in used], [p for _, p in wanted], [g for _, g in used], allow_unused=True
        )
        return Product(
            gradients={
                recorded[name]: (g.to_dense() if g.is_sparse else g).double()
                for (name, _), g in zip(wanted, gradients, strict=True)
                if g is not None
            },
            outputs=sketches,
        )


def _called(model: nn.Module, args: Any, kwargs: Any, exact: bool) -> Any:  # noqa: ANN401
    """Return the outputs of a call. Raise `CannotTellError` with what the model raises."""
    try:
        return model(*args, **kwargs)
    except CannotTellError:
        raise
    except Exception as error:
        how = "in float64" if exact else "a second time"
        raise CannotTellError(f"the model cannot be computed {how}: {describe_error(error)}") from error


def _without_each_other(used: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Subtract from each output's gradient the part that came through other outputs computed from it."""
    outputs = [output for output, _ in used]
    made_of = []
    for number, output in enumerate(outputs):
        others = outputs[:number] + outputs[number + 1 :]
        found = torch.autograd.grad(output, others, torch.ones_like(output), retain_graph=True, allow_unused=True)
        flags = [g is not None for g in found]
        made_of.append([*flags[:number], False, *flags[number:]])
    direct: dict[int, Tensor] = {}
    while len(direct) < len(used):
        for number, (output, gradient) in enumerate(used):
            later = [other for other in range(len(used)) if made_of[other][number]]
            if number in direct or any(other not in direct for other in later):
                continue
            if later:
                heads, values = [outputs[o] for o in later], [direct[o] for o in later]
                gradient = gradient - torch.autograd.grad(heads, output, values, retain_graph=True)[0]
            direct[number] = gradient
    return [(output, direct[number]) for number, output in enumerate(outputs)]


def _unique_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    seen = set[int]()
    for prefix, module in bare_modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield (f"{prefix}.{name}" if prefix else name), parameter


def _named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    for prefix, module in bare_modules(model):
        for name, buffer in module._buffers.items():
            yield (f"{prefix}.{name}" if prefix else name), buffer


@contextlib.contextmanager
def _without_recomputation(note: Callable[[], None]) -> Iterator[None]:
    """Make `torch.utils.checkpoint.checkpoint` keep activations: it notes the call, and calls the function.

    Scripts may have imported it under any name. Its parts are replaced, which it looks up at every call.
    """
    from torch.utils import checkpoint

    def plain(*_: Any, **__: Any) -> Iterator[None]:  # noqa: ANN401
        note()
        yield

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:  # noqa: ANN401
            note()
            return function(*args)

    parts = {"_checkpoint_without_reentrant_generator": plain, "CheckpointFunction": Plain}
    kept = {name: getattr(checkpoint, name) for name in parts if hasattr(checkpoint, name)}
    for name in kept:
        setattr(checkpoint, name, parts[name])
    try:
        yield
    finally:
        for name, part in kept.items():
            setattr(checkpoint, name, part)


@contextlib.contextmanager
def _surroundings(exact: bool, autocast: torch.dtype | None) -> Iterator[None]:
    """Set the dtype and autocast of a recomputation. Raise `CommunicatesError` if the model communicates."""
    import torch.distributed as dist

    def refuse(*_: Any, **__: Any) -> Any:  # noqa: ANN401
        raise CommunicatesError("the model itself communicates between ranks in its forward pass")

    names = [name for name in _COMMUNICATES if hasattr(dist, name)]
    kept: dict[str, Callable[..., Any]] = {name: getattr(dist, name) for name in names}
    default = torch.get_default_dtype()
    for name in names:
        setattr(dist, name, refuse)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            if exact:
                torch.set_default_dtype(torch.float64)
                stack.enter_context(_Doubles())
            elif autocast is not None:
                stack.enter_context(torch.autocast("cpu", dtype=autocast))
            yield
    finally:
        torch.set_default_dtype(default)
        for name, function in kept.items():
            setattr(dist, name, function)
