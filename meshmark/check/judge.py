"""Judge a recorded run: what was compared, and the first thing that is wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from meshmark.check.exact import Product, Recomputer
from meshmark.check.gradients import FACTOR, LEFT_OVER, UNSEEN, Comparison, Expected, compare, explain
from meshmark.check.objective import MEANS, Objective, UnseenError, objective_of, scaled_total
from meshmark.check.pieces import CannotTellError
from meshmark.check.recording import Call, Clip
from meshmark.check.rows import repeated_rows, shared_rows
from meshmark.check.run import Moment, Run
from meshmark.check.updates import UnknownOptimizerError, Updates, explain_update
from meshmark.check.verdict import Finding, Level, Verdict
from meshmark.judge.faults import Fault

CLAMPED = 1e-3
"""Relative error up to which gradients are the right ones clipped by value."""
DRAWS = 3
"""Number of recomputations with rounding, for each micro-batch, from which the noise is measured."""


_NOT_FINITE = "not finite"


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
    uncleared: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Gradients of every replica as they were before this step, if nothing has cleared them."""
    widest: str = ""
    """The parameter for which that error is needed."""
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
            self.add(Level.UNKNOWN, "not judged", str(reason))
        micro = _micro_batches(run.folder.step(0, 0).calls) if run.num_steps else 0
        if 0 < run.num_steps < self.asked:
            self.add(Level.NOTE, "fewer steps", f"the script took {run.num_steps}, and {self.asked} were asked for")
        together = max(len(f.partners) for f in run.facts)
        parts = [f"tensor parallelism over {together}"] if together > 1 else []
        wrapped = ", ".join([*run.wrappers, *parts]) or "no wrapper"
        verdict.setting = f"{_count(run.num_steps, 'step')} of {_count(run.world, 'rank')} ({wrapped})" + (
            f", {micro} micro-batches a step" if micro > 1 else ""
        )

    def _go(self) -> None:
        run = self.run
        recomputer = Recomputer(self.copies)
        updates = [Updates(f.rank) for f in run.facts]
        previous: Moment | None = None
        unknown_optimizer = ""
        same: list[bool] = []
        repeats: list[bool] = []
        for number in range(run.num_steps):
            moment = run.moment(number)
            if not number:
                self._report_strange_tensors()
                self._report_bypass()
                self._replicas(moment.before, moment, "before the first step")
            same.append(shared_rows([s.calls for s in moment.readers]))
            if previous is not None:
                repeats.append(repeated_rows(previous.ranks[0].calls, moment.ranks[0].calls))
                if any(s.changed for s in moment.ranks):
                    self.add(
                        Level.NOTE, "parameters changed between steps",
                        "something other than the optimizer changed them (averaging, reset, loaded?)", number,
                    )  # fmt: skip
            if self._is_not_finite(moment):
                break
            self._gradients(recomputer, moment)
            self._clipping(moment)
            try:
                for rank, (step, own) in enumerate(zip(moment.ranks, updates, strict=True)):
                    wrong = own.compare(step, moment.before_parts[rank])
                    if wrong:
                        told = explain_update(step, moment.before_parts[rank], wrong)
                        fault = Fault.NEVER_UPDATED if "did not move" in told else Fault.UPDATE
                        self.add(Level.WRONG, fault, f"rank {rank}: {told}", number)
            except UnknownOptimizerError as error:
                unknown_optimizer = str(error)
            self._replicas(moment.after, moment, "after the step")
            previous = moment
            self._crossing(moment)
            self._buffers(moment)
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
        self.verdict.lines["gradients"] = (
            f"off by {self.worst:.2g} of float64's at most; an error of {self.detects:.2g} would be seen"
            if self.detects
            else "right but for their size, which the script changes"
            if "scaled by the script" in self.seen
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

    def _is_not_finite(self, moment: Moment) -> bool:
        """Add a finding, and return True, if the optimizer steps on gradients that are not finite."""
        for owner, gradients in moment.gradients.items():
            if bad := [name for name, g in gradients.items() if not bool(torch.isfinite(g).all())]:
                told = f"the optimizer steps on gradients that are infinite or no numbers: {_named(bad)}"
                where = f", on rank {owner}" if len(moment.ranks) > 1 else ""
                self.add(Level.WRONG, _NOT_FINITE, told + where, moment.number)
                return True
        return False

    def _gradients(self, recomputer: Recomputer, moment: Moment) -> None:
        run, number = self.run, moment.number
        eps = max(torch.finfo(d).eps for d in run.facts[0].dtypes.values())
        parts: list[list[dict[str, Tensor]]] = []
        noisy: list[dict[str, Tensor]] = [{} for _ in range(DRAWS)]
        for rank, step in enumerate(moment.ranks):
            parts.append([])
            values = moment.before[run.owners[rank]]
            for index, call in enumerate(step.calls if rank in run.readers else ()):
                if not call.used_gradients:
                    continue
                right = recomputer.product(call, values)
                draws = []
                for draw in range(DRAWS):
                    seed = hash((number, rank, index, draw)) % 2**31
                    draws.append(recomputer.product(call, values, nudges=torch.Generator().manual_seed(seed)))
                self._forward(call.outputs, right, draws, f"rank {rank}, micro-batch {index}")
                parts[-1].append({name: g / call.scale for name, g in right.gradients.items()})
                for total, product in zip(noisy, draws, strict=True):
                    for name, g in product.gradients.items():
                        total[name] = total[name] + g / call.scale if name in total else g / call.scale
        stepped = [name for g in moment.ranks[0].groups for name in g.names]
        names = [name for name in stepped if any(name in part for of_rank in parts for part in of_rank)]
        if not stepped and Fault.NEVER_UPDATED in self.seen:
            return  # the optimizer holds no parameter of the model, which is said
        if not any(parts) or not names:
            self.add(
                Level.UNKNOWN, "no gradient seen",
                "the model was called, but nothing that it returned was differentiated before the optimizer's step",
                number,
            )  # fmt: skip
            return
        total = {name: sum((p[name] for of in parts for p in of if name in p), torch.zeros(())) for name in names}
        noise = {}
        for name, x in total.items():
            squares = [float((d[name] - x).norm()) ** 2 for d in noisy]
            noise[name] = float(np.sqrt(np.mean(squares))) / (float(x.norm()) or 1.0)
        owned = {owner: [r for r, o in enumerate(run.owners) if o == owner] for owner in dict.fromkeys(run.owners)}
        scaled = moment.ranks[0].clips[-1].scaled if moment.ranks[0].clips else 1.0
        if scaled != 1.0:
            self.add(
                Level.WRONG, Fault.CLIPPING,
                f"gradients are clipped while they are {scaled:g} times too large: call scaler.unscale_ before "
                "clip_grad_norm_", number,
            )  # fmt: skip
        gradients = {
            owner: {n: g.double() / scaled for n, g in moment.gradients[owner].items() if n in total} for owner in owned
        }
        if not number:
            self.factor = _factor(gradients, total, len(run.readers))
        exact = {name: self.factor * x for name, x in total.items()}
        micro = max(_micro_batches(step.calls) for step in moment.readers)
        known = self._known(micro)
        found: dict[int, Comparison] = {}
        again: dict[str, Tensor] | None = None
        for owner, ranks in owned.items():
            found[owner] = comparison = compare(gradients[owner], exact, noise, eps)
            if comparison.unseen > UNSEEN:
                raise CannotTellError(
                    f"rounding moves the gradients by {comparison.unseen / FACTOR:.2g} of their size, which would hide "
                    "errors of 30 %"
                )
            if not comparison.wrong:
                self.worst = max(self.worst, comparison.worst)
                self.detects, self.widest = max((self.detects, self.widest), (comparison.detects, comparison.widest))
                continue
            before = self.uncleared.get(owner)
            if recomputer.recomputes and again is None:
                again = self._recomputed(recomputer, moment)
            scaled_only = _is_multiple(gradients[owner], exact, comparison.wrong)
            if again is not None and not scaled_only and _is_multiple(gradients[owner], again, comparison.wrong):
                self.add(
                    Level.WRONG, Fault.BACKWARD,
                    "activations that torch.utils.checkpoint computes again are not those of the forward pass: random "
                    "numbers are drawn anew (preserve_rng_state=False?), or something has changed in between; "
                    f"{_named(comparison.wrong)} off by {min(comparison.worst, 1e9):.2g}", number,
                )  # fmt: skip
                continue
            if (
                all(n in moment.added for n in comparison.wrong)
                and not compare(
                    {n: moment.added[n] for n in comparison.wrong}, {n: exact[n] for n in comparison.wrong}, noise, eps
                ).wrong
            ):
                self.add(
                    Level.WRONG, Fault.NOT_REDUCED,
                    f"{_named(comparison.wrong)} a sum over the tensor-parallel group, and each rank keeps its own "
                    "summand (SequenceParallel missing?)", number,
                )  # fmt: skip
                continue
            expected = Expected(ranks=ranks, factor=self.factor, known=known)
            told = explain(gradients[owner], parts, before, comparison.wrong, expected)
            detail = told.detail + f"; off by {min(comparison.worst, 1e9):.2g}"
            if bound := _clamped(gradients[owner], exact):
                told_bound = (
                    f"no element of a gradient is beyond {bound:.4g} (clipping of its own, which is not judged)"
                )
                self.add(Level.NOTE, "scaled by the script", told_bound, number)
                self.unseen = self.unseen or "the script clips gradients itself"
                continue
            if told.fault == Fault.SCALED and self._clipped_by_hand(gradients[owner], exact):
                told_norm = _norm(gradients[owner])
                self.add(
                    Level.NOTE, "scaled by the script",
                    f"all gradients are scaled to a norm of {told_norm:.4g} (clipping of its own, which is not judged)",
                    number,
                )  # fmt: skip
                self.unseen = self.unseen or "the script scales gradients itself"
                continue
            self.add(Level.WRONG, told.fault, detail, number)
        self._note_uncleared(moment, parts)
        if not any(c.wrong for c in found.values()):
            try:
                self.objectives.append(objective_of(moment.readers, self.factor))
            except UnseenError as reason:
                self.unseen = str(reason)
        else:
            self.unseen = self.unseen or "gradients are not those of the recorded rows"

    def _note_uncleared(self, moment: Moment, parts: list[list[dict[str, Tensor]]]) -> None:
        """Note what gradients hold if nothing clears them: of parameters that are not stepped, everything so far."""
        for owner in dict.fromkeys(self.run.owners):
            held, stepped = self.uncleared.setdefault(owner, {}), moment.clipped[owner]
            held |= {name: g.double() for name, g in stepped.items()}
            for part in (part for of_rank in parts for part in of_rank):
                for name in part.keys() - stepped.keys():
                    held[name] = held.get(name, torch.zeros(())) + self.factor * part[name]

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
        steps = max(step.schedule_steps for step in moment.ranks)
        if steps > 1:
            self.add(
                Level.NOTE, "schedule steps",
                f"the learning-rate schedule takes {steps} steps for one of the optimizer", moment.number,
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

    def _clipped_by_hand(self, own: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> bool:
        """Return whether gradients are the right ones scaled down to a norm that is a round number."""
        norm = _norm(own)
        return norm < 0.999 * _norm(exact) and any(abs(norm * k - round(norm * k)) < 1e-4 for k in (1, 2, 10))

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
            if clip.scaled == 1.0 and clip.norm_type == 2.0:
                self._one_clipping(clip, moment)

    def _one_clipping(self, clip: Clip, moment: Moment) -> None:
        """Judge one call of a clipping function."""
        eps = max((torch.finfo(g.dtype).eps for of in moment.gradients.values() for g in of.values()), default=0.0)
        allowed = max(1e-4, 4 * eps)  # norm, factor and product are rounded in the gradients' own format
        norms = []
        for owner, gradients in moment.gradients.items():
            own = moment.clipped.get(owner, {})
            names = [n for n in clip.names if n in own and n in gradients]
            if not names:  # of an optimizer that holds other tensors
                return
            norm = _norm({n: gradients[n] for n in names})
            norms.append(norm)
            before = torch.cat([gradients[n].double().reshape(-1) for n in names])
            after = torch.cat([own[n].double().reshape(-1) for n in names])
            if clip.by_value:
                off = float((after - before.clamp(-clip.max_norm, clip.max_norm)).norm()) / (float(after.norm()) or 1.0)
                if off > allowed:
                    told = f"gradients are not those of clipping by value to {clip.max_norm:g}; off by {off:.2g}"
                    self.add(Level.WRONG, Fault.CLIPPING, told, moment.number)
                continue
            right = min(1.0, clip.max_norm / (norm + 1e-6))
            factor = float(after @ before / (before @ before)) if before.any() else 1.0
            left_over = float((after - factor * before).norm()) / (float(after.norm()) or 1.0)
            if left_over > allowed:
                told = "the optimizer steps on other gradients than those that were clipped"
                self.add(Level.WRONG, Fault.CLIPPING, told, moment.number)
            elif abs(factor / right - 1) > allowed:
                used = clip.max_norm / factor if factor < 1 else norm
                told = f"scaled by {factor:.4g}, as by a norm of {used:.4g}; the norm of all gradients is {norm:.4g}"
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
        """Report tensors of the optimizers that no model has, and parameters of a model that are in no optimizer."""
        strangers, held = self.run.facts[0].strangers, set(self.run.facts[0].held)
        left = [name for name in self.run.trained if name not in held]
        if strangers and left:
            self.add(
                Level.WRONG, Fault.NEVER_UPDATED,
                f"the optimizer holds {_count(strangers, 'tensor')} that no model has, and {len(left)} of the model's "
                f"{_count(len(self.run.trained), 'parameter')} ({left[0]}) are in no optimizer: was it made before the "
                "model was wrapped or copied?", 0,
            )  # fmt: skip
        elif left:
            told = f"{len(left)} of {_count(len(self.run.trained), 'parameter')} are in no optimizer ({left[0]})"
            self.add(Level.NOTE, "not trained", told)

    def _replicas(self, tensors: Mapping[int, Mapping[str, Tensor]], moment: Moment, when: str) -> None:
        first, *others = tensors
        for other in others:  # which may hold only what is not sharded
            odd = [
                n for n, x in tensors[first].items() if n in tensors[other] and not torch.equal(x, tensors[other][n])
            ]
            if odd:
                far = max(float((tensors[first][n].double() - tensors[other][n].double()).abs().max()) for n in odd)
                told = f"ranks {first} and {other} hold other parameters {when}: {odd[0]}"
                told += f" and {len(odd) - 1} more" if len(odd) > 1 else ""
                self.add(Level.WRONG, Fault.DRIFT, f"{told}, by up to {far:.2g}", moment.number)
                self.verdict.lines.pop("replicas", None)
                return
        replicas = len(set(self.run.owners))
        if replicas > 1 and Fault.DRIFT not in self.seen:
            self.verdict.lines["replicas"] = f"{replicas}, equal bit for bit before and after every step"

    def _data(self, same: list[bool], repeats: list[bool]) -> None:
        if len(self.run.readers) > 1 and same and all(same):
            self.add(
                Level.WRONG, "ranks read the same rows",
                "every row of rank 0 is a row of every other rank too (DistributedSampler missing, or one seed for "
                "all?)",
            )  # fmt: skip
        elif len(self.run.readers) > 1:
            self.verdict.lines["data"] = "ranks read different rows"
        if repeats and all(repeats):
            self.add(Level.NOTE, "the same rows at every step", "each step reads the batch of the one before")

    def _renewed(self, updates: list[Updates], moment: Moment) -> None:
        stateful = [g.cls for g in moment.ranks[0].groups if not g.cls.endswith(".SGD") or g.options.get("momentum")]
        if updates[0].renewed and stateful:
            self.add(
                Level.WRONG, Fault.UPDATE,
                "the optimizer is a new object at every step, so that its moments are forgotten",
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
        found = max(self.objectives, key=lambda o: o.high - o.low)
        candidates = [c for c in MEANS if all(c in o.candidates for o in self.objectives)]
        known = self._known(max(1, len(found.counts) // len(self.run.readers)))
        off = scaled_total(found.total, known) if not found.several_terms else None
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
            told += f"; weights add up to {found.total:.4g}"
        lines["objective"] = told
        if self.objective and self.objective not in candidates:
            self.add(Level.WRONG, Fault.UNEVEN, f"asked for {MEANS[self.objective]}, the script optimises {told}")
        elif not self.objective and "tokens" not in candidates and not is_sum:
            kind = "a mean of means" if "ranks" in candidates else "another objective than the mean over targets"
            self.add(Level.NOTE, kind, f"{uneven}; `--objective tokens` makes it a failure")


def _micro_batches(calls: list[Call]) -> int:
    """Return how often a step called the model that it called most."""
    return max(Counter(call.root for call in calls).values(), default=0)


def _factor(gradients: Mapping[int, Mapping[str, Tensor]], total: Mapping[str, Tensor], world: int) -> float:
    """Return the weight of each rank's gradient: 1 if ranks are added up, 1 / `world` if they are averaged.

    The sum is chosen only if it fits to 2 %; otherwise the mean is assumed.
    """
    if world == 1:
        return 1.0
    scale = sum(float((x * x).sum()) for x in total.values()) or 1.0
    fits = []
    for own in gradients.values():
        fits.append(sum(float((own[n] * x).sum()) for n, x in total.items() if n in own) / scale)
    found = float(np.mean(fits))
    return 1.0 if abs(found - 1) < 0.02 else 1 / world


def _is_multiple(own: Mapping[str, Tensor], other: Mapping[str, Tensor], names: list[str]) -> bool:
    """Return whether the gradients of `names` are those of `other`, also if the script then scales them down."""
    if not all(n in own and n in other for n in names):
        return False
    flat, right = (torch.cat([x[n].double().reshape(-1) for n in names]) for x in (own, other))
    scale = float(flat @ right / (right @ right)) if right.any() else 0.0
    return 0.0 < scale < 1.0 + LEFT_OVER and float((flat - scale * right).norm()) <= LEFT_OVER * float(flat.norm())


def _clamped(own: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float | None:
    """Return the bound if gradients are the right ones clipped by value, else None."""
    names = [n for n in exact if n in own]
    flat, right = (torch.cat([x[n].double().reshape(-1) for n in names]) for x in (own, exact))
    bound = float(flat.abs().max())
    if not 0.0 < bound < 0.999 * float(right.abs().max()):
        return None
    off = float((flat - right.clamp(-bound, bound)).norm()) / float(flat.norm())
    return bound if off < CLAMPED else None


def _named(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more are" if len(names) > 1 else " is")


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return float(np.sqrt(sum(float(t.double().square().sum()) for t in tensors.values())))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
