"""Find where a run first deviates from the truth: in which module, and in its forward or backward pass.

Hooks record the outputs of all modules in the forward pass. In the backward pass they record the gradients that enter
a module by its outputs and leave it by its inputs, and those of its parameters before they are reduced. One process
computes the same in float64, from the run's own parameters, inputs and gradient of the model's output. The first
record, in the run's own order, that is off by more than rounding identifies the module, because everything before it
was right.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from meshmark.algorithms.contract import Tensors
from meshmark.judge.twin import doubles, exact_model, fresh_buffers
from meshmark.models.module import random_bits, with_values
from meshmark.reference.data import Batch, make_batch
from meshmark.spec.case import Case
from meshmark.spec.workload import Workload

NOISE_RUNS = 3
ALLOWED = 8.0
"""Allowed deviation as a multiple of the largest one in the noise runs, of which there are few."""
_ROUNDED = 2.0**-23
"""Share of a tensor's norm by which a float32 copy of the truth is off."""


class Direction(StrEnum):
    """The pass in which a module deviates first."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Point(StrEnum):
    """The kind of tensor that was recorded."""

    INPUT = "input"
    OUTPUT = "output"
    OUTPUT_GRADIENT = "gradient of the output"
    INPUT_GRADIENT = "gradient of the input"
    PARAMETER_GRADIENT = "gradient of a parameter"


@dataclass(frozen=True, kw_only=True)
class Rows:
    """How many rows of the first tensor that deviates are off. Rows run over all dimensions but the last."""

    number: int
    off: int
    zero: int
    """Rows that are off because they are zero and should not be."""

    def __str__(self) -> str:
        """A phrase, empty where all rows are off in the same way."""
        zero = f"{self.zero} of them zero" if self.zero else ""
        if self.off == self.number:
            return f"in all rows, {zero}" if 0 < self.zero < self.off else ("where it is zero" if zero else "")
        return f"in {self.off:,} of {self.number:,} rows" + (f", {zero}" if zero else "")


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """The first deviation of one rank."""

    rank: int
    step: int
    micro_batch: int
    place: int
    """Index among the recorded tensors of the step. It compares ranks that do the same."""
    module: str
    """Canonical name. Empty for the model itself."""
    direction: Direction
    point: Point
    parameter: str = ""
    ratio: float
    """Distance from the truth, in tolerances."""
    rows: Rows | None = None
    """None for a tensor without rows."""

    @property
    def what(self) -> tuple[str, str, str]:
        """Key that ranks with the same deviation share."""
        return self.module, self.direction, self.parameter


def describe(found: Sequence[Beginning], world_size: int) -> str:
    """Return a sentence on where a run begins to deviate. `found` is from the ranks that do."""
    if not found:
        return (
            "in every rank's modules, the forward pass and the backward pass of the gradient that the engine's own "
            "loss hands them are right: look at that loss, the reduction over ranks, clipping and the update"
        )
    first = min(found, key=lambda each: (each.step, each.place))
    alike = sorted(each.rank for each in found if (each.step, each.what) == (first.step, first.what))
    who = "all ranks" if len(alike) == world_size > 1 else f"rank{'s' * (len(alike) > 1)} {_listed(alike)}"
    where = first.module or "the model's own code"
    which = f" (its gradient of {first.parameter})" if first.parameter else ""
    before = "forward right everywhere; " if first.direction is Direction.BACKWARD else ""
    count = f"micro-batch {first.micro_batch} of step {first.step}"
    extent = f", {rows}" if (rows := str(first.rows or "")) else ""
    return (
        f"{before}{first.direction} first wrong at {where}{which}, on {who}, in {count}{extent}: "
        f"{first.ratio:.3g} x tolerance"
    )


def _listed(ranks: Sequence[int]) -> str:
    *most, last = map(str, ranks)
    return f"{', '.join(most)} and {last}" if most else last


def canonical(name: str) -> str:
    """Return a module's name without the wrappers of FSDP1 and of activation checkpointing on its way."""
    wrappers = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
    return ".".join(part for part in name.split(".") if part not in wrappers)


Key = tuple[str, Point, int, int]
"""Module (or parameter), point, index of the module's call, index of the tensor."""


