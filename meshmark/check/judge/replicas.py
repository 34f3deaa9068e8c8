"""Judge what should be the same on all ranks: parameters, hyperparameters, modes, and when they step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshmark.check.judge.tensors import all_equal
from meshmark.check.run import Moment, Run
from meshmark.check.verdict import Level, Verdict
from meshmark.judge.faults import Fault
from meshmark.text import pluralize

SAME_METRIC = 1e-6
"""Relative difference up to which ranks' metrics count as equal."""


@dataclass(kw_only=True)
class ReplicaJudge:
    """Judge of the copies of a model that ranks hold."""

    run: Run
    verdict: Verdict
    repaired: bool = False
    """Whether replicas that differ after the optimizer's step are equal when the next begins."""
    usual_calls: int = 0
    """Number of calls of models in the last step in which all ranks had as many."""

    def judge(self, previous: Moment | None, moment: Moment) -> None:
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

    def judge_end(self, moment: Moment) -> None:
        """Report replicas that differ after the last step."""
        if not self.repaired:
            self._replicas(moment.after, moment, "after the step")

    def skips(self, moment: Moment) -> bool:
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
        if all_equal(moment.after) or not all_equal(moment.before):
            return False
        few, many = (self.run.readers[counts.index(of(counts))] for of in (min, max))
        self.verdict.add(
            Level.WRONG, "a step of some ranks only",
            f"rank {few} takes this step after {pluralize(min(counts), 'call')} of the model, and rank {many} after "
            f"{max(counts)}: they then hold other parameters (does one rank skip a step that others take?)",
            moment.number,
        )  # fmt: skip
        self.verdict.lines.pop("replicas", None)
        return True

    def _replicas(self, tensors: Mapping[int, Mapping[str, Tensor]], moment: Moment, when: str) -> None:
        if drifted := _drifted(tensors):
            first, other, odd = drifted
            far = max(float((tensors[first][n].double() - tensors[other][n].double()).abs().max()) for n in odd)
            told = f"ranks {first} and {other} hold other parameters {when}: {odd[0]}"
            told += f" and {len(odd) - 1} more" if len(odd) > 1 else ""
            self.verdict.add(Level.WRONG, Fault.DRIFT, f"{told}, by up to {far:.2g}", moment.number)
            self.verdict.lines.pop("replicas", None)
            return
        replicas = len(set(self.run.owners))
        if replicas > 1 and not self.verdict.has(Fault.DRIFT):
            self.verdict.lines["replicas"] = f"{replicas}, equal bit for bit before and after every step"


def judge_modes(run: Run, moment: Moment, verdict: Verdict) -> None:
    """Report ranks of which one trains while another evaluates."""
    readers = [[call.training for call in step.calls if call.used_gradients] for step in moment.readers]
    for rank, modes in zip(run.readers, readers, strict=True):
        if len(modes) == len(readers[0]) and modes != readers[0]:
            verdict.add(
                Level.WRONG, "training mode differs",
                f"ranks {run.readers[0]} and {rank} call modules in other modes: one trains and one evaluates "
                "(model.train() missing after an evaluation?)", moment.number,
            )  # fmt: skip


def judge_schedules(moment: Moment, verdict: Verdict) -> None:
    """Report hyperparameters that differ between ranks' optimizers, and what will make them differ."""
    first, *others = moment.ranks
    options = {name: group.options for group in first.groups for name in group.names}
    for rank, step in enumerate(others, start=1):
        for group in step.groups:
            for name in group.names:
                for key, value in group.options.items():
                    own = options.get(name, {}).get(key, value)
                    if isinstance(value, bool | int | float | tuple) and own != value:
                        verdict.add(
                            Level.WRONG, "hyperparameters differ",
                            f"rank 0's optimizer steps {name} with {key} = {_shown(own)}, and rank {rank}'s with "
                            f"{_shown(value)}", moment.number,
                        )  # fmt: skip
        for own, metric in zip(first.metrics, step.metrics, strict=False):
            if abs(own - metric) > SAME_METRIC * max(abs(own), abs(metric)):
                verdict.add(
                    Level.WRONG, "a schedule follows other metrics",
                    f"ReduceLROnPlateau is given {own:.4g} on rank 0 and {metric:.4g} on rank {rank}, so that "
                    "their learning rates will not be lowered at the same steps (average it over ranks first)",
                    moment.number,
                )  # fmt: skip


def note_buffers(moment: Moment, verdict: Verdict) -> None:
    """Note buffers, such as running statistics, that ranks hold other values of, or take from the first rank."""
    taken = [(rank, call.replaced[0]) for rank, s in enumerate(moment.ranks) for call in s.calls if call.replaced]
    if taken:
        rank, name = taken[0]
        verdict.add(
            Level.NOTE, "buffers of one rank",
            f"the first rank's {name} replaces rank {rank}'s at every forward pass (broadcast_buffers of DDP): it "
            "is made of the first rank's rows alone", moment.number,
        )  # fmt: skip
    first, *others = [step.calls[0].buffers for step in moment.ranks if step.calls]
    for rank, held in enumerate(others, start=1):
        odd = [n for n, x in first.items() if n in held and not torch.equal(x, held[n])]
        if odd:
            verdict.add(
                Level.NOTE, "buffers differ",
                f"ranks 0 and {rank} hold other values of {odd[0]}: they are made of each rank's own rows",
                moment.number,
            )  # fmt: skip
            return


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


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
