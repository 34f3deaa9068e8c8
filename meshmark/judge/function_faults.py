"""Explain gradients as those of another function: a variant of a module, another loss, or one more term in it.

The functions that the model calls are recorded with their modules. Each is then replaced by its variants: in all
modules that call it or in one, on all ranks and micro-batches or on some. The error of the loss shows which are likely.
A variant is reported only if it explains *every* gradient and the loss up to rounding, with nothing fitted.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshmark.algorithms.contract import Tensors
from meshmark.judge.failed_step import SAME, Explanation, FailedStep, Fit, block_of
from meshmark.judge.faults import Fault
from meshmark.judge.truth import exact_loss
from meshmark.judge.twin import Change
from meshmark.models.mixture.module import Mixture
from meshmark.models.module import Model, parameter_shapes
from meshmark.reference.data import IGNORED, Batch
from meshmark.reference.objective import loss_share
from meshmark.spec.case import Case
from meshmark.spec.workload import Loss

_LEFT = 0.01
"""Share of a tensor's deviation that a variant may leave unexplained."""
_LEFT_BY_ROUNDING = 0.2
"""The same share for a variant that rounds.

The run's values are off by a last place of float32, so those near a boundary are rounded the other way than in float64.
This is one in some thousand elements, each off by three times the mean error of rounding.
"""
_CLEAR = 10.0
"""Multiple of its tolerance by which a tensor must be off. For smaller errors many variants fit up to rounding."""
_MOST_TRIED = 24
"""Number of variants, of those that change the loss, whose gradients are computed."""
_MOST_TOLD = 3
"""Largest number of equally good variants that are reported."""

_Function = Callable[..., Tensor]
_Parts = tuple[int, ...]
"""Indices of micro-batches, counted rank by rank."""


@dataclass(frozen=True, kw_only=True)
class _Variant:
    """A function other than the one asked for."""

    detail: str
    change: Change
    fault: Fault = Fault.VARIANT
    leaves: float = _LEFT
    """Share of a tensor's deviation that it may leave unexplained."""
    couples_rows: bool = False
    """Whether rows of one micro-batch affect each other, so that micro-batches must be computed one by one."""


# --- Variants of modules.


