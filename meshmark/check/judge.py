"""Judge a recorded run: what was compared, and the first thing that is wrong."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from meshmark.check.exact import CommunicatesError, Product, Recomputer
from meshmark.check.gradients import (
    CLAMPED,
    FACTOR,
    LEFT_OVER,
    UNSEEN,
    Comparison,
    Expected,
    Explanation,
    clipped_singly,
    compare,
    explain,
    penalty_in,
    shortened,
)
from meshmark.check.objective import MEANS, SAME, Objective, UnseenError, objective_of, scaled_total
from meshmark.check.overwritten import Earlier, change_of
from meshmark.check.pieces import CannotTellError
from meshmark.check.recorder import beside_outputs
from meshmark.check.recording import Call, Clip, Step
from meshmark.check.rows import rows_of
from meshmark.check.run import Moment, Run
from meshmark.check.updates import UnknownOptimizerError, Updates, explain_update
from meshmark.check.verdict import Finding, Level, Verdict
from meshmark.judge.faults import Fault, named_factor
from meshmark.judge.pristine import pristine

CLIPPED_EARLY = 1e-3
"""Relative error up to which gradients are those of the ranks, each clipped on its own and then added up."""
DRAWS = 3
"""Number of recomputations with rounding, for each micro-batch, from which the noise is measured."""


ALONG = 0.99
"""Cosine from which on weights were moved along a gradient. Ranks may each follow their own."""
UNUSED = 1e-6
"""Part of the norm of all gradients up to which that of a parameter without a use counts as zero."""
SAME_METRIC = 1e-6
"""Relative difference up to which ranks' metrics count as equal."""
_NOT_FINITE = "not finite"


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


@dataclass(frozen=True, kw_only=True)
class _WrongGradients:
    """Gradients of one replica that are not the right ones."""

    moment: Moment
    own: Mapping[str, Tensor]
    exact: Mapping[str, Tensor]
    comparison: Comparison
    noise: Mapping[str, float]
    eps: float
    parts: list[list[dict[str, Tensor]]]
    """Gradients by rank and micro-batch that they should be made of."""
    previous: Mapping[str, Tensor] | None
    """Gradients before this step, if nothing has cleared them."""
    expected: Expected
    again: Callable[[], Mapping[str, Tensor] | None]
    """Returns the gradients of activations that are computed again; None where none are."""

    @property
    def names(self) -> list[str]:
        """Wrong parameters, the worst first."""
        return self.comparison.wrong

    @property
    def off_by(self) -> str:
        return f"off by {min(self.comparison.worst, 1e9):.2g}"

    @functools.cached_property
    def explanation(self) -> Explanation:
        """The weights with which the parts add up to the gradients, in words."""
        return explain(self.own, self.parts, self.previous, self.names, self.expected)

    @property
    def detail(self) -> str:
        return f"{self.explanation.detail}; {self.off_by}"

    @property
    def edited(self) -> set[str]:
        """Parameters whose gradients the script changes itself, on all ranks."""
        return set.intersection(*(set(step.edited) for step in self.moment.ranks))


