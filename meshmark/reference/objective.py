"""The loss and the optimizer: the parts of a step that do not depend on the framework.

Cross-entropy is computed a few rows at a time, so that nothing of the size of the outputs is kept but they themselves
and, in the backward pass, their gradient. Optimizers are PyTorch's own, and the same rules in float64 for the truth.
Each class knows one kind; what a kind keeps of a parameter is in `meshmark.spec.optimizer`, without torch.

Shape suffixes: N rows, V classes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from meshmark.reference.data import IGNORED, Batch
from meshmark.reference.layer_wise import LAMB, LARS
from meshmark.spec.case import Tuning
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.workload import Loss

# --- The optimizers that workloads train with: PyTorch's own, and the same rules in float64 for the truth.

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


# --- Cross-entropy a few rows at a time.

ROWS = 256
"""At once; of 50,257 classes 51 MB in float32."""


def chunked_cross_entropy(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Each target's cross-entropy times its weight, summed, in at least float32; `outputs` has one dim more, the
    classes."""
    loss: Tensor = ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        outputs.flatten(0, -2), targets.flatten(), weights.flatten()
    )
    return loss


class ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs_NV: Tensor, targets_N: Tensor, weights_N: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(outputs_NV, targets_N, weights_N)
        total = torch.zeros((), dtype=_wide_dtype(outputs_NV), device=outputs_NV.device)
        for rows in _chunks(len(outputs_NV)):
            wide = outputs_NV[rows].to(total.dtype)
            each = F.cross_entropy(wide, targets_N[rows], ignore_index=IGNORED, reduction="none")
            total += (each * weights_N[rows].to(total.dtype)).sum()
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        """Softmax less one at the target, times what the row counts."""
        outputs_NV, targets_N, weights_N = ctx.saved_tensors
        found_NV = torch.empty_like(outputs_NV)
        for rows in _chunks(len(outputs_NV)):
            targets = targets_N[rows]
            share = torch.softmax(outputs_NV[rows].to(gradient.dtype), -1)
            share[torch.arange(len(targets), device=targets.device), targets.clamp(min=0)] -= 1
            counts = weights_N[rows].to(gradient.dtype) * (targets != IGNORED) * gradient
            found_NV[rows] = share.mul_(counts[:, None])  # rounded once
        return found_NV, None, None


def _chunks(num_rows: int) -> Iterator[slice]:
    return (slice(start, start + ROWS) for start in range(0, num_rows, ROWS))


def _wide_dtype(outputs: Tensor) -> torch.dtype:
    return torch.float64 if outputs.dtype is torch.float64 else torch.float32


# --- The loss and the optimizer: the parts of a step that do not depend on the framework.

_PLAIN = Tuning()


def loss_share(outputs: Tensor, batch: Batch, loss: Loss, *, chunked: bool = False) -> Tensor:
    """The share that `batch` has in the loss of its global batch: the sum over its targets, by weight, over the weight
    of all targets of the *global* batch. The shares of all parts add up to the global mean whatever the number of
    targets in each. Scalar, in float32 or, for float64 outputs, float64. `chunked`: without a copy of the outputs."""
    if chunked:
        weights = batch.weights if loss is Loss.WEIGHTED_CROSS_ENTROPY else torch.ones_like(batch.weights)
        return chunked_cross_entropy(outputs, batch.targets, weights) / batch.total_weight
    if loss is Loss.OWN:
        return _wide(outputs) / batch.total_weight
    if loss is Loss.CROSS_ENTROPY:
        return cross_entropy(outputs, batch.targets) / batch.total_weight
    return weighted_cross_entropy(outputs, batch.targets, batch.weights) / batch.total_weight


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Summed over all targets but those that are `IGNORED`; `outputs` has one dim more, the classes."""
    flat = _wide(outputs).flatten(0, -2)
    return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")


def weighted_cross_entropy(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """The same, each target times its weight."""
    wide = _wide(outputs)
    each = F.cross_entropy(wide.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return (each * weights.flatten().to(wide.dtype)).sum()


def _wide(outputs: Tensor) -> Tensor:
    return outputs if outputs.dtype is torch.float64 else outputs.float()


def build_optimizer(
    spec: OptimizerSpec, parameters: Iterable[tuple[str, nn.Parameter]], tuning: Tuning = _PLAIN
) -> torch.optim.Optimizer:
    """PyTorch's optimizer for `spec` over named parameters, of which frozen ones are left out; fused where that is a
    case's `tuning`."""
    return reference_optimizer(spec).build(parameters, **({"fused": True} if tuning.fused_optimizer else {}))


class Schedule(Protocol):
    """A scheduler of learning rates: PyTorch's, or a framework's around it."""

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...

    def get_last_lr(self) -> Sequence[float | Tensor]: ...


def build_schedule(spec: OptimizerSpec, optimizer: torch.optim.Optimizer) -> Schedule | None:
    """PyTorch's scheduler for `spec`, to be stepped once an optimizer step; None when the rate is constant."""
    return LambdaLR(optimizer, spec.rate_factor) if spec.warmup_steps else None
