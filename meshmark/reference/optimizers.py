"""The optimizers that workloads train with: PyTorch's own, and the same rules in float64 for the truth.

Each class knows one kind; what a kind keeps of a parameter is in `meshmark.spec.optimizer`, without torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshmark.reference.layer_wise import LAMB, LARS
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec

Named = Iterable[tuple[str, nn.Parameter]]


class ReferenceOptimizer(ABC):
    """Base of the kinds of optimizers."""

    def __init__(self, spec: OptimizerSpec) -> None:
        self.spec = spec

    @abstractmethod
    def arguments(self) -> tuple[type[Optimizer], dict[str, Any]]:
        """Class and keyword arguments, for frameworks that construct the optimizer themselves."""

    def build(self, parameters: Named, **more: bool) -> Optimizer:
        """PyTorch's, over named parameters, of which frozen ones are left out; with `more` arguments, where its class
        takes them."""
        cls, arguments = self.arguments()
        return cls(parameter_groups(self.spec, parameters), **(arguments | more))

    def build_exact(self, parameters: Named) -> Optimizer:
        """Return an optimizer whose step on float64 parameters is exact except for float64's rounding."""
        return self.build(parameters)


class AdamW(ReferenceOptimizer):
    def arguments(self) -> tuple[type[Optimizer], dict[str, Any]]:
        spec = self.spec
        return torch.optim.AdamW, {
            "lr": spec.learning_rate,
            "betas": spec.betas,
            "eps": spec.eps,
            "weight_decay": spec.weight_decay,
        }


class SGD(ReferenceOptimizer):
    def arguments(self) -> tuple[type[Optimizer], dict[str, Any]]:
        spec = self.spec
        plain = {"lr": spec.learning_rate, "weight_decay": spec.weight_decay}
        return torch.optim.SGD, {**plain, "momentum": spec.momentum, "nesterov": spec.nesterov}


class Adafactor(ReferenceOptimizer):
    def arguments(self) -> tuple[type[Optimizer], dict[str, Any]]:
        """The first epsilon is given, for PyTorch's own choice is another in float64."""
        spec = self.spec
        return torch.optim.Adafactor, {
            "lr": spec.learning_rate,
            "beta2_decay": spec.beta2_decay,
            "eps": (spec.eps, 1e-3),
            "weight_decay": spec.weight_decay,
        }


class LayerWise(ReferenceOptimizer):
    def arguments(self) -> tuple[type[Optimizer], dict[str, Any]]:
        spec = self.spec
        plain = {"lr": spec.learning_rate, "weight_decay": spec.weight_decay}
        if spec.kind is OptimizerKind.LARS:
            return LARS, {**plain, "momentum": spec.momentum}
        return LAMB, {**plain, "betas": spec.betas, "eps": spec.eps}


class Muon(ReferenceOptimizer):
    """Muon for the matrices of blocks and AdamW for all others, as one optimizer."""

    def arguments(self) -> tuple[type[Optimizer], dict[str, Any]]:
        """Return class and arguments of the optimizer for the matrices."""
        spec = self.spec
        return torch.optim.Muon, {
            "lr": spec.learning_rate,
            "weight_decay": spec.weight_decay,
            "momentum": spec.momentum,
            "nesterov": spec.nesterov,
            "adjust_lr_fn": "match_rms_adamw",
        }

    def build(self, parameters: Named, **more: bool) -> Optimizer:
        assert not more, "none that both parts take"
        return self._both(parameters, torch.optim.Muon)

    def build_exact(self, parameters: Named) -> Optimizer:
        return self._both(parameters, ExactMuon)

    def _both(self, parameters: Named, cls: Callable[..., Optimizer]) -> Optimizer:
        named = list(parameters)
        matrices = [(name, p) for name, p in named if self.spec.orthogonalizes(name, tuple(p.shape))]
        chosen = {name for name, _ in matrices}
        others = [(name, p) for name, p in named if name not in chosen]
        arguments = self.arguments()[1]
        return Together([cls(parameter_groups(self.spec, matrices), **arguments), AdamW(self.spec).build(others)])


_KINDS: dict[OptimizerKind, type[ReferenceOptimizer]] = {
    OptimizerKind.ADAMW: AdamW,
    OptimizerKind.SGD: SGD,
    OptimizerKind.ADAFACTOR: Adafactor,
    OptimizerKind.MUON: Muon,
    OptimizerKind.LARS: LayerWise,
    OptimizerKind.LAMB: LayerWise,
}


def reference_optimizer(spec: OptimizerSpec) -> ReferenceOptimizer:
    return _KINDS[spec.kind](spec)


def parameter_groups(spec: OptimizerSpec, parameters: Named) -> list[dict[str, Any]]:
    """Return parameter groups for PyTorch: one group, or a second one without weight decay if `spec` asks for it."""
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": [p for name, p in trained if spec.decays(name)]}]
    if spec.groups_decay:
        groups.append({"params": [p for name, p in trained if not spec.decays(name)], "weight_decay": 0.0})
    return groups


class Together(Optimizer):
    """Several optimizers, each over parameters of its own, as one: with one state, one list of groups, one step."""

    def __init__(self, parts: list[Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Give every part the groups and the state of the whole."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.state, part.param_groups = self.state, [next(groups) for _ in part.param_groups]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()  # loading a checkpoint replaces both

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for part in self.parts:
            part.step()


class ExactMuon(Optimizer):
    """PyTorch's Muon in the parameters' own precision: `torch.optim.Muon` makes updates orthogonal in bf16, whatever it
    is given."""

    def __init__(self, params: list[dict[str, Any]], **options: Any) -> None:  # noqa: ANN401
        defaults = torch.optim.Muon([nn.Parameter(torch.empty(1, 1))], **options).defaults
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
                update = newton_schulz(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                rate = group["lr"] * 0.2 * math.sqrt(max(parameter.shape))  # "match_rms_adamw"
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-rate)


def newton_schulz(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """`matrix` over its norm, with every singular value s replaced by a s + b s^3 + c s^5, `steps` times: near one for
    all that are not small (https://kellerjordan.github.io/posts/muon)."""
    a, b, c = coefficients
    found: Tensor = matrix / matrix.norm().clamp(min=eps)
    for _ in range(steps):
        gram = found @ found.T
        found = a * found + (b * gram + c * gram @ gram) @ found
    return found
