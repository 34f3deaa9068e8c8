"""Judge the gradients that the optimizer steps on."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from meshmark.check.exact import Product, Recomputer
from meshmark.check.gradients import FACTOR, UNSEEN, Comparison, Expected, compare, penalty_in, shortened
from meshmark.check.judge.explanations import Explainer, WrongGradients
from meshmark.check.judge.tensors import cosine, equal, equal_at, flattened, is_near, multiple, norm_of
from meshmark.check.objective import SAME, Objective, UnseenError, objective_of
from meshmark.check.pieces import CannotTellError
from meshmark.check.recorder import beside_outputs
from meshmark.check.recording import Call, Step
from meshmark.check.rows import rows_of
from meshmark.check.run import Moment, Run, num_micro_batches
from meshmark.check.verdict import Level, Verdict
from meshmark.judge.faults import Fault
from meshmark.text import pluralize

DRAWS = 3
"""Number of recomputations with rounding, for each micro-batch, from which the noise is measured."""
ALONG = 0.99
"""Cosine from which on weights were moved along a gradient. Ranks may each follow their own."""
UNUSED = 1e-6
"""Part of the norm of all gradients up to which that of a parameter without a use counts as zero."""


@dataclass(frozen=True, kw_only=True)
class _Products:
    """Gradients of a step's calls, which one process computes in float64."""

    parts: list[list[dict[str, Tensor]]]
    """The exact gradients by rank and micro-batch."""
    drawn: list[list[dict[str, Tensor]]]
    """The same as means of what rounding makes of them; empty in float32 and wider."""
    noisy: list[dict[str, Tensor]]
    """Their sums, each time with other rounding."""
    low: set[torch.dtype]
    """Dtypes narrower than float32 that the script computes in."""
    names: list[str]
    """Parameters that the optimizer steps on."""

    @functools.cached_property
    def total(self) -> dict[str, Tensor]:
        """The sums of the exact gradients, by parameter."""
        return {n: sum((p[n] for of in self.parts for p in of if n in p), torch.zeros(())) for n in self.names}

    @functools.cached_property
    def noise(self) -> dict[str, float]:
        """How far rounding moves each sum, relative to its norm."""
        noise = {}
        for name, x in self.total.items():
            squares = [float((d[name] - x).norm()) ** 2 for d in self.noisy]
            noise[name] = float(np.sqrt(np.mean(squares))) / (float(x.norm()) or 1.0)
        return noise