def other_function(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    """Explain by a variant of what one module, or all of a kind, computes."""
    if (failed.twin and failed.case.tuning.compile) or not is_clear(failed, fit) or not failed.affords(1):
        return None
    likely = _likely(failed, list(_variants(failed)))
    found = list[tuple[float, str, Fault]]()
    for variant, parts in likely:
        if not failed.affords(1):
            break
        left = _left(failed, _with_parts(failed, variant, parts), exact, variant.leaves)
        if left <= 1:
            found.append((left, f"{variant.detail}{failed.in_micro_batches(parts)}", variant.fault))
    told = sorted(found)
    return (told[0][2], ", or ".join(detail for _, detail, _ in told)) if 0 < len(told) <= _MOST_TOLD else None


def is_clear(failed: FailedStep, fit: Fit) -> bool:
    """Return whether some gradient is so far off that rounding leaves room for few explanations."""
    return any(fit.deviations[n] * fit.units[n] > _CLEAR * failed.tolerances[n] for n in failed.names)


def _likely(failed: FailedStep, variants: Sequence[_Variant]) -> list[tuple[_Variant, _Parts]]:
    """Return the variants, and the micro-batches that may have them, by which the loss is off as the run's is."""
    found, count = list[tuple[float, _Variant, _Parts]](), len(failed.micro_batch_parts)
    of_backward = list[tuple[_Variant, _Parts]]()
    for variant in variants:
        if not failed.affords(1):
            break
        losses = failed.losses_of(failed.batch, [variant.change] * count)
        if np.allclose(losses, failed.micro_batch_losses, rtol=1e-12, atol=0):  # it changes the backward pass alone
            of_backward += [(variant, tuple(range(count)))] if failed.loss_fits else []
        else:
            found += [(left, variant, parts) for left, parts in failed.subsets_by_loss(losses)]
    found.sort(key=lambda each: each[0])
    return [(variant, parts) for _, variant, parts in found[:_MOST_TRIED]] + of_backward


def _with_parts(failed: FailedStep, variant: _Variant, parts: _Parts) -> Tensors:
    """Return the gradients with a variant in these micro-batches."""
    right, change = failed.micro_batch_parts, variant.change
    if len(parts) == len(right) and not variant.couples_rows:
        return failed.truth(failed.step, failed.batch, change=change)
    batches = list(failed.batch.micro_batches(len(right)))
    other = {i: failed.truth(failed.step, batches[i], change=change) for i in parts}
    return {n: np.sum([other.get(i, part)[n] for i, part in enumerate(right)], axis=0) for n in right[0]}


def _left(failed: FailedStep, candidate: Tensors, exact: Tensors, share: float) -> float:
    """Return the largest unexplained part of a gradient, relative to what may remain; up to 1 all is explained.

    `share` is the share of a wrong tensor's deviation that may remain. Tensors that are right must stay right.
    """
    own, worst = failed.trace.gradients[failed.step], 0.0
    for name, tolerance in [*failed.tolerances.items(), *failed.right.items()]:
        if name not in candidate:
            continue
        deviation = float(np.linalg.norm(own[name] - exact[name])) if name in failed.tolerances else 0.0
        left = float(np.linalg.norm(own[name] - candidate[name]))
        if left != left:  # it overflows, as bf16 in the place of a scaled fp16 may: NaN would be lost in `max`
            return math.inf
        worst = max(worst, left / (max(tolerance, share * deviation) or 1e-300))
    return worst


def _variants(failed: FailedStep) -> Iterator[_Variant]:
    """Yield the variants of every module, those of several modules before those of one."""
    workload = failed.case.workload
    calls, others = dict[str, list[str]](), dict[str, Mapping[str, _Function]]()
    options, names_of_modules, mixtures = list[tuple[str, str, float]](), list[str](), list[str]()

    def note(name: str, kind: str, func: _Function, args: Sequence[Any], given: Mapping[str, Any]) -> Tensor:
        calls.setdefault(kind, []).append(name)
        _, others[kind] = _kind(func.__name__, args, given) or ("", {})
        return func(*args, **given)

    def recorded(model: Model) -> contextlib.AbstractContextManager[None]:
        options.extend(_options(model))
        mixtures.extend(name for name, module in model.named_modules() if isinstance(module, Mixture))
        names_of_modules.extend(name for name, module in model.named_modules() if name and any(module.children()))
        return _taken(model, note)

    few = failed.batch if workload.couples_rows else failed.batch.rows(0, 1)
    exact_loss(workload, failed.trace.parameters[failed.step], few, failed.case.layout, Change(within=recorded))
    for how, names in calls.items():
        for modules in _groups(list(dict.fromkeys(names))):
            for detail, function in others[how].items():
                within = _replacing(modules, how, function)
                yield _Variant(detail=f"{_named(modules)} with {detail}", change=Change(within=within))
    for module in names_of_modules:
        for detail, output in _OUTPUTS.items():
            yield _Variant(
                detail=f"{module} with {detail}", change=Change(within=returning(module, _of_one_shape(output)))
            )
    for option, values in _OPTIONS.items():
        held = {name: value for name, o, value in options if o == option}
        for modules in _groups(list(held)):
            for value in values:
                if any(held[name] != value for name in modules):
                    detail = f"{_named(modules)} with {option} {value:g} in place of {held[modules[0]]:g}"
                    yield _Variant(detail=detail, change=Change(within=_setting(modules, option, value or _TINY)))
    for modules in _groups(mixtures) if mixtures else ():
        for detail, weigh in _WEIGHTS.items():
            change = Change(within=_weighing(modules, weigh))
            yield _Variant(detail=f"{_named(modules)} with {detail}", change=change, couples_rows=True)
    for rank in range(failed.case.layout.tp if failed.case.layout.tp > 1 else 0):
        for how, names in calls.items():
            for modules in _groups(list(dict.fromkeys(names))) if how not in ("layer norm", "positions") else ():
                for detail, function in others[how].items():
                    part = _on_rank(function, rank, failed.case.layout.tp)
                    told = f"{_named(modules)} with {detail}, on tensor-parallel rank {rank}"
                    yield _Variant(detail=told, change=Change(within=_replacing(modules, how, part)))
    yield from _rounded_messages(failed.case)
    attentions, cp = list(dict.fromkeys(calls.get("causal attention", []))), failed.case.layout.cp
    for modules in _groups(attentions) if attentions and cp > 1 else ():
        told = f"{_named(modules)} with no gradient for keys and values of other context-parallel ranks"
        apart = _replacing(modules, "causal attention", _apart_in_backward(cp))
        yield _Variant(detail=told, change=Change(within=apart))
    for rank in range(cp if cp > 1 else 0):
        for modules in _groups(attentions) if attentions else ():
            for detail, see in _SEEN_BY_PART.items():
                told = f"{_named(modules)} with {detail}, on context-parallel rank {rank}"
                yield _Variant(
                    detail=told,
                    change=Change(within=_replacing(modules, "causal attention", _causal_in_part(rank, cp, see))),
                )


def ends_of_stages(case: Case) -> list[str]:
    """Return the blocks behind which a pipeline is cut. Empty for a model of the user's own, whose names differ."""
    layout, model = case.layout, case.workload.model
    if layout.pp == 1:
        return []
    stages = model.stage_of_layers(layout.pp * layout.virtual_stages)
    blocks = set(map(block_of, parameter_shapes(model)))
    ends = [f"blocks.{i}" for i in range(model.num_layers) if stages.get(i + 1) != stages.get(i + 2)]
    return ends if blocks.issuperset(ends) else []


def _rounded_messages(case: Case) -> Iterator[_Variant]:
    """Yield messages between the stages of a pipeline in 16 bits, where the stages compute in 32."""
    ends = ends_of_stages(case)
    for narrow in (torch.bfloat16, torch.float16) if ends and not case.precision.is_mixed else ():
        for forward, backward in ((True, True), (True, False), (False, True)):
            what = " and ".join(["activations"] * forward + ["their gradients"] * backward)
            within = rounding_outputs(ends, narrow, forward=forward, backward=backward)
            told = f"{what} rounded to {str(narrow).removeprefix('torch.')} between stages"
            change = Change(within=within)
            yield _Variant(detail=told, change=change, fault=Fault.PRECISION, leaves=_LEFT_BY_ROUNDING)


def rounding_outputs(
    modules: Sequence[str], narrow: torch.dtype, *, forward: bool, backward: bool
) -> Callable[[Model], contextlib.AbstractContextManager[None]]:
    """Return a context in which the outputs of these modules, or their gradients, are rounded."""

    def rounded(_inputs: object, output: Tensor) -> Tensor:
        result: Tensor = _Rounded.apply(output, narrow, forward, backward)  # type: ignore[no-untyped-call]
        return result

    @contextlib.contextmanager
    def within(model: Model) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name in modules:
                stack.enter_context(returning(name, rounded)(model))
            yield

    return within


class _Rounded(torch.autograd.Function):
    """The identity, with its value or its gradient rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, narrow: torch.dtype, forward: bool, backward: bool) -> Tensor:  # noqa: ANN401
        ctx.narrow = narrow if backward else None
        return x.to(narrow).to(x.dtype) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        (gradient,) = gradients
        return gradient.to(ctx.narrow).to(gradient.dtype) if ctx.narrow else gradient, None, None, None


_OPTIONS: dict[str, Sequence[float]] = {
    "eps": (1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 0.0),
    "rope_theta": (1_000.0, 10_000.0, 50_000.0, 100_000.0, 500_000.0, 1_000_000.0),
}
"""Options that modules hold, and usual values of them."""
_TINY = 1e-30
"""Stands for an eps of 0, which batch norm refuses."""


def _options(model: nn.Module) -> Iterator[tuple[str, str, float]]:
    """Yield the modules that hold one of the options: name, option and value."""
    for name, module in model.named_modules():
        for option in _OPTIONS:
            if isinstance(value := getattr(module, option, None), float):
                yield name, option, value


def _groups(names: Sequence[str]) -> list[list[str]]:
    """Return all modules, those with the same last name, and each alone."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(name.rpartition(".")[2], []).append(name)
    found = [list(names), *alike.values(), *([name] for name in names)]
    return [list(group) for group in dict.fromkeys(map(tuple, found))]


def _named(modules: Sequence[str]) -> str:
    if len(modules) == 1:
        return modules[0]
    kinds = dict.fromkeys(name.rpartition(".")[2] for name in modules)
    return f"all of {', '.join(kinds)}"


def _setting(modules: Sequence[str], option: str, value: float) -> Callable[[Model], Any]:
    @contextlib.contextmanager
    def within(model: Model) -> Iterator[None]:
        held = {name: getattr(model.get_submodule(name), option) for name in modules}
        try:
            for name in modules:
                setattr(model.get_submodule(name), option, value)
            yield
        finally:
            for name, before in held.items():
                setattr(model.get_submodule(name), option, before)

    return within


# --- Mixtures of experts that weigh experts otherwise. N tokens, E experts, K experts of a token.

_Weigh = Callable[[Tensor, Tensor], Tensor]
"""Returns the weights [N, K] of the chosen experts from all scores [N, E] and the numbers [N, K] of these experts."""


def _with_room(factor: float, by_place: bool) -> _Weigh:
    """Return weights of which those beyond an expert's capacity are zero: its tokens are dropped (arXiv:2006.16668).

    An expert has room for `factor` K N / E tokens. The first that come are taken: token by token or, `by_place`, first
    all of those whose first choice it is.
    """

    def weigh(scores_NE: Tensor, chosen_NK: Tensor) -> Tensor:
        ordered = chosen_NK.T.flatten() if by_place else chosen_NK.flatten()
        sent = F.one_hot(ordered, scores_NE.shape[1])
        number = (sent.cumsum(0) * sent).sum(1)  # of a token among those that its expert is sent, from 1
        taken = number <= math.ceil(factor * chosen_NK.numel() / scores_NE.shape[1])
        taken_NK = taken.view(chosen_NK.T.shape).T if by_place else taken.view(chosen_NK.shape)
        return scores_NE.gather(1, chosen_NK).softmax(-1) * taken_NK

    return weigh


_WEIGHTS: dict[str, _Weigh] = {
    "weights that are the softmax over all experts, not over the chosen ones": (
        lambda scores_NE, chosen_NK: scores_NE.softmax(-1).gather(1, chosen_NK)
    ),
    "weights that are the sigmoid of the scores": lambda scores_NE, chosen_NK: scores_NE.gather(1, chosen_NK).sigmoid(),
    "equal weights of the chosen experts": (
        lambda scores_NE, chosen_NK: torch.full_like(scores_NE.gather(1, chosen_NK), 1 / chosen_NK.shape[1])
    ),
    "the first of the chosen experts alone": (
        lambda scores_NE, chosen_NK: (chosen_NK == chosen_NK[:, :1]).to(scores_NE) + 0 * scores_NE.gather(1, chosen_NK)
    ),
    **{
        f"tokens dropped beyond a capacity of {factor:g} x the mean{order}": _with_room(factor, by_place)
        for factor in (1.0, 1.25, 1.5, 2.0)
        for order, by_place in (("", False), (", first choices first", True))
    },
}
"""Other ways to weigh experts, by description."""


def _weighing(modules: Sequence[str], weigh: _Weigh) -> Callable[[Model], Any]:
    """Return a context in which these mixtures of experts weigh them so."""

    @contextlib.contextmanager
    def within(model: Model) -> Iterator[None]:
        changed = [model.get_submodule(name) for name in modules]
        with contextlib.ExitStack() as stack:
            for each in changed:
                assert isinstance(each, Mixture)
                stack.enter_context(_weighed_by(each, weigh))
            yield

    return within


@contextlib.contextmanager
def _weighed_by(mixture: Mixture, weigh: _Weigh) -> Iterator[None]:
    held, router = list[tuple[Tensor, Tensor]](), mixture.router

    def route(scores_NE: Tensor) -> Tensor:
        chosen_NK = router(scores_NE) if router else mixture.route(scores_NE)
        held.append((scores_NE, chosen_NK))
        return chosen_NK

    mixture.router = route
    mixture.weigh = lambda chosen_scores_NK: weigh(*held.pop())  # type: ignore[method-assign]
    try:
        yield
    finally:
        del mixture.weigh
        mixture.router = router


_OUTPUTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "an output of zero": lambda _x, y: torch.zeros_like(y),
    "its input as its output": lambda x, _y: x,
}
"""Functions from a module's input and output, of one shape, to the output of a branch or block that is skipped.

Modules without submodules are not tried, because skipping a projection is much like skipping the branch that it ends.
"""


