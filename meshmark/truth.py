"""The truth: one process, float64, plain PyTorch; and how far a run is from it.

Two float32 runs that are both correct drift apart: AdamW's first step is the sign of the gradient, so one element
whose gradient is all rounding moves by twice the learning rate, and everything after it differs. Comparing
trajectories must then either alarm at random or tolerate real errors. So a run is judged by induction, each step on
its own: it starts at the prescribed values; at the parameters where it *is*, its loss and gradients are those that
float64 computes there; and from its own gradients its update is the one that a float64 optimizer makes of them.
Nothing accumulates, and the noise of the last step is that of the first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from meshmark.data import Batch, make_batch
from meshmark.errors import AdapterError
from meshmark.initial import initial_value
from meshmark.model import Transformer, parameter_shapes
from meshmark.objective import build_optimizer, loss_share
from meshmark.trace import Tensors, Trace
from meshmark.workload import OptimizerSpec, Workload


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """One quantity y of a run at one step, against the truth x. Norms are L2 over the whole tensor, in float64."""

    distance: float
    """||y - x||; infinite where y is missing or not finite."""
    scale: float
    """||x||."""
    factor: float
    """<y, x> / ||x||^2: y is about this multiple of the truth."""


Deviations = dict[str, list[Deviation]]
"""By quantity, then step: `loss`, `norm`, `gradients/NAME`, `parameters/NAME`, and `initial/NAME` (one step)."""


def assess(trace: Trace, workload: Workload, start: Tensors | None = None) -> Deviations:
    """Every quantity of a (gathered) trace against the truth.

    `start` replaces the workload's initial values. Raises `AdapterError` for a tensor of an unknown name or shape.
    """
    _check_names(trace, workload)
    start = initial_values(workload) if start is None else start
    found: Deviations = {f"initial/{name}": [deviation(trace.parameters[0].get(name), x)] for name, x in start.items()}
    optimizer = ExactOptimizer(workload.optimizer)
    for step, own in enumerate(trace.gradients):
        here, after = trace.parameters[step], trace.parameters[step + 1]
        here = {name: here.get(name, np.full(x.shape, np.nan)) for name, x in start.items()}
        loss, gradients = exact_gradients(workload, here, make_batch(workload, step))
        found.setdefault("loss", []).append(_scalar(trace.losses[step], loss))
        for name, x in gradients.items():
            found.setdefault(f"gradients/{name}", []).append(deviation(own.get(name), x))
        own = {name: own.get(name, np.zeros_like(x)) for name, x in gradients.items()}
        told = trace.norms[step]
        if told is not None:
            found.setdefault("norm", []).append(_scalar(told, global_norm(own)))
        for name, x in optimizer.step(here, own).items():
            found.setdefault(f"parameters/{name}", []).append(deviation(after.get(name), x))
    return found


def initial_values(workload: Workload) -> Tensors:
    """The prescribed start, float32."""
    shapes = parameter_shapes(workload.model)
    return {
        name: initial_value(workload.model, name, shape, seed=workload.seed).numpy() for name, shape in shapes.items()
    }


def exact_gradients(workload: Workload, parameters: Tensors, batch: Batch) -> tuple[float, Tensors]:
    """Loss of a global batch, and its gradient by every parameter, in float64."""
    with torch.device("meta"):
        model = Transformer(workload.model)
    values = {name: torch.from_numpy(value).double().requires_grad_() for name, value in parameters.items()}
    loss = loss_share(torch.func.functional_call(model, values, (batch.tokens_BT,)), batch)
    gradients = torch.autograd.grad(loss, list(values.values()), allow_unused=True, materialize_grads=True)
    return float(loss.detach()), {name: g.numpy() for name, g in zip(values, gradients, strict=True)}


def global_norm(tensors: Tensors) -> float:
    """L2 norm over all tensors together, in float64."""
    return float(np.sqrt(sum(np.sum(np.square(t, dtype=np.float64)) for t in tensors.values())))


class ExactOptimizer:
    """Clipping and the optimizer in float64, with moments made of the gradients that it is given."""

    def __init__(self, spec: OptimizerSpec) -> None:
        self.spec = spec
        self.parameters: dict[str, nn.Parameter] = {}
        self.optimizer: torch.optim.Optimizer | None = None

    def step(self, parameters: Tensors, gradients: Tensors) -> Tensors:
        """What `parameters` become under `gradients` (unclipped)."""
        if self.optimizer is None:
            self.parameters = {
                name: nn.Parameter(torch.tensor(p, dtype=torch.float64)) for name, p in parameters.items()
            }
            self.optimizer = self.build()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(torch.from_numpy(parameters[name]))
                parameter.grad = torch.tensor(gradients[name], dtype=torch.float64)
        if self.spec.clip_norm is not None:
            self.clip(self.spec.clip_norm)
        self.optimizer.step()
        return {name: p.detach().numpy().copy() for name, p in self.parameters.items()}

    def build(self) -> torch.optim.Optimizer:
        return build_optimizer(self.spec, self.parameters.values())

    def clip(self, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(self.parameters.values(), max_norm)


def deviation(y: NDArray[np.floating] | None, x: NDArray[np.floating]) -> Deviation:
    """`y` None means missing."""
    exact = np.asarray(x, dtype=np.float64)
    scale = float(np.linalg.norm(exact))
    if y is None:
        return Deviation(distance=float("inf"), scale=scale, factor=0.0)
    own = np.asarray(y, dtype=np.float64)
    distance = float(np.linalg.norm(own - exact))
    return Deviation(
        distance=distance if np.isfinite(distance) else float("inf"), scale=scale,
        factor=float(np.sum(own * exact)) / scale**2 if scale else 0.0,
    )  # fmt: skip


def _scalar(y: float, x: float) -> Deviation:
    return deviation(np.array([y]), np.array([x]))


def _check_names(trace: Trace, workload: Workload) -> None:
    shapes = parameter_shapes(workload.model)
    for kind, steps in (("parameters", trace.parameters), ("gradients", trace.gradients)):
        for name, tensor in (item for tensors in steps for item in tensors.items()):
            if name not in shapes:
                raise AdapterError(f"{kind}() returned {name!r}; the canonical names are {', '.join(shapes)}")
            if tensor.shape != shapes[name]:
                raise AdapterError(f"{kind}() returned {name!r} as {tensor.shape}; its full shape is {shapes[name]}")
