"""Explains updates that are wrong: by which other rule would the run's own gradients have moved its parameters there?

The rivals are the float64 optimizer with one thing changed, replayed over the run; the one that comes closest is taken
if it leaves no more than rounding, or a tenth of the deviation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from meshmark.judge.deviation import Tensors, global_norm
from meshmark.judge.faults import Fault, named_factor
from meshmark.judge.gradient_faults import Explanation, FailedStep, low_precisions, rounding
from meshmark.judge.trace import Trace
from meshmark.judge.truth import ExactOptimizer
from meshmark.reference.objective import build_optimizer
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec

LEFT_OVER = 0.1


def explain_updates(failed: FailedStep) -> Explanation | None:
    """Why wrong parameters stand where they do after the step."""
    before, after = failed.trace.parameters[failed.step], failed.trace.parameters[failed.step + 1]
    if absent := [name for name in failed.names if name not in after]:
        return Fault.MISSING, f"{len(absent)} parameters are absent"
    if frozen := [name for name in failed.names if not failed.case.workload.trains(name)]:
        return Fault.UPDATE, f"{len(frozen)} frozen parameters moved"
    still = [name for name in failed.names if np.array_equal(before[name], after[name])]
    kinds = low_precisions(after[name] for name in failed.names)
    if failed.step and all(np.array_equal(after[n], failed.trace.parameters[0][n]) for n in failed.names):
        return Fault.UPDATE, f"{len(failed.names)} parameters are back at their initial values"
    if kinds and len(still) < len(failed.names):  # some may stay, where updates are below the last place
        return Fault.PRECISION, f"every value of {len(failed.names)} parameters is a {kinds[0]} number"
    if still:
        return Fault.NEVER_UPDATED, f"{len(still)} of {len(failed.names)} wrong parameters did not move at all"
    exact = replay(failed, ExactOptimizer(failed.case.workload.optimizer))
    return (
        _rival(failed, exact)
        or _stretched(failed, exact)
        or _decayed(failed, exact)
        or rounding(_relative(failed, exact), "updates")
    )


class _Changes(TypedDict, total=False):
    """Fields of the optimizer that rivals take otherwise."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_norm: float | None
    warmup_steps: int
    decay_matrices_only: bool


@dataclass(frozen=True, kw_only=True)
class Rival:
    """One thing changed in the optimizer."""

    fault: Fault
    detail: str
    optimizer: ExactOptimizer
    gradients: Callable[[Trace, int], Tensors] | None = None
    """Other than the run's own."""


