"""Judge the steps of the optimizers."""

from __future__ import annotations

from meshmark.check.gradients import UNSEEN, shortened
from meshmark.check.run import Moment, Run
from meshmark.check.updates import UnknownOptimizerError, Updates, explain_update
from meshmark.check.verdict import UPDATES_NOT_JUDGED, Level, Verdict
from meshmark.judge.faults import Fault
from meshmark.judge.pristine import pristine


class UpdateJudge:
    """Judge of all ranks' optimizers, step by step."""

    def __init__(self, run: Run, verdict: Verdict) -> None:
        self.run, self.verdict = run, verdict
        self.ranks = [Updates(f.rank) for f in run.facts]
        self.unknown = ""
        """An optimizer whose rule is not known here."""

    def judge(self, moment: Moment) -> None:
        """Report updates that the optimizers' rules do not lead to."""
        try:
            for rank in range(len(self.ranks)):
                self._judge_rank(rank, moment)
        except UnknownOptimizerError as error:
            self.unknown = str(error)

    def _judge_rank(self, rank: int, moment: Moment) -> None:
        step, own = moment.ranks[rank], self.ranks[rank]
        before = moment.before_parts[rank] | step.stepped_from
        with pristine():  # an optimizer's class is judged by PyTorch's own code of it
            wrong = own.compare(moment.number, step, before)
        if own.restored and moment.number:
            self.verdict.add(
                Level.NOTE, "optimizer state set by the script",
                "something other than the optimizer's steps has set its state of "
                f"{shortened(own.restored)} (a checkpoint that was loaded?)", moment.number,
            )  # fmt: skip
        if wrong:
            told = explain_update(step, before, wrong)
            fault = Fault.NEVER_UPDATED if "did not move" in told else Fault.UPDATE
            self.verdict.add(Level.WRONG, fault, f"rank {rank}: {told}", moment.number)

    def judge_end(self, moment: Moment) -> None:
        """Report optimizers that forget their state, after the last step."""
        stateful = [g.cls for g in moment.ranks[0].groups if not g.cls.endswith(".SGD") or g.options.get("momentum")]
        first = self.ranks[0]
        if stateful and len(first.renewed) == self.run.num_steps - 1 > 1:
            self.verdict.add(
                Level.WRONG, Fault.UPDATE,
                "the optimizer is a new object at every step, so that its moments are forgotten",
            )  # fmt: skip
        elif stateful and first.renewed:
            self.verdict.add(
                Level.NOTE, "a new optimizer",
                "a new optimizer steps parameters that another one did before, and begins without its moments",
                first.renewed[0],
            )  # fmt: skip
        elif stateful and first.forgotten == self.run.num_steps - 1 > 1:
            self.verdict.add(
                Level.WRONG, Fault.UPDATE,
                "the optimizer's state is emptied before every step, so that its moments are forgotten",
            )  # fmt: skip

    def report_unknown(self) -> None:
        """Report optimizers whose rule is not known. One of whole tensors does as it would in one process."""
        if not self.unknown:
            return
        told = f"{self.unknown} is not among the optimizers that are known here"
        if any(piece.ranks for f in self.run.facts for piece in f.pieces.values()):
            self.verdict.add(
                Level.UNKNOWN, UPDATES_NOT_JUDGED,
                f"{told}, and it steps on parts of tensors: a norm or a matrix function of a part, as in LAMB, Muon or "
                "Adafactor, is not that of the whole",
            )  # fmt: skip
        else:
            self.verdict.add(Level.NOTE, UPDATES_NOT_JUDGED, f"{told}; replicas are compared after its steps")

    def note_hidden(self) -> None:
        """Note errors that the rounding of weights would hide."""
        hidden = max(u.hidden for u in self.ranks)
        if hidden <= UNSEEN or self.verdict.has(Fault.UPDATE, Fault.NEVER_UPDATED):
            return
        lost = any(u.lost for u in self.ranks)
        told = ": a whole step is lost in it" if lost else ": the direction alone is judged" if hidden > 1 else ""
        self.verdict.add(
            Level.NOTE, "updates beside rounding",
            f"steps of the optimizer are small beside the rounding of the weights{told}, and errors of up to "
            f"{hidden:.2g} times a step would be hidden (keep weights in float32?)",
        )  # fmt: skip

    def told(self, moment: Moment) -> str:
        """Return what the updates were compared with, given the last step, and how far off they are."""
        if self.unknown:
            return f"not judged: the rule of {self.unknown} is not known"
        names = list(dict.fromkeys(g.cls.rpartition(".")[2] for g in moment.ranks[0].groups))
        return f"{', '.join(names)}: off by {max(u.worst for u in self.ranks):.2g} of float64's step at most"