@dataclass(kw_only=True)
class GradientJudge:
    """Judge of gradients, step by step."""

    run: Run
    recomputer: Recomputer
    verdict: Verdict
    objectives: list[Objective] = field(default_factory=list)
    """The objective of each step whose gradients are right."""
    unseen: str = ""
    """Why the objective is not judged."""
    worst: float = 0.0
    """The largest relative error."""
    detects: float = 0.0
    """The smallest relative error that would have been detected in every gradient."""
    widest: str = ""
    """The parameter for which that error is needed."""
    uncleared: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Gradients of every replica as they were before this step, if nothing has cleared them."""
    waiting: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Gradients of every replica, of earlier steps, that no optimizer has stepped on yet."""
    rounded: str = ""
    """Precision in which the gradients were judged, if rounding moves them too far from float64's."""
    penalty: str = ""
    """A penalty on weights that the loss holds."""
    num_micro: int = 0
    """Number of micro-batches of the first step."""
    lost: list[tuple[str, bool]] = field(default_factory=list)
    """Calls whose losses no rank differentiates, in words, and whether they have rows of their own, by step."""
    factor: float = 1.0
    """Factor by which the reduction multiplies each rank's gradient."""

    def judge(self, moment: Moment) -> None:
        """Judge the gradients that the optimizer steps on."""
        run = self.run
        self._lost(moment)
        self._perturbed(moment)
        products = self._products(moment)
        if products is None:
            return
        noise, total = products.noise, products.total
        eps = max(torch.finfo(d).eps for d in run.facts[0].dtypes.values() if d.is_floating_point)
        beside = {name for step in moment.ranks for name in step.beside}
        owned = {owner: [r for r, o in enumerate(run.owners) if o == owner] for owner in dict.fromkeys(run.owners)}
        self._unused(moment, total, beside)
        scaled = self._scale(moment)
        gradients = {
            owner: {n: g.double() / scaled for n, g in moment.gradients[owner].items() if n in total} for owner in owned
        }
        if beside:
            for owner, own in gradients.items():
                gradients[owner] = self._without_penalty(own, moment.before[owner], products.parts, noise, beside)
        if not moment.number:
            self.factor = _factor(gradients, total, moment.readers)
        factor = self._own_factor(moment, gradients, total) or self.factor
        right = {name: factor * x for name, x in total.items()}
        for name in beside & right.keys():  # rounded at the size of the sum, of which the penalty may be most
            sizes = [float(of[name].double().norm()) / scaled for of in moment.gradients.values() if name in of]
            noise[name] = max(noise[name], eps * max(sizes, default=0.0) / (float(right[name].norm()) or 1.0))
        micro = max(num_micro_batches(step.calls) for step in moment.readers)
        self.num_micro = self.num_micro or micro
        again = functools.cache(lambda: self._recomputed(moment) if self.recomputer.recomputes else None)
        compared: list[Comparison] = []
        for owner, ranks in owned.items():
            held = {name for rank in ranks for g in moment.ranks[rank].groups for name in g.names}
            exact = {name: x for name, x in right.items() if name in held}  # ranks may step a part each
            comparison, parts = self._compared(gradients[owner], exact, products, eps, moment)
            if comparison.wrong:
                wrong = WrongGradients(
                    run=run,
                    moment=moment,
                    own=gradients[owner],
                    exact=exact,
                    comparison=comparison,
                    noise=noise,
                    eps=eps,
                    parts=parts,
                    previous=self.uncleared.get(owner),
                    expected=Expected(ranks=ranks, factor=factor, known=run.known_factors(micro)),
                    again=again,
                )
                explainer = Explainer(verdict=self.verdict)
                comparison = explainer.judge(wrong)
                self.unseen = self.unseen or explainer.unseen
            if not comparison.wrong:
                self._count_in(comparison)
            compared.append(comparison)
        self._note_uncleared(moment, products.parts)
        if any(comparison.wrong for comparison in compared):
            self.unseen = self.unseen or "gradients are not those of the recorded rows"
            return
        try:
            self.objectives.append(objective_of(moment.readers, factor))
        except UnseenError as reason:
            self.unseen = str(reason)

    def _lost(self, moment: Moment) -> None:
        """Report calls in training whose losses are computed, and by which nothing is differentiated."""
        lost = [sum(map(_is_lost, step.calls)) for step in moment.readers]
        if not any(lost):
            return
        number = sum(len(step.calls) for step in moment.readers)
        told = (
            f"losses of {sum(lost)} of {pluralize(number, 'call')} of the model are computed and never differentiated"
        )
        if len(set(lost)) > 1:
            rank = self.run.readers[lost.index(max(lost))]
            told += f", most of them on rank {rank} (no backward pass there?)"
            self.verdict.add(Level.WRONG, Fault.DROPPED, told, moment.number)
            return
        self.lost.append((told, all(_has_rows_of_its_own(step) for step in moment.readers)))

    def judge_lost(self) -> None:
        """Report losses that no rank has differentiated, after the last step.

        Of rows that no other call has, at every step, they are a part of the batch; of others they may be for a log.
        """
        if not self.lost:
            return
        told, _ = self.lost[0]
        if len(self.lost) == self.run.num_steps and all(has_rows for _, has_rows in self.lost):
            told += (
                ", at every step, and no other call has their rows (a backward pass after the loop over micro-batches?)"
            )
            self.verdict.add(Level.WRONG, Fault.DROPPED, told, 0)
        else:
            self.verdict.add(Level.NOTE, "losses without a backward pass", f"{told} (losses for a log?)")

    def note_hidden(self) -> None:
        """Note errors that rounding would hide."""
        if self.detects > UNSEEN:
            self.verdict.add(
                Level.NOTE, "errors would be hidden",
                f"in the gradient of {self.widest}, rounding would hide errors of less than {self.detects:.2g} (a run "
                "in float32 shows more)",
            )  # fmt: skip

    @property
    def told(self) -> str:
        """What the gradients were compared with, and how far off they are."""
        if self.detects:
            truth = f"one process's in {self.rounded}" if self.rounded else "float64's"
            return f"off by {self.worst:.2g} of {truth} at most; an error of {self.detects:.2g} would be seen"
        if self.verdict.has("scaled by the script"):
            return "right but for their size, which the script changes"
        if self.verdict.has(
            "gradients changed by the script",
            "a communication hook",
            "gradients summed in a lower precision",
            "copies are stepped",
        ):
            return "not judged, as said above"
        return "wrong on every rank and step, as said above"

    def _unused(self, moment: Moment, used: Mapping[str, Tensor], beside: set[str]) -> None:
        """Report parameters that the optimizer steps with a gradient although no call of the step uses them."""
        edited = {name for step in moment.ranks for name in step.edited}
        for owner, own in moment.gradients.items():
            held = {name for group in moment.ranks[owner].groups for name in group.names} - used.keys() - beside
            least = UNUSED * norm_of(own)
            waiting = self.waiting.get(owner, {})
            held -= {n for n, x in waiting.items() if n in own and is_near(own[n].double(), x, SAME)}
            odd = {name: own[name] for name in held if name in own and float(own[name].double().norm()) > least}
            before, after = moment.before[owner], moment.after[owner]
            if still := sorted(n for n in held & own.keys() - odd.keys() if not torch.equal(before[n], after[n])):
                self.verdict.add(
                    Level.NOTE, "stepped without use",
                    f"no call of this step uses {shortened(still)}, and the optimizer moves it, on a gradient of "
                    "zero, by its momentum or weight decay", moment.number,
                )  # fmt: skip
            if not odd:
                continue
            worst = max(odd, key=lambda name: float(odd[name].double().norm()))
            names = shortened([worst, *(odd.keys() - {worst})])
            told = f"no call of this step uses {names}, and the optimizer steps on a gradient of norm "
            told += f"{norm_of(odd):.3g} (of an earlier step, or of other memory?)"
            if worst in edited:
                self.verdict.add(Level.UNKNOWN, "gradients changed by the script", told, moment.number)
            else:
                self.verdict.add(Level.WRONG, Fault.NOT_CLEARED, told, moment.number)

    def _products(self, moment: Moment) -> _Products | None:
        """Return what one process computes of the step's calls; None, with a finding, if no gradient is to be judged.

        Raises `CannotTellError` if the calls cannot be reproduced.
        """
        run = self.run
        parts: list[list[dict[str, Tensor]]] = []
        drawn: list[list[dict[str, Tensor]]] = []
        noisy: list[dict[str, Tensor]] = [{} for _ in range(DRAWS)]
        low = {dtype for step in moment.readers for call in step.calls if (dtype := call.autocast)}
        dtypes = [d for d in (*run.facts[0].dtypes.values(), *self.recomputer.low) if d.is_floating_point]
        low |= {d for d in dtypes if torch.finfo(d).bits < 32}
        for rank, step in enumerate(moment.ranks):
            parts.append([])
            drawn.append([])
            for index, call in enumerate(step.calls if rank in run.readers else ()):
                if not call.used_gradients:
                    continue
                values = moment.weights(run.owners[rank], step.calls_before + index)
                right = self.recomputer.product(call, values)
                draws = []
                for draw in range(DRAWS):
                    seed = hash((moment.number, rank, index, draw)) % 2**31
                    draws.append(self.recomputer.product(call, values, nudges=torch.Generator().manual_seed(seed)))
                _check_outputs(call.outputs, right, draws, f"rank {rank}, micro-batch {index}")
                parts[-1].append({name: g / call.scale for name, g in right.gradients.items()})
                if low:
                    sums = {n: sum((d.gradients[n] for d in draws), torch.zeros(())) for n in right.gradients}
                    drawn[-1].append({n: g / (DRAWS * call.scale) for n, g in sums.items()})
                for total, product in zip(noisy, draws, strict=True):
                    for name, g in product.gradients.items():
                        total[name] = total[name] + g / call.scale if name in total else g / call.scale
        stepped = dict.fromkeys(name for step in moment.ranks for g in step.groups for name in g.names)
        names = [name for name in stepped if any(name in part for of_rank in parts for part in of_rank)]
        if not stepped and run.facts[0].strangers:
            self.unseen = "the optimizer steps on no gradient of the model"
            return None
        if not any(parts) or not names:
            self.unseen = "no gradient was seen"
            if beside := {name for step in moment.ranks for name in step.beside}:
                raise CannotTellError(beside_outputs(min(beside)))
            self.verdict.add(
                Level.UNKNOWN, "no gradient seen",
                "the model was called, but nothing that it returned was differentiated before the optimizer's step",
                moment.number,
            )  # fmt: skip
            return None
        return _Products(parts=parts, drawn=drawn, noisy=noisy, low=low, names=names)

    def _scale(self, moment: Moment) -> float:
        """Return by how much a GradScaler has multiplied the gradients when they are clipped or stepped on, and report
        what is done to them at the wrong moment.
        """
        first, number = moment.ranks[0], moment.number
        still = first.still_scaled
        if still != 1.0:
            self.verdict.add(
                Level.WRONG, Fault.SCALED,
                f"the optimizer steps on gradients that a GradScaler has multiplied by {still:g}: call "
                "scaler.step(optimizer) in the place of optimizer.step()", number,
            )  # fmt: skip
        scaled = first.clips[-1].scaled if first.clips else still
        if first.clips and scaled != 1.0:
            self.verdict.add(
                Level.WRONG, Fault.CLIPPING,
                f"gradients are clipped while they are {scaled:g} times too large: call scaler.unscale_ before "
                "clip_grad_norm_", number,
            )  # fmt: skip
        if first.not_scaled == 1.0 or scaled != 1.0:
            return scaled
        self.verdict.add(
            Level.WRONG, Fault.SCALED,
            f"a GradScaler divides gradients by {first.not_scaled:g}, and the loss was not multiplied by it "
            "(scaler.scale(loss).backward()?)", number,
        )  # fmt: skip
        return 1.0 / first.not_scaled

    def _compared(
        self, own: Mapping[str, Tensor], exact: Mapping[str, Tensor], products: _Products, eps: float, moment: Moment
    ) -> tuple[Comparison, list[list[dict[str, Tensor]]]]:
        """Return the comparison of a replica's gradients with the right ones, and the parts to explain them by.

        Where rounding moves them far, they are compared with those of one process in the script's own precision. Raises
        `CannotTellError` if nothing but a large error would be seen, or if the model cannot be called again.
        """
        comparison = compare(own, exact, products.noise, eps)
        if comparison.wrong or comparison.unseen > UNSEEN:
            self._check_repeats(moment)
        if comparison.unseen <= UNSEEN:
            return comparison, products.parts
        rounding, low = comparison.unseen / FACTOR, products.low
        near = self._near(own, products.noisy, [*exact], low) if low else None
        if near is not None:
            self.rounded = " and ".join(sorted(str(d).removeprefix("torch.") for d in low))
            self.verdict.add(
                Level.NOTE, "coarse rounding",
                f"in {self.rounded}, rounding alone, as of a ReLU's input around 0, moves the gradients by "
                f"{100 * rounding:.2g} % from float64's; they are judged by those of one process in the same "
                "precision", moment.number,
            )  # fmt: skip
        elif not comparison.wrong:
            raise CannotTellError(
                f"rounding alone moves the gradients by {100 * rounding:.2g} % from those in float64, so that only an "
                f"error of {100 * comparison.unseen:.2g} % would be detected; for a verdict one of "
                f"{100 * UNSEEN:.0f} % must be detectable (run the script in float32)"
            )
        return near or comparison, products.drawn if low else products.parts

    def _check_repeats(self, moment: Moment) -> None:
        """Raise `CannotTellError` if a model computes something else when it is called again in the same way."""
        rank = self.run.readers[0]
        step, owner = moment.ranks[rank], self.run.owners[rank]
        for call in {call.root: call for call in step.calls if call.used_gradients}.values():
            place = step.calls_before + next(i for i, own in enumerate(step.calls) if own is call)
            if not self.recomputer.repeats(call, moment.weights(owner, place)):
                raise CannotTellError(
                    "the model computes something else when it is called again with the same inputs: it keeps a state "
                    "that is not recorded. Recorded are parameters, buffers, and small plain attributes of modules"
                )

    def _count_in(self, right: Comparison) -> None:
        """Let the verdict's largest error, and the largest that would not be seen, cover gradients that are right."""
        self.worst = max(self.worst, right.worst)
        self.detects, self.widest = max((self.detects, self.widest), (right.detects, right.widest))

    def _own_factor(
        self, moment: Moment, gradients: Mapping[int, Mapping[str, Tensor]], total: Mapping[str, Tensor]
    ) -> float | None:
        """Return the factor by which the script itself multiplies all gradients, if that makes the loss a mean.

        Losses may be added up and the gradients divided, by the number of micro-batches or of targets, only after the
        backward pass. That is the same as dividing the losses.
        """
        factors = []
        for own in gradients.values():
            names = [name for name in total if name in own]
            if len(names) < len(total):
                return None
            flat = flattened(own, names)
            factor, left = multiple(flat, flattened(total, names))
            if factor <= 0.0 or left > SAME * float(flat.norm()):
                return None
            factors.append(factor)
        if max(factors) > (1 + SAME) * min(factors) or abs(factors[0] / self.factor - 1) <= SAME:
            return None
        try:
            found = objective_of(moment.readers, factors[0])
        except UnseenError:
            return None
        return factors[0] / found.total if abs(found.total - 1) <= SAME else None

    def _near(
        self, own: Mapping[str, Tensor], noisy: list[dict[str, Tensor]], names: list[str], low: set[torch.dtype]
    ) -> Comparison | None:
        """Return the comparison with the same computation in the script's own precision, if they are the same."""
        mean = {n: sum((d[n] for d in noisy), torch.zeros(())) / DRAWS for n in names}
        spread = {}
        for name, x in mean.items():
            squares = [float((d[name] - x).norm()) ** 2 for d in noisy]
            spread[name] = float(np.sqrt(sum(squares) / (DRAWS - 1))) / (float(x.norm()) or 1.0)
        exact = {name: self.factor * x for name, x in mean.items()}
        comparison = compare(own, exact, spread, max(torch.finfo(dtype).eps for dtype in low))
        return None if comparison.wrong or comparison.unseen > UNSEEN else comparison

    def _without_penalty(
        self,
        own: dict[str, Tensor],
        weights: Mapping[str, Tensor],
        parts: list[list[dict[str, Tensor]]],
        noise: Mapping[str, float],
        beside: set[str],
    ) -> dict[str, Tensor]:
        """Return gradients without that of a penalty on weights. Raise `CannotTellError` if there is no penalty."""
        names = sorted(beside & own.keys() & weights.keys())
        flat = [part for of_rank in parts for part in of_rank]
        penalty = penalty_in(own, flat, weights, names, float(np.median(list(noise.values()))))
        if penalty is None:
            raise CannotTellError(beside_outputs(min(beside)))
        self.penalty = self.penalty or penalty.text
        if penalty.text:
            self.verdict.add(
                Level.NOTE, "a penalty on weights", f"beside the model's outputs, the loss holds {penalty.text}"
            )
        return {name: g - penalty.gradients[name] if name in penalty.gradients else g for name, g in own.items()}

    def _perturbed(self, moment: Moment) -> None:
        """Leave calls out of a step that were made before its weights were changed, if the gradients are without them.

        Sharpness-aware minimization (Foret et al., 2021) moves weights along the gradient of a first pass, and steps on
        that of a second.
        """
        first = {rank: _calls_before(step) for rank, step in enumerate(moment.ranks)}
        if not any(first.values()):
            return
        owner, number = self.run.owners[0], moment.number
        sums: list[dict[str, Tensor]] = [{}, {}]
        for rank in self.run.readers:
            for index, call in enumerate(moment.ranks[rank].calls):
                if call.used_gradients:
                    place = moment.ranks[rank].calls_before + index
                    product = self.recomputer.product(call, moment.weights(self.run.owners[rank], place))
                    total = sums[index >= first[rank]]
                    for name, g in product.gradients.items():
                        total[name] = total.get(name, torch.zeros(())) + g / call.scale
        if not sums[0]:  # passes without a gradient
            return
        own = {n: g.double() for n, g in moment.gradients[owner].items() if n in sums[1]}
        both = {n: x + sums[0].get(n, torch.zeros(())) for n, x in sums[1].items()}
        there = moment.weights(owner, moment.ranks[0].calls_before + first[0])
        moved = {n: x.double() - moment.before[owner][n].double() for n, x in there.items()}
        along = cosine(moved, sums[0]) > ALONG
        if not own or cosine(own, sums[1]) < cosine(own, both):
            if along:
                self.verdict.add(
                    Level.WRONG, Fault.NOT_CLEARED,
                    "the gradient of a first pass, along which the weights are then moved, is still in that of the "
                    "second (zero_grad missing between the passes of sharpness-aware minimization?)", number,
                )  # fmt: skip
            return
        for rank, step in enumerate(moment.ranks):
            step.calls, step.calls_before = step.calls[first[rank] :], step.calls_before + first[rank]
        last = moment.ranks[0].calls[-1].weights
        if not along and last and all(equal_at(n, moment.ranks[0].stepped_from, last) for n in last):
            self.verdict.add(
                Level.WRONG, Fault.DROPPED,
                "the gradients of calls that were made before the script changed the weights are lost (zero_grad "
                "between micro-batches?)", number,
            )  # fmt: skip
            return
        told = f"moved by {norm_of(moved):.4g}{'' if along else ', and not'} along the gradient of the first"
        self.verdict.add(
            Level.NOTE, "two passes a step",
            f"the optimizer steps on the gradients of a second pass, for which the weights were {told}"
            + (" (sharpness-aware minimization)" if along else ""), number,
        )  # fmt: skip

    def _note_uncleared(self, moment: Moment, parts: list[list[dict[str, Tensor]]]) -> None:
        """Note what gradients hold if nothing clears them: of parameters that are not stepped, everything so far."""
        for owner in dict.fromkeys(self.run.owners):
            held, stepped = self.uncleared.setdefault(owner, {}), moment.clipped[owner]
            waiting = {n: x for n, x in self.waiting.get(owner, {}).items() if n not in stepped}
            held |= {name: g.double() for name, g in stepped.items()}
            for part in (part for of_rank in parts for part in of_rank):
                for name in part.keys() - stepped.keys():
                    held[name] = held.get(name, torch.zeros(())) + self.factor * part[name]
                    waiting[name] = waiting.get(name, torch.zeros(())) + self.factor * part[name]
            self.waiting[owner] = waiting

    def _recomputed(self, moment: Moment) -> dict[str, Tensor]:
        """Return the gradients of activations that are computed again in the backward pass, as by the script."""
        total: dict[str, Tensor] = {}
        for rank, step in zip(self.run.readers, moment.readers, strict=True):
            values = moment.before[self.run.owners[rank]]
            for call in step.calls:
                if call.used_gradients:
                    for name, g in self.recomputer.product(call, values, recompute=True).gradients.items():
                        total[name] = total.get(name, torch.zeros(())) + self.factor * g / call.scale
        return total


