"""Judge which mean the script optimises, from what single steps have shown."""

from __future__ import annotations

from collections.abc import Mapping

from meshmark.check.judge.gradients import GradientJudge
from meshmark.check.objective import MEANS, SAME, Objective, scaled_total
from meshmark.check.verdict import Level, Verdict
from meshmark.judge.faults import Fault, named_factor
from meshmark.text import pluralize


class ObjectiveJudge:
    """Judge of the objective, after all steps."""

    def __init__(self, gradients: GradientJudge, asked: str | None, verdict: Verdict) -> None:
        self.run, self.verdict = gradients.run, verdict
        self.gradients, self.objectives = gradients, gradients.objectives
        self.asked = asked
        """The mean that the user expects the script to optimise."""

    def judge(self) -> None:
        """Report an objective that is not the one that was asked for, or not a mean."""
        lines = self.verdict.lines
        if not self.objectives:
            lines["objective"] = f"not judged: {self.gradients.unseen}"
            if self.asked:
                self.verdict.add(Level.UNKNOWN, "objective not judged", self.gradients.unseen)
            elif len(self.run.readers) > 1 and self.gradients.factor == 1.0 and self.gradients.detects:
                self.verdict.add(
                    Level.NOTE, "summed over ranks", "right only if the script divides by the number of all rows"
                )
            return
        self._note_remainder()
        self._note_detached()
        most = max(len(o.counts) for o in self.objectives)
        found = max((o for o in self.objectives if len(o.counts) == most), key=lambda o: o.high - o.low)
        candidates = [c for c in MEANS if all(c in o.candidates for o in self.objectives)]
        num_calls = len(found.counts) + found.num_unused
        known = self.run.known_factors(max(1, num_calls // len(self.run.readers)))
        off = scaled_total(found.total, known) if not found.several_terms else None
        if off and found.has_factor and found.total < 1.0:
            self.verdict.add(
                Level.NOTE, "a factor of the loss",
                f"the script multiplies its loss by {found.multiplied:g}, which is {off} too", 0,
            )  # fmt: skip
        if found.has_factor or found.sums_in_rows or found.averages_positions:
            off = None
        if off:
            if found.total > 1:
                cause = "losses of micro-batches or ranks are added up, not averaged"
            elif found.num_unused:
                cause = f"{pluralize(found.num_unused, 'call')} of the model without a backward pass"
            else:
                cause = "the loss or its gradient is divided twice"
            told = f"weights of targets add up to {off}, where a mean has 1: {cause}"
            self.verdict.add(Level.WRONG, Fault.SCALED, told, 0)
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
        lines["objective"] = told + ("; plus the penalty on weights" if self.gradients.penalty else "")
        if self.asked and self.asked not in candidates and found.reweighed:
            self.verdict.add(
                Level.UNKNOWN, "objective not judged",
                f"the loss weighs single targets by itself, as a focal loss does: {uneven}",
            )  # fmt: skip
        elif self.asked and self.asked not in candidates:
            self.verdict.add(Level.WRONG, Fault.UNEVEN, f"asked for {MEANS[self.asked]}, the script optimises {told}")
        elif not self.asked and "tokens" not in candidates and not is_sum:
            kind = "a mean of means" if "ranks" in candidates else "another objective than the mean over targets"
            self.verdict.add(Level.NOTE, kind, f"{uneven}; `--objective tokens` makes it a failure")

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
                self.verdict.add(
                    Level.WRONG if self.asked else Level.NOTE, "a remainder of micro-batches",
                    f"a step of {few} of {many} micro-batches counts {share:.3g} times as much as others: its losses "
                    f"are divided by {many} too",
                )  # fmt: skip

    def _note_detached(self) -> None:
        """Note targets that count in the loss, and by whose row of the output nothing is differentiated."""
        found = max(self.objectives, key=lambda o: o.num_detached)
        if found.num_detached:
            self.verdict.add(
                Level.WRONG if self.asked else Level.NOTE, "rows without a gradient",
                f"{found.num_detached} of {found.num_targets:,} targets of a step count in the loss, and its gradient "
                "does not reach the model's output for them (detached, or multiplied by 0?)",
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
        is_factor = is_factor and not found.averages_positions
        is_number = abs(divisor - round(divisor)) < 1e-3 * abs(divisor - found.num_targets)
        if is_factor or not is_number or "tokens" not in found.candidates:
            return told
        extra = round(divisor) - found.num_targets
        told += f": the loss of {found.num_targets:,} targets is divided by {round(divisor):,}"
        if extra == found.num_rows:
            told += ", one more for each row (are labels counted before they are shifted?)"
        elif found.averages_positions:
            told += ", the number of all positions, of which the others do not count"
        level = Level.WRONG if self.asked else Level.NOTE
        self.verdict.add(level, "divided by another number", told.partition(": ")[2], 0)
        return told
