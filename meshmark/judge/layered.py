"""The truth of a model that is too large to differentiate at once: float64, layer by layer, on any device.

The forward pass keeps only the inputs of each layer. The backward pass runs every layer again, from the last to the
first, and yields its gradients before the next. One layer is in memory at a time, for as many rows as take at most
`MOST_BYTES`.

A run is compared with this truth one tensor at a time. A step's gradients come layer by layer from `LayeredTruth`; each
is compared and released. In updates, tensors share only the norm that all are clipped by, so each tensor is followed
separately through all steps.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshmark import rank_progress
from meshmark.algorithms.contract import Tensors
from meshmark.judge.deviation import Deviation, QuantityKind, TensorPrint, TruthPrint
from meshmark.judge.deviation import Quantity as Q
from meshmark.judge.trace import Trace
from meshmark.judge.truth import (
    PRINTED_GRADIENTS,
    ExactOptimizer,
    drawn_like,
    near,
    scalar_deviation,
    tensor_print,
)
from meshmark.models.module import Model, build_model, drawn_name, initial_value, parameter_shapes
from meshmark.models.transformer import ModelSpec
from meshmark.reference.data import Batch, make_batch
from meshmark.reference.objective import loss_share
from meshmark.spec.optimizer import OptimizerSpec
from meshmark.spec.workload import Workload

# --- The truth of a model that is too large to differentiate at once: float64, layer by layer, on any device.

MOST_BYTES = 2**30
"""Approximate upper bound for one layer's activations, in bytes."""
_WORKING = 4
"""Tensors of the size of a layer's largest that autograd holds at once: logits, their logarithms, gradients."""


Piece = dict[str, Tensor | None]
"""Gradients of some parameters, on the device. None for a parameter without effect on the loss."""


class LayeredTruth:
    """Loss and gradients of a global batch at given parameters, without dropout."""

    def __init__(self, workload: Workload, parameters: Tensors, batch: Batch, device: torch.device) -> None:
        """`parameters` are read one layer at a time. The workload's rows must not be coupled."""
        assert not workload.couples_rows
        self.workload, self.parameters, self.batch, self.device = workload, parameters, batch, device
        self.loss = 0.0
        """The loss. Complete once the first piece has been yielded."""
        self._tied: dict[str, Tensor] = {}
        """Gradients of parameters that another layer also contributes to."""

    @property
    def num_layers(self) -> int:
        return self.workload.model.num_layers + 2

    def pieces(self) -> Iterator[Piece]:
        """Yield each layer's gradients, from the last to the first. Every trained parameter comes once."""
        inputs, above = self._inputs(), list[Tensor]()
        for layer in reversed(range(self.num_layers)):
            model, values = self._layer(layer)
            gradients, above = self._differentiate(model, values, inputs.pop(), above)
            rank_progress.advance()
            yield self._untied(model, gradients)

    @torch.no_grad()
    def _inputs(self) -> list[list[Tensor]]:
        """Return the inputs of each layer, in parts of some rows."""
        rows = [part.inputs.to(self.device) for part in self._parts()]
        found = [rows]
        for layer in range(self.num_layers - 1):
            model, values = self._layer(layer)
            rows = [torch.func.functional_call(model, values, (x,)) for x in rows]
            found.append(rows)
            rank_progress.advance()
        return found

    def _parts(self) -> list[Batch]:
        count = min(rows_at_once(self.workload), len(self.batch))
        return [self.batch.rows(i, min(i + count, len(self.batch))) for i in range(0, len(self.batch), count)]

    def _layer(self, layer: int) -> tuple[Model, dict[str, Tensor]]:
        """Return a model of one layer without values, and its values."""
        with torch.device("meta"):
            model = build_model(self.workload.model, [layer])
        model.eval().skipped_block = self.batch.skipped_block
        return model, {name: self._value(drawn_name(model.spec, name), p.shape) for name, p in model.named_parameters()}

    def _value(self, name: str, shape: torch.Size) -> Tensor:
        """Return a parameter's value, or NaN if the run did not report it."""
        told = self.parameters.get(name)
        value = torch.full(shape, math.nan) if told is None else torch.from_numpy(told)
        return value.to(self.device, torch.float64).requires_grad_(self.batch.trains(name))

    def _differentiate(
        self, model: Model, values: dict[str, Tensor], inputs: list[Tensor], above: list[Tensor]
    ) -> tuple[Piece, list[Tensor]]:
        """Return the gradients of a layer's trained parameters and of its inputs. `above` is those of its outputs."""
        trained = {name: value for name, value in values.items() if value.requires_grad}
        names = [name for name in values if self.workload.trains(drawn_name(model.spec, name))]
        total, below = Piece.fromkeys(names), list[Tensor]()
        for i, (rows, part) in enumerate(zip(inputs, self._parts(), strict=True)):
            x = rows.detach().requires_grad_(rows.is_floating_point())
            wanted = [*trained.values(), *([x] if x.requires_grad else [])]
            out: Tensor = torch.func.functional_call(model, values, (x,))
            if not above:
                part = part.to(self.device)
                out = loss_share(out, part, self.workload.loss)
                self.loss += float(out.detach())
            inwards = above[i] if above else None
            found = torch.autograd.grad(out, wanted, inwards, allow_unused=True) if out.requires_grad else ()
            for name, gradient in zip(trained, found, strict=False):
                before = total[name]
                total[name] = before if gradient is None else gradient if before is None else before + gradient
            below += [g for g in found[len(trained) :] if g is not None]
        return total, below

    def _untied(self, model: Model, gradients: Piece) -> Piece:
        """Return whole gradients by canonical name. A tied head's part is kept until the embedding's gradient."""
        found: Piece = {}
        for name, gradient in gradients.items():
            whole = drawn_name(model.spec, name)
            if whole != name:
                self._tied |= {} if gradient is None else {whole: gradient}
            elif gradient is not None and name in self._tied:
                found[name] = gradient.add_(self._tied.pop(name))
            else:
                found[name] = gradient
        return found