def _check_outputs(outputs: list[Tensor], right: Product, draws: list[Product], where: str) -> None:
    """Raise `CannotTellError` if the copy's outputs differ from those of the script's model."""
    for index, (own, x) in enumerate(zip(outputs, right.outputs, strict=True)):
        noise = max(float((d.outputs[index] - x).norm()) for d in draws)
        scale = float(x.norm())
        distance = float((own - x).norm()) if own.shape == x.shape else math.inf
        if distance > 3 * FACTOR * max(noise, 1e-7 * scale):
            raise CannotTellError(
                f"the model's output cannot be reproduced ({where}: off by {distance / (scale or 1.0):.2g}): it "
                "depends on something that is not recorded, or was computed with other parameters"
            )


def _is_lost(call: Call) -> bool:
    """Return whether a loss of a call in training is computed and never differentiated.

    It is noted with the last call before it, which may be of another model, such as a teacher.
    """
    is_differentiated = bool(call.used_gradients) or any(term.gradient is not None for term in call.terms)
    return bool(call.terms) and any(call.training) and not is_differentiated


def _has_rows_of_its_own(step: Step) -> bool:
    """Return whether calls whose losses are never differentiated have rows that no other call of the step has."""
    lost, others = rows_of([[c for c in step.calls if _is_lost(c)], [c for c in step.calls if not _is_lost(c)]])
    return bool(lost - others)