_Output = Callable[[Sequence[Any], Any], Tensor | None]
"""Maps a module's inputs and output to the output that replaces it, or to None to keep it."""


def _of_one_shape(output: Callable[[Tensor, Tensor], Tensor]) -> _Output:
    """Return `output` for modules with one input and output of one shape."""

    def other(inputs: Sequence[Any], own: Any) -> Tensor | None:  # noqa: ANN401
        alike = len(inputs) == 1 and all(isinstance(x, Tensor) for x in (*inputs, own)) and inputs[0].shape == own.shape
        return output(inputs[0], own) if alike else None

    return other


def returning(module: str, output: _Output) -> Callable[[Model], Any]:
    """Return a context in which `module` returns another output."""

    @contextlib.contextmanager
    def within(model: Model) -> Iterator[None]:
        hook = model.get_submodule(module).register_forward_hook(lambda _module, inputs, own: output(inputs, own))
        try:
            yield
        finally:
            hook.remove()

    return within


# --- Modules that pass no gradient on.


def no_input_gradient(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    """Explain by a module that passes no gradient to its input, or none for one tensor-parallel rank's outputs.

    Such a module leaves the loss and its own parameters right. All other modules are tried, because the loss does not
    show which one it is.
    """
    if (failed.twin and failed.case.tuning.compile) or not is_clear(failed, fit):
        return None
    if abs(failed.loss_error) > max(failed.loss_tolerance, 1e-12):
        return None
    count, names = len(failed.micro_batch_parts), list[str]()

    def named(model: Model) -> contextlib.AbstractContextManager[None]:
        names.extend(name for name, module in model.named_modules() if name and not isinstance(module, nn.ModuleDict))
        return contextlib.nullcontext()

    few = failed.batch if failed.case.workload.couples_rows else failed.batch.rows(0, 1)
    exact_loss(
        failed.case.workload, failed.trace.parameters[failed.step], few, failed.case.layout, Change(within=named)
    )
    tp = failed.case.layout.tp
    for rank in (None, *range(tp if tp > 1 else 0)):
        for module in names:
            if any(name.startswith(f"{module}.") for name in failed.tolerances) or not failed.affords(1):
                continue
            change = Change(within=_detaching(module, rank, tp))
            other = failed.parts_of_micro_batches(failed.step, failed.batch, changes=[change] * count)
            for parts in failed.subsets:
                chosen = [other[i] if i in parts else right for i, right in enumerate(failed.micro_batch_parts)]
                candidate = {n: np.sum([part[n] for part in chosen], axis=0) for n in exact}
                if _left(failed, candidate, exact, _LEFT) <= 1:
                    where = "" if rank is None else f", on tensor-parallel rank {rank}"
                    where += failed.in_micro_batches(parts)
                    return Fault.BACKWARD, f"{module} passes no gradient to its input{where}"
    return None


def _detaching(module: str, rank: int | None, tp: int) -> Callable[[Model], Any]:
    """Return a context in which `module` passes no gradient to its input.

    With a `rank`, this holds only for the `1/tp` of its outputs that this tensor-parallel rank computes.
    """

    @contextlib.contextmanager
    def within(model: Model) -> Iterator[None]:
        own = model.get_submodule(module)
        forward = own.forward

        def other(*inputs: Any, **options: Any) -> Any:  # noqa: ANN401
            detached = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
            y = forward(*detached, **options)
            return (
                y
                if rank is None or not isinstance(y, Tensor)
                else _of_rank(y, forward(*inputs, **options), rank, tp, -1)
            )

        own.forward = other
        try:
            yield
        finally:
            del own.forward

    return within


def _of_rank(other: Tensor, right: Tensor, rank: int, tp: int, dim: int) -> Tensor:
    """Return `right` with one tensor-parallel rank's part taken from `other`. The part is `1/tp` of `dim`."""
    if right.shape[dim] % tp:
        return right
    chosen = torch.arange(right.shape[dim], device=right.device) // (right.shape[dim] // tp) == rank
    return torch.where(chosen.view([-1 if d == dim % right.dim() else 1 for d in range(right.dim())]), other, right)


# --- Functions that modules call.


def _on_rank(function: _Function, rank: int, tp: int) -> _Function:
    """Return a function that applies `function` on one tensor-parallel rank only.

    The rank's part is its heads in attention, and otherwise its part of the last dimension.
    """

    def compute(own: _Function, *args: Any, **options: Any) -> Tensor:  # noqa: ANN401
        dim = 1 if own.__name__ == "scaled_dot_product_attention" else -1
        return _of_rank(function(own, *args, **options), own(*args, **options), rank, tp, dim)

    return compute


def _causal(shift: int) -> _Function:
    """Attention whose tokens see `shift` tokens beyond themselves."""

    def attend(function: _Function, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:  # noqa: ANN401
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril(shift)
        mask[:, 0] |= ~mask.any(-1)  # a token that would see nothing sees the first token
        return function(q, k, v, **{**options, "is_causal": False, "attn_mask": mask})

    return attend


_SEEN_BY_PART: dict[str, Callable[[Tensor, int], Tensor]] = {
    "a causal mask that counts queries from the first key": lambda seen, start: torch.ones_like(seen).tril(),
    "keys of its own part alone": lambda seen, start: seen & (torch.arange(seen.shape[1], device=seen.device) >= start),
    "keys of later tokens too": lambda seen, start: torch.ones_like(seen),
}
"""What queries of one part of a sequence may see by mistake, of the keys that they should see and the part's start."""


def _causal_in_part(rank: int, parts: int, see: Callable[[Tensor, int], Tensor]) -> _Function:
    """Causal attention whose queries see other keys in one of `parts` equal parts of a sequence."""

    def attend(function: _Function, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:  # noqa: ANN401
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        size = q.shape[-2] // parts
        own = slice(rank * size, (rank + 1) * size)
        mask[own] = see(mask[own], rank * size)
        return function(q, k, v, **{**options, "is_causal": False, "attn_mask": mask})

    return attend


def _apart_in_backward(parts: int) -> _Function:
    """Causal attention that passes no gradient from queries to keys and values in another of `parts` equal parts."""

    def attend(function: _Function, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:  # noqa: ANN401
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        found = []
        for own in torch.arange(q.shape[-2], device=q.device).chunk(parts):
            keys, values = (x.detach().index_copy(-2, own, x.index_select(-2, own)) for x in (k, v))
            changed = {**options, "is_causal": False, "attn_mask": mask[own]}
            found.append(function(q.index_select(-2, own), keys, values, **changed))
        return torch.cat(found, -2)

    return attend


def _window(size: int) -> _Function:
    """Causal attention whose tokens see `size` tokens, up to themselves."""

    def attend(function: _Function, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:  # noqa: ANN401
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        mask = mask.triu(1 - size)
        return function(q, k, v, **{**options, "is_causal": False, "attn_mask": mask})

    return attend


def _scaled_by(power: float) -> _Function:
    def attend(function: _Function, q: Tensor, *args: Any, **options: Any) -> Tensor:  # noqa: ANN401
        return function(q, *args, **{**options, "scale": q.shape[-1] ** -power})

    return attend


def _scaled_by_heads(heads: float) -> _Function:
    """Attention whose scores are divided by the root of the width of so many heads."""

    def attend(function: _Function, q: Tensor, *args: Any, **options: Any) -> Tensor:  # noqa: ANN401
        return function(q, *args, **{**options, "scale": (q.shape[-1] * heads) ** -0.5})

    return attend


def _not_transposed(function: _Function, *args: Any, **options: Any) -> Tensor:  # noqa: ANN401
    """Attention whose heads [B, H, T, D] are read as [B, T, H, D] behind it."""
    y = function(*args, **options)
    return y.reshape(y.shape[0], y.shape[2], y.shape[1], y.shape[3]).transpose(1, 2)


def _exchanged(function: _Function, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:  # noqa: ANN401
    return function(k, q, v, **options)


def _whole(function: _Function, *args: Any, **options: Any) -> Tensor:  # noqa: ANN401
    return function(*args, **{**options, "is_causal": False})


def _layer_norm(normalise: Callable[[Tensor, float], Tensor]) -> _Function:
    """Layer norm that divides and centres by `normalise`, a function of the input and eps."""

    def compute(
        _function: _Function,
        x: Tensor,
        shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        y = normalise(x, eps)
        return (y if weight is None else y * weight) + (0 if bias is None else bias)

    return compute


def _uncentred(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _of_sample(x: Tensor, eps: float) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + eps)


def _of_constants(x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True).detach()
    return centred * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + eps).detach()


def _without(*which: str) -> _Function:
    """A norm that does not use these of its parameters."""

    def normalise(function: _Function, *args: Any, **options: Any) -> Tensor:  # noqa: ANN401
        given = dict(zip(("input", "normalized_shape", "weight", "bias", "eps"), args, strict=False)) | options
        return function(**{**given, **dict.fromkeys(which)})

    return normalise


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exact GELU (erf)": F.gelu,
    "GELU approximated by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "GELU approximated by a sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
    "SiLU": F.silu,
    "ReLU": F.relu,
    "squared ReLU": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "no activation": lambda x: x.clone(),
}


def _activation(function: Callable[[Tensor], Tensor]) -> _Function:
    return lambda _function, x, *_, **__: function(x)


def _activations(own: str) -> dict[str, _Function]:
    return {f"{n} in place of {own}": _activation(f) for n, f in _ACTIVATIONS.items() if n != own}


_NORMS: dict[str, _Function] = {
    "the mean left in": _layer_norm(_uncentred),
    "the variance over n - 1": _layer_norm(_of_sample),
    "mean and deviation taken for constants in the backward pass": _layer_norm(_of_constants),
    "no weight": _without("weight"),
    "no bias": _without("bias"),
}


_WINDOWS = sorted(size << power for size in (2, 3) for power in range(20))
"""Numbers of tokens that a window may show."""


def _of_attention(q: Tensor, k: Tensor, options: Mapping[str, Any]) -> tuple[str, dict[str, _Function]]:
    """Return the kind of an attention of queries to keys, and its variants."""
    heads, length = q.shape[-3], q.shape[-2]
    widths = {0.5: "half a head's width", 2.0: "two heads' width", 4.0: "four heads' width"}
    found: dict[str, _Function] = {
        "scores not scaled": _scaled_by(0.0),
        "scores divided by the heads' width, not its root": _scaled_by(1.0),
        "scores divided by the root of the model's width, not of a head's": _scaled_by_heads(heads),
        **{f"scores divided by the root of {name}": _scaled_by_heads(n) for n, name in widths.items() if n != heads},
        "heads that are not transposed back before they are joined": _not_transposed,
        **({"queries and keys exchanged": _exchanged} if q.shape == k.shape else {}),
    }
    if not options.get("is_causal"):
        return "attention", found | {"a causal mask": _causal(0)}
    return "causal attention", found | {
        "attention that is not causal": _whole,
        "a causal mask that shows one token too many": _causal(1),
        "a causal mask that hides a token from itself": _causal(-1),
        **{f"a window of {size} token{'s' * (size > 1)}": _window(size) for size in _WINDOWS if size < length},
    }


def _kind(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> tuple[str, dict[str, _Function]] | None:
    """Return the kind of a call, and what may be computed in its place, by description; None for other calls."""
    if name == "gelu":
        tanh = (options.get("approximate") or (args[1] if len(args) > 1 else "none")) == "tanh"
        own = "GELU approximated by tanh" if tanh else "exact GELU (erf)"
        return own, _activations(own)
    if name in ("silu", "relu", "sigmoid", "tanh"):
        own = {"silu": "SiLU", "relu": "ReLU"}.get(name, name)
        return own, _activations(own)
    if name == "scaled_dot_product_attention" and options.get("attn_mask") is None and len(args) == 3:
        return _of_attention(args[0], args[1], options)
    if name == "embedding" and args[0].ndim == 1 and len(args[0]) > 1:  # tokens are [B, T]
        return "positions", _POSITIONS
    return ("layer norm", _NORMS) if name == "layer_norm" else None


def _at_other_places(other: Callable[[Tensor], Tensor]) -> _Function:
    return lambda func, places_T, *args, **options: func(other(places_T), *args, **options)


_POSITIONS: dict[str, _Function] = {
    "positions that start again at zero in the middle": _at_other_places(lambda T: T % (len(T) // 2)),
    "positions one too large": _at_other_places(lambda T: (T + 1).clamp(max=len(T) - 1)),
    "positions one too small": _at_other_places(lambda T: (T - 1).clamp(min=0)),
    "positions counted from the end": _at_other_places(lambda T: T.flip(0)),
}
"""Embeddings of other positions than those of the tokens."""


_Take = Callable[[str, str, _Function, Sequence[Any], Mapping[str, Any]], Tensor]
"""Computes a call from the name of the calling module, the kind of the call, the function and its arguments."""


class _Calls(TorchFunctionMode):
    """Passes every call of a function that has variants to `take`, with the name of the innermost calling module."""

    def __init__(self, take: _Take) -> None:
        super().__init__()
        self.take, self.inside = take, [""]

    def __torch_function__(
        self, func: _Function, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # noqa: ANN401
        options = dict(kwargs or {})
        kind = _kind(getattr(func, "__name__", ""), args, options)
        return self.take(self.inside[-1], kind[0], func, args, options) if kind else func(*args, **options)


@contextlib.contextmanager
def _taken(model: nn.Module, take: _Take) -> Iterator[None]:
    """Let `take` compute the calls of the model's forward pass."""
    with contextlib.ExitStack() as stack:
        calls = _Calls(take)
        for name, module in model.named_modules():

            def enter(_module: nn.Module, _args: object, name: str = name) -> None:
                calls.inside.append(name)

            def leave(_module: nn.Module, _args: object, _output: object) -> None:
                calls.inside.pop()

            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        with calls:
            yield


def _replacing(modules: Sequence[str], kind: str, other: _Function) -> Callable[[Model], Any]:
    """Return a context in which calls of one kind in these modules are `other`'s."""

    def take(name: str, found: str, func: _Function, args: Sequence[Any], options: Mapping[str, Any]) -> Tensor:
        return other(func, *args, **options) if found == kind and name in modules else func(*args, **options)

    return lambda model: _taken(model, take)


# --- Other losses.


def other_objective(failed: FailedStep, fit: Fit, exact: Tensors, most: float = math.inf) -> Explanation | None:
    """Explain by the gradient of one more term than the loss has, such as a penalty on logits or on weights.

    `most` is the norm that may remain unexplained, in units of `fit`.
    """
    for name, gradients, value in _terms(failed, exact) if is_clear(failed, fit) else ():
        weights, left = fit.fitted(fit.exact, fit.flat(gradients))
        if left > min(most, fit.allowed):
            continue
        whole, factor = (float(w) for w in weights)
        candidate = {n: whole * exact[n] + factor * gradients[n] for n in exact}
        if abs(factor) < 1e-12 or abs(whole) < SAME or _left(failed, candidate, exact, _LEFT) > 1:
            continue
        by = (whole - 1) * failed.loss + factor * value
        close = failed.loss_tolerance + SAME * abs(by)
        if failed.loss_fits:
            told = "the reported loss is without it"
        elif abs(failed.loss_error - by) <= close:
            told = "the reported loss has it too"
        else:
            continue
        truth = "the truth" if abs(whole - 1) < 1e-3 else f"{whole:.4g} times the truth"
        return Fault.OBJECTIVE, f"{truth} plus {factor:.4g} times the gradient of {name}; {told}"
    return None


def _terms(failed: FailedStep, exact: Tensors) -> Iterator[tuple[str, Tensors, float]]:
    """Yield what is added to losses: name, gradients and value."""
    at = failed.trace.parameters[failed.step]
    if failed.case.workload.loss is not Loss.OWN:
        for name, term in _LOGIT_TERMS.items():
            for places, of_all in (("the targets", False), ("all positions, masked ones too", True)):
                if (of_all and not (failed.batch.targets == IGNORED).any()) or not failed.affords(1):
                    continue
                found = failed.computed(failed.step, failed.batch, change=Change(loss=_term(term, of_all)))
                yield f"{name}, summed over {places} and divided by their number", found.gradients, found.loss
    zeros = {n: np.zeros_like(g) for n, g in exact.items()}
    for which, names in (
        ("parameters", list(exact)),
        ("matrices", [n for n in exact if exact[n].ndim > 1]),
    ):
        squares = {n: np.asarray(at[n], dtype=np.float64) for n in names}
        total = sum(float(np.square(x).sum()) for x in squares.values())
        yield f"half the squares of the {which} (an L2 penalty)", {**zeros, **squares}, total / 2
        sizes = {n: np.sign(x) for n, x in squares.items()}
        total = sum(float(np.abs(x).sum()) for x in squares.values())
        yield f"the sizes of the {which} (an L1 penalty)", {**zeros, **sizes}, total


_LOGIT_TERMS: dict[str, Callable[[Tensor], Tensor]] = {
    "the squared log-sum-exp of the logits (a z-loss)": lambda x: x.logsumexp(-1).square(),
    "the squares of the logits": lambda x: x.square().sum(-1),
    "the log-sum-exp of the logits": lambda x: x.logsumexp(-1),
    "the cross-entropy with all classes alike (label smoothing)": lambda x: -x.log_softmax(-1).mean(-1),
    "the entropy of the predictions": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
}
"""Terms that logits [..., V] have, one for each target."""


def _term(term: Callable[[Tensor], Tensor], of_all: bool) -> Callable[[Tensor, Batch], Tensor]:
    def loss(outputs: Tensor, part: Batch) -> Tensor:
        wide = outputs if outputs.dtype is torch.float64 else outputs.float()
        each = term(wide).flatten()
        counted = torch.ones_like(each) if of_all else (part.targets != IGNORED).flatten().to(each.dtype)
        return (each * counted).sum() / part.total_weight

    return loss


def narrow_loss(failed: FailedStep, fit: Fit, exact: Tensors) -> Explanation | None:
    """Explain by a loss that is computed in 16 bits."""
    loss = failed.case.workload.loss
    if loss is not Loss.CROSS_ENTROPY or not is_clear(failed, fit):
        return None
    for kind, narrow in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        for how, share in _NARROW.items():
            if not failed.affords(1):
                return None
            change = Change(loss=functools.partial(share, narrow))
            found = failed.truth(failed.step, failed.batch, change=change)
            if _left(failed, found, exact, _LEFT_BY_ROUNDING) <= 1:
                return Fault.PRECISION, f"the loss is computed in {kind}: {how}"
    return None


def _of_rounded(narrow: torch.dtype, outputs: Tensor, part: Batch) -> Tensor:
    return loss_share(outputs.to(narrow).to(outputs.dtype), part, Loss.CROSS_ENTROPY)


def _all_narrow(narrow: torch.dtype, outputs: Tensor, part: Batch) -> Tensor:
    flat = outputs.to(narrow).flatten(0, -2)
    each = F.cross_entropy(flat, part.targets.flatten(), ignore_index=IGNORED, reduction="none")
    return each.to(outputs.dtype).sum() / part.total_weight


_NARROW: dict[str, Callable[[torch.dtype, Tensor, Batch], Tensor]] = {
    "of rounded logits": _of_rounded,
    "logits and their logarithms": _all_narrow,
}
