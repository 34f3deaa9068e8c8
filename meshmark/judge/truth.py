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
from torch import nn

from meshmark import rank_progress
from meshmark.errors import AdapterError
from meshmark.judge.deviation import Deviation, Deviations, QuantityKind, Tensors, deviation, global_norm
from meshmark.judge.trace import Trace
from meshmark.reference.data import Batch, make_batch
from meshmark.reference.initial import initial_value
from meshmark.reference.objective import build_optimizer, loss_share
from meshmark.reference.transformer import Transformer, parameter_shapes
from meshmark.spec.optimizer import OptimizerSpec
from meshmark.spec.workload import Workload


def assess(trace: Trace, workload: Workload, start: Tensors | None = None) -> Deviations:
    """Every quantity of a (gathered) trace against the truth.

    `start` replaces the workload's initial values. Raises `AdapterError` for a tensor of an unknown name or shape.
    """
    _check_names(trace, workload)
    start = initial_values(workload) if start is None else start
    found: Deviations = {
        QuantityKind.INITIAL.of(name): [deviation(trace.parameters[0].get(name), x)] for name, x in start.items()
    }
    optimizer = ExactOptimizer(workload.optimizer)
    rank_progress.begin(rank_progress.Phase.TRUTH, len(trace.gradients))
    for step, own in enumerate(trace.gradients):
        here, after = trace.parameters[step], trace.parameters[step + 1]
        here = {name: here.get(name, np.full(x.shape, np.nan)) for name, x in start.items()}
        batch = make_batch(workload, step)
        exact = exact_gradients(workload, here, batch)
        found.setdefault(QuantityKind.LOSS.of(), []).append(_scalar(trace.losses[step], exact.loss))
        if trace.evaluations:
            found.setdefault(QuantityKind.EVALUATION.of(), []).append(_scalar(trace.evaluations[step], exact.loss))
        for name, x in exact.gradients.items():
            absent = np.zeros_like(x) if name in exact.unused else None
            found.setdefault(QuantityKind.GRADIENTS.of(name), []).append(deviation(own.get(name, absent), x))
        own = {name: own.get(name, np.zeros_like(x)) for name, x in exact.gradients.items() if name not in exact.unused}
        reported = trace.norms[step]
        if reported is not None:
            found.setdefault(QuantityKind.NORM.of(), []).append(_scalar(reported, global_norm(own)))
        for name, x in optimizer.step(here, own).items():
            found.setdefault(QuantityKind.PARAMETERS.of(name), []).append(deviation(after.get(name), x))
    return found


def initial_values(workload: Workload) -> Tensors:
    """The prescribed start, float32."""
    shapes = parameter_shapes(workload.model)
    return {
        name: initial_value(workload.model, name, shape, seed=workload.seed).numpy() for name, shape in shapes.items()
    }


@dataclass(frozen=True, kw_only=True)
class Exact:
    """What float64 computes of a global batch."""

    loss: float
    gradients: Tensors
    """By every parameter that is trained; zero where unused."""
    unused: frozenset[str]
    """Parameters that are trained but had no part in this loss."""


def exact_gradients(workload: Workload, parameters: Tensors, batch: Batch) -> Exact:
    """Loss and gradients of a global batch, without dropout."""
    with torch.device("meta"):
        model = Transformer(workload.model)
    model.eval().skipped_block = batch.skipped_block
    values = {name: torch.from_numpy(value).double() for name, value in parameters.items()}
    trained = {name: value.requires_grad_() for name, value in values.items() if workload.trains(name)}
    loss = loss_share(torch.func.functional_call(model, values, (batch.tokens_BT,)), batch)
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    found = dict(zip(trained, gradients, strict=True))
    rank_progress.advance()
    return Exact(
        loss=float(loss.detach()),
        unused=frozenset(name for name, g in found.items() if g is None),
        gradients={name: np.zeros(parameters[name].shape) if g is None else g.numpy() for name, g in found.items()},
    )


class ExactOptimizer:
    """Clipping, schedule and optimizer in float64, with moments made of the gradients that it is given."""

    def __init__(self, spec: OptimizerSpec) -> None:
        self.spec = spec
        self.parameters: dict[str, nn.Parameter] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self.steps = 0

    def step(self, parameters: Tensors, gradients: Tensors) -> Tensors:
        """What `parameters` become under `gradients` (unclipped); those without a gradient stay, as they do in
        PyTorch, and so do their moments."""
        if self.optimizer is None:
            self.parameters = {
                name: nn.Parameter(torch.tensor(p, dtype=torch.float64)) for name, p in parameters.items()
            }
            self.optimizer = self.build()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(torch.from_numpy(parameters[name]))
                own = gradients.get(name)
                parameter.grad = None if own is None else torch.tensor(own, dtype=torch.float64)
        if self.spec.clip_norm is not None:
            self.clip(self.spec.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.spec.learning_rate * self.spec.rate_factor(self.steps)
        self.optimizer.step()
        self.steps += 1
        return {name: p.detach().numpy().copy() for name, p in self.parameters.items()}

    def build(self) -> torch.optim.Optimizer:
        return build_optimizer(self.spec, self.parameters.items())

    def clip(self, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(self.parameters.values(), max_norm)


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
