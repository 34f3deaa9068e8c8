"""The first wrong step of a run: what is wrong there, and what would have been right."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from meshmark.adapter.contract import Arithmetic, Casting
from meshmark.algorithms.contract import Tensors
from meshmark.judge.deviation import global_norm
from meshmark.judge.faults import Fault
from meshmark.judge.tolerance_model import ZERO
from meshmark.judge.trace import Trace
from meshmark.judge.truth import Exact, exact_gradients, exact_loss
from meshmark.judge.twin import UNCHANGED, Change, Twin, TwinStep, together
from meshmark.reference.data import Batch, make_batch
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Precision

LEFT_OVER = 0.05
"""Share of a deviation that may remain unexplained."""
_SEARCH_SECONDS = 60.0
"""Budget of the search for a defect's name, on a `Stopwatch`."""
_SEARCH_CLOCK_SECONDS = 120.0
"""Most seconds by the clock that a search takes on a busy machine. A run may need two searches, which together are
shorter than `rank_progress.EXPLAIN_SECONDS`.
"""
_LOSS_LEFT, _LOSS_LEFT_BY_TWIN = 0.01, 0.1
"""Share of what a hypothesis changes in the loss that may remain unexplained."""
_CPU = torch.device("cpu")
SAME = 0.02
"""Weights of sequences that differ by less, relative to the largest, count as equal."""