@dataclass(kw_only=True)
class Call:
    """Records of one forward pass of the whole model and its backward pass."""

    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    notes: dict[Key, Tensor] = field(default_factory=dict)
    """Tensors in the order in which they were recorded."""
    output_gradient: tuple[Tensor | None, ...] = ()
    """Gradients of the model's outputs."""


class Recorder:
    """Records a model's forward and backward passes while its context is active."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.calls: list[Call] = []
        self._now: Call | None = None
        self._counts: dict[tuple[str, Point], int] = {}
        self._back: dict[int, tuple[Call, int]] = {}
        self._handles: list[RemovableHandle] = []
        self._quiet = warnings.catch_warnings()

    def __enter__(self) -> Recorder:
        self._quiet.__enter__()
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        warnings.filterwarnings("ignore", "For backward hooks to be called")
        self._handles.append(self.root.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True))
        for raw, module in self.root.named_modules():
            name = canonical(raw)
            self._handles += [
                module.register_forward_pre_hook(self._before(name), with_kwargs=True),
                module.register_forward_hook(self._forward(name)),
                module.register_full_backward_pre_hook(self._backward(name, Point.OUTPUT_GRADIENT)),
                module.register_full_backward_hook(self._backward(name, Point.INPUT_GRADIENT)),
            ]
        for raw, parameter in self.root.named_parameters():
            if parameter.requires_grad and type(parameter) is nn.Parameter:
                self._handles.append(parameter.register_hook(self._parameter(canonical(raw))))  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._quiet.__exit__(None, None, None)

    def _begin(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        copied = pytree.tree_map(_copy, (inputs, keywords))
        self._now = Call(inputs=copied[0], keywords=copied[1])
        self._counts = {}
        self.calls.append(self._now)

    def _note(self, call: Call, name: str, point: Point, tensors: Any) -> None:  # noqa: ANN401
        count = self._counts.get((name, point), 0)
        self._counts[name, point] = count + 1
        for place, tensor in enumerate(pytree.tree_leaves(tensors)):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                call.notes[name, point, count, place] = _copy(tensor)

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, keywords: dict[str, Any]) -> None:  # noqa: ANN401
            if self._now is not None:
                self._note(self._now, name, Point.INPUT, [inputs, keywords])

        return hook

    def _forward(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:  # noqa: ANN401
            if self._now is not None:  # else recomputed in the backward pass
                self._note(self._now, name, Point.OUTPUT, output)
            if not name:
                self._now = None

        return hook

    def _backward(self, name: str, point: Point) -> Callable[..., None]:
        def hook(module: nn.Module, *gradients: Any) -> None:  # noqa: ANN401
            call, given = self.calls[-1], gradients[0]
            if not name and point is Point.OUTPUT_GRADIENT:
                call.output_gradient = tuple(None if g is None else _copy(g) for g in given)
            self._note(call, name, point, list(given))

        return hook

    def _parameter(self, name: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            self._note(self.calls[-1], name, Point.PARAMETER_GRADIENT, [gradient])

        return hook


def _copy(value: Any) -> Any:  # noqa: ANN401
    return value.detach().clone() if isinstance(value, Tensor) else value


def first_deviation(
    calls: Sequence[Call],
    parameters: Tensors,
    case: Case,
    rank: int,
    step: int,
) -> Beginning | None:
    """Return where one rank's step first deviates, or None. `parameters` are whole, from before the step."""
    workload, batch, place = case.workload, make_batch(case.workload, step), 0
    for number, call in enumerate(calls):
        exact = _replay(call, doubles(parameters), workload, batch)
        noise = [_replay(call, _perturbed(parameters, case, run), workload, batch) for run in range(NOISE_RUNS)]
        judge = functools.partial(_ratio, call.notes, exact, noise)

        def is_off(key: Key, judge: Callable[[Key], float] = judge) -> bool:
            return judge(key) > 1

        for key in call.notes:
            place += 1
            if (ratio := judge(key)) > 1:
                found = _named(key, ratio)
                if found.parameter and is_off((found.module, Point.INPUT_GRADIENT, key[2], 0)):
                    found = dataclasses.replace(found, parameter="")  # all that its backward pass computes
                rows = _rows(call.notes, exact, noise, key)
                return dataclasses.replace(found, rank=rank, step=step, micro_batch=number, place=place, rows=rows)
    return None


