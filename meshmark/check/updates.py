"""Compare a script's updates with its optimizer's class in float64, given the gradients that the script stepped on.

Each rank's parts are enough, because the optimizers known here treat every element separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshmark.check.gradients import FACTOR
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


class UnknownOptimizerError(Exception):
    """The optimizer's rule is not known here. The text is the class."""


class Rule:
    """One optimizer of one rank, in float64, or in the script's precision with nudged gradients."""

    def __init__(self, *, nudges: torch.Generator | None = None) -> None:
        self.nudges = nudges
        self.optimizer: torch.optim.Optimizer | None = None
        self.parameters: dict[str, nn.Parameter] = {}

    def step(self, step: Step, which: int, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters of optimizer `which` after a step. Raises `UnknownOptimizerError`."""
        groups = [g for g in step.groups if g.optimizer == which and g.names]
        if self.optimizer is None:
            cls = _rule_of(groups[0])
            self._build(cls, step, groups, before)
        assert self.optimizer is not None
        for group in groups[len(self.optimizer.param_groups) :]:  # `add_param_group` since the step before
            self.optimizer.add_param_group(self._group(group, before))
        for own, group in zip(self.optimizer.param_groups, groups, strict=True):
            own.update({k: v for k, v in group.options.items() if k in own and k not in _HOW})
            for name in group.names:
                parameter = self.parameters[name]
                parameter.data.copy_(before[name])
                gradient = step.gradients.get(name)
                parameter.grad = None if gradient is None else self._nudged(gradient, parameter.dtype)
        self.optimizer.step()
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def _nudged(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        gradient = gradient.to(dtype)
        if self.nudges is None:
            return gradient
        signs = torch.randint(-1, 2, gradient.shape, generator=self.nudges).to(dtype)
        return gradient * (1 + signs * torch.finfo(dtype).eps)

    def _kept(self, value: Tensor) -> Tensor:
        return value.double() if self.nudges is None and value.is_floating_point() else value.clone()

    def _group(self, group: Group, before: Mapping[str, Tensor]) -> dict[str, Any]:
        own = [nn.Parameter(self._kept(before[name])) for name in group.names]
        self.parameters |= dict(zip(group.names, own, strict=True))
        return {"params": own} | {k: v for k, v in group.options.items() if k not in _HOW}

    def _build(self, cls: Any, step: Step, groups: Any, before: Mapping[str, Tensor]) -> None:  # noqa: ANN401
        self.optimizer = cls([self._group(group, before) for group in groups], foreach=False)
        for name, state in step.state.items():
            if name in self.parameters:
                self.optimizer.state[self.parameters[name]] = {
                    k: torch.as_tensor(v, dtype=torch.float32).clone()
                    if k == "step"
                    else self._kept(v)
                    if isinstance(v, Tensor)
                    else v
                    for k, v in state.items()
                }


def _rule_of(group: Group) -> Any:  # noqa: ANN401
    """Return PyTorch's class of the same rule. Raises `UnknownOptimizerError`."""
    if group.cls in _COMPILED_ADAM and group.options.get("bias_correction", True):
        return torch.optim.AdamW if group.options["adam_w_mode"] else torch.optim.Adam
    cls = _BY_NAME.get(group.cls)
    if cls is None:
        raise UnknownOptimizerError(group.cls)
    return cls


def _coarseness(group: Group) -> float:
    """Return the relative rounding of a step of DeepSpeed's compiled Adam, beside that of the gradients.

    It keeps the powers of both betas in float32, rounds them at every step, and divides by `1 - beta1**t` and by the
    root of `1 - beta2**t`. Rounding of `t * eps / 2` moves `1 - beta**t` by up to `eps / 2 / (1 - beta)` of its size.
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
        self.previous: dict[str, int] = {}
        self.renewed: list[str] = []
        """Parameters that a new optimizer object steps although another one did before."""
        self.worst = 0.0

    def compare(self, step: Step, before: Mapping[str, Tensor]) -> dict[str, tuple[float, Tensor]]:
        """Return the parameters whose update is wrong: by how many tolerances, and the right value."""
        wrong = {}
        coarse = {name: _coarseness(g) for g in step.groups if g.cls in _COMPILED_ADAM for name in g.names}
        for which in dict.fromkeys(g.optimizer for g in step.groups if g.names):
            if which not in self.exact:
                self.exact[which] = Rule()
                seeds = [torch.Generator().manual_seed(1000 * self.rank + draw) for draw in range(DRAWS)]
                self.noisy[which] = [Rule(nudges=seed) for seed in seeds]
            right = self.exact[which].step(step, which, before)
            draws = [rule.step(step, which, before) for rule in self.noisy[which]]
            for name, x in right.items():
                if self.previous.setdefault(name, which) != which:
                    self.renewed.append(name)
                    self.previous[name] = which
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
        return wrong


def explain_update(step: Step, before: Mapping[str, Tensor], wrong: Mapping[str, tuple[float, Tensor]]) -> str:
    """Describe a wrong update."""
    names = sorted(wrong, key=lambda n: wrong[n][0], reverse=True)
    where = names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    still = [n for n in names if bool((step.after[n] == before[n]).all())]
    if still:
        return f"{len(still)} of {len(names)} wrong parameters did not move at all ({still[0]})"
    right = torch.cat([(wrong[n][1] - before[n].double()).reshape(-1) for n in names])
    own = torch.cat([(step.after[n].double() - before[n].double()).reshape(-1) for n in names])
    factor = float(own @ right / (right @ right)) if right.any() else 0.0
    if float((own - factor * right).norm()) <= 0.05 * float((own - right).norm()):
        return f"{where} moves {factor:.4g} times the right step"
    return f"{where} is not where the optimizer's rule leads from the script's own gradients"