@dataclass(kw_only=True)
class Judge:
    """Judge of one run. It goes through the steps and collects findings."""

    run: Run
    copies: Mapping[int, nn.Module]
    objective: str | None
    """The mean that the user expects the script to optimise."""
    asked: int
    """Number of steps that were asked for."""
    verdict: Verdict
    seen: set[str] = field(default_factory=set)
    objectives: list[Objective] = field(default_factory=list)
    unseen: str = ""
    worst: float = 0.0
    detects: float = 0.0
    """The smallest relative error that would have been detected in every gradient."""
    read: list[Counter[bytes]] = field(default_factory=list)
    """How often each reader has read each row."""
    shared: list[int] = field(default_factory=list)
    """Most rows that two ranks have in common, by step."""
    handed_on: list[bool] = field(default_factory=list)
    """Whether a rank reads what another read in the step before, by step from the second on."""
    uncleared: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Gradients of every replica as they were before this step, if nothing has cleared them."""
    waiting: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Gradients of every replica, of earlier steps, that no optimizer has stepped on yet."""
    widest: str = ""
    """The parameter for which that error is needed."""
    rounded: str = ""
    """Precision in which the gradients were judged, if rounding moves them too far from float64's."""
    penalty: str = ""
    """A penalty on weights that the loss holds."""
    num_micro: int = 0
    """Number of micro-batches of the first step."""
    usual_calls: int = 0
    """Number of calls of models in the last step in which all ranks had as many."""
    repaired: bool = False
    """Whether replicas that differ after the optimizer's step are equal when the next begins."""
    clips: list[str] = field(default_factory=list)
    factor: float = 1.0
    """Factor by which the reduction multiplies each rank's gradient."""

    def add(self, level: Level, fault: str, text: str, step: int | None = None) -> None:
        """Add a finding, unless one of the same class was added before."""
        if fault not in self.seen:
            self.seen.add(fault)
            self.verdict.findings.append(Finding(level=level, fault=fault, text=text, step=step))

    def judge(self) -> None:
        """Fill the verdict."""
        run, verdict = self.run, self.verdict
        try:
            run.check()
            self._go()
        except CannotTellError as reason:
            if isinstance(reason, CommunicatesError):  # its ranks may hold other parts by design
                verdict.findings = [f for f in verdict.findings if f.fault != Fault.DRIFT]
            self.add(Level.UNKNOWN, "not judged", str(reason))
        micro = self.num_micro or (_micro_batches(run.folder.step(0, 0).calls) if run.num_steps else 0)
        if 0 < run.num_steps < self.asked and not any(f.end == "still running" for f in run.facts):
            who = "the script"
            if len({f.num_steps for f in run.facts}) > 1:  # ranks may run out of batches one by one, as with `Join`
                who = f"rank {min(run.facts, key=lambda f: f.num_steps).rank}"
            told = f"{who} took {run.num_steps}, and {self.asked} were asked for"
            self.add(Level.NOTE, "fewer steps", told)
        together = max(len(f.partners) for f in run.facts)
        parts = [f"tensor parallelism over {together}"] if together > 1 else []
        wrapped = ", ".join([*run.wrappers, *parts]) or "no wrapper"
        verdict.setting = f"{_count(run.num_steps, 'step')} of {_count(run.world, 'rank')} ({wrapped})" + (
            f", {micro} micro-batches a step" if micro > 1 else ""
        )

    def _go(self) -> None:
        run = self.run
        recomputer = Recomputer(self.copies, run.facts[0].aliases)
        updates = [Updates(f.rank) for f in run.facts]
        previous: Moment | None = None
        unknown_optimizer = ""
        same: list[bool] = []
        repeats: list[list[bool]] = []
        rows: list[Counter[bytes]] = []
        for number in range(run.num_steps):
            moment = run.moment(number)
            if not number:
                self._report_strange_tensors()
                self._report_bypass()
            self._judge_replicas(previous, moment)
            if number < 2:
                self._report_copies(previous, moment)
            rows_before, rows = rows, [rows_of(s.calls) for s in moment.readers]
            self._note_shared_rows(rows_before, rows)
            same.append(bool(rows[0]) and all(own == rows[0] for own in rows) and _same_targets(moment))
            if previous is not None:
                repeats.append([before == now for before, now in zip(rows_before, rows, strict=True)])
                self._overwritten(previous, moment)
            if self._is_not_finite(moment):
                break
            if moment.dropped:
                self.add(
                    Level.NOTE, "a step skipped",
                    f"gradients of {_count(moment.dropped, 'call')} of the model are cleared without a step of the "
                    "optimizer, on all ranks", number,
                )  # fmt: skip
            self._modes(moment)
            if self._skips(moment):
                break
            early = self._clipped_early(moment)
            if early and moment.gradients is not moment.clipped:
                self.unseen = "gradients are clipped before they are reduced"
            else:
                self._gradients(recomputer, moment)
            if not early:
                self._clipping(moment)
            self._changed_before_the_update(moment)
            self._schedules(moment)
            try:
                for rank, (step, own) in enumerate(zip(moment.ranks, updates, strict=True)):
                    before = moment.before_parts[rank] | step.stepped_from
                    with pristine():  # an optimizer's class is judged by PyTorch's own code of it
                        wrong = own.compare(step, before)
                    if own.restored and number:
                        self.add(
                            Level.NOTE, "optimizer state set by the script",
                            "something other than the optimizer's steps has set its state of "
                            f"{shortened(own.restored)} (a checkpoint that was loaded?)", number,
                        )  # fmt: skip
                    if wrong:
                        told = explain_update(step, before, wrong)
                        fault = Fault.NEVER_UPDATED if "did not move" in told else Fault.UPDATE
                        self.add(Level.WRONG, fault, f"rank {rank}: {told}", number)
            except UnknownOptimizerError as error:
                unknown_optimizer = str(error)
            previous = moment
            self._crossing(moment)
            self._buffers(moment)
        else:  # no step was the last to be judged
            if not self.repaired:
                self._replicas(moment.after, moment, "after the step")
        self._data(same, repeats)
        self._renewed(updates, moment)
        if not_finite := _NOT_FINITE in self.seen:
            self.verdict.lines["objective"] = "not judged: nothing is, from the step on that is not finite"
        else:
            self._judge_objective()
        if self.detects > UNSEEN:
            self.add(
                Level.NOTE, "errors would be hidden",
                f"in the gradient of {self.widest}, rounding would hide errors of less than {self.detects:.2g} (a run "
                "in float32 shows more)",
            )  # fmt: skip
        hidden = max(u.hidden for u in updates)
        if hidden > UNSEEN and not self.seen & {Fault.UPDATE, Fault.NEVER_UPDATED}:
            lost = any(u.lost for u in updates)
            told = ": a whole step is lost in it" if lost else ": the direction alone is judged" if hidden > 1 else ""
            self.add(
                Level.NOTE, "updates beside rounding",
                f"steps of the optimizer are small beside the rounding of the weights{told}, and errors of up to "
                f"{hidden:.2g} times a step would be hidden (keep weights in float32?)",
            )  # fmt: skip
        truth = f"one process's in {self.rounded}" if self.rounded else "float64's"
        self.verdict.lines["gradients"] = (
            f"off by {self.worst:.2g} of {truth} at most; an error of {self.detects:.2g} would be seen"
            if self.detects
            else "right but for their size, which the script changes"
            if "scaled by the script" in self.seen
            else "not judged, as said above"
            if self.seen & {"gradients changed by the script", "a communication hook", "copies are stepped"}
            else "wrong on every rank and step, as said above"
        )
        if self.clips:
            self.verdict.lines["clipping"] = self.clips[0]
        optimizers = list(dict.fromkeys(g.cls.rpartition(".")[2] for g in moment.ranks[0].groups))
        self.verdict.lines["updates"] = (
            "not judged from the step on that is not finite"
            if not_finite
            else f"not judged: {unknown_optimizer} is not among the optimizers that are known here"
            if unknown_optimizer
            else f"{', '.join(optimizers)}: off by {max(u.worst for u in updates):.2g} of float64's step at most"
        )

    # The parts of a step

    def _overwritten(self, previous: Moment, moment: Moment) -> None:
        """Report weights that the optimizer has stepped and that something else has changed since."""
        if not any(s.changed for s in moment.ranks):
            return
        owner = self.run.owners[0]
        now, held = moment.before[owner], previous.after[owner]
        stepped = [n for g in previous.ranks[0].groups for n in g.names if n in previous.ranks[0].gradients]
        names = [n for n in stepped if n in held and not torch.equal(now[n], held[n])]
        if not names:
            return
        change = change_of({n: now[n] for n in names}, self.run.history(moment.number, owner, names))
        told = f"something other than the optimizer has set {shortened(names)} to {change.text}"
        if change.averaged:
            self.add(
                Level.WRONG, "trained on averaged weights",
                f"{told}, and the script trains on (an average of weights that is not kept apart, or not taken back?)",
                moment.number,
            )  # fmt: skip
        else:
            self.add(Level.NOTE, "parameters changed between steps", told, moment.number)

    def _changed_before_the_update(self, moment: Moment) -> None:
        """Note weights that are other ones when the optimizer steps than when their gradients were computed."""
        for before, step in zip(moment.before_parts, moment.ranks, strict=True):
            at_call = step.calls[-1].weights if step.calls else {}
            now = {
                name: x
                for name, x in step.stepped_from.items()
                if name in step.gradients and not _equal_at(name, at_call, step.stepped_from)
            }
            if not now:
                continue
            change = change_of(now, [Earlier(when="before the step", values={n: before[n] for n in now})])
            self.add(
                Level.NOTE, "parameters changed before the update",
                "between the gradients and the update, something other than the optimizer has set "
                f"{shortened(now)} to {change.text}", moment.number,
            )  # fmt: skip
            return

    def _is_not_finite(self, moment: Moment) -> bool:
        """Add a finding, and return True, if the optimizer steps on gradients that are not finite."""
        for owner, gradients in moment.gradients.items():
            if bad := [name for name, g in gradients.items() if not bool(torch.isfinite(g).all())]:
                told = f"the optimizer steps on gradients that are infinite or no numbers: {_named(bad)}"
                where = f", on rank {owner}" if len(moment.ranks) > 1 else ""
                self.add(Level.WRONG, _NOT_FINITE, told + where, moment.number)
                return True
        return False

    def _skips(self, moment: Moment) -> bool:
        """Add a finding, and return True, if the optimizer of one rank steps after other calls than another's.

        Ranks may have other numbers of micro-batches, but they step together: they then hold the same parameters.
        """
        counts = [len(step.calls) for step in moment.readers]
        usual = self.usual_calls
        if len(set(counts)) == 1:
            self.usual_calls = counts[0]
            return False
        if not usual or min(counts) != usual or max(counts) % usual:
            return False
        if _all_equal(moment.after) or not _all_equal(moment.before):
            return False
        few, many = (self.run.readers[counts.index(of(counts))] for of in (min, max))
        self.add(
            Level.WRONG, "a step of some ranks only",
            f"rank {few} takes this step after {_count(min(counts), 'call')} of the model, and rank {many} after "
            f"{max(counts)}: they then hold other parameters (does one rank skip a step that others take?)",
            moment.number,
        )  # fmt: skip
        self.unseen = "ranks step at different times"
        self.verdict.lines.pop("replicas", None)
        return True

    def _clipped_early(self, moment: Moment) -> bool:
        """Return whether each rank clips its own gradient, and the script adds them up only then."""
        if len(moment.gradients) < 2 or not all(step.clips for step in moment.ranks):
            return False
        owners = list(moment.gradients)
        names = sorted(set.intersection(*(set(of[o]) for of in (moment.gradients, moment.clipped) for o in owners)))
        if not names:
            return False
        own, stepped = ([_flat(of[o], names) for o in owners] for of in (moment.gradients, moment.clipped))
        alike = SAME_METRIC * float(own[0].norm())
        if float((own[1] - own[0]).norm()) <= alike or any(float((x - stepped[0]).norm()) > alike for x in stepped):
            return False
        if _multiple(own[1], own[0])[1] <= CLIPPED_EARLY * float(own[1].norm()):  # one gradient, scaled by each rank
            return False
        matrix = torch.stack(own, 1)
        weights = torch.linalg.lstsq(matrix, stepped[0].unsqueeze(1), driver="gelsd").solution.squeeze(1)
        left = float((stepped[0] - matrix @ weights).norm())
        if left > CLIPPED_EARLY * float(stepped[0].norm()) or float(weights.min()) <= CLIPPED_EARLY:
            return False
        told = "every rank clips the gradient of its own rows, by its own norm, before gradients are reduced over ranks"
        if float(weights.max() - weights.min()) <= CLIPPED_EARLY * float(weights.max()):
            self.add(
                Level.NOTE, "clipped before reduction", f"{told} (without effect: the norms are below the bound)",
                moment.number,
            )  # fmt: skip
            moment.gradients = moment.clipped
        else:
            self.add(Level.WRONG, "clipped before reduction", told, moment.number)
        return True

    def _gradients(self, recomputer: Recomputer, moment: Moment) -> None:
        """Judge the gradients that the optimizer steps on."""
        run = self.run
        self._perturbed(recomputer, moment)
        products = self._products(recomputer, moment)
        if products is None:
            return
        noise, total = products.noise, products.total
        eps = max(torch.finfo(d).eps for d in run.facts[0].dtypes.values())
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
        micro = max(_micro_batches(step.calls) for step in moment.readers)
        self.num_micro = self.num_micro or micro
        again = functools.cache(lambda: self._recomputed(recomputer, moment) if recomputer.recomputes else None)
        compared: list[Comparison] = []
        for owner, ranks in owned.items():
            held = {name for rank in ranks for g in moment.ranks[rank].groups for name in g.names}
            exact = {name: x for name, x in right.items() if name in held}  # ranks may step a part each
            comparison, parts = self._compared(gradients[owner], exact, products, eps, moment.number)
            if comparison.wrong:
                wrong = _WrongGradients(
                    moment=moment,
                    own=gradients[owner],
                    exact=exact,
                    comparison=comparison,
                    noise=noise,
                    eps=eps,
                    parts=parts,
                    previous=self.uncleared.get(owner),
                    expected=Expected(ranks=ranks, factor=factor, known=self._known(micro)),
                    again=again,
                )
                comparison = self._explained(wrong)
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

    def _unused(self, moment: Moment, used: Mapping[str, Tensor], beside: set[str]) -> None:
        """Report parameters that the optimizer steps with a gradient although no call of the step uses them."""
        edited = {name for step in moment.ranks for name in step.edited}
        for owner, own in moment.gradients.items():
            held = {name for group in moment.ranks[owner].groups for name in group.names} - used.keys() - beside
            least = UNUSED * _norm(own)
            waiting = self.waiting.get(owner, {})
            held -= {n for n, x in waiting.items() if n in own and _is_near(own[n].double(), x, SAME)}
            odd = {name: own[name] for name in held if name in own and float(own[name].double().norm()) > least}
            before, after = moment.before[owner], moment.after[owner]
            if still := sorted(n for n in held & own.keys() - odd.keys() if not torch.equal(before[n], after[n])):
                self.add(
                    Level.NOTE, "stepped without use",
                    f"no call of this step uses {shortened(still)}, and the optimizer moves it, on a gradient of "
                    "zero, by its momentum or weight decay", moment.number,
                )  # fmt: skip
            if not odd:
                continue
            worst = max(odd, key=lambda name: float(odd[name].double().norm()))
            names = shortened([worst, *(odd.keys() - {worst})])
            told = f"no call of this step uses {names}, and the optimizer steps on a gradient of norm "
            told += f"{_norm(odd):.3g} (of an earlier step, or of other memory?)"
            if worst in edited:
                self.add(Level.UNKNOWN, "gradients changed by the script", told, moment.number)
            else:
                self.add(Level.WRONG, Fault.NOT_CLEARED, told, moment.number)

    def _products(self, recomputer: Recomputer, moment: Moment) -> _Products | None:
        """Return what one process computes of the step's calls; None, with a finding, if no gradient is to be judged.

        Raises `CannotTellError` if the calls cannot be reproduced.
        """
        run = self.run
        parts: list[list[dict[str, Tensor]]] = []
        drawn: list[list[dict[str, Tensor]]] = []
        noisy: list[dict[str, Tensor]] = [{} for _ in range(DRAWS)]
        low = {dtype for step in moment.readers for call in step.calls if (dtype := call.autocast)}
        low |= {d for d in [*run.facts[0].dtypes.values(), *recomputer.low] if torch.finfo(d).bits < 32}
        for rank, step in enumerate(moment.ranks):
            parts.append([])
            drawn.append([])
            for index, call in enumerate(step.calls if rank in run.readers else ()):
                if not call.used_gradients:
                    continue
                values = moment.weights(run.owners[rank], step.calls_before + index)
                right = recomputer.product(call, values)
                draws = []
                for draw in range(DRAWS):
                    seed = hash((moment.number, rank, index, draw)) % 2**31
                    draws.append(recomputer.product(call, values, nudges=torch.Generator().manual_seed(seed)))
                self._forward(call.outputs, right, draws, f"rank {rank}, micro-batch {index}")
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
            self.add(
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
            self.add(
                Level.WRONG, Fault.SCALED,
                f"the optimizer steps on gradients that a GradScaler has multiplied by {still:g}: call "
                "scaler.step(optimizer) in the place of optimizer.step()", number,
            )  # fmt: skip
        scaled = first.clips[-1].scaled if first.clips else still
        if first.clips and scaled != 1.0:
            self.add(
                Level.WRONG, Fault.CLIPPING,
                f"gradients are clipped while they are {scaled:g} times too large: call scaler.unscale_ before "
                "clip_grad_norm_", number,
            )  # fmt: skip
        if first.not_scaled == 1.0 or scaled != 1.0:
            return scaled
        self.add(
            Level.WRONG, Fault.SCALED,
            f"a GradScaler divides gradients by {first.not_scaled:g}, and the loss was not multiplied by it "
            "(scaler.scale(loss).backward()?)", number,
        )  # fmt: skip
        return 1.0 / first.not_scaled

    def _compared(
        self, own: Mapping[str, Tensor], exact: Mapping[str, Tensor], products: _Products, eps: float, number: int
    ) -> tuple[Comparison, list[list[dict[str, Tensor]]]]:
        """Return the comparison of a replica's gradients with the right ones, and the parts to explain them by.

        Where rounding moves them far, they are compared with those of one process in the script's own precision. Raises
        `CannotTellError` if nothing but a large error would be seen.
        """
        comparison = compare(own, exact, products.noise, eps)
        if comparison.unseen <= UNSEEN:
            return comparison, products.parts
        rounding, low = comparison.unseen / FACTOR, products.low
        near = self._near(own, products.noisy, [*exact], low) if low else None
        if near is not None:
            self.rounded = " and ".join(sorted(str(d).removeprefix("torch.") for d in low))
            self.add(
                Level.NOTE, "coarse rounding",
                f"in {self.rounded}, rounding alone, as of a ReLU's input around 0, moves the gradients by "
                f"{100 * rounding:.2g} % from float64's; they are judged by those of one process in the same "
                "precision", number,
            )  # fmt: skip
        elif not comparison.wrong:
            raise CannotTellError(
                f"rounding alone moves the gradients by {100 * rounding:.2g} % from those in float64, so that only an "
                f"error of {100 * comparison.unseen:.2g} % would be detected; for a verdict one of "
                f"{100 * UNSEEN:.0f} % must be detectable (run the script in float32)"
            )
        return near or comparison, products.drawn if low else products.parts

    # Why gradients are wrong

    def _explained(self, wrong: _WrongGradients) -> Comparison:
        """Report why a replica's gradients are wrong, by the first explanation that fits.

        Returns the comparison by which they count: another one if the script has changed right gradients.
        """
        explanations: Sequence[Callable[[_WrongGradients], Comparison | None]] = (
            self._activations_again,
            self._own_summands,
            self._factor_by_rank,
            self._bounded_elements,
            self._clipped_one_by_one,
            self._clipped_to_norm,
            self._edited,
            self._hooked,
        )
        for explanation in explanations:
            if (comparison := explanation(wrong)) is not None:
                return comparison
        self.add(Level.WRONG, wrong.explanation.fault, wrong.detail, wrong.moment.number)
        return wrong.comparison

    def _activations_again(self, wrong: _WrongGradients) -> Comparison | None:
        """Explain by activations that the backward pass computes otherwise than the forward pass did."""
        if (again := wrong.again()) is None or _is_multiple(wrong.own, wrong.exact, wrong.names):
            return None
        if not _is_multiple(wrong.own, again, wrong.names):
            return None
        self.add(
            Level.WRONG, Fault.BACKWARD,
            "activations that torch.utils.checkpoint computes again are not those of the forward pass: random "
            "numbers are drawn anew (preserve_rng_state=False?), or something has changed in between; "
            f"{_named(wrong.names)} {wrong.off_by}", wrong.moment.number,
        )  # fmt: skip
        return wrong.comparison

    def _own_summands(self, wrong: _WrongGradients) -> Comparison | None:
        """Explain by tensor-parallel ranks that do not add their gradients up."""
        names, added = wrong.names, wrong.moment.added
        if not all(n in added for n in names):
            return None
        if compare({n: added[n] for n in names}, {n: wrong.exact[n] for n in names}, wrong.noise, wrong.eps).wrong:
            return None
        self.add(
            Level.WRONG, Fault.NOT_REDUCED,
            f"{_named(names)} a sum over the tensor-parallel group, and each rank keeps its own "
            "summand (SequenceParallel missing?)", wrong.moment.number,
        )  # fmt: skip
        return wrong.comparison

    def _factor_by_rank(self, wrong: _WrongGradients) -> Comparison | None:
        """Explain by a factor of each rank's own."""
        factors = self._scaled_by_rank(wrong.moment, wrong.exact, wrong.names)
        if not factors:
            return None
        shown = ", ".join(f"{x:.4g}" for x in factors)
        shards = any(self.run.facts[0].pieces[n].ranks for n in wrong.names)
        each = f"each rank scales {'its own part of ' if shards else ''}the gradients by its own factor ({shown})"
        if shards:
            each += ", as by the norm of that part; the norm of all gradients is the same on all ranks"
        else:
            each += ", after they are reduced (a number of its own rows or tokens, in the place of all ranks'?)"
        self.add(Level.WRONG, Fault.CLIPPING if shards else Fault.SCALED, each, wrong.moment.number)
        self.unseen = "each rank scales gradients by a factor of its own"
        return wrong.comparison

    def _bounded_elements(self, wrong: _WrongGradients) -> Comparison | None:
        """Explain by elements that the script bounds."""
        if not (bound := _clamped(wrong.own, wrong.exact)):
            return None
        text = f"no element of a gradient is beyond {bound:.4g} (clipping of its own, which is not judged)"
        self.add(Level.NOTE, "scaled by the script", text, wrong.moment.number)
        self.unseen = self.unseen or "the script clips gradients itself"
        return wrong.comparison

    def _clipped_one_by_one(self, wrong: _WrongGradients) -> Comparison | None:
        """Explain by tensors, or rows of tensors, that the script clips one by one."""
        single = clipped_singly(wrong.own, wrong.exact, wrong.names) if wrong.edited else None
        if single is None or not wrong.edited.issuperset(wrong.names):
            return None
        before = compare({**wrong.own, **single.gradients}, wrong.exact, wrong.noise, wrong.eps)
        if before.wrong:
            return None
        self.add(
            Level.NOTE, "gradients clipped one by one",
            f"{_named(wrong.names)} the right gradient, which the script has multiplied {single.text} "
            "(clipping one by one, which is not judged)", wrong.moment.number,
        )  # fmt: skip
        return before

    def _clipped_to_norm(self, wrong: _WrongGradients) -> Comparison | None:
        """Explain by gradients that the script scales down to a norm."""
        if wrong.explanation.fault != Fault.SCALED or not _is_clipped_by_hand(wrong.own, wrong.exact):
            return None
        self.add(
            Level.NOTE, "scaled by the script",
            f"all gradients are scaled to a norm of {_norm(wrong.own):.4g} (clipping of its own, which is not judged)",
            wrong.moment.number,
        )  # fmt: skip
        self.unseen = self.unseen or "the script scales gradients itself"
        return wrong.comparison

    def _edited(self, wrong: _WrongGradients) -> Comparison | None:
        """Explain by gradients that the script changes itself."""
        fault = wrong.explanation.fault
        own_factor = fault == Fault.SCALED and not any(name in wrong.detail for name in wrong.expected.known)
        unknown = own_factor or fault in (Fault.BACKWARD, Fault.UNEXPLAINED)
        if not (unknown and wrong.edited.issuperset(wrong.names)):
            return None
        self.add(
            Level.UNKNOWN, "gradients changed by the script",
            "the script changes gradients in a hook or after the backward pass; "
            f"{_named(wrong.names)} not judged", wrong.moment.number,
        )  # fmt: skip
        self.unseen = self.unseen or "the script changes gradients itself"
        return wrong.comparison

    def _hooked(self, wrong: _WrongGradients) -> Comparison | None:
        """Explain by a communication hook of DDP's."""
        hooks, fault = " and ".join(self.run.facts[0].hooks), wrong.explanation.fault
        if not hooks or fault not in (Fault.PRECISION, Fault.BACKWARD, Fault.UNEXPLAINED):
            return None
        level = Level.NOTE if fault == Fault.PRECISION else Level.UNKNOWN
        self.add(
            level, "a communication hook",
            f"gradients pass DDP's communication hook {hooks}, which may change them: {wrong.off_by} (not judged)",
            wrong.moment.number,
        )  # fmt: skip
        self.unseen = self.unseen or "a communication hook changes gradients"
        return wrong.comparison

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
            flat = _flat(own, names)
            factor, left = _multiple(flat, _flat(total, names))
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

    def _scaled_by_rank(self, moment: Moment, exact: Mapping[str, Tensor], wrong: list[str]) -> list[float]:
        """Return the factor by which each rank has scaled the gradients that it holds; empty if they do not differ."""
        factors = []
        for f, step in zip(self.run.facts, moment.ranks, strict=True):
            names = [n for n in wrong if n in step.complete_gradients and n not in f.gradient_pieces]
            if not names or f.partial:
                return []
            parts = {n: step.complete_gradients[n] for n in names}
            own, right = _flat(parts, names), _flat({n: f.pieces[n].take(exact[n], x) for n, x in parts.items()}, names)
            factor, left = _multiple(own, right)
            if factor <= 0.0 or left > CLAMPED * float(own.norm()):
                return []
            factors.append(factor)
        return factors if max(factors) - min(factors) > CLAMPED * max(factors) else []

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
            self.add(Level.NOTE, "a penalty on weights", f"beside the model's outputs, the loss holds {penalty.text}")
        return {name: g - penalty.gradients[name] if name in penalty.gradients else g for name, g in own.items()}

    def _perturbed(self, recomputer: Recomputer, moment: Moment) -> None:
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
                    product = recomputer.product(call, moment.weights(self.run.owners[rank], place))
                    total = sums[index >= first[rank]]
                    for name, g in product.gradients.items():
                        total[name] = total.get(name, torch.zeros(())) + g / call.scale
        if not sums[0]:  # passes without a gradient
            return
        own = {n: g.double() for n, g in moment.gradients[owner].items() if n in sums[1]}
        both = {n: x + sums[0].get(n, torch.zeros(())) for n, x in sums[1].items()}
        there = moment.weights(owner, moment.ranks[0].calls_before + first[0])
        moved = {n: x.double() - moment.before[owner][n].double() for n, x in there.items()}
        along = _angle(moved, sums[0]) > ALONG
        if not own or _angle(own, sums[1]) < _angle(own, both):
            if along:
                self.add(
                    Level.WRONG, Fault.NOT_CLEARED,
                    "the gradient of a first pass, along which the weights are then moved, is still in that of the "
                    "second (zero_grad missing between the passes of sharpness-aware minimization?)", number,
                )  # fmt: skip
            return
        for rank, step in enumerate(moment.ranks):
            step.calls, step.calls_before = step.calls[first[rank] :], step.calls_before + first[rank]
        last = moment.ranks[0].calls[-1].weights
        if not along and last and all(_equal_at(n, moment.ranks[0].stepped_from, last) for n in last):
            self.add(
                Level.WRONG, Fault.DROPPED,
                "the gradients of calls that were made before the script changed the weights are lost (zero_grad "
                "between micro-batches?)", number,
            )  # fmt: skip
            return
        told = f"moved by {_norm(moved):.4g}{'' if along else ', and not'} along the gradient of the first"
        self.add(
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

    def _recomputed(self, recomputer: Recomputer, moment: Moment) -> dict[str, Tensor]:
        """Return the gradients of activations that are computed again in the backward pass, as by the script."""
        total: dict[str, Tensor] = {}
        for rank, step in zip(self.run.readers, moment.readers, strict=True):
            values = moment.before[self.run.owners[rank]]
            for call in step.calls:
                if call.used_gradients:
                    for name, g in recomputer.product(call, values, recompute=True).gradients.items():
                        total[name] = total.get(name, torch.zeros(())) + self.factor * g / call.scale
        return total

    def _crossing(self, moment: Moment) -> None:
        """Note what the script does that gradients and updates of single steps do not show."""
        names = [step.gathered for step in moment.ranks if step.gathered]
        if names:
            self.add(
                Level.NOTE, "values cross ranks",
                f"{names[0]} is called between forward and backward, and no gradient passes it: what other ranks' rows "
                "add to the loss has no gradient on any rank, and the objective is that of each rank's own loss "
                "(torch.distributed.nn.functional has collectives that gradients pass)", moment.number,
            )  # fmt: skip
        self._gathers(moment)
        again = next((s.epoch_again for s in moment.ranks if s.epoch_again is not None), None)
        if again is not None:
            self.add(
                Level.NOTE, "the same order again",
                f"a DistributedSampler begins epoch {again} again, with the same order of rows (sampler.set_epoch "
                "missing?)", moment.number,
            )  # fmt: skip
        steps = max(step.schedule_steps for step in moment.ranks)
        if steps > 1:
            told = f"the learning-rate schedule takes {steps} steps for one of the optimizer"
            if steps == max(step.schedule_steps_by_design for step in moment.ranks):
                told += (
                    ", one a process, as Accelerate's prepared schedules do: it must be made for as many times the "
                    "steps, or by an Accelerator with split_batches=True"
                )
            self.add(Level.NOTE, "schedule steps", told, moment.number)

    def _gathers(self, moment: Moment) -> None:
        """Judge functions of the script's own that gather tensors: their gradient is the sum over the ranks' losses.

        If every rank computes the whole loss, that is a multiple of the gradient of its own.
        """
        world = len(moment.ranks)
        for gathers in zip(*(step.gathers for step in moment.ranks), strict=False):
            if len({g.result.shape for g in gathers}) > 1:
                continue
            allowed = max(SAME, 4 * torch.finfo(gathers[0].given.dtype).eps)
            whole = torch.stack([g.result.double() for g in gathers]).sum(0)
            given = torch.stack([g.given.double() for g in gathers])
            if _is_near(given, whole, allowed):
                continue
            alone = torch.stack([g.result[rank].double() for rank, g in enumerate(gathers)])
            told = "an autograd function of the script's own gathers values over ranks, and its backward pass "
            told += (
                "leaves out the gradients of other ranks' losses"
                if _is_near(given, alone, allowed)
                else "does not add up the gradients of the ranks' losses"
            )
            is_mean = bool(self.objectives) and abs(self.objectives[-1].total - 1) <= SAME
            if is_mean and self.factor != 1.0 and _is_near(world * given, whole, allowed):
                self.add(
                    Level.WRONG, Fault.SCALED,
                    f"{told}: every rank computes the loss of all rows, and after the average over ranks the gradient "
                    f"that passes it is {named_factor(1 / world, self._known(1))} times the right one", moment.number,
                )  # fmt: skip
            else:
                if _is_near(given, alone, allowed):
                    told += " (each rank's loss takes other ranks' values for constants)"
                self.add(Level.NOTE, "values cross ranks", told, moment.number)

    def _schedules(self, moment: Moment) -> None:
        """Report hyperparameters that differ between ranks' optimizers, and what will make them differ."""
        first, *others = moment.ranks
        options = {name: group.options for group in first.groups for name in group.names}
        for rank, step in enumerate(others, start=1):
            for group in step.groups:
                for name in group.names:
                    for key, value in group.options.items():
                        own = options.get(name, {}).get(key, value)
                        if isinstance(value, bool | int | float | tuple) and own != value:
                            self.add(
                                Level.WRONG, "hyperparameters differ",
                                f"rank 0's optimizer steps {name} with {key} = {_shown(own)}, and rank {rank}'s with "
                                f"{_shown(value)}", moment.number,
                            )  # fmt: skip
            for own, metric in zip(first.metrics, step.metrics, strict=False):
                if abs(own - metric) > SAME_METRIC * max(abs(own), abs(metric)):
                    self.add(
                        Level.WRONG, "a schedule follows other metrics",
                        f"ReduceLROnPlateau is given {own:.4g} on rank 0 and {metric:.4g} on rank {rank}, so that "
                        "their learning rates will not be lowered at the same steps (average it over ranks first)",
                        moment.number,
                    )  # fmt: skip

    def _buffers(self, moment: Moment) -> None:
        """Note buffers, such as running statistics, that ranks hold other values of, or take from the first rank."""
        taken = [(rank, call.replaced[0]) for rank, s in enumerate(moment.ranks) for call in s.calls if call.replaced]
        if taken:
            rank, name = taken[0]
            self.add(
                Level.NOTE, "buffers of one rank",
                f"the first rank's {name} replaces rank {rank}'s at every forward pass (broadcast_buffers of DDP): it "
                "is made of the first rank's rows alone", moment.number,
            )  # fmt: skip
        first, *others = [step.calls[0].buffers for step in moment.ranks if step.calls]
        for rank, held in enumerate(others, start=1):
            odd = [n for n, x in first.items() if n in held and not torch.equal(x, held[n])]
            if odd:
                self.add(
                    Level.NOTE, "buffers differ",
                    f"ranks 0 and {rank} hold other values of {odd[0]}: they are made of each rank's own rows",
                    moment.number,
                )  # fmt: skip
                return

    def _known(self, micro: int) -> dict[str, float]:
        world = len(self.run.readers)
        known: dict[str, float] = {}
        if world > 1:
            known |= {"the number of ranks": float(world), "1 / the number of ranks": 1 / world}
        if micro > 1:
            known |= {"the number of micro-batches": float(micro), "1 / the number of micro-batches": 1 / micro}
        if world > 1 and micro > 1:
            both = float(world * micro)
            known |= {"ranks x micro-batches": both, "1 / (ranks x micro-batches)": 1 / both}
        return known

    def _forward(self, outputs: list[Tensor], right: Product, draws: list[Product], where: str) -> None:
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

    def _clipping(self, moment: Moment) -> None:
        steps = moment.ranks
        for step in steps:
            if held := [name for name in step.clipped_nothing if name in step.gradients]:
                self.add(
                    Level.WRONG, Fault.CLIPPING,
                    f"clipping has no effect: when it is called, none of its parameters has a gradient ({held[0]}). "
                    "DeepSpeed's ZeRO keeps gradients elsewhere, and clips if its configuration has gradient_clipping",
                    moment.number,
                )  # fmt: skip
        if not any(s.clips for s in steps):
            return
        number = moment.number
        missing = [r for r, s in enumerate(steps) if not s.clips]
        if missing:
            self.add(Level.WRONG, Fault.CLIPPING, f"rank {missing[0]} does not clip, others do", number)
            return
        clips = steps[0].clips
        if all(step.clips_in_turn for step in steps):
            self._clipping_in_turn(clips, moment)
            return
        if len(clips) > 1 and not steps[0].clips_parts:
            told = f"gradients are clipped {len(clips)} times a step, before they are complete"
            self.add(Level.WRONG, Fault.CLIPPING, told, number)
            return
        trained = [n for g in steps[0].groups for n in g.names if n in steps[0].gradients]
        left = [n for n in trained if not any(n in clip.names for clip in clips)]
        if left:
            told = f"{len(left)} of {len(trained)} gradients are not clipped ({left[0]})"
            self.add(Level.NOTE, "clipping of a part", told, number)
        if len(clips) > 1:
            told = f"{len(clips)} sets of parameters are clipped, each by its own norm"
            self.add(Level.NOTE, "clipping of parts", told, number)
        for clip in clips:
            if clip.scaled == 1.0:
                self._one_clipping(clip, moment)

    def _clipping_in_turn(self, clips: Sequence[Clip], moment: Moment) -> None:
        """Judge several clippings, each of what the one before has left."""
        eps = max((torch.finfo(g.dtype).eps for of in moment.gradients.values() for g in of.values()), default=0.0)
        for owner, gradients in moment.gradients.items():
            right = {name: x.double() for name, x in gradients.items()}
            for clip in clips:
                names = [name for name in clip.names if name in right]
                norm = _norm({name: right[name] for name in names}, clip.norm_type)
                factor = min(1.0, clip.max_norm / (norm + 1e-6))
                for name in names:
                    bound = clip.max_norm
                    right[name] = right[name].clamp(-bound, bound) if clip.by_value else factor * right[name]
            own = moment.clipped.get(owner, {})
            names = [name for name in right if name in own]
            if names and _farthest(own, {name: right[name] for name in names}) > max(1e-4, 4 * eps):
                told = f"gradients are not those that {len(clips)} clippings, one after the other, leave"
                self.add(Level.WRONG, Fault.CLIPPING, told, moment.number)
                return
        self.clips.append(f"{len(clips)} clippings, one after the other")

    def _one_clipping(self, clip: Clip, moment: Moment) -> None:
        """Judge one call of a clipping function."""
        eps = max((torch.finfo(g.dtype).eps for of in moment.gradients.values() for g in of.values()), default=0.0)
        allowed = max(1e-4, 4 * eps)  # norm, factor and product are rounded in the gradients' own format
        norms = []
        for owner, gradients in moment.gradients.items():
            own = moment.clipped.get(owner, {})
            held = {n for group in moment.ranks[owner].groups for n in group.names}
            names = [n for n in clip.names if n in gradients and (n in own or n in held)]
            if not names:  # of an optimizer that holds other tensors
                return
            norm = _norm({n: gradients[n] for n in clip.names if n in gradients}, clip.norm_type)
            norms.append(norm)
            before = torch.cat([gradients[n].double().reshape(-1) for n in names])
            whole = {name: own.get(name, torch.zeros_like(gradients[name])) for name in names}
            after = torch.cat([whole[n].double().reshape(-1) for n in names])
            if clip.by_value:
                right_values = {name: gradients[name].double().clamp(-clip.max_norm, clip.max_norm) for name in names}
                off = _farthest(whole, right_values)
                if off > allowed:
                    told = f"gradients are not those of clipping by value to {clip.max_norm:g}; off by {off:.2g}"
                    self.add(Level.WRONG, Fault.CLIPPING, told, moment.number)
                continue
            right = min(1.0, clip.max_norm / (norm + 1e-6))
            factor = float(after @ before / (before @ before)) if before.any() else 1.0
            left_over = _farthest(whole, {name: factor * gradients[name].double() for name in names})
            if left_over > allowed:
                told = "the optimizer steps on other gradients than those that were clipped"
                if parts := _norms_of_parts(moment.ranks, clip, allowed):
                    shown = ", ".join(f"{x:.4g}" for x in parts)
                    told = (
                        f"each rank clips by the norm of its own part of the gradients ({shown}); that of all is "
                        f"{norm:.4g} (call the wrapper's own clip_grad_norm_)"
                    )
                self.add(Level.WRONG, Fault.CLIPPING, told, moment.number)
                return
            elif abs(factor / right - 1) > allowed:
                used = clip.max_norm / factor if factor < 1 else norm
                told = f"scaled by {factor:.4g}, as by a norm of {used:.4g}; the norm of all gradients is {norm:.4g}"
                if abs(factor - 1) <= allowed:
                    told = (
                        f"the optimizer steps on gradients of norm {norm:.4g}, which are not clipped to "
                        f"{clip.max_norm:g} (clip_grad_norm_ after the step, or of other tensors?)"
                    )
                self.add(Level.WRONG, Fault.CLIPPING, told, moment.number)
        if clip.by_value:
            shown = f"elements clipped to {clip.max_norm:g}"
        elif norms[0] > clip.max_norm:
            shown = f"norm {norms[0]:.4g}, clipped to {clip.max_norm:g}"
        else:
            shown = f"norm {norms[0]:.4g}, below {clip.max_norm:g}"
        self.clips.append(f"{shown} (first step)")

    def _report_bypass(self) -> None:
        """Note that the script calls a module past its wrapper."""
        names = [f.bypassed for f in self.run.facts if f.bypassed]
        if names:
            why = (
                ", which then reduces no gradients"
                if names[0] == "DistributedDataParallel"
                else ", which then does not see the call"
            )
            self.add(
                Level.NOTE, "wrapper bypassed",
                f"a module is called past the {names[0]} around it{why} (call the wrapper, not its `.module`)",
            )  # fmt: skip

    def _report_strange_tensors(self) -> None:
        """Note parameters that are in no optimizer, unless one holds other tensors, which `_report_copies` judges."""
        left = self._left_out()
        if left and not self.run.facts[0].strangers:
            told = f"{len(left)} of {_count(len(self.run.trained), 'parameter')} are in no optimizer ({left[0]})"
            self.add(Level.NOTE, "not trained", told)

    def _left_out(self) -> list[str]:
        """Return the parameters of models that are in no optimizer of any rank."""
        held = {name for f in self.run.facts for name in f.held}
        return [name for name in self.run.trained if name not in held]

    def _report_copies(self, previous: Moment | None, moment: Moment) -> None:
        """Report an optimizer of tensors that are in no model, if there are parameters that are in no optimizer.

        If these parameters change between steps nevertheless, the script copies updated tensors into the model, as with
        float32 masters that are kept by hand.
        """
        strangers, left = self.run.facts[0].strangers, self._left_out()
        if not strangers or not left:
            return
        told = (
            f"the optimizer holds {_count(strangers, 'tensor')} that no model has, and {len(left)} of the model's "
            f"{_count(len(self.run.trained), 'parameter')} ({left[0]}) are in no optimizer"
        )
        owner = self.run.owners[0]
        if previous is None:
            if self.run.num_steps == 1:
                self.add(Level.UNKNOWN, "copies are stepped", f"{told}; two steps would tell whether they change")
        elif all(torch.equal(previous.before[owner][n], moment.before[owner][n]) for n in left):
            self.add(
                Level.WRONG, Fault.NEVER_UPDATED, f"{told}: was it made before the model was wrapped or copied?", 0
            )
        else:
            self.add(
                Level.UNKNOWN, "copies are stepped",
                f"{told}. Yet they change: the script steps on copies, such as masters in float32 or a flat buffer of "
                "which they are views. Gradients of copies, and what is written into the model, are not judged", 0,
            )  # fmt: skip

    def _judge_replicas(self, previous: Moment | None, moment: Moment) -> None:
        """Report replicas that differ when a step begins.

        After the optimizer's own step they may: a script may let each rank step a part and broadcast it then.
        """
        if previous is None:
            self._replicas(moment.before, moment, "before the first step")
        elif _drifted(previous.after) and not _drifted(moment.before):
            self.repaired = True
            self.verdict.lines["replicas"] = (
                f"{len(set(self.run.owners))}, equal bit for bit before every step (the script makes them so after the "
                "optimizer's step)"
            )
        else:
            self._replicas(previous.after, previous, "after the step")
            self._replicas(moment.before, moment, "before the step")

    def _replicas(self, tensors: Mapping[int, Mapping[str, Tensor]], moment: Moment, when: str) -> None:
        if drifted := _drifted(tensors):
            first, other, odd = drifted
            far = max(float((tensors[first][n].double() - tensors[other][n].double()).abs().max()) for n in odd)
            told = f"ranks {first} and {other} hold other parameters {when}: {odd[0]}"
            told += f" and {len(odd) - 1} more" if len(odd) > 1 else ""
            self.add(Level.WRONG, Fault.DRIFT, f"{told}, by up to {far:.2g}", moment.number)
            self.verdict.lines.pop("replicas", None)
            return
        replicas = len(set(self.run.owners))
        if replicas > 1 and Fault.DRIFT not in self.seen:
            self.verdict.lines["replicas"] = f"{replicas}, equal bit for bit before and after every step"

    def _modes(self, moment: Moment) -> None:
        """Report ranks of which one trains while another evaluates."""
        readers = [[call.training for call in step.calls if call.used_gradients] for step in moment.readers]
        for rank, modes in zip(self.run.readers, readers, strict=True):
            if len(modes) == len(readers[0]) and modes != readers[0]:
                self.add(
                    Level.WRONG, "training mode differs",
                    f"ranks {self.run.readers[0]} and {rank} call modules in other modes: one trains and one evaluates "
                    "(model.train() missing after an evaluation?)", moment.number,
                )  # fmt: skip

    def _note_shared_rows(self, before: list[Counter[bytes]], rows: list[Counter[bytes]]) -> None:
        """Count the rows that several ranks read, in one step or one after the other."""
        self.read = [seen + own for seen, own in zip(self.read or [Counter() for _ in rows], rows, strict=True)]
        pairs = list(itertools.permutations(range(len(rows)), 2))
        self.shared.append(max(((rows[a] & rows[b]).total() for a, b in pairs), default=0))
        if before:
            self.handed_on.append(any(rows[a] and rows[a] == before[b] for a, b in pairs))

    def _data(self, same: list[bool], repeats: list[list[bool]]) -> None:
        if len(self.run.readers) > 1 and same and all(same):
            self.add(
                Level.WRONG, "ranks read the same rows",
                "every row of rank 0 is a row of every other rank too (DistributedSampler missing, or one seed for "
                "all?)",
            )  # fmt: skip
        elif len(self.run.readers) > 1:
            self.verdict.lines["data"] = "ranks read different rows"
            is_small = any(max(seen.values(), default=0) > 1 for seen in self.read)  # few rows exist, or batches repeat
            if min(self.shared, default=0) and not is_small:
                self.verdict.lines["data"] = f"ranks read up to {max(self.shared)} rows in common"
                self.add(
                    Level.NOTE, "ranks share rows",
                    f"at every step, up to {_count(max(self.shared), 'row')} of one rank are read by another too "
                    "(shards that overlap?)",
                )  # fmt: skip
            if self.handed_on and all(self.handed_on) and not is_small:
                self.add(
                    Level.NOTE, "rows read again by another rank",
                    "at every step, one rank reads the rows that another has read in the step before",
                )  # fmt: skip
        stale = [rank for rank, of in zip(self.run.readers, zip(*repeats, strict=True), strict=False) if all(of)]
        if stale and len(stale) < len(self.run.readers):
            self.add(
                Level.WRONG, "the same rows at every step",
                f"rank {stale[0]} reads the batch of the step before at every step, and other ranks do not",
            )  # fmt: skip
        elif stale:
            self.add(Level.NOTE, "the same rows at every step", "each step reads the batch of the one before")

    def _renewed(self, updates: list[Updates], moment: Moment) -> None:
        stateful = [g.cls for g in moment.ranks[0].groups if not g.cls.endswith(".SGD") or g.options.get("momentum")]
        if updates[0].renewed and stateful:
            self.add(
                Level.WRONG, Fault.UPDATE,
                "the optimizer is a new object at every step, so that its moments are forgotten",
            )  # fmt: skip
        elif stateful and updates[0].forgotten == self.run.num_steps - 1 > 1:
            self.add(
                Level.WRONG, Fault.UPDATE,
                "the optimizer's state is emptied before every step, so that its moments are forgotten",
            )  # fmt: skip

    def _judge_objective(self) -> None:
        lines = self.verdict.lines
        if not self.objectives:
            lines["objective"] = f"not judged: {self.unseen}"
            if self.objective:
                self.add(Level.UNKNOWN, "objective not judged", self.unseen)
            elif len(self.run.readers) > 1 and self.factor == 1.0 and self.detects:
                self.add(Level.NOTE, "summed over ranks", "right only if the script divides by the number of all rows")
            return
        self._note_remainder()
        most = max(len(o.counts) for o in self.objectives)
        found = max((o for o in self.objectives if len(o.counts) == most), key=lambda o: o.high - o.low)
        candidates = [c for c in MEANS if all(c in o.candidates for o in self.objectives)]
        known = self._known(max(1, len(found.counts) // len(self.run.readers)))
        off = scaled_total(found.total, known) if not found.several_terms else None
        if off and found.has_factor and found.total < 1.0:
            self.add(
                Level.NOTE, "a factor of the loss",
                f"the script multiplies its loss by {found.multiplied:g}, which is {off} too", 0,
            )  # fmt: skip
        if found.has_factor or found.sums_in_rows:
            off = None
        if off:
            cause = (
                "losses of micro-batches or ranks are added up, not averaged"
                if found.total > 1
                else ("the loss or its gradient is divided twice")
            )
            self.add(Level.WRONG, Fault.SCALED, f"weights of targets add up to {off}, where a mean has 1: {cause}", 0)
        is_sum = found.candidates[:1] == ["tokens"] and abs(found.total - found.num_targets) < 1e-3 * found.total
        uneven = f"single targets count {found.low:.2f} to {found.high:.2f} times the average"
        if len(candidates) == len(MEANS):
            told = "a mean over targets, of rows and of ranks alike (equal numbers of targets everywhere)"
        elif candidates:
            told = " = ".join(MEANS[c] for c in candidates)
            if "tokens" not in candidates:
                told += f"; {uneven}"
        else:
            told = f"none of the means over targets, rows or ranks; {uneven}"
        if is_sum and found.num_targets > 1:
            told = f"a sum over {found.num_targets:,} targets, not a mean"
        elif abs(found.total - 1) > 1e-3 and not off:
            told += f"; {self._told_size(found, known)}"
        lines["objective"] = told + ("; plus the penalty on weights" if self.penalty else "")
        if self.objective and self.objective not in candidates and found.reweighed:
            self.add(
                Level.UNKNOWN, "objective not judged",
                f"the loss weighs single targets by itself, as a focal loss does: {uneven}",
            )  # fmt: skip
        elif self.objective and self.objective not in candidates:
            self.add(Level.WRONG, Fault.UNEVEN, f"asked for {MEANS[self.objective]}, the script optimises {told}")
        elif not self.objective and "tokens" not in candidates and not is_sum:
            kind = "a mean of means" if "ranks" in candidates else "another objective than the mean over targets"
            self.add(Level.NOTE, kind, f"{uneven}; `--objective tokens` makes it a failure")

    def _note_remainder(self) -> None:
        """Note a step of fewer micro-batches whose losses are divided by the number that other steps have.

        Every micro-batch of the epoch then counts the same, as a script may mean it. It is not the mean over that
        step's batch, which is what `--objective` asks for.
        """
        full = max(self.objectives, key=lambda o: len(o.counts))
        for each in self.objectives:
            share = len(each.counts) / max(1, len(full.counts))
            if share < 1 and abs(each.total - share * full.total) <= SAME * full.total:
                few, many = (len(o.counts) // len(self.run.readers) for o in (each, full))
                self.add(
                    Level.WRONG if self.objective else Level.NOTE, "a remainder of micro-batches",
                    f"a step of {few} of {many} micro-batches counts {share:.3g} times as much as others: its losses "
                    f"are divided by {many} too",
                )  # fmt: skip

    def _told_size(self, found: Objective, known: Mapping[str, float]) -> str:
        """Say why the weights of targets do not add up to 1."""
        if len(found.totals) > 1:
            return f"its {len(found.totals)} terms weigh {', '.join(f'{x:.3g}' for x in found.totals)}"
        told = f"it counts {found.total:.4g} times"
        divisor = found.num_targets / found.total
        if "tokens" in found.candidates and any(abs(divisor - x) < 1e-3 for x in known.values() if x > 1):
            sums = {name: x for name, x in known.items() if x > 1}
            return f"it is a sum over {found.num_targets:,} targets, divided by {named_factor(divisor, sums)}"
        is_factor = abs(100 * found.total - round(100 * found.total)) < 1e-4  # such as 0.5, which a script may choose
        is_number = abs(divisor - round(divisor)) < 1e-3 * abs(divisor - found.num_targets)
        if is_factor or not is_number or "tokens" not in found.candidates:
            return told
        extra = round(divisor) - found.num_targets
        told += f": the loss of {found.num_targets:,} targets is divided by {round(divisor):,}"
        if extra == found.num_rows:
            told += ", one more for each row (are labels counted before they are shifted?)"
        level = Level.WRONG if self.objective else Level.NOTE
        self.add(level, "divided by another number", told.partition(": ")[2], 0)
        return told


def _calls_before(step: Step) -> int:
    """Return the number of calls after which the script has changed the weights for the last time."""
    changes = [i for i in range(1, len(step.calls)) if not _equal(step.calls[i - 1].weights, step.calls[i].weights)]
    return changes[-1] if changes else 0


def _equal(first: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return first.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in first.items())


def _farthest(own: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """Return the largest relative distance of a tensor from the right one. All are in one format.

    A tensor may be far smaller than others, and Adam moves it as far.
    """
    far = 0.0
    for name, x in right.items():
        tiny = torch.finfo(own[name].dtype).tiny * max(1, x.numel()) ** 0.5
        distance = max(0.0, float((own[name].double() - x).norm()) - tiny)
        far = max(far, distance / (float(x.norm()) or 1.0) if distance else 0.0)
    return far


def _equal_at(name: str, first: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return name in first and torch.equal(first[name], other[name])


def _is_near(own: Tensor, right: Tensor, allowed: float) -> bool:
    return float((own - right).norm()) <= allowed * float(right.norm())


def _same_targets(moment: Moment) -> bool:
    """Return whether the losses of all ranks are of the same rows of the outputs, so far as zero gradients tell.

    Ranks may share an input, such as a graph, of which each has other targets.
    """

    def scored(step: Step) -> list[list[bool]]:
        gradients = (g for call in step.calls for _, g in call.used_gradients if g.dim())
        return [g.flatten(1).any(1).tolist() if g.dim() > 1 else g.bool().tolist() for g in gradients]

    first, *others = map(scored, moment.readers)
    return all(other == first for other in others)


def _drifted(replicas: Mapping[int, Mapping[str, Tensor]]) -> tuple[int, int, list[str]] | None:
    """Return two replicas that differ, and in which parameters; None if there are none.

    A replica may hold only what is not sharded.
    """
    first, *others = replicas
    for other in others:
        own, theirs = replicas[first], replicas[other]
        if odd := [n for n, x in own.items() if n in theirs and not torch.equal(x, theirs[n])]:
            return first, other, odd
    return None


def _all_equal(replicas: Mapping[int, Mapping[str, Tensor]]) -> bool:
    first, *others = replicas.values()
    return all(_equal(first, other) for other in others)


def _angle(own: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the cosine of the angle between two gradients."""
    product = sum(float((own[n] * x).sum()) for n, x in other.items() if n in own)
    return product / ((_norm(own) * _norm(other)) or 1.0)


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _micro_batches(calls: list[Call]) -> int:
    """Return how often a step called the model that it called most."""
    return max(Counter(call.root for call in calls).values(), default=0)


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


def _is_multiple(own: Mapping[str, Tensor], other: Mapping[str, Tensor], names: list[str]) -> bool:
    """Return whether the gradients of `names` are those of `other`, also if the script then scales them down."""
    if not all(n in own and n in other for n in names):
        return False
    flat = _flat(own, names)
    scale, left = _multiple(flat, _flat(other, names))
    return 0.0 < scale < 1.0 + LEFT_OVER and left <= LEFT_OVER * float(flat.norm())


def _multiple(own: Tensor, other: Tensor) -> tuple[float, float]:
    """Return the multiple of `other` that is nearest to `own`, and the norm of the rest; 0 if `other` is all zero."""
    factor = float(own @ other / (other @ other)) if other.any() else 0.0
    return factor, float((own - factor * other).norm())


def _is_clipped_by_hand(own: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> bool:
    """Return whether gradients are the right ones scaled down to a norm that is a round number, such as 0.1 or 5."""
    norm = _norm(own)
    multiples = [norm * k for k in (1, 2, 10)]
    return norm < 0.999 * _norm(exact) and any(x > 0.5 and abs(x - round(x)) < 1e-4 * min(x, 1.0) for x in multiples)


def _clamped(own: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float | None:
    """Return the bound if gradients are the right ones clipped by value, else None."""
    names = [n for n in exact if n in own]
    flat, right = (torch.cat([x[n].double().reshape(-1) for n in names]) for x in (own, exact))
    bound = float(flat.abs().max())
    if not 0.0 < bound < 0.999 * float(right.abs().max()):
        return None
    off = float((flat - right.clamp(-bound, bound)).norm()) / float(flat.norm())
    return bound if off < CLAMPED else None


def _norms_of_parts(steps: Sequence[Step], clip: Clip, allowed: float) -> list[float]:
    """Return the norm of each rank's own gradients if each was clipped by it; empty otherwise."""
    norms, factors = [], []
    for step in steps:
        before = {n: g for c in step.clips if c.names == clip.names for n, g in c.gradients.items() if n in clip.names}
        names = [n for n in before if n in step.gradients]
        if not names:
            return []
        flat, own = _flat(before, names), _flat(step.gradients, names)
        norms.append(float(torch.linalg.vector_norm(flat, clip.norm_type)))
        factors.append(float(own @ flat / (flat @ flat)) if flat.any() else 1.0)
        right = min(1.0, clip.max_norm / (norms[-1] + 1e-6))
        if float((own - factors[-1] * flat).norm()) > allowed * float(own.norm()):
            return []
        if abs(factors[-1] / right - 1) > allowed:
            return []
    return norms if max(factors) > (1 + allowed) * min(factors) else []


def _flat(tensors: Mapping[str, Tensor], names: list[str]) -> Tensor:
    return torch.cat([tensors[n].double().reshape(-1) for n in names])


def _named(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more are" if len(names) > 1 else " is")


def _norm(tensors: Mapping[str, Tensor], order: float = 2.0) -> float:
    """Return the norm of all tensors together, as `torch.nn.utils.clip_grad_norm_` defines it."""
    norms = [torch.linalg.vector_norm(t.double(), order) for t in tensors.values()]
    return float(torch.linalg.vector_norm(torch.stack(norms), order)) if norms else 0.0


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