def _ratio(
    notes: Mapping[Key, Tensor], exact: Mapping[Key, Tensor], noise: Sequence[Mapping[Key, Tensor]], key: Key
) -> float:
    """Return how far a note is off, in tolerances; 0 where there is nothing to compare it with."""
    told, x = notes.get(key), exact.get(key)
    if told is None or x is None or x.shape != told.shape or _is_given(key):
        return 0.0
    distance = _distance(told, x)
    allowed = ALLOWED * max(_distance(run[key], x) for run in noise) + _ROUNDED * float(x.norm())
    return distance / allowed if allowed else (float("inf") if distance else 0.0)


def _rows(
    notes: Mapping[Key, Tensor], exact: Mapping[Key, Tensor], noise: Sequence[Mapping[Key, Tensor]], key: Key
) -> Rows | None:
    """Count the rows of a tensor that are off. Returns None for a vector or a number."""

    def rows_of(values: Mapping[Key, Tensor]) -> Tensor:
        return values[key].double().cpu().flatten(0, -2)

    if exact[key].dim() < 2:
        return None
    own, x = rows_of(notes), rows_of(exact)
    norms = x.norm(dim=1)
    spread = torch.stack([(rows_of(run) - x).norm(dim=1) for run in noise]).amax(dim=0)
    off = ~((own - x).norm(dim=1) <= ALLOWED * spread + _ROUNDED * norms)  # NaN is off
    zero = off & (own == 0).all(dim=1)
    return Rows(number=len(off), off=int(off.sum()), zero=int(zero.sum()))


def _is_given(key: Key) -> bool:
    """Return whether a recorded tensor is an input of the replay."""
    return key[0] == "" and key[1] is Point.OUTPUT_GRADIENT


def _named(key: Key, ratio: float) -> Beginning:
    """Return which module a deviation of `key` points to, given that everything before was right.

    A wrong input comes from code of the enclosing module, and so does a wrong gradient of an output.
    """
    name, point, _, _ = key
    module, parameter = name, ""
    if point is Point.PARAMETER_GRADIENT:
        module, _, parameter = name.rpartition(".")
    elif point in (Point.INPUT, Point.OUTPUT_GRADIENT):
        module = name.rpartition(".")[0]
    return Beginning(
        rank=0,
        step=0,
        micro_batch=0,
        place=0,
        module=module,
        direction=Direction.FORWARD if point in (Point.INPUT, Point.OUTPUT) else Direction.BACKWARD,
        point=point,
        parameter=parameter,
        ratio=ratio,
    )


def _distance(own: Tensor, exact: Tensor) -> float:
    found = float((own.double().cpu() - exact.double().cpu()).norm())
    return found if found == found else float("inf")


def _replay(call: Call, values: Mapping[str, Tensor], workload: Workload, batch: Batch) -> dict[Key, Tensor]:
    """Compute one call again, in the precision of `values`, and return its records."""
    model = exact_model(workload, batch)
    leaves = {name: value.requires_grad_(batch.trains(name)) for name, value in values.items()}
    buffers = {name: value.to(next(iter(values.values())).dtype) for name, value in fresh_buffers(workload).items()}
    inputs, keywords = pytree.tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, (call.inputs, call.keywords))

    def replay() -> dict[Key, Tensor]:
        with torch.enable_grad(), Recorder(model) as recorder:
            output = model(*inputs, **keywords)
            [replayed] = recorder.calls
            for name, leaf in leaves.items():
                if leaf.requires_grad:
                    leaf.register_hook(recorder._parameter(name))  # type: ignore[no-untyped-call]
            outputs = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
            given = [g for g in call.output_gradient if g is not None]
            if given and len(given) == len(outputs):
                torch.autograd.backward(outputs, [g.cpu().to(out.dtype) for g, out in zip(given, outputs, strict=True)])
        return replayed.notes

    return with_values(model, {**leaves, **buffers}, replay)


def _perturbed(parameters: Tensors, case: Case, run: int) -> dict[str, Tensor]:
    """Return float32 values with errors of up to half a unit in the last place of the products' precision."""
    ulp = 2.0 ** -(case.precision.compute.mantissa_bits + 1)
    found = {}
    for name, value in parameters.items():
        exact = torch.from_numpy(value.copy()).double()
        bits = random_bits(f"beginning/{run}/{name}", tuple(exact.shape), seed=case.workload.seed)
        found[name] = (exact * (1 + (bits & 0xFFFF).double().div(0xFFFF).mul(2).sub(1) * ulp)).float()
    return found
