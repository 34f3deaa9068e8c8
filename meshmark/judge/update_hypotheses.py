"""Hypotheses about wrong updates: the float64 optimizer with one thing changed."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from meshmark.algorithms.contract import Tensors
from meshmark.judge.deviation import global_norm
from meshmark.judge.failed_step import block_of, rows_of
from meshmark.judge.faults import Fault
from meshmark.judge.trace import Trace
from meshmark.judge.truth import ExactOptimizer
from meshmark.spec.optimizer import LAYER_WISE, OptimizerKind, OptimizerSpec
from meshmark.text import pluralize

_DECOUPLED = (OptimizerKind.ADAMW, OptimizerKind.MUON, OptimizerKind.ADAFACTOR)
"""Optimizers that multiply weights by 1 - rate x decay, apart from the gradient's step."""


@dataclass(frozen=True, kw_only=True)
class UpdateHypothesis:
    """An optimizer with one thing changed."""

    fault: Fault
    detail: str
    optimizer: ExactOptimizer
    gradients: Callable[[Trace, int], Tensors] | None = None
    """Gradients that replace the run's own, as a function of the trace and the step."""


def update_hypotheses(
    spec: OptimizerSpec, failed_step: int, shards: int = 1, wrong: Sequence[str] = ()
) -> Iterator[UpdateHypothesis]:
    """Yield errors of optimizers. Some occur at `failed_step` only, as after a resume.

    `shards` is the number of ranks that share the rows of every tensor. `wrong` lists the wrong parameters.
    """

    def variant(fault: Fault, detail: str, changed: OptimizerSpec) -> UpdateHypothesis:
        return UpdateHypothesis(fault=fault, detail=detail, optimizer=ExactOptimizer(changed))

    if spec.clip_norm is not None:
        yield variant(Fault.CLIPPING, "as if not clipped", replace(spec, clip_norm=None))
        for limit in sorted({1.0, spec.clip_norm / 2, spec.clip_norm * 2} - {spec.clip_norm}):
            yield variant(Fault.CLIPPING, f"clipped to {limit:g}", replace(spec, clip_norm=limit))
        for unit, group_of in _CLIP_UNITS.items():
            detail = f"each {unit} clipped on its own"
            yield UpdateHypothesis(fault=Fault.CLIPPING, detail=detail, optimizer=_ClipsGroups(spec, group_of))
        yield UpdateHypothesis(
            fault=Fault.CLIPPING, detail="clipped by value, not by norm", optimizer=_ClipsValues(spec)
        )
        yield UpdateHypothesis(
            fault=Fault.CLIPPING, detail="clipped by the norm of the step before", optimizer=_ClipsByLast(spec)
        )
        yield UpdateHypothesis(
            fault=Fault.CLIPPING, detail="clipped twice by the same norm", optimizer=_ClipsTwice(spec)
        )
        yield UpdateHypothesis(
            fault=Fault.CLIPPING,
            detail="gradients are scaled to the norm that they are to be clipped to, also where theirs is below it",
            optimizer=_ClipsUp(spec),
        )
        yield UpdateHypothesis(
            fault=Fault.CLIPPING,
            detail="clipped by the norm of gradients that the loss scale still multiplies",
            optimizer=ExactOptimizer(replace(spec, clip_norm=None)),
            gradients=functools.partial(_clipped_while_scaled, spec.clip_norm),
        )
        if shards > 1:
            own = "clipped by the norm of a rank's own rows, not of all"
            yield UpdateHypothesis(fault=Fault.CLIPPING, detail=own, optimizer=_ClipsShards(spec, shards))
        if wrong:
            alone = "clipped by the norm of their own blocks, not of all, as of one pipeline stage"
            yield UpdateHypothesis(fault=Fault.CLIPPING, detail=alone, optimizer=_ClipsBlocks(spec, wrong))
    if spec.weight_decay:
        yield variant(Fault.UPDATE, "without weight decay", replace(spec, weight_decay=0.0))
        for decay in sorted({0.01, 0.1} - {spec.weight_decay}):
            yield variant(Fault.UPDATE, f"with a weight decay of {decay:g}", replace(spec, weight_decay=decay))
    if spec.weight_decay and spec.groups_decay:
        detail = f"with weight decay on {', '.join(spec.no_decay) or 'norms and biases'}"
        yield variant(Fault.UPDATE, detail, replace(spec, decay_matrices_only=False, no_decay=()))
    if spec.warmup_steps:
        yield variant(Fault.UPDATE, "without the schedule's warm-up", replace(spec, warmup_steps=0))
        for shift in (-1, 1):
            late = f"with the learning rate of {'the step before' if shift < 0 else 'the next step'}"
            yield UpdateHypothesis(fault=Fault.UPDATE, detail=late, optimizer=_Shifted(spec, shift))
        if failed_step:
            yield UpdateHypothesis(
                fault=Fault.UPDATE, detail="with a schedule that restarted", optimizer=_Restarts(spec, failed_step)
            )
        if spec.weight_decay and spec.kind in _DECOUPLED:
            full = "with weight decay by the full rate, not by the schedule's"
            yield UpdateHypothesis(fault=Fault.UPDATE, detail=full, optimizer=_DecaysAtFullRate(spec))
        for times in (2, 4):
            detail = f"with a schedule that runs {times} times too fast"
            yield variant(Fault.UPDATE, detail, replace(spec, warmup_steps=max(1, spec.warmup_steps // times)))
        for times in (2, 3, 4, 8):
            detail = (
                f"with a schedule that goes on by {times} after every update, as if stepped once a micro-batch or rank"
            )
            yield UpdateHypothesis(fault=Fault.UPDATE, detail=detail, optimizer=_StepsOften(spec, times))
    yield from _hypotheses_of_memory(spec, failed_step)
    for rank, other in itertools.permutations(range(shards), 2) if failed_step and shards <= _MOST_SHARDS else ():
        detail = f"with the moments of rank {other}'s part of a flat buffer in that of rank {rank}, from this step on"
        swapped = _TakesShard(spec, failed_step, shards, (rank, other))
        yield UpdateHypothesis(fault=Fault.MISPLACED, detail=detail, optimizer=swapped)
    if len(wrong) == 2 and failed_step:
        exchanged = _ExchangesMoments(spec, failed_step, (wrong[0], wrong[1]))
        detail = f"with the moments of {wrong[0]} and {wrong[1]} exchanged before this step"
        yield UpdateHypothesis(fault=Fault.MISPLACED, detail=detail, optimizer=exchanged)
    yield from _hypotheses_of_kind(spec)
    for parts in dict.fromkeys((1, shards)) if spec.kind in LAYER_WISE else ():
        whose = "all tensors together" if parts == 1 else "each rank's part of a flat buffer"
        detail = f"with one trust ratio for {whose}, not for each tensor"
        yield UpdateHypothesis(fault=Fault.UPDATE, detail=detail, optimizer=_TrustsParts(spec, parts))
    yield UpdateHypothesis(
        fault=Fault.STALE_GRADIENT,
        detail="made of the gradients of the step before",
        optimizer=ExactOptimizer(spec),
        gradients=lambda trace, step: trace.gradients[max(step - 1, 0)],
    )
    yield UpdateHypothesis(
        fault=Fault.UPDATE,
        detail="as if unused parameters had a gradient of zero",
        optimizer=ExactOptimizer(spec),
        gradients=lambda trace, step: {
            n: trace.gradients[step].get(n, np.zeros_like(x)) for n, x in trace.parameters[step].items()
        },
    )


def _clipped_while_scaled(limit: float, trace: Trace, step: int) -> Tensors:
    own, scale = trace.gradients[step], trace.loss_scales[step] if trace.loss_scales else 1.0
    factor = min(1.0, limit / (scale * global_norm(own) + 1e-6))
    return {name: factor * gradient.astype(np.float64) for name, gradient in own.items()}


def _variant(spec: OptimizerSpec, detail: str) -> UpdateHypothesis:
    return UpdateHypothesis(fault=Fault.UPDATE, detail=detail, optimizer=ExactOptimizer(spec))


def _hypotheses_of_kind(spec: OptimizerSpec) -> Iterator[UpdateHypothesis]:
    """Yield errors specific to one kind of optimizer."""
    if spec.kind is OptimizerKind.ADAMW:
        yield UpdateHypothesis(
            fault=Fault.UPDATE, detail="weight decay added to the gradient", optimizer=_Coupled(spec)
        )
        yield UpdateHypothesis(fault=Fault.UPDATE, detail="AMSGrad", optimizer=_Options(spec, {"amsgrad": True}))
        for eps in dict.fromkeys((spec.eps, *_EPSILONS)):
            size = "" if eps == spec.eps else f" {eps:g}"
            inside = _EpsInside(replace(spec, eps=eps))
            yield UpdateHypothesis(fault=Fault.UPDATE, detail=f"with eps{size} inside the root", optimizer=inside)
        for eps in dict.fromkeys((spec.eps, *_EPSILONS)):
            size = "" if eps == spec.eps else f" {eps:g}"
            detail = f"with eps{size} added before bias correction"
            early = _EpsEarly(replace(spec, eps=eps))
            yield UpdateHypothesis(fault=Fault.UPDATE, detail=detail, optimizer=early)
        for name, moment in (("first", "exp_avg"), ("second", "exp_avg_sq")) if spec.clip_norm is not None else ():
            detail = f"with a {name} moment of gradients that are not clipped"
            yield UpdateHypothesis(fault=Fault.UPDATE, detail=detail, optimizer=_UnclippedMoment(spec, moment))
    if spec.kind in LAYER_WISE:
        alike = _Options(spec, {"layer_wise": False})
        yield UpdateHypothesis(fault=Fault.UPDATE, detail="with one rate for all tensors", optimizer=alike)
    if spec.kind in (OptimizerKind.ADAMW, OptimizerKind.LAMB):
        yield UpdateHypothesis(fault=Fault.UPDATE, detail="without bias correction", optimizer=_Uncorrected(spec))
        usual = ((0.9, 0.999), (0.9, 0.99), (0.9, 0.98), (0.9, 0.95), (0.0, spec.betas[1]), spec.betas[::-1])
        for betas in sorted(set(usual) - {spec.betas}):
            yield _variant(replace(spec, betas=betas), f"with betas {betas}")
    if spec.kind in (OptimizerKind.ADAMW, OptimizerKind.ADAFACTOR, OptimizerKind.LAMB):
        for eps in _EPSILONS:
            yield _variant(replace(spec, eps=eps), f"with eps {eps:g}")
    if spec.kind is OptimizerKind.ADAFACTOR:
        for decay in sorted({-1.0, -0.9, -0.7, -0.5, 0.0} - {spec.beta2_decay}):
            yield _variant(replace(spec, beta2_decay=decay), f"with a beta2_decay of {decay:g}")
    if spec.momentum and spec.kind is not OptimizerKind.LARS:
        without = "without" if spec.nesterov else "with"
        yield _variant(replace(spec, nesterov=not spec.nesterov), f"{without} Nesterov's look-ahead")
    if spec.momentum:
        for momentum in sorted({0.5, 0.8, 0.9, 0.95, 0.99} - {spec.momentum}):
            yield _variant(replace(spec, momentum=momentum), f"with a momentum of {momentum:g}")
    if spec.kind is OptimizerKind.SGD and spec.momentum and not spec.nesterov:
        dampened = _Options(spec, {"dampening": spec.momentum})
        yield UpdateHypothesis(fault=Fault.UPDATE, detail="with dampening", optimizer=dampened)
    if spec.kind is OptimizerKind.MUON:
        yield UpdateHypothesis(
            fault=Fault.UPDATE, detail="not made orthogonal", optimizer=_Options(spec, {"ns_steps": 0})
        )


def _hypotheses_of_memory(spec: OptimizerSpec, step: int) -> Iterator[UpdateHypothesis]:
    """Yield optimizers that forget states, at every step or only at `step`."""
    moments = _MOMENTS[spec.kind]
    if moments == ("momentum_buffer",) and not spec.momentum:
        return
    yield UpdateHypothesis(fault=Fault.UPDATE, detail="moments forgotten after every step", optimizer=_Forgets(spec))
    first, second = moments[:1], moments[1:]
    parts = [("moments", moments)]
    if moments == ("exp_avg", "exp_avg_sq"):
        parts += [("first moments", first), ("second moments", second)]
    for what, names in parts:
        forgetting = _ForgetsNow(spec, step, names)
        yield UpdateHypothesis(fault=Fault.UPDATE, detail=f"{what} forgotten before this step", optimizer=forgetting)
    if first == ("exp_avg",) and step:
        for detail, names in (
            ("bias correction begins again at this step, with the moments of before", ()),
            ("moments and their count of steps forgotten before this step", moments),
        ):
            restarted = _CountsAgain(spec, step, names)
            yield UpdateHypothesis(fault=Fault.UPDATE, detail=detail, optimizer=restarted)
        for count in (1, 2):
            detail = f"bias correction of {pluralize(count, 'step')} more from this step on"
            yield UpdateHypothesis(fault=Fault.UPDATE, detail=detail, optimizer=_CountsAhead(spec, step, count))
    for what, names in parts:
        yield UpdateHypothesis(
            fault=Fault.PRECISION, detail=f"with {what} kept in bf16", optimizer=_RoundsMoments(spec, names)
        )
    yield UpdateHypothesis(
        fault=Fault.UPDATE, detail="with the moments of the step before", optimizer=_Lags(spec, step)
    )
    if step:
        for what, names in parts:
            for how, move in _MOVES.items():
                moved = _MovesMoments(spec, step, names, move)
                yield UpdateHypothesis(fault=Fault.MISPLACED, detail=f"{what} {how} before this step", optimizer=moved)
            for places in (1, -1):
                other = "next" if places > 0 else "last"
                detail = f"with {what} of the {other} parameter of the same shape, from this step on"
                swapped = _TakesMoments(spec, step, names, places)
                yield UpdateHypothesis(fault=Fault.MISPLACED, detail=detail, optimizer=swapped)


def _fsdp_unit(name: str) -> str:
    block = block_of(name)
    return block if block.rpartition(".")[2].isdigit() else ""


_CLIP_UNITS: dict[str, Callable[[str], str]] = {
    "tensor": lambda name: name,
    "block, the embedding and the head": block_of,
    "block, and what is in none,": _fsdp_unit,
    "module": lambda name: name.rpartition(".")[0],
}
"""Kinds of units that may be clipped by their own norm, each with a function from a parameter's name to its unit."""


class _ClipsGroups(ExactOptimizer):
    """Clips each group of parameters by its own norm."""

    def __init__(self, spec: OptimizerSpec, group_of: Callable[[str], str]) -> None:
        super().__init__(spec)
        self.group_of = group_of

    def clip(self, max_norm: float) -> None:
        groups: dict[str, list[nn.Parameter]] = {}
        for name, parameter in self.parameters.items():
            groups.setdefault(self.group_of(name), []).append(parameter)
        for group in groups.values():
            nn.utils.clip_grad_norm_(group, max_norm)


class _ClipsValues(ExactOptimizer):
    def clip(self, max_norm: float) -> None:
        nn.utils.clip_grad_value_(self.parameters.values(), max_norm)


class _ClipsShards(ExactOptimizer):
    """Clips each rank's rows by their own norm."""

    def __init__(self, spec: OptimizerSpec, shards: int) -> None:
        super().__init__(spec)
        self.shards = shards

    def clip(self, max_norm: float) -> None:
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        for rank in range(self.shards):
            own = [gradient[rows_of(rank, self.shards, len(gradient))] for gradient in gradients if gradient.dim()]
            scale = (max_norm / (nn.utils.get_total_norm(own) + 1e-6)).clamp(max=1.0)
            for part in own:
                part.mul_(scale)


class _TrustsParts(ExactOptimizer):
    """Takes equal parts of a flat buffer of all tensors for single tensors."""

    def __init__(self, spec: OptimizerSpec, parts: int) -> None:
        super().__init__(spec)
        self.parts = parts

    def step(self, parameters: Tensors, gradients: Tensors) -> Tensors:
        if parameters.keys() != gradients.keys():  # then what a part has of the others' is not known
            return parameters
        buffers = [np.concatenate([of[name].ravel() for name in parameters]) for of in (parameters, gradients)]
        size = -(-len(buffers[0]) // self.parts)
        cuts = range(size, len(buffers[0]), size)
        moved = super().step(*({str(i): x for i, x in enumerate(np.split(each, cuts))} for each in buffers))
        flat = np.concatenate(list(moved.values()))
        ends = np.cumsum([x.size for x in parameters.values()])[:-1]
        pieces = zip(parameters.items(), np.split(flat, ends), strict=True)
        return {name: piece.reshape(x.shape) for (name, x), piece in pieces}


class _ClipsBlocks(ExactOptimizer):
    """Clips by the norm of the blocks that have the parameters `names`, and of all blocks between them."""

    def __init__(self, spec: OptimizerSpec, names: Sequence[str]) -> None:
        super().__init__(spec)
        self.names = names

    def clip(self, max_norm: float) -> None:
        blocks = list(dict.fromkeys(block_of(name) for name in self.parameters))
        places = [blocks.index(block_of(name)) for name in self.names]
        own = set(blocks[min(places) : max(places) + 1])
        gradients = [p.grad for name, p in self.parameters.items() if block_of(name) in own and p.grad is not None]
        nn.utils.clip_grads_with_norm_(self.parameters.values(), max_norm, nn.utils.get_total_norm(gradients))


class _ClipsTwice(ExactOptimizer):
    def clip(self, max_norm: float) -> None:
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), max_norm)
        nn.utils.clip_grads_with_norm_(self.parameters.values(), max_norm, norm)


class _ClipsUp(ExactOptimizer):
    """Multiplies by max_norm / norm, also where that is more than 1."""

    def clip(self, max_norm: float) -> None:
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        factor = max_norm / float(nn.utils.get_total_norm(gradients))
        for gradient in gradients:
            gradient.mul_(factor)


class _DecaysAtFullRate(ExactOptimizer):
    """Weights decay by the rate of after the warm-up, in every step."""

    def step(self, parameters: Tensors, gradients: Tensors) -> Tensors:
        spec = self.spec
        lacking = spec.learning_rate * (1 - spec.rate_factor(self.steps)) * spec.weight_decay
        found = super().step(parameters, gradients)
        return {
            name: x - lacking * parameters[name] if name in gradients and spec.decays(name) else x
            for name, x in found.items()
        }


class _ClipsByLast(ExactOptimizer):
    """Clips by the norm of the step before; the first step by its own."""

    last: Tensor | None = None

    def clip(self, max_norm: float) -> None:
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        nn.utils.clip_grads_with_norm_(self.parameters.values(), max_norm, norm if self.last is None else self.last)
        self.last = norm


_EPSILONS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7)


class _AdamByHand(ExactOptimizer):
    """AdamW whose step is computed from its moments, so that a part of it can be another."""

    def moments(self, name: str, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the first and second moment of the parameter `name`."""
        return state["exp_avg"], state["exp_avg_sq"]

    def divisor(self, square: Tensor, correction: float, eps: float) -> Tensor:
        """Return what the corrected first moment is divided by."""
        return (square / correction).sqrt() + eps

    def step(self, parameters: Tensors, gradients: Tensors) -> Tensors:
        after = super().step(parameters, gradients)
        assert self.optimizer
        names = {parameter: name for name, parameter in self.parameters.items()}
        for group in self.optimizer.param_groups:
            (first, second), rate = group["betas"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, name = self.optimizer.state[parameter], names[parameter]
                count = float(state["step"])
                mean, square = self.moments(name, state)
                move = mean / (1 - first**count) / self.divisor(square, 1 - second**count, group["eps"])
                after[name] = parameters[name] * (1 - rate * group["weight_decay"]) - rate * move.numpy()  # type: ignore[index]
        return after


class _EpsInside(_AdamByHand):
    """Divides by the root of the second moment plus eps, where Adam adds eps to the root."""

    def divisor(self, square: Tensor, correction: float, eps: float) -> Tensor:
        return (square / correction + eps).sqrt()


class _EpsEarly(_AdamByHand):
    """Adds eps to the root of the second moment before its bias is corrected (arXiv:1412.6980, end of section 2)."""

    def divisor(self, square: Tensor, correction: float, eps: float) -> Tensor:
        return (square.sqrt() + eps) / math.sqrt(correction)


class _UnclippedMoment(_AdamByHand):
    """Adam with one of its moments of the gradients before they are clipped."""

    def __init__(self, spec: OptimizerSpec, moment: str) -> None:
        super().__init__(spec)
        self.moment, self.unclipped = moment, ExactOptimizer(replace(spec, clip_norm=None))

    def moments(self, name: str, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        assert self.unclipped.optimizer
        other = self.unclipped.optimizer.state[self.unclipped.parameters[name]]
        return super().moments(name, {**state, self.moment: other[self.moment]})

    def step(self, parameters: Tensors, gradients: Tensors) -> Tensors:
        self.unclipped.step(parameters, gradients)
        return super().step(parameters, gradients)


class _RoundsMoments(ExactOptimizer):
    """Keeps moments in bf16 between steps."""

    def __init__(self, spec: OptimizerSpec, names: tuple[str, ...]) -> None:
        super().__init__(spec)
        self.names = names

    def step(self, parameters: Tensors, gradients: Tensors) -> Tensors:
        after = super().step(parameters, gradients)
        assert self.optimizer
        for state in self.optimizer.state.values():
            for name in state.keys() & set(self.names):
                state[name].copy_(state[name].bfloat16())
        return after


class _Coupled(ExactOptimizer):
    """Adam with L2 regularisation in the place of AdamW."""

    def build(self) -> torch.optim.Optimizer:
        spec = self.spec
        return torch.optim.Adam(
            self.parameters.values(),
            lr=spec.learning_rate,
            betas=spec.betas,
            eps=spec.eps,
            weight_decay=spec.weight_decay,
        )


class _Uncorrected(ExactOptimizer):
    """Adam without bias correction: its moments start at zero, but count as those of a late step."""

    def build(self) -> torch.optim.Optimizer:
        optimizer = super().build()
        for parameter in self.parameters.values():
            optimizer.state[parameter] = {
                "step": torch.tensor(1e9),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        return optimizer


class _Shifted(ExactOptimizer):
    """The schedule is some steps ahead of the optimizer."""

    def __init__(self, spec: OptimizerSpec, shift: int) -> None:
        super().__init__(spec)
        self.steps = shift


class _StepsOften(ExactOptimizer):
    """The schedule is stepped several times after every update."""

    def __init__(self, spec: OptimizerSpec, times: int) -> None:
        super().__init__(spec)
        self.times = times

    def step(self, parameters: Tensors, gradients: Tensors) -> Tensors:
        after = super().step(parameters, gradients)
        self.steps += self.times - 1
        return after


class _Restarts(ExactOptimizer):
    """The schedule begins again at one step. The optimizer goes on."""

    def __init__(self, spec: OptimizerSpec, step: int) -> None:
        super().__init__(spec)
        self.at, self.done = step, 0

    def step(self, parameters: Tensors, gradients: Tensors) -> Tensors:
        if self.done == self.at:
            self.steps = 0
        self.done += 1
        return super().step(parameters, gradients)


_MOMENTS: dict[OptimizerKind, tuple[str, ...]] = {
    OptimizerKind.ADAMW: ("exp_avg", "exp_avg_sq"),
    OptimizerKind.SGD: ("momentum_buffer",),
    OptimizerKind.ADAFACTOR: ("row_var", "col_var", "variance"),
    OptimizerKind.MUON: ("momentum_buffer", "exp_avg", "exp_avg_sq"),
    OptimizerKind.LARS: ("momentum_buffer",),
    OptimizerKind.LAMB: ("exp_avg", "exp_avg_sq"),
}
"""States that each kind of optimizer keeps of a parameter."""


class _Options(ExactOptimizer):
    """Options of PyTorch's that no workload asks for."""

    def __init__(self, spec: OptimizerSpec, options: dict[str, float]) -> None:
        super().__init__(spec)
        self.options = options

    def build(self) -> torch.optim.Optimizer:
        optimizer = super().build()
        for group in optimizer.param_groups:
            group.update({name: value for name, value in self.options.items() if name in group})
        return optimizer


class _ForgetsNow(ExactOptimizer):
    """Forgets moments once, as a resume does."""

    def __init__(self, spec: OptimizerSpec, step: int, names: tuple[str, ...]) -> None:
        super().__init__(spec)
        self.at, self.names = step, names

    def step(self, parameters: Tensors, gradients: Tensors) -> Tensors:
        if self.optimizer is not None and self.steps == self.at:
            self.change_all()
        return super().step(parameters, gradients)

    def change_all(self) -> None:
        assert self.optimizer is not None
        for state in self.optimizer.state.values():
            self.change(state)

    def change(self, state: dict[str, Tensor]) -> None:
        for name in state.keys() & set(self.names):
            state[name].zero_()


_MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "shifted down by a row": lambda moment: moment.roll(1, 0),
    "shifted up by a row": lambda moment: moment.roll(-1, 0),
    "with halves of their rows exchanged": lambda moment: moment.roll(len(moment) // 2, 0),
    "with their rows and columns exchanged": lambda moment: (
        moment.T if moment.dim() == 2 and moment.shape[0] == moment.shape[1] else moment
    ),
}
"""Ways to misplace the moments of a parameter, by description."""


class _MovesMoments(_ForgetsNow):
    """Once puts the moments with these names in other places of the same parameter."""

    def __init__(
        self, spec: OptimizerSpec, step: int, names: tuple[str, ...], move: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(spec, step, names)
        self.move = move

    def change(self, state: dict[str, Tensor]) -> None:
        for name in state.keys() & set(self.names):
            if state[name].dim():
                state[name].copy_(self.move(state[name].clone()))


class _TakesMoments(_ForgetsNow):
    """Once gives every parameter the moments of another one.

    It is the one `places` further on among the parameters with the same shape and states.
    """

    def __init__(self, spec: OptimizerSpec, step: int, names: tuple[str, ...], places: int) -> None:
        super().__init__(spec, step, names)
        self.places = places

    def change_all(self) -> None:
        assert self.optimizer is not None
        alike: dict[tuple[torch.Size, frozenset[str]], list[Tensor]] = {}
        for parameter in self.parameters.values():
            if parameter in self.optimizer.state:  # under Muon, other parameters of a matrix's shape have other moments
                kept_names = frozenset(self.optimizer.state[parameter])
                alike.setdefault((parameter.shape, kept_names), []).append(parameter)
        for parameters in alike.values():
            kept = [{k: v.clone() for k, v in self.optimizer.state[p].items() if k in self.names} for p in parameters]
            for index, own in enumerate(parameters):
                for name, moment in kept[(index + self.places) % len(parameters)].items():
                    self.optimizer.state[own][name].copy_(moment)


_MOST_SHARDS = 4
"""Number of ranks up to which one rank's part of the moments is looked for in the place of another's."""


class _TakesShard(_ForgetsNow):
    """Once gives one rank's part of all parameters, laid out one behind the other, the moments of another rank's."""

    def __init__(self, spec: OptimizerSpec, step: int, shards: int, places: tuple[int, int]) -> None:
        super().__init__(spec, step, _MOMENTS[spec.kind])
        self.shards, self.places = shards, places

    def change_all(self) -> None:
        assert self.optimizer is not None
        kept = [self.optimizer.state[p] for p in self.parameters.values() if p in self.optimizer.state]
        for name in self.names:
            held = [state[name] for state in kept if name in state]
            if not held:
                continue
            flat = torch.cat([moment.flatten() for moment in held])
            own, other = (rows_of(rank, self.shards, len(flat)) for rank in self.places)
            part = flat[other].clone()[: own.stop - own.start]
            flat[own.start : own.start + len(part)] = part
            for moment, values in zip(held, torch.split(flat, [m.numel() for m in held]), strict=True):
                moment.copy_(values.view_as(moment))


class _ExchangesMoments(_ForgetsNow):
    """Once exchanges the moments of two parameters, as where a checkpoint's are read under one another's names."""

    def __init__(self, spec: OptimizerSpec, step: int, pair: tuple[str, str]) -> None:
        super().__init__(spec, step, _MOMENTS[spec.kind])
        self.pair = pair

    def change_all(self) -> None:
        assert self.optimizer is not None
        if not self.parameters.keys() >= set(self.pair):
            return
        one, other = (self.optimizer.state.get(self.parameters[name], {}) for name in self.pair)
        for name in set(self.names) & one.keys() & other.keys():
            if one[name].shape == other[name].shape:
                one[name], other[name] = other[name], one[name]


class _CountsAgain(_ForgetsNow):
    """Once begins to count steps again, for bias correction, and forgets the moments with these names."""

    def change(self, state: dict[str, Tensor]) -> None:
        super().change(state)
        if "step" in state:
            state["step"] = torch.zeros_like(torch.as_tensor(state["step"]))


class _CountsAhead(ExactOptimizer):
    """Once counts steps that were not taken, for bias correction."""

    def __init__(self, spec: OptimizerSpec, step: int, count: int) -> None:
        super().__init__(spec)
        self.at, self.count = step, count

    def step(self, parameters: Tensors, gradients: Tensors) -> Tensors:
        if self.optimizer is not None and self.steps == self.at:
            for state in self.optimizer.state.values():
                if "step" in state:
                    state["step"] = torch.as_tensor(state["step"]) + self.count
        return super().step(parameters, gradients)


class _Lags(ExactOptimizer):
    """Once restores the moments of one step earlier, as if from a checkpoint written too early."""

    def __init__(self, spec: OptimizerSpec, step: int) -> None:
        super().__init__(spec)
        self.at, self.earlier = step, dict[Tensor, dict[str, Tensor]]()

    def step(self, parameters: Tensors, gradients: Tensors) -> Tensors:
        if self.optimizer is not None and self.steps == self.at:
            for parameter, moments in self.earlier.items():
                for name, moment in moments.items():
                    self.optimizer.state[parameter][name].copy_(moment)
        if self.optimizer is not None:
            names = _MOMENTS[self.spec.kind]
            self.earlier = {p: {n: s[n].clone() for n in names if n in s} for p, s in self.optimizer.state.items()}
        return super().step(parameters, gradients)


class _Forgets(ExactOptimizer):
    def step(self, parameters: Tensors, gradients: Tensors) -> Tensors:
        if self.optimizer is not None:
            self.optimizer.state.clear()
        return super().step(parameters, gradients)
