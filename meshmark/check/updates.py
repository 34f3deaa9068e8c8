"""Compare a script's updates with its optimizer's class in float64, given the gradients that the script stepped on.

Each rank's parts are enough, because the optimizers known here treat every element separately.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshmark.check.gradients import FACTOR, shortened
from meshmark.check.recording import Group, Step

KNOWN = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
)
"""Optimizers that work element by element, so that a shard is updated like the whole."""
_BY_NAME = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in KNOWN}
_COMPILED_ADAM = ("deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam", "deepspeed.ops.adam.fused_adam.FusedAdam")
"""DeepSpeed's own, which is Adam or AdamW."""
_HOW = {"foreach": False, "fused": None, "capturable": False, "differentiable": False}
"""Options that affect how a step is computed but not its result."""
DRAWS = 3
CLEAR = 0.3
"""Largest part of a small step by which the rounding of gradients may turn it, so that its direction is judged."""
SAME_WAY = 0.5
"""Cosine up to which a small step is not the one of the optimizer's rule in the script's precision."""


class UnknownOptimizerError(Exception):
    """The optimizer's rule is not known here. The text is the class."""


class Rule:
    """One optimizer of one rank, in float64, or in the script's precision with nudged gradients."""

    def __init__(self, *, nudges: torch.Generator | None = None) -> None:
        self.nudges = nudges
        self.optimizer: torch.optim.Optimizer | None = None
        self.parameters: dict[str, nn.Parameter] = {}
        self.restored: list[str] = []
        """Parameters whose state the script has set since the step before."""

    def step(self, step: Step, which: int, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters of optimizer `which` after a step. Raises `UnknownOptimizerError`."""
        groups = [g for g in step.groups if g.optimizer == which and g.names]
        optimizer = self._with(groups, before)
        self._restore(optimizer, step)
        stepped = {name: self.parameters[name] for group in groups for name in group.names}
        for name, parameter in stepped.items():
            parameter.data.copy_(before[name])
            gradient = step.gradients.get(name)
            parameter.grad = None if gradient is None else self._nudged(gradient, parameter.dtype)
        optimizer.step()
        return {name: p.detach().clone() for name, p in stepped.items()}

    def _with(self, groups: Sequence[Group], before: Mapping[str, Tensor]) -> torch.optim.Optimizer:
        """Return the optimizer with these groups. A script may add some, take some out, or move parameters."""
        for group in groups:
            for name in group.names:
                if name not in self.parameters:
                    self.parameters[name] = nn.Parameter(self._kept(before[name]))
        own = [
            {"params": [self.parameters[name] for name in group.names]}
            | {k: v for k, v in group.options.items() if k not in _HOW}
            for group in groups
        ]
        if self.optimizer is None:
            self.optimizer = _rule_of(groups[0])(own, foreach=False)
        else:
            self.optimizer.param_groups.clear()
            for each in own:
                self.optimizer.add_param_group(each)
        return self.optimizer

    def _restore(self, optimizer: torch.optim.Optimizer, step: Step) -> None:
        """Take over the state that something else than the optimizer's steps has set."""
        self.restored = []
        for name, state in step.state.items():
            if name not in self.parameters:
                continue
            own = optimizer.state.get(self.parameters[name], {})
            if own and _is_same_state(own, state):
                continue
            self.restored.append(name)
            optimizer.state[self.parameters[name]] = {
                k: torch.as_tensor(v, dtype=torch.float32).clone()
                if k == "step"
                else self._kept(v)
                if isinstance(v, Tensor)
                else v
                for k, v in state.items()
            }

    def _nudged(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        gradient = gradient.to(dtype)
        if self.nudges is None:
            return gradient
        signs = torch.randint(-1, 2, gradient.shape, generator=self.nudges).to(dtype)
        return gradient * (1 + signs * torch.finfo(dtype).eps)

    def _kept(self, value: Tensor) -> Tensor:
        return value.double() if self.nudges is None and value.is_floating_point() else value.clone()


def _is_same_state(own: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Return whether a recorded state is the one that this optimizer has, but for rounding."""

    def is_same(mine: Any, other: Any) -> bool:  # noqa: ANN401
        eps = torch.finfo(other.dtype).eps if isinstance(other, Tensor) and other.is_floating_point() else 0.0
        mine, other = (torch.as_tensor(x, dtype=torch.float64) for x in (mine, other))
        return mine.shape == other.shape and bool((mine - other).norm() <= max(1e-4, 8 * eps) * mine.norm())

    return all(key in state and is_same(value, state[key]) for key, value in own.items() if value is not None)


def _rule_of(group: Group) -> Any:  # noqa: ANN401
    """Return PyTorch's class of the same rule. Raises `UnknownOptimizerError`."""
    if group.cls in _COMPILED_ADAM and group.options.get("bias_correction", True):
        return torch.optim.AdamW if group.options["adam_w_mode"] else torch.optim.Adam
    cls = _BY_NAME.get(group.cls)
    if cls is None:
        raise UnknownOptimizerError(group.cls)
    return cls


def _coarseness(group: Group) -> float:
    """Return the relative rounding of a step of DeepSpeed's Adam, or of a step that `torch.compile` runs, beside that
    of the gradients.

    DeepSpeed's keeps the powers of both betas in float32, rounds them at every step, and divides by `1 - beta1**t` and
    by the root of `1 - beta2**t`. Rounding of `t * eps / 2` moves `1 - beta**t` by up to `eps / 2 / (1 - beta)` of its
    size.
    """
    half = torch.finfo(torch.float32).eps / 2
    beta1, beta2 = group.options["betas"]
    return float(half / (1 - beta1) + half / (1 - beta2) / 2)


class Updates:
    """All optimizers of one rank over the run."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.exact: dict[int, Rule] = {}
        self.noisy: dict[int, list[Rule]] = {}
        self.optimizers: dict[str, set[int]] = {}
        """By parameter, the optimizers that have stepped it."""
        self.renewed: list[int] = []
        """Numbers of steps in which a new optimizer object, without a state, steps what another one did before."""
        self.worst = 0.0
        self.hidden = 0.0
        """Largest error of a step, relative to the step, that the rounding of weights would hide."""
        self.lost = False
        """True if a whole step of a tensor by the optimizer's rule was lost in the rounding of its values."""
        self.restored: list[str] = []
        """Parameters whose state the script has set between the last two steps."""
        self.forgotten = 0
        """Number of steps before which the script has emptied the state."""

    def compare(self, number: int, step: Step, before: Mapping[str, Tensor]) -> dict[str, tuple[float, Tensor]]:
        """Return the parameters whose update in step `number` is wrong: by how many tolerances, and the right value."""
        wrong, self.restored = {}, []
        tolerances, moves, own, ruled, small = 0.0, 0.0, list[Tensor](), list[Tensor](), dict[str, Tensor]()
        in_float32 = [g for g in step.groups if g.cls in _COMPILED_ADAM or (g.is_compiled and "betas" in g.options)]
        coarse = {name: _coarseness(g) for g in in_float32 for name in g.names}
        for which in dict.fromkeys(g.optimizer for g in step.groups if g.names):
            if which not in self.exact:
                self.exact[which] = Rule()
                seeds = [torch.Generator().manual_seed(1000 * self.rank + draw) for draw in range(DRAWS)]
                self.noisy[which] = [Rule(nudges=seed) for seed in seeds]
            right = self.exact[which].step(step, which, before)
            self.restored += self.exact[which].restored
            draws = [rule.step(step, which, before) for rule in self.noisy[which]]
            for name, x in right.items():
                known = self.optimizers.setdefault(name, {which})
                if which not in known and not step.state.get(name) and number not in self.renewed:
                    self.renewed.append(number)
                known.add(which)
                y = step.after[name].double()
                if not y.numel():
                    continue
                noise = max(float((d[name].double() - x).norm()) for d in draws)
                eps = torch.finfo(step.after[name].dtype).eps
                moved = float((x - before[name].double()).norm())
                noise = max(noise, 0.5 * eps * float(x.norm()), coarse.get(name, 0.0) * moved)
                tolerance = FACTOR * noise + 1e-30
                distance = float((y - x).norm())
                if moved:
                    self.worst = max(self.worst, distance / max(moved, float(x.norm()) * eps))
                if not distance <= tolerance:
                    wrong[name] = distance / tolerance, x
                if not moved:
                    continue
                tolerances, moves = tolerances + tolerance**2, moves + moved**2
                if tolerance > moved:  # a step that is left out, or goes the other way, is within the rounding
                    rule = torch.stack([d[name].double() for d in draws]).mean(0) - before[name].double()
                    spread = max(float((d[name].double() - draws[0][name].double()).norm()) for d in draws[1:])
                    self.lost |= not rule.any()
                    if spread <= CLEAR * float(rule.norm()) and rule.any():
                        small[name] = x
                        own.append((y - before[name].double()).reshape(-1))
                        ruled.append(rule.reshape(-1))
        if small and not wrong:
            rule, taken = torch.cat(ruled), torch.cat(own)
            if float(rule @ taken) <= SAME_WAY * float(rule.norm() * taken.norm()):
                wrong = {name: (1.0, x) for name, x in small.items()}
        if moves:
            self.hidden = max(self.hidden, math.sqrt(tolerances / moves))
        self.forgotten += bool(self.restored) and not any(step.state[name] for name in self.restored)
        return wrong


def explain_update(step: Step, before: Mapping[str, Tensor], wrong: Mapping[str, tuple[float, Tensor]]) -> str:
    """Describe a wrong update."""
    names = sorted(wrong, key=lambda n: wrong[n][0], reverse=True)
    where = shortened(names)
    still = [n for n in names if bool((step.after[n] == before[n]).all())]
    if still:
        return f"{len(still)} of {len(names)} wrong parameters did not move at all ({still[0]})"
    right = torch.cat([(wrong[n][1] - before[n].double()).reshape(-1) for n in names])
    own = torch.cat([(step.after[n].double() - before[n].double()).reshape(-1) for n in names])
    factor = float(own @ right / (right @ right)) if right.any() else 0.0
    if float((own - factor * right).norm()) <= 0.05 * float((own - right).norm()):
        return f"{where} moves {factor:.4g} times the right step"
    return f"{where} is not where the optimizer's rule leads from the script's own gradients"