def rivals(spec: OptimizerSpec, scene_step: int) -> Iterator[Rival]:
    """What optimizers get wrong, some of it at `scene_step` alone, as after a resume."""

    def variant(fault: Fault, detail: str, **changes: Unpack[_Changes]) -> Rival:
        changed = dataclasses.replace(spec, **changes)
        return Rival(fault=fault, detail=detail, optimizer=ExactOptimizer(changed))

    if spec.clip_norm is not None:
        yield variant(Fault.CLIPPING, "as if not clipped", clip_norm=None)
        for limit in sorted({1.0, spec.clip_norm / 2, spec.clip_norm * 2} - {spec.clip_norm}):
            yield variant(Fault.CLIPPING, f"clipped to {limit:g}", clip_norm=limit)
        yield Rival(fault=Fault.CLIPPING, detail="each tensor clipped on its own", optimizer=_ClipsEach(spec))
        yield Rival(fault=Fault.CLIPPING, detail="clipped by value, not by norm", optimizer=_ClipsValues(spec))
    if spec.weight_decay:
        yield variant(Fault.UPDATE, "without weight decay", weight_decay=0.0)
    if spec.weight_decay and spec.decay_matrices_only:
        yield variant(Fault.UPDATE, "with weight decay on norms and biases", decay_matrices_only=False)
    if spec.warmup_steps:
        yield variant(Fault.UPDATE, "without the schedule's warm-up", warmup_steps=0)
        for shift in (-1, 1):
            late = f"with the learning rate of {'the step before' if shift < 0 else 'the next step'}"
            yield Rival(fault=Fault.UPDATE, detail=late, optimizer=_Shifted(spec, shift))
        for times in (2, 4):
            detail = f"with a schedule that runs {times} times too fast"
            yield variant(Fault.UPDATE, detail, warmup_steps=max(1, spec.warmup_steps // times))
    if spec.kind is OptimizerKind.ADAMW:
        yield Rival(fault=Fault.UPDATE, detail="weight decay added to the gradient", optimizer=_Coupled(spec))
        yield Rival(fault=Fault.UPDATE, detail="without bias correction", optimizer=_Uncorrected(spec))
        yield Rival(fault=Fault.UPDATE, detail="moments forgotten after every step", optimizer=_Forgets(spec))
        for what, names in (("moments", _MOMENTS), ("first moments", _MOMENTS[:1]), ("second moments", _MOMENTS[1:])):
            yield Rival(
                fault=Fault.UPDATE,
                detail=f"{what} forgotten before this step",
                optimizer=_ForgetsNow(spec, scene_step, names),
            )
        yield Rival(fault=Fault.UPDATE, detail="with the moments of the step before", optimizer=_Lags(spec, scene_step))
        for betas in ((0.9, 0.999), (0.9, 0.99), (0.0, spec.betas[1]), spec.betas[::-1]):
            yield variant(Fault.UPDATE, f"with betas {betas}", betas=betas)
        for eps in (1e-3, 1e-4, 1e-5, 1e-6, 1e-7):
            yield variant(Fault.UPDATE, f"with eps {eps:g}", eps=eps)
    yield Rival(
        fault=Fault.STALE_GRADIENT,
        detail="made of the gradients of the step before",
        optimizer=ExactOptimizer(spec),
        gradients=lambda trace, step: trace.gradients[max(step - 1, 0)],
    )
    yield Rival(
        fault=Fault.UPDATE,
        detail="as if unused parameters had a gradient of zero",
        optimizer=ExactOptimizer(spec),
        gradients=lambda trace, step: {
            n: trace.gradients[step].get(n, np.zeros_like(x)) for n, x in trace.parameters[step].items()
        },
    )


def replay(
    failed: FailedStep, optimizer: ExactOptimizer, gradients: Callable[[Trace, int], Tensors] | None = None
) -> Tensors:
    """Where `optimizer` puts the run's parameters after the failed step, having seen its gradients from the first on;
    those of parameters that a step does not use are left out, unless `gradients` brings them."""
    trace, uses, after = failed.trace, failed.case.workload.uses, {}
    for step in range(failed.step + 1):
        own = {name: g for name, g in trace.gradients[step].items() if uses(name, step)}
        after = optimizer.step(trace.parameters[step], gradients(trace, step) if gradients else own)
    return after


def _rival(failed: FailedStep, exact: Tensors) -> Explanation | None:
    """The closest rival, if it is close enough."""
    after = failed.trace.parameters[failed.step + 1]
    found = []
    for rival in rivals(failed.case.workload.optimizer, failed.step):
        there = replay(failed, rival.optimizer, rival.gradients)
        worst = max(
            float(np.linalg.norm(after[n] - there[n]))
            / max(tolerance, LEFT_OVER * float(np.linalg.norm(after[n] - exact[n])))
            for n, tolerance in failed.tolerances.items()
        )
        found.append((worst, rival))
    worst, rival = min(found, key=lambda pair: pair[0])
    return (rival.fault, rival.detail) if worst <= 1 else None


def _stretched(failed: FailedStep, exact: Tensors) -> Explanation | None:
    """The right step times a constant, such as a wrong learning rate."""
    before, after = failed.trace.parameters[failed.step], failed.trace.parameters[failed.step + 1]
    right = np.concatenate([(exact[n] - before[n]).ravel() for n in failed.names])
    own = np.concatenate([(after[n].astype(np.float64) - before[n]).ravel() for n in failed.names])
    factor = float(own @ right / (right @ right)) if right.any() else 0.0
    if np.linalg.norm(own - factor * right) > LEFT_OVER * np.linalg.norm(own - right):
        return None
    return Fault.UPDATE, f"{named_factor(factor, failed.known_factors())} times the right step"


def _decayed(failed: FailedStep, exact: Tensors) -> Explanation | None:
    """The right step but for weight decay: what is left over is a multiple of the parameters."""
    spec, before, after = failed.case.workload.optimizer, failed.trace.parameters[failed.step], failed.trace.parameters
    rate = spec.learning_rate * spec.rate_factor(failed.step) * spec.weight_decay
    multiples = {}
    for name in failed.names:
        here, beyond = before[name].astype(np.float64), after[failed.step + 1][name] - exact[name]
        multiple = float(np.sum(here * beyond)) / (float(np.sum(here * here)) or 1.0)
        if np.linalg.norm(beyond - multiple * here) > LEFT_OVER * np.linalg.norm(beyond):
            return None
        multiples[name] = -multiple / rate if rate else -multiple
    reported = ", ".join(f"{m:.4g}" for m in sorted({round(m, 2) for m in multiples.values()})[:4])
    return Fault.UPDATE, f"weight decay beyond the right one, as multiples of it: {reported}"


def _relative(failed: FailedStep, exact: Tensors) -> list[float]:
    before, after = failed.trace.parameters[failed.step], failed.trace.parameters[failed.step + 1]
    return sorted(
        float(np.linalg.norm(after[n] - exact[n]) / (np.linalg.norm(exact[n] - before[n]) or 1.0)) for n in failed.names
    )


class _ClipsEach(ExactOptimizer):
    def clip(self, max_norm: float) -> None:
        for parameter in self.parameters.values():
            nn.utils.clip_grad_norm_([parameter], max_norm)


class _ClipsValues(ExactOptimizer):
    def clip(self, max_norm: float) -> None:
        nn.utils.clip_grad_value_(self.parameters.values(), max_norm)


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
    """Adam's moments start at zero and nothing makes up for it: as if many steps had gone before."""

    def build(self) -> torch.optim.Optimizer:
        optimizer = build_optimizer(self.spec, self.parameters.items())
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


_MOMENTS = ("exp_avg", "exp_avg_sq")


class _ForgetsNow(ExactOptimizer):
    """Forgets moments once, as a resume does."""

    def __init__(self, spec: OptimizerSpec, step: int, names: tuple[str, ...]) -> None:
        super().__init__(spec)
        self.at, self.names = step, names

    def step(self, parameters: Tensors, gradients: Tensors) -> Tensors:
        if self.optimizer is not None and self.steps == self.at:
            for state in self.optimizer.state.values():
                for name in self.names:
                    state[name].zero_()
        return super().step(parameters, gradients)


class _Lags(ExactOptimizer):
    """Once takes the moments, and their count, of one step earlier, as a checkpoint written too early has them."""

    def __init__(self, spec: OptimizerSpec, step: int) -> None:
        super().__init__(spec)
        self.at, self.earlier = step, dict[Tensor, dict[str, Tensor]]()

    def step(self, parameters: Tensors, gradients: Tensors) -> Tensors:
        if self.optimizer is not None and self.steps == self.at:
            for parameter, moments in self.earlier.items():
                for name in _MOMENTS:
                    self.optimizer.state[parameter][name].copy_(moments[name])
        if self.optimizer is not None:
            self.earlier = {p: {n: s[n].clone() for n in _MOMENTS} for p, s in self.optimizer.state.items()}
        return super().step(parameters, gradients)


class _Forgets(ExactOptimizer):
    def clip(self, max_norm: float) -> None:
        super().clip(max_norm)
        if self.optimizer is not None:
            self.optimizer.state.clear()


def explain_norm(reported: float, gradients: Tensors, failed: FailedStep) -> Explanation:
    """A global norm that is not that of the run's own gradients."""
    earlier = failed.trace.gradients[failed.step - 1] if failed.step else {}
    if earlier and abs(reported / global_norm(earlier) - 1) < 1e-5:
        return Fault.STALE_GRADIENT, f"the norm told is that of the gradients of step {failed.step - 1}"
    known = {f"1/sqrt({k})": v**-0.5 for k, v in failed.known_factors().items() if v > 1 and "/" not in k}
    return (
        Fault.CLIPPING,
        f"the norm told is {named_factor(reported / global_norm(gradients), known)} times the right one",
    )