def rows_at_once(workload: Workload) -> int:
    """Return the number of rows whose activations of one layer fit into `MOST_BYTES`."""
    spec, positions = workload.model, workload.model.seq_len
    if isinstance(spec, ModelSpec):
        widest = max(4 * spec.hidden, spec.num_heads * positions, spec.vocab_size, spec.ffn_hidden)
    else:
        widest = spec.widest
    return max(MOST_BYTES // (8 * _WORKING * positions * widest), 1)


# --- Compare a run with the truth one tensor at a time, like `meshmark.judge.truth` for a run in memory.


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
    if trace.reports_norms:
        trace.take_worst_norm(step, norm.value)
        reported = trace.norms[step]  # in steps that report none, nothing is judged
        note(QuantityKind.NORM.of(), scalar_deviation(norm.value if reported is None else reported, norm.value))
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


# --- The fingerprint of this truth, like `meshmark.judge.truth.truth_print`.


class _NearInitial(Mapping[str, NDArray[np.floating]]):
    """Values near a workload's initial ones. Each is drawn when it is read."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.shapes = workload, parameter_shapes(workload.model)

    def __getitem__(self, name: str) -> NDArray[np.floating]:
        shape = self.shapes[name]
        initial = initial_value(self.workload.model, name, shape, seed=self.workload.seed)
        return near(initial.numpy(), drawn_like(name, shape))

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def pieces_print(workload: Workload, device: torch.device) -> TruthPrint:
    """Return a fingerprint of the truth in this process: the step of one row, layer by layer on `device`, and some
    updates of each tensor alone.
    """
    rank_progress.begin(rank_progress.Phase.TRUTH, 2 * (workload.model.num_layers + 2))
    start, batch = _NearInitial(workload), make_batch(workload, 0)
    row = int(batch.weights.flatten(1).sum(1).argmax()) if batch.weights.dim() > 1 else int(batch.weights.argmax())
    truth = LayeredTruth(workload, start, batch.rows(row, row + 1), device)
    gradients, updates, square = dict[str, TensorPrint](), dict[str, TensorPrint](), 0.0
    for piece in truth.pieces():
        for name, gradient in piece.items():
            if gradient is not None:
                drawn = drawn_like(name, start.shapes[name])
                gradients[name] = tensor_print(gradient.cpu().numpy(), drawn)
                square += float(np.vdot(drawn, drawn))
    norms = [abs(factor) * math.sqrt(square) for factor in PRINTED_GRADIENTS]
    for name in gradients:
        optimizer, drawn = _PieceOptimizer(workload.optimizer, norms), drawn_like(name, start.shapes[name])
        before = start[name]
        values: Tensors = {name: before}
        for factor in PRINTED_GRADIENTS:
            values = optimizer.step(values, {name: factor * drawn})
        updates[name] = tensor_print(values[name] - before, drawn)
        rank_progress.tick()
    return TruthPrint(loss=truth.loss, gradients=gradients, updates=updates)


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
