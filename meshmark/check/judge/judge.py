"""Judge a recorded run: what was compared, and the first thing that is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from meshmark.check.exact import CommunicatesError, Recomputer
from meshmark.check.judge import weights
from meshmark.check.judge.clipping import clipped_early, judge_clipping
from meshmark.check.judge.crossing import judge_crossing
from meshmark.check.judge.data import DataJudge
from meshmark.check.judge.explanations import with_verb
from meshmark.check.judge.functions import FunctionJudge
from meshmark.check.judge.gradients import GradientJudge
from meshmark.check.judge.objective import ObjectiveJudge
from meshmark.check.judge.replicas import ReplicaJudge, judge_modes, judge_schedules, note_buffers
from meshmark.check.judge.updates import UpdateJudge
from meshmark.check.pieces import CannotTellError
from meshmark.check.run import Moment, Run, num_micro_batches
from meshmark.check.verdict import Level, Verdict
from meshmark.judge.faults import Fault
from meshmark.text import pluralize

_NOT_FINITE = "not finite"


@dataclass(kw_only=True)
class Judge:
    """Judge of one run. It shows each step to the judges of single subjects, which add their findings."""

    run: Run
    copies: Mapping[int, nn.Module]
    objective: str | None
    """The mean that the user expects the script to optimise."""
    asked: int
    """Number of steps that were asked for."""
    verdict: Verdict

    def judge(self) -> None:
        """Fill the verdict."""
        run, verdict = self.run, self.verdict
        micro = 0
        try:
            if not self._is_blind():
                run.check()
                micro = self._judge_steps()
        except CannotTellError as reason:
            if isinstance(reason, CommunicatesError):  # its ranks may hold other parts by design
                verdict.findings = [f for f in verdict.findings if f.fault != Fault.DRIFT]
            verdict.add(Level.UNKNOWN, "not judged", str(reason))
        micro = micro or (num_micro_batches(run.folder.step(0, 0).calls) if run.num_steps else 0)
        if 0 < run.num_steps < self.asked and not any(f.end == "still running" for f in run.facts):
            who = "the script"
            if len({f.num_steps for f in run.facts}) > 1:  # ranks may run out of batches one by one, as with `Join`
                who = f"rank {min(run.facts, key=lambda f: f.num_steps).rank}"
            told = f"{who} took {run.num_steps}, and {self.asked} were asked for"
            verdict.add(Level.NOTE, "fewer steps", told)
        together = max(len(f.partners) for f in run.facts)
        parts = [f"tensor parallelism over {together}"] if together > 1 else []
        wrapped = ", ".join([*run.wrappers, *parts]) or "no wrapper"
        verdict.setting = f"{pluralize(run.num_steps, 'step')} of {pluralize(run.world, 'rank')} ({wrapped})" + (
            f", {micro} micro-batches a step" if micro > 1 else ""
        )

    def _is_blind(self) -> bool:
        """Add a finding, and return True, if some ranks alone step after calls with gradients switched off."""
        blind = [f.rank for f in self.run.facts if f.blind_steps and not f.num_steps]
        if not blind or len(blind) == self.run.world:
            return False
        self.verdict.add(
            Level.WRONG, Fault.DROPPED,
            f"rank {blind[0]} calls the model with gradients switched off and steps its optimizer, others with "
            "gradients (an evaluation's torch.no_grad that it has not left?)", 0,
        )  # fmt: skip
        return True

    def _judge_steps(self) -> int:
        """Judge all steps, and fill the verdict's lines. Returns the number of micro-batches of the first step."""
        run, verdict = self.run, self.verdict
        replicas, data = ReplicaJudge(run=run, verdict=verdict), DataJudge(run=run, verdict=verdict)
        functions = FunctionJudge(run=run, verdict=verdict)
        recomputer = Recomputer(self.copies, run.facts[0].aliases)
        gradients = GradientJudge(run=run, recomputer=recomputer, verdict=verdict)
        updates = UpdateJudge(run, verdict)
        clipping = ""
        previous: Moment | None = None
        for number in range(run.num_steps):
            moment = run.moment(number)
            if not number:
                weights.note_not_trained(run, verdict)
                weights.note_bypass(run, verdict)
            replicas.judge(previous, moment)
            if number < 2:
                weights.judge_copies(run, previous, moment, verdict)
            data.see(moment)
            functions.see(moment)
            if previous is not None:
                weights.judge_overwritten(run, previous, moment, verdict)
            if self._is_not_finite(moment):
                break
            if moment.dropped:
                verdict.add(
                    Level.NOTE, "a step skipped",
                    f"gradients of {pluralize(moment.dropped, 'call')} of the model are cleared without a step of the "
                    "optimizer, on all ranks (a pass for the gradients of inputs is no step either)", number,
                )  # fmt: skip
            judge_modes(run, moment, verdict)
            if replicas.skips(moment):
                gradients.unseen = "ranks step at different times"
                break
            early = clipped_early(moment, verdict)
            if early and moment.gradients is not moment.clipped:
                gradients.unseen = "gradients are clipped before they are reduced"
            else:
                gradients.judge(moment)
            if not early:
                told = judge_clipping(moment, verdict)
                clipping = clipping or told
            weights.note_changed_before_the_update(moment, verdict)
            judge_schedules(moment, verdict)
            updates.judge(moment)
            previous = moment
            judge_crossing(gradients, moment, verdict)
            note_buffers(moment, verdict)
        else:  # no step was the last to be judged
            replicas.judge_end(moment)
        data.judge()
        functions.judge()
        updates.judge_end(moment)
        updates.report_unknown()
        gradients.judge_lost()
        if not_finite := verdict.has(_NOT_FINITE):
            verdict.lines["objective"] = "not judged: nothing is, from the step on that is not finite"
        else:
            ObjectiveJudge(gradients, self.objective, verdict).judge()
        gradients.note_hidden()
        updates.note_hidden()
        verdict.lines["gradients"] = gradients.told
        if clipping:
            verdict.lines["clipping"] = clipping
        verdict.lines["updates"] = (
            "not judged from the step on that is not finite" if not_finite else updates.told(moment)
        )
        return gradients.num_micro

    def _is_not_finite(self, moment: Moment) -> bool:
        """Add a finding, and return True, if the optimizer steps on gradients that are not finite."""
        for owner, gradients in moment.gradients.items():
            if bad := [name for name, g in gradients.items() if not bool(torch.isfinite(g).all())]:
                told = f"the optimizer steps on gradients that are infinite or no numbers: {with_verb(bad)}"
                where = f", on rank {owner}" if len(moment.ranks) > 1 else ""
                self.verdict.add(Level.WRONG, _NOT_FINITE, told + where, moment.number)
                return True
        return False
