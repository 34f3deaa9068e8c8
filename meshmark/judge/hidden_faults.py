"""Find faults of a run in 16 bits that are smaller than the rounding of other correct arithmetic.

Correct engines may round in other places than the twin, so a run passes that is as far from the twin as they are. A
weight that is one update old, a message that is rounded, or a norm that is computed in 16 bits may be as near. Exact
bits tell them apart: a run that has the twin's results of a wrong computation, and not those of the right one, computes
what is wrong.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from meshmark import rank_progress
from meshmark.adapter.contract import Casting
from meshmark.algorithms.contract import Tensors
from meshmark.judge.deviation import Deviations, QuantityKind, deviation
from meshmark.judge.failed_step import Stopwatch
from meshmark.judge.faults import MOST_NAMES, Diagnosis, Fault
from meshmark.judge.function_faults import ends_of_stages, rounding_outputs
from meshmark.judge.tolerance_model import ToleranceModel
from meshmark.judge.trace import Trace
from meshmark.judge.twin import UNCHANGED, Change, Twin, TwinStep, known_parameters
from meshmark.models.module import Model, build_model, parameter_shapes
from meshmark.reference.data import Batch, make_batch
from meshmark.text import describe_error

SEARCH_SECONDS = 30.0
"""Budget of the search, on a `Stopwatch`."""
CLOCK_SECONDS = 90.0
"""Most seconds by the clock that the search takes on a busy machine."""


def hidden_fault(trace: Trace, deviations: Deviations, tolerance_model: ToleranceModel, twin: Twin) -> Diagnosis | None:
    """Return the diagnosis of a run that has the bits of a wrong one, and passes only as an equivalent of the twin, or
    does not pass.

    None if there is no such run, or if the search finds nothing within its budget. A search that fails is no fault of
    the run's.
    """
    try:
        return _search(trace, deviations, tolerance_model, twin)
    except torch.OutOfMemoryError:
        raise
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        print(f"the search for hidden faults failed: {describe_error(error)}", file=sys.stderr)
        return None


def _search(trace: Trace, deviations: Deviations, tolerance_model: ToleranceModel, twin: Twin) -> Diagnosis | None:
    last = len(trace.gradients) - 1
    if last < 1 or (tolerance_model.accepts(deviations) and not tolerance_model.fitted_to(deviations).way):
        return None
    rank_progress.begin(rank_progress.Phase.EXPLAIN)
    run = _Run(trace=trace, tolerance_model=tolerance_model, twin=twin)
    # A copy that every second update refreshes is right at some steps, and those say nothing.
    wrong_steps = [step for step in range(1, last + 1) if not run.has(run.right(step), step)]
    if not wrong_steps:
        return None
    *others, end = wrong_steps
    layout = twin.case.layout
    forward_is_right, watch = run.has_right_loss(end), Stopwatch()
    for wrong in itertools.chain(_rounded_messages(twin), _narrow_norms(twin), _older_weights(trace, twin)):
        if watch.seconds > SEARCH_SECONDS or watch.clock_seconds > CLOCK_SECONDS:
            return None
        rank_progress.advance()
        if wrong.backward_only is not forward_is_right:
            continue
        for ranks in run.ranks_of(wrong, end):
            if all(ranks in run.ranks_of(wrong, step) for step in others):
                return Diagnosis(
                    fault=wrong.fault,
                    step=wrong_steps[0],
                    names=list(wrong.names)[:MOST_NAMES],
                    num_names=len(wrong.names),
                    ranks=[i for i in range(layout.world_size) if layout.coordinates(i).dp in ranks],
                    detail=f"{wrong.detail}{' in the backward pass' if wrong.backward_only else ''}, bit for bit",
                )
    return None


@dataclass(frozen=True, kw_only=True)
class _Wrong:
    """A wrong computation of a step. By default it is the right one."""

    fault: Fault = Fault.FORWARD
    detail: str = ""
    names: Sequence[str] = ()
    """Names of parameters whose older values are used."""
    age: int | None = None
    """By how many steps these are older. None for the initial values."""
    change: Change = UNCHANGED
    backward_only: bool = False
    """True if the forward pass is right."""

    def older(self, trace: Trace, step: int) -> Tensors:
        """Return the older values of `names`."""
        before = trace.parameters[0 if self.age is None else max(step - self.age, 0)]
        return {name: before[name] for name in self.names}


@dataclass(kw_only=True)
class _Run:
    """A run whose results are compared with those of wrong computations."""

    trace: Trace
    tolerance_model: ToleranceModel
    twin: Twin
    _right: dict[int, list[TwinStep]] = field(default_factory=dict)

    def right(self, step: int) -> list[TwinStep]:
        """Return the results of the right computation, by data-parallel rank."""
        if step not in self._right:
            self._right[step] = self.parts(_Wrong(), step)
        return self._right[step]

    def ranks_of(self, wrong: _Wrong, step: int) -> list[tuple[int, ...]]:
        """Return the data-parallel ranks that compute `wrong`, if the run then has the results that it has.

        An empty tuple stands for all ranks. The loss, which takes less time, is compared first.
        """
        right = self.right(step)
        alone: list[tuple[int, ...]] = [(rank,) for rank in range(len(right))] if len(right) > 1 else []
        found = [(), *alone]
        if not wrong.backward_only:
            losses = self._losses(wrong, step)
            found = [
                ranks
                for ranks in found
                if self._has_loss([losses[i] if i in ranks or not ranks else p.loss for i, p in enumerate(right)], step)
            ]
        if not found:
            return []
        other = self.parts(wrong, step)
        return [
            ranks
            for ranks in found
            if self.has([other[i] if i in ranks or not ranks else part for i, part in enumerate(right)], step)
        ]

    def _rows(self, step: int) -> list[Batch]:
        """Return each data-parallel rank's rows, or all rows together if the sum over ranks is rounded."""
        case, batch = self.twin.case, make_batch(self.twin.case.workload, step)
        return [batch] if case.precision.narrows_reduction else list(batch.micro_batches(case.layout.dp))

    def _losses(self, wrong: _Wrong, step: int) -> list[float]:
        values = {**self._now(step), **wrong.older(self.trace, step)}
        return [self.twin.loss_of(values, part, wrong.change) for part in self._rows(step)]

    def _now(self, step: int) -> Tensors:
        return known_parameters(self.trace, self.twin.case.workload, step)

    def parts(self, wrong: _Wrong, step: int) -> list[TwinStep]:
        """Return the results of a computation, by data-parallel rank."""
        now, older = self._now(step), wrong.older(self.trace, step)
        forward, backward = (now, older) if wrong.backward_only else ({**now, **older}, None)
        return [self.twin.step_of(self.trace, forward, part, step, backward, wrong.change) for part in self._rows(step)]

    def has(self, parts: Sequence[TwinStep], step: int) -> bool:
        """Return whether the run has the sum of these parts, but for the order of its sums."""
        return self._has_loss([part.loss for part in parts], step) and all(
            self._has_gradient(name, np.sum([part.gradients[name] for part in parts], axis=0), step)
            for name in parts[0].gradients
        )

    def has_right_loss(self, step: int) -> bool:
        """Return whether the run's loss is that of the right computation."""
        return self._has_loss([part.loss for part in self.right(step)], step)

    def _has_loss(self, shares: Sequence[float], step: int) -> bool:
        told = deviation(np.array(self.trace.losses[step]), np.array(sum(shares)))
        return told.distance <= self.tolerance_model.tolerance(QuantityKind.TWIN_LOSS.of(), step)

    def _has_gradient(self, name: str, own: Any, step: int) -> bool:  # noqa: ANN401
        quantity = QuantityKind.TWIN.of(name)
        if quantity not in self.tolerance_model.noise:
            return True
        absent = None if own.any() else np.zeros_like(own)
        told = deviation(self.trace.gradients[step].get(name, absent), own)
        return told.distance <= self.tolerance_model.tolerance(quantity, step)