class Stopwatch:
    """Measures seconds of work: by the clock, or by this process's processor time where that is less.

    On a busy machine a search then looks as far as on an idle one. Processor time alone would count every thread.
    """

    def __init__(self) -> None:
        self._begun = time.monotonic(), time.process_time()

    @property
    def seconds(self) -> float:
        return min(self.clock_seconds, time.process_time() - self._begun[1])

    @property
    def clock_seconds(self) -> float:
        return time.monotonic() - self._begun[0]


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
    loss_tolerance: float = math.inf
    right: Mapping[str, float] = field(default_factory=dict)
    """Tolerances of the gradients that are right, by name."""
    search: Stopwatch = field(default_factory=Stopwatch)
    """Time that the search for the defect has taken, which may try the step with and without its twin."""

    @property
    def names(self) -> list[str]:
        return list(self.tolerances)

    @property
    def batch(self) -> Batch:
        return make_batch(self.case.workload, self.step)

    def truth(
        self,
        step: int,
        batch: Batch,
        parameters: Tensors | None = None,
        backward: Tensors | None = None,
        change: Change = UNCHANGED,
    ) -> Tensors:
        """Return the right gradients for `batch` at the run's parameters before `step`, or at `parameters`.

        `backward` are the parameters in the backward pass, if they differ from those in the forward pass. `change`
        replaces what the model or its loss computes.
        """
        return self.computed(step, batch, parameters, backward, change).gradients

    def computed(
        self,
        step: int,
        batch: Batch,
        parameters: Tensors | None = None,
        backward: Tensors | None = None,
        change: Change = UNCHANGED,
    ) -> Exact | TwinStep:
        """Return loss and gradients, as `truth` does."""
        at = self.trace.parameters[step] if parameters is None else parameters
        if self.twin:
            # Pass only parameters that differ, because each is overwritten in every micro-batch.
            differ = {n: x for n, x in (backward or {}).items() if x is not at[n] and not np.array_equal(x, at[n])}
            return self.twin.step_of(self.trace, at, batch, self.step, differ, change)
        return exact_gradients(self.case.workload, at, batch, self.case.layout, backward, change)

    def affords(self, count: int) -> bool:
        """Return whether the search has time for `count` more gradients of the batch.

        The search is bounded, so that a wrong case ends in time.
        """
        seconds = self._timed_parts[1]
        in_time = self.search.clock_seconds + count * seconds <= _SEARCH_CLOCK_SECONDS
        return in_time and self.search.seconds + count * seconds <= _SEARCH_SECONDS

    @property
    def exact(self) -> Tensors:
        """The right gradients."""
        return self._right.gradients

    @property
    def loss(self) -> float:
        """The right loss."""
        return self._right.loss

    @property
    def loss_error(self) -> float:
        """Difference of the run's loss from the right one."""
        return self.trace.losses[self.step] - self._right.loss

    @property
    def loss_fits(self) -> bool:
        """Whether the run's loss is the right one, but for rounding."""
        return abs(self.loss_error) <= max(self.loss_tolerance, 1e-12)

    @functools.cached_property
    def _right(self) -> Exact | TwinStep:
        """The right loss and gradients."""
        return self.computed(self.step, self.batch)

    def in_bf16(self) -> Tensors:
        """Return the gradients of the batch under autocast to bf16, without the layout."""
        alone = dataclasses.replace(self.case, precision=Precision.BF16, layout=Layout())
        twin = Twin(case=alone, arithmetic=Arithmetic(casting=Casting.AUTOCAST, averages=False), device=_CPU)
        return twin.step(self.trace.parameters[self.step], self.batch).gradients

    @property
    def rank_parts(self) -> list[Tensors]:
        """The part of each data-parallel rank in the right gradients."""
        return self._timed_parts[0]

    @functools.cached_property
    def _timed_parts(self) -> tuple[list[Tensors], float]:
        """`rank_parts`, and the seconds that they took, which are those of one gradient of the batch.

        The first gradient takes longer than all later ones.
        """
        _ = self._right
        stopwatch = Stopwatch()
        return self.parts_of_ranks(self.step, self.batch), stopwatch.seconds

    def parts_of_ranks(self, step: int, batch: Batch) -> list[Tensors]:
        """Return the part of each data-parallel rank in what `truth` returns."""
        dp = self.case.layout.dp
        return [self.truth(step, batch.shard(rank, dp)) for rank in range(dp)]

    @property
    def splits(self) -> bool:
        """Whether the parts of a rank's micro-batches add up to the part of the rank."""
        layout, narrow = self.case.layout, self.case.precision.narrows_reduction
        rows = layout.dp * layout.num_micro_batches
        return layout.num_micro_batches > 1 and len(self.batch) % rows == 0 and not (self.twin and narrow)

    def parts_of_micro_batches(
        self,
        step: int,
        batch: Batch,
        parameters: Tensors | None = None,
        backward: Tensors | None = None,
        changes: Sequence[Change] = (),
    ) -> list[Tensors]:
        """Return the part of each micro-batch, rank by rank, in what `truth` returns.

        If the parts of micro-batches do not add up to those of ranks, the parts of ranks are returned. `changes` has a
        change for each part, or is empty.
        """
        count = self.case.layout.dp * (self.case.layout.num_micro_batches if self.splits else 1)
        pairs = zip(batch.micro_batches(count), changes or [UNCHANGED] * count, strict=True)
        return [self.truth(step, part, parameters, backward, change) for part, change in pairs]

    @functools.cached_property
    def micro_batch_parts(self) -> list[Tensors]:
        """The part of each rank's micro-batches in the right gradients, rank by rank."""
        return self.parts_of_micro_batches(self.step, self.batch) if self.splits else self.rank_parts

    @functools.cached_property
    def micro_batch_losses(self) -> NDArray[np.float64]:
        """The share of each of `micro_batch_parts` in the right loss, in float64."""
        return self.losses_of(self.batch)

    def losses_of(self, batch: Batch, changes: Sequence[Change] = (), step: int | None = None) -> NDArray[np.float64]:
        """Return the share of each micro-batch of `batch` in the loss, in float64: in a third of a gradient's time.

        `changes` has a change for every micro-batch, or none. `step` is the one whose parameters are used.
        """
        at = self.trace.parameters[self.step if step is None else step]
        parts = list(batch.micro_batches(len(self.micro_batch_parts)))
        pairs = zip(parts, changes or [UNCHANGED] * len(parts), strict=True)
        workload, layout = self.case.workload, self.case.layout
        return np.array([exact_loss(workload, at, part, layout, change) for part, change in pairs])

    def subsets_by_loss(self, losses: NDArray[np.float64]) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Yield the sets of micro-batches whose `losses`, in place of the right ones, explain the run's loss.

        Each is a pair of the error of the loss that remains and the indices.
        """
        off = losses - self.micro_batch_losses
        for subset in self.subsets:
            by = float(off[list(subset)].sum())
            # A twin rounds. Changes of the loss below its rounding show in gradients only.
            allowed = self.loss_tolerance + (_LOSS_LEFT_BY_TWIN if self.twin else _LOSS_LEFT) * abs(by)
            if math.isfinite(by) and by and abs(by - self.loss_error) <= max(allowed, 1e-12):
                yield abs(by - self.loss_error), subset

    @property
    def subsets(self) -> list[tuple[int, ...]]:
        """Which micro-batches may be wrong together: all, those of a rank, one of each rank, or one alone."""
        count, ranks = len(self.micro_batch_parts), self.case.layout.dp
        each = count // ranks
        whole = [tuple(range(count))]
        of_ranks = [tuple(range(r * each, (r + 1) * each)) for r in range(ranks)]
        of_micro = [tuple(range(m, count, each)) for m in range(each)]
        return list(dict.fromkeys([*whole, *of_ranks, *of_micro, *((i,) for i in range(count))]))

    def in_micro_batches(self, indices: Sequence[int]) -> str:
        """Return where parts of `micro_batch_parts` are, in words; empty for all of them."""
        dp, count = self.case.layout.dp, len(self.micro_batch_parts) // self.case.layout.dp
        ranks, micro = sorted({i // count for i in indices}), sorted({i % count for i in indices})
        if len(indices) < len(ranks) * len(micro):
            return f" in micro-batches {', '.join(map(str, indices))} of {dp * count}, counted rank by rank"
        on = f" on data-parallel {_numbered('rank', ranks)}" if len(ranks) < dp else ""
        return f"{on} in {_numbered('micro-batch', micro)}" if len(micro) < count else on

    @functools.cached_property
    def row_parts(self) -> list[Tensors]:
        """The part of each of `parts` in the right gradients."""
        return [self.truth(self.step, part) for part in self.parts(self.batch)]

    def others_with(self, indices: Iterable[int]) -> int:
        """Return how many right gradients have some of these `parts` in them."""
        exact, count = self.exact, 0
        least = ZERO * global_norm(exact)  # of a gradient that is zero but for rounding, every part is about as large
        for name in exact.keys() - self.tolerances.keys():
            if np.linalg.norm(exact[name]) < least:
                continue
            largest = max(float(np.abs(self.row_parts[i][name]).max(initial=0.0)) for i in indices)
            count += largest > SAME * float(np.abs(exact[name]).max(initial=0.0)) > 0
        return count

    @property
    def num_shards(self) -> int:
        """Number of ranks that gather a weight from their rows of it, 1 if each holds it whole."""
        return self.case.layout.dp if self.case.layout.zero_stage == 3 else self.case.layout.tp

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
        for step, which in ((self.step - 1, "before"), (self.step + 1, "after")):
            if step >= 0:
                other = make_batch(self.case.workload, step).total_weight
                if other != batch.total_weight:
                    name = f"the {unit} of this step / those of the step {which}"
                    known |= {name: batch.total_weight / other}
        scales = self.trace.loss_scales
        if self.step < len(scales) and (scale := scales[self.step]) not in (0.0, 1.0):
            known |= {"the loss scale": scale, "1/the loss scale": 1 / scale}
        clip, gradients = self.case.workload.optimizer.clip_norm, self.trace.gradients[self.step]
        if clip is not None and (norm := global_norm(self.exact)):
            known |= {"clip_norm / global norm": clip / norm, "global norm / clip_norm": norm / clip}
        return known if gradients else {}


Explanation = tuple[Fault, str]


class Fit:
    """Least squares over all wrong tensors together, each in units of the norm of its exact gradient.

    With a `region`, over its elements alone.
    """

    def __init__(
        self,
        failed: FailedStep,
        own: Tensors,
        exact: Tensors,
        region: Mapping[str, NDArray[np.bool_]] | None = None,
    ) -> None:
        self.region = region
        self.units = {name: float(np.linalg.norm(self._of(exact, name))) or 1.0 for name in failed.names}
        self.own = self.flat(own)
        self.exact = self.flat(exact)
        off = {name: self._of(own, name) - self._of(exact, name) for name in failed.names}
        self.deviations = {n: float(np.linalg.norm(off[n])) / u for n, u in self.units.items()}
        allowed = [max(failed.tolerances[n] / u, LEFT_OVER * self.deviations[n]) for n, u in self.units.items()]
        self.allowed = float(np.linalg.norm(allowed))

    def flat(self, tensors: Tensors) -> NDArray[np.float64]:
        return np.concatenate([self._of(tensors, n) / u for n, u in self.units.items()])

    def _of(self, tensors: Tensors, name: str) -> NDArray[np.float64]:
        tensor = np.asarray(tensors[name], dtype=np.float64)
        return tensor[self.region[name]] if self.region else tensor.ravel()

    def weights(self, *candidates: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """Return the weights with which the (flat) candidates add up to the run's gradient, or None if they do not."""
        found, left = self.fitted(*candidates)
        return found if left <= self.allowed else None

    def fitted(self, *candidates: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
        """Return the best weights, and the norm of what they leave unexplained: all, if a candidate is not finite.

        In fp16 a hypothesis may overflow where the run did not.
        """
        basis = np.stack(candidates, axis=1)
        if not np.isfinite(basis).all():
            return np.zeros(len(candidates)), math.inf
        found = np.asarray(np.linalg.lstsq(basis, self.own, rcond=None)[0])
        return found, float(np.linalg.norm(self.own - basis @ found))


def _numbered(word: str, numbers: Sequence[int]) -> str:
    several = {"rank": "ranks", "micro-batch": "micro-batches"}[word]
    return f"{word if len(numbers) == 1 else several} {', '.join(map(str, numbers))}"


def rows_of(rank: int, shards: int, count: int) -> slice:
    """Return the slice of `count` rows that is dealt to `rank`: ceil(count / shards) each until none is left."""
    most = -(-count // shards)
    return slice(min(rank * most, count), min((rank + 1) * most, count))


def block_of(name: str) -> str:
    """Return the block that a parameter belongs to: `blocks.1`, or the first module where none is numbered."""
    first, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return f"{first}.{number}" if number.isdigit() else first
