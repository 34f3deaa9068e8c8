"""Compare a run with the truth one tensor at a time, like `meshmark.judge.truth` for a run in memory.

A step's gradients come layer by layer from `LayeredTruth`; each is compared and released. In updates, tensors share
only the norm that all are clipped by, so each tensor is followed separately through all steps.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from numpy.typing import NDArray
from torch import Tensor

from meshmark import rank_progress
from meshmark.judge.deviation import Deviation, QuantityKind, Tensors
from meshmark.judge.deviation import Quantity as Q
from meshmark.judge.layered import LayeredTruth
from meshmark.judge.trace import Trace
from meshmark.judge.truth import ExactOptimizer, scalar_deviation
from meshmark.reference.build import parameter_shapes
from meshmark.reference.data import make_batch
from meshmark.reference.initial import initial_value
from meshmark.spec.optimizer import OptimizerSpec
from meshmark.spec.workload import Workload


@contextlib.contextmanager
def all_cores(share: int = 1) -> Iterator[None]:
    """Let PyTorch use all cores of this process, divided by `share` processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // share, 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)


_CHUNK = 2**22
"""Elements of a tensor that are compared at once."""
Found = dict[Q, list[Deviation]]
Shapes = Mapping[str, tuple[int, ...]]


def assess_pieces(
    trace: Trace, workload: Workload, start: Tensors | None = None, device: torch.device | None = None
) -> Found:
    """Return every deviation of the steps for which `trace` has gradients, computed on `device` (by default the CPU).

    `start` replaces the workload's initial values. The workload's rows must not be coupled, and its replicas must not
    differ.
    """
    device, found, num_steps = device or torch.device("cpu"), Found(), len(trace.gradients)
    rank_progress.begin(rank_progress.Phase.TRUTH, 2 * num_steps * (workload.model.num_layers + 2))
    shapes = parameter_shapes(workload.model)
    for name, shape in shapes.items():
        x = torch.from_numpy(start[name]).to(device) if start else None
        if x is None:  # drawn on the device, whose bits are those of any other
            x = initial_value(workload.model, name, shape, seed=workload.seed, device=device)
        found[QuantityKind.INITIAL.of(name)] = [tensor_deviation(trace.parameters[0].get(name), x)]
        rank_progress.tick()
    norms = [_assess_gradients(trace, workload, step, shapes, device, found) for step in range(num_steps)]
    spec = workload.optimizer
    for name, shape in shapes.items():
        found[QuantityKind.PARAMETERS.of(name)] = _assess_updates(trace, spec, name, shape, norms, device)
        rank_progress.tick()
    return found


@dataclass(frozen=True, kw_only=True)
class _Norm:
    """Norm of all gradients that the run reported at a step."""

    value: float
    used: frozenset[str]
    """Parameters that contributed to it."""


def _assess_gradients(
    trace: Trace, workload: Workload, step: int, shapes: Shapes, device: torch.device, found: Found
) -> _Norm:
    truth = LayeredTruth(workload, trace.parameters[step], make_batch(workload, step), device)
    squares, used = 0.0, set[str]()

    def note(quantity: Q, value: Deviation) -> None:
        found.setdefault(quantity, []).append(value)

    for piece in truth.pieces():
        for name, x in piece.items():
            y = trace.gradients[step].get(name)
            if x is not None:
                used.add(name)
                squares += 0.0 if y is None else _square(y, device)
            elif y is None:
                y = torch.zeros(shapes[name]).numpy()
            exact = torch.zeros(shapes[name], device=device) if x is None else x
            note(QuantityKind.GRADIENTS.of(name), tensor_deviation(y, exact))
    note(QuantityKind.LOSS.of(), scalar_deviation(trace.losses[step], truth.loss))
    if trace.evaluations:
        note(QuantityKind.EVALUATION.of(), scalar_deviation(trace.evaluations[step], truth.loss))
    norm = _Norm(value=math.sqrt(squares), used=frozenset(used))
    if (told := trace.norms[step]) is not None:
        note(QuantityKind.NORM.of(), scalar_deviation(told, norm.value))
    return norm


def _assess_updates(
    trace: Trace, spec: OptimizerSpec, name: str, shape: tuple[int, ...], norms: Sequence[_Norm], device: torch.device
) -> list[Deviation]:
    """Return the deviations of one parameter after each step."""
    optimizer = _PieceOptimizer(spec, [norm.value for norm in norms])
    found = []
    for step, norm in enumerate(norms):
        here = trace.parameters[step].get(name)
        before = torch.full(shape, math.nan).numpy() if here is None else here
        own = trace.gradients[step].get(name, torch.zeros(shape).numpy()) if name in norm.used else None
        after = optimizer.step({name: before}, {} if own is None else {name: own})
        found.append(tensor_deviation(trace.parameters[step + 1].get(name), torch.from_numpy(after[name]).to(device)))
    return found


class _PieceOptimizer(ExactOptimizer):
    """Optimizer of one parameter, clipped by the norm of all."""

    def __init__(self, spec: OptimizerSpec, norms: Sequence[float]) -> None:
        super().__init__(spec)
        self.norms = norms

    def clip(self, max_norm: float) -> None:
        norm = torch.tensor(self.norms[self.steps], dtype=torch.float64)
        torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), max_norm, norm)


def tensor_deviation(y: NDArray | None, x: Tensor) -> Deviation:  # type: ignore[type-arg]
    """Like `deviation`, for an x on a device that is too large to be widened at once."""
    exact = torch.split(x.detach().flatten(), _CHUNK)
    scale = math.sqrt(sum(float(part.double().square().sum()) for part in exact))
    if y is None:
        return Deviation(distance=math.inf, scale=scale, factor=0.0)
    squares, product = 0.0, 0.0
    for own, part in zip(torch.split(torch.from_numpy(y).flatten(), _CHUNK), exact, strict=True):
        here, there = own.to(x.device, torch.float64), part.double()
        squares += float((here - there).square().sum())
        product += float((here * there).sum())
    distance = math.sqrt(squares) if math.isfinite(squares) else math.inf
    return Deviation(distance=distance, scale=scale, factor=product / scale**2 if scale else 0.0)


def _square(y: NDArray, device: torch.device) -> float:  # type: ignore[type-arg]
    parts = torch.split(torch.from_numpy(y).flatten(), _CHUNK)
    return sum(float(part.to(device, torch.float64).square().sum()) for part in parts)