# --- Weights that are a step old, or as they were at the start: copies in 16 bits that an update has not refreshed.


def _older_weights(trace: Trace, twin: Twin) -> Iterator[_Wrong]:
    """Yield older values of all parameters, of those of a kind or a module, and of single ones."""
    shapes = parameter_shapes(twin.case.workload.model)
    held = {name: shape for name, shape in shapes.items() if name in trace.parameters[0]}
    for which, names in _units(held).items():
        for age, when in ((1, "before the last update"), (None, "before the first step")):
            for backward_only in (False, True):
                detail = f"the gradient with {which} as {'they were' if len(names) > 1 else 'it was'} {when}"
                yield _Wrong(
                    fault=Fault.STALE_WEIGHTS, detail=detail, names=names, age=age, backward_only=backward_only
                )


def _units(shapes: dict[str, tuple[int, ...]]) -> dict[str, list[str]]:
    """Return groups of parameters that one copy may hold, by description, each group once."""
    found = {"all weights": list(shapes)}
    found["all vectors"] = [name for name, shape in shapes.items() if len(shape) < 2]
    found["all matrices"] = [name for name, shape in shapes.items() if len(shape) > 1]
    found["the weights of all norms"] = [name for name in shapes if re.search(r"norm\w*\.", name)]
    for name in shapes:
        parts = name.split(".")
        for size in range(1, len(parts)):
            module = ".".join(parts[:size])
            found.setdefault(f"the weights of {module}", []).append(name)
        found.setdefault(f"all {re.sub(r'[.][0-9]+[.]', '.*.', name)}", []).append(name)
    found |= {name: [name] for name in shapes}
    once: dict[tuple[str, ...], str] = {}
    for which, names in found.items():
        if names:
            once.setdefault(tuple(names), which if len(names) > 1 else names[0])
    return {which: list(names) for names, which in once.items()}