def _calls_before(step: Step) -> int:
    """Return the number of calls after which the script has changed the weights for the last time."""
    changes = [i for i in range(1, len(step.calls)) if not equal(step.calls[i - 1].weights, step.calls[i].weights)]
    return changes[-1] if changes else 0


def _factor(gradients: Mapping[int, Mapping[str, Tensor]], total: Mapping[str, Tensor], ranks: Sequence[Step]) -> float:
    """Return the weight of each rank's gradient: 1 if ranks are added up, 1 / `world` if they are averaged.

    Where neither fits all tensors to 2 %, some of them are wrong: it is then the one that makes the loss a mean over
    targets, or the one that fits most tensors, or else the mean over ranks.
    """
    world = len(ranks)
    if world == 1:
        return 1.0
    scale = sum(float((x * x).sum()) for x in total.values()) or 1.0
    fits, single = [], [0.0]
    for own in gradients.values():
        products = {n: float((own[n] * x).sum()) for n, x in total.items() if n in own}
        fits.append(sum(products.values()) / scale)
        single += [product / (float((total[n] * total[n]).sum()) or 1.0) for n, product in products.items()]
    together = float(np.mean(fits))
    for factor in (1.0, 1 / world):
        if abs(together / factor - 1) < 0.02:
            return factor
    try:
        means = [factor for factor in (1.0, 1 / world) if abs(objective_of(ranks, factor).total - 1) <= SAME]
    except UnseenError:
        means = []
    if len(means) == 1:
        return means[0]
    return 1.0 if abs(float(np.median(single)) - 1) < 0.02 else 1 / world
