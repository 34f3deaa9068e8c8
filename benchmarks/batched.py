"""Many correct runs of one small problem as one computation: `torch.func.vmap` over runs, each with row orders and last
bits of its own, as noise runs have them.

Kernels work on all runs at once, and so round in another order than `single`'s: these are runs of one more correct
framework, whose noise is that of its own runs. The truth of every run is taken at that run's own parameters, in
float64, in the same way. Tensors are stacked over runs: R runs first, then the parameter's dims.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshmark.adapter.engine import AUTOCAST, initial_model
from meshmark.judge.deviation import Deviation, Deviations, Quantity, QuantityKind
from meshmark.judge.tolerance_model import Comparisons, noise_run
from meshmark.judge.truth import initial_values
from meshmark.judge.twin import exact_model
from meshmark.models.module import Model, random_bits
from meshmark.passes.noise import num_chunks, num_ways
from meshmark.reference.data import Batch, make_batch
from meshmark.reference.objective import loss_share, reference_optimizer
from meshmark.spec.case import Case
from meshmark.spec.optimizer import OptimizerKind, OptimizerSpec
from meshmark.spec.precision import Dtype
from meshmark.spec.workload import Workload

Stacked = dict[str, Tensor]
"""By canonical name."""
_Step = tuple[Stacked, Tensor]
"""Gradients and losses."""


def train_batched(case: Case, steps: int, num_runs: int) -> list[Comparisons]:
    """`num_runs` runs; where there are two ways of casting, they take turns at them, as noise runs do."""
    ways, found = num_ways(case), dict[int, Comparisons]()
    for way in range(ways):
        own = range(way, num_runs, ways)
        every = assess_batched(train(case, steps, own, cast_weights=bool(way)), case.workload)
        found |= {run: noise_run(deviations, case.precision) for run, deviations in zip(own, every, strict=True)}
    return [found[run] for run in range(num_runs)]


@dataclass(kw_only=True)
class Traces:
    """Results of the runs: like `meshmark.judge.trace.Trace`, stacked over runs."""

    parameters: list[Stacked] = field(default_factory=list)
    gradients: list[Stacked] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)


def train(case: Case, steps: int, runs: Sequence[int], *, cast_weights: bool = False) -> Traces:
    """`runs` seed the perturbations."""
    workload, dtype = case.workload, AUTOCAST.get(case.precision.compute)
    model = initial_model(case, torch.device("cpu"))
    here = _perturbed(case, runs)
    optimizer = StackedOptimizer(workload.optimizer, here)
    trace = Traces(parameters=[here])
    for step in range(steps):
        batch = make_batch(workload, step)
        drawn = [random_bits(f"order/{run}", (len(batch),), seed=workload.seed).argsort() for run in runs]
        rows = batch.take(torch.stack(drawn))
        share = _share(model, workload, batch, cast_to=dtype if cast_weights else None)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None and not cast_weights):
            gradients, losses = _differentiated(share, here, rows, num_chunks(case))
        here, norms = optimizer.step(here, gradients)
        trace.losses.append(losses)
        trace.gradients.append(gradients)
        trace.norms += [] if norms is None else [norms]
        trace.parameters.append(here)
    return trace


def assess_batched(trace: Traces, workload: Workload) -> list[Deviations]:
    """`meshmark.judge.truth.assess` of every run, but for initial values and evaluation."""
    found = dict[Quantity, list[list[Deviation]]]()

    def note(quantity: Quantity, values: Tensor, exact: Tensor) -> None:
        found.setdefault(quantity, []).append(_deviations(values, exact))

    optimizer = StackedOptimizer(workload.optimizer, _double(trace.parameters[0]))
    for step, (gradients, losses) in enumerate(zip(trace.gradients, trace.losses, strict=True)):
        here, batch = _double(trace.parameters[step]), make_batch(workload, step)
        share = _share(exact_model(workload, batch), workload, batch)
        with _quick():
            exact, loss = vmap(grad_and_value(share), in_dims=(0, None, None, None))(
                here, batch.inputs, batch.targets, batch.weights
            )
        note(QuantityKind.LOSS.of(), losses, loss)
        after, norms = optimizer.step(here, _double(gradients))
        if norms is not None:
            note(QuantityKind.NORM.of(), trace.norms[step], norms)
        for name in exact:
            note(QuantityKind.GRADIENTS.of(name), gradients[name], exact[name])
            note(QuantityKind.PARAMETERS.of(name), trace.parameters[step + 1][name], after[name])
    return [{q: [by_run[run] for by_run in steps] for q, steps in found.items()} for run in range(len(losses))]


class StackedOptimizer:
    """A workload's optimizer, elementwise and so the same for all runs at once, with every run's own clipping."""

    def __init__(self, spec: OptimizerSpec, parameters: Stacked) -> None:
        assert spec.kind in (OptimizerKind.ADAMW, OptimizerKind.SGD), f"{spec.kind} is not elementwise"
        self.spec, self.steps = spec, 0
        self.parameters = {name: nn.Parameter(p.clone()) for name, p in parameters.items()}
        self.optimizer = reference_optimizer(spec).build(self.parameters.items())

    @torch.no_grad()
    def step(self, parameters: Stacked, gradients: Stacked) -> tuple[Stacked, Tensor | None]:
        """Return `parameters` after an update by `gradients` (unclipped), and the runs' norms if there is clipping."""
        clip = self.spec.clip_norm
        norms = (
            None if clip is None else torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
        )
        for name, parameter in self.parameters.items():
            parameter.copy_(parameters[name])
            parameter.grad = gradients[name].clone()
            if clip is not None and norms is not None:
                factor = (clip / (norms + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
                parameter.grad.mul_(factor.view(-1, *[1] * (parameter.dim() - 1)))
        for group in self.optimizer.param_groups:
            group["lr"] = self.spec.learning_rate * self.spec.rate_factor(self.steps)
        self.optimizer.step()
        self.steps += 1
        return {name: p.detach().clone() for name, p in self.parameters.items()}, norms


def _perturbed(case: Case, runs: Sequence[int]) -> Stacked:
    """Every run's initial values, off by up to half a unit in the last place of what matrix products run in."""
    ulp, found = 2.0 ** -(case.precision.compute.mantissa_bits + 1), {}
    for name, start in initial_values(case.workload).items():
        bits = random_bits(f"perturbations/{name}", (max(runs) + 1, *start.shape), seed=case.workload.seed)[list(runs)]
        values = torch.from_numpy(start).double() * (1 + (bits & 0xFFFF).double().div(0xFFFF).mul(2).sub(1) * ulp)
        found[name] = values if case.precision.master is Dtype.FP64 else values.float()
    return found


def _share(model: Model, workload: Workload, batch: Batch, cast_to: torch.dtype | None = None) -> Callable[..., Tensor]:
    """One run's share of the loss of some rows of `batch`, as a function of parameters, inputs, targets, weights."""
    model.skipped_block = batch.skipped_block

    def share(parameters: Stacked, inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        own = {name: p.to(cast_to) for name, p in parameters.items()} if cast_to else parameters
        part = Batch(inputs=inputs, targets=targets, weights=weights, total_weight=batch.total_weight)
        return loss_share(functional_call(model, own, (inputs,)), part, workload.loss)

    return share


def _differentiated(share: Callable[..., Tensor], here: Stacked, rows: Batch, num_micro_batches: int) -> _Step:
    """Gradients and losses of all runs, added up over micro-batches, of `rows` [R, B, ...]."""
    size = rows.inputs.shape[1] // num_micro_batches
    gradients, losses = Stacked(), torch.zeros((), dtype=next(iter(here.values())).dtype)
    for start in range(0, num_micro_batches * size, size):
        micro = [tensor[:, start : start + size] for tensor in (rows.inputs, rows.targets, rows.weights)]
        with _quick():
            found, shares = vmap(grad_and_value(share))(here, *micro)
        gradients = {name: gradients[name] + g if name in gradients else g for name, g in found.items()}
        losses = losses + shares
    return gradients, losses


@contextmanager
def _quick() -> Iterator[None]:
    """Attention by matrix products, which have batched kernels."""
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        yield


def _double(tensors: Stacked) -> Stacked:
    return {name: tensor.double() for name, tensor in tensors.items()}


def _deviations(values: Tensor, exact: Tensor) -> list[Deviation]:
    """By run."""
    own, truth = values.detach().double().reshape(len(exact), -1), exact.detach().reshape(len(exact), -1)
    scales, distances, products = truth.norm(dim=1), (own - truth).norm(dim=1), (own * truth).sum(dim=1)
    return [
        Deviation(distance=distance, scale=scale, factor=product / scale**2 if scale else 0.0)
        for distance, scale, product in zip(distances.tolist(), scales.tolist(), products.tolist(), strict=True)
    ]