# --- Messages between the stages of a pipeline that are rounded, and wide again when they arrive.


def _rounded_messages(twin: Twin) -> Iterator[_Wrong]:
    """Yield messages rounded to the precision of products, in each direction and in both.

    Under autocast, the residual stream that passes from block to block has the precision of the weights.
    """
    ends = ends_of_stages(twin.case)
    if not ends or twin.arithmetic.casting is not Casting.AUTOCAST:
        return
    narrow = getattr(torch, twin.case.precision.compute)
    for forward, backward in ((True, True), (True, False), (False, True)):
        what = " and ".join(["activations"] * forward + ["their gradients"] * backward)
        yield _Wrong(
            fault=Fault.PRECISION,
            detail=f"{what} rounded to {twin.case.precision.compute} between stages",
            change=Change(within=rounding_outputs(ends, narrow, forward=forward, backward=backward)),
            backward_only=not forward,
        )


# --- Norms that are computed in 16 bits, which autocast leaves in 32.


def _narrow_norms(twin: Twin) -> Iterator[_Wrong]:
    """Yield norms whose input, weight and bias are rounded to the precision of products: all norms, and single ones."""
    if twin.arithmetic.casting is not Casting.AUTOCAST or twin.case.tuning.compile:
        return
    with torch.device("meta"):
        modules = dict(build_model(twin.case.workload.model).named_modules())
    norms = [n for n, m in modules.items() if type(m).__name__.endswith("Norm") and not isinstance(m, BatchNorm)]
    for names in dict.fromkeys((tuple(norms), *((name,) for name in norms))) if norms else ():
        what = names[0] if len(names) == 1 else "all norms"
        yield _Wrong(
            fault=Fault.PRECISION,
            detail=f"{what} computed in {twin.case.precision.compute}",
            change=Change(within=_narrowing(names, getattr(torch, twin.case.precision.compute))),
        )


def _narrowing(
    modules: Sequence[str], narrow: torch.dtype
) -> Callable[[Model], contextlib.AbstractContextManager[None]]:
    """Return a context in which these modules compute in `narrow`."""

    def narrowed(module: nn.Module) -> Callable[..., Tensor]:
        def forward(x: Tensor, *rest: Any, **options: Any) -> Tensor:  # noqa: ANN401
            own = copy.copy(module)
            values: dict[str, Any] = {n: p if p is None else p.to(narrow) for n, p in module._parameters.items()}
            vars(own)["_parameters"] = values
            with torch.autocast(x.device.type, enabled=False):
                found: Tensor = type(module).forward(own, x.to(narrow), *rest, **options)
            return found

        return forward

    @contextlib.contextmanager
    def within(model: Model) -> Iterator[None]:
        changed = [model.get_submodule(name) for name in modules]
        for module in changed:
            module.forward = narrowed(module)
        try:
            yield
        finally:
            for module in changed:
                del module.forward

    return within
