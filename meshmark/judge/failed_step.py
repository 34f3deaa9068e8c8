"""The first wrong step of a run: what is wrong there, and what would have been right."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from meshmark.adapter.arithmetic import Arithmetic, Casting
from meshmark.judge.buffers import together
from meshmark.judge.deviation import Tensors, global_norm
from meshmark.judge.faults import Fault
from meshmark.judge.trace import Trace
from meshmark.judge.truth import exact_gradients
from meshmark.judge.twin import Twin
from meshmark.reference.data import Batch, make_batch
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Precision

LEFT_OVER = 0.05
"""Share of a deviation that may remain unexplained."""
_SEARCH_SECONDS = 20.0
_CPU = torch.device("cpu")
SAME = 0.02
"""Weights of sequences that differ by less, relative to the largest, count as equal."""


@dataclass(frozen=True, kw_only=True)
class FailedStep:
    """A step of a run at which some tensors are wrong."""

    case: Case
    trace: Trace
    step: int
    tolerances: dict[str, float]
    """Tolerances of the wrong tensors by name, the worst first."""
    twin: Twin | None = None
    """Replaces the truth if the error is too small for it."""
    drifted: bool = False
    """True if ranks that should hold the same gradient do not."""
    loss_is_wrong: bool = False

    @property
    def names(self) -> list[str]:
        return list(self.tolerances)

    @property
    def batch(self) -> Batch:
        return make_batch(self.case.workload, self.step)

    def truth(self, step: int, batch: Batch, parameters: Tensors | None = None) -> Tensors:
        """Return the right gradients for `batch` at the run's parameters before `step`, or at `parameters`."""
        at = self.trace.parameters[step] if parameters is None else parameters
        if self.twin:
            return self.twin.step_of(self.trace, at, batch, self.step).gradients
        return exact_gradients(self.case.workload, at, batch, self.case.layout).gradients

    def affords(self, count: int) -> bool:
        """Return whether `count` gradients of the batch can be computed in the seconds that a search may take.

        A case that is wrong must not come to its time limit while its defect is searched for.
        """
        return count * self._timed[1] <= _SEARCH_SECONDS

    @property
    def exact(self) -> Tensors:
        """The right gradients."""
        return self._timed[0]

    @functools.cached_property
    def _timed(self) -> tuple[Tensors, float]:
        """The right gradients, and the seconds that they took."""
        begin = time.monotonic()
        return self.truth(self.step, self.batch), time.monotonic() - begin

    def in_bf16(self) -> Tensors:
        """Return the gradients of the batch under autocast to bf16, without the layout."""
        alone = dataclasses.replace(self.case, precision=Precision.BF16, layout=Layout())
        twin = Twin(case=alone, arithmetic=Arithmetic(casting=Casting.AUTOCAST, averages=False), device=_CPU)
        return twin.step(self.trace.parameters[self.step], self.batch).gradients

    @functools.cached_property
    def rank_parts(self) -> list[Tensors]:
        """The part of each data-parallel rank in the right gradients."""
        return self.parts_of_ranks(self.step, self.batch)

    def parts_of_ranks(self, step: int, batch: Batch, parameters: Tensors | None = None) -> list[Tensors]:
        """Return the part of each data-parallel rank in what `truth` returns."""
        dp = self.case.layout.dp
        return [self.truth(step, batch.shard(rank, dp), parameters) for rank in range(dp)]

    def parts(self, batch: Batch) -> list[Batch]:
        """Return the smallest parts whose gradients add up: single rows, or rows that are normalised together."""
        workload, layout = self.case.workload, self.case.layout
        if self.twin:
            return list(batch.micro_batches(len(batch) * layout.dp * layout.num_micro_batches // workload.global_batch))
        if workload.couples_rows:
            return together(workload, batch, layout)
        return [batch.rows(i, i + 1) for i in range(len(batch))]

    @property
    def parts_name(self) -> str:
        if self.twin or self.case.workload.couples_rows:
            return "micro-batches"
        unit = self.case.workload.unit
        return "sequences" if unit == "tokens" else unit

    def known_factors(self) -> dict[str, float]:
        """Return constants by which gradients and losses are multiplied by mistake."""
        layout, batch, unit = self.case.layout, self.batch, self.case.workload.unit
        degrees = {
            "dp": layout.dp,
            "tp": layout.tp,
            "cp": layout.cp,
            "pp": layout.pp,
            "num_micro_batches": layout.num_micro_batches,
        }
        degrees = {name: n for name, n in degrees.items() if n > 1}
        pairs = itertools.combinations(degrees.items(), 2)
        counts = degrees | {f"{a} x {b}": m * n for (a, m), (b, n) in pairs}
        known = {name: float(n) for name, n in counts.items()}
        known |= {f"1/({name})" if " " in name else f"1/{name}": 1 / n for name, n in known.items()}
        known |= {
            "the wrong sign": -1.0,
            f"number of {unit}": batch.total_weight,
            f"unmasked part of the {unit}": batch.total_weight / batch.targets.numel(),
        }
        clip, gradients = self.case.workload.optimizer.clip_norm, self.trace.gradients[self.step]
        if clip is not None and (norm := global_norm(self.exact)):
            known |= {"clip_norm / global norm": clip / norm, "global norm / clip_norm": norm / clip}
        return known if gradients else {}


Explanation = tuple[Fault, str]


class Fit:
    """Least squares over all wrong tensors together, each in units of the norm of its exact gradient."""

    def __init__(self, failed: FailedStep, own: Tensors, exact: Tensors) -> None:
        self.units = {name: float(np.linalg.norm(exact[name])) or 1.0 for name in failed.names}
        self.own = self.flat(own)
        self.exact = self.flat(exact)
        self.deviations = {n: float(np.linalg.norm(own[n] - exact[n])) / u for n, u in self.units.items()}
        allowed = [max(failed.tolerances[n] / u, LEFT_OVER * self.deviations[n]) for n, u in self.units.items()]
        self.allowed = float(np.linalg.norm(allowed))

    def flat(self, tensors: Tensors) -> NDArray[np.float64]:
        return np.concatenate([np.asarray(tensors[n], dtype=np.float64).ravel() / u for n, u in self.units.items()])

    def weights(self, *candidates: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """Return the weights with which the (flat) candidates add up to the run's gradient, or None if they do not."""
        basis = np.stack(candidates, axis=1)
        found = np.linalg.lstsq(basis, self.own, rcond=None)[0]
        return np.asarray(found) if np.linalg.norm(self.own - basis @ found) <= self.allowed else None
