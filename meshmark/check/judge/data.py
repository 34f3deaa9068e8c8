"""Judge which rows of data ranks read."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field

from meshmark.check.recording import Step
from meshmark.check.rows import num_repeated, rows_of
from meshmark.check.run import Moment, Run
from meshmark.check.verdict import Level, Verdict
from meshmark.text import pluralize, some_of


@dataclass(kw_only=True)
class DataJudge:
    """Judge of the rows that ranks read. It is shown the steps one after the other, and judges them together."""

    run: Run
    verdict: Verdict
    rows: list[Counter[bytes]] = field(default_factory=list)
    """How often each reader has read each row in the last step."""
    read: list[Counter[bytes]] = field(default_factory=list)
    """How often each reader has read each row in all steps."""
    shared: list[int] = field(default_factory=list)
    """Most rows that two ranks have in common, by step."""
    handed_on: list[bool] = field(default_factory=list)
    """Whether a rank reads what another read in the step before, by step from the second on."""
    alike: set[tuple[int, int]] | None = None
    """Pairs of ranks that have read the same rows for the same targets at every step."""
    repeats: list[list[bool]] = field(default_factory=list)
    """Whether each reader reads the rows of the step before, by step from the second on."""
    within: list[int] = field(default_factory=list)
    """Most calls of one reader that have the inputs and targets of an earlier call of the step, by step."""

    def see(self, moment: Moment) -> None:
        """Take in the rows of a step."""
        before, self.rows = self.rows, rows_of([s.calls for s in moment.readers])
        self._note_shared(before)
        self.within.append(max((num_repeated(s.calls) for s in moment.readers), default=0))
        targets = [_targets(step) for step in moment.readers]
        readers = list(enumerate(self.run.readers))
        alike = {
            (one, other)
            for (i, one), (j, other) in itertools.combinations(readers, 2)
            if self.rows[i] and self.rows[i] == self.rows[j] and targets[i] == targets[j]
        }
        self.alike = alike if self.alike is None else self.alike & alike
        if before:
            self.repeats.append([earlier == now for earlier, now in zip(before, self.rows, strict=True)])

    def _note_shared(self, before: list[Counter[bytes]]) -> None:
        """Count the rows that several ranks read, in one step or one after the other."""
        rows = self.rows
        self.read = [seen + own for seen, own in zip(self.read or [Counter() for _ in rows], rows, strict=True)]
        pairs = list(itertools.permutations(range(len(rows)), 2))
        self.shared.append(max(((rows[a] & rows[b]).total() for a, b in pairs), default=0))
        if before:
            self.handed_on.append(any(rows[a] and rows[a] == before[b] for a, b in pairs))

    def judge(self) -> None:
        """Report ranks that read the same rows, and rows that are read at every step."""
        if self.alike and len(self.alike) == math.comb(len(self.run.readers), 2):
            self.verdict.add(
                Level.WRONG, "ranks read the same rows",
                "every row of rank 0 is a row of every other rank too (DistributedSampler missing, or one seed for "
                "all?)",
            )  # fmt: skip
        elif self.alike:
            shown = some_of([f"ranks {one} and {other}" for one, other in sorted(self.alike)])
            self.verdict.add(
                Level.WRONG, "ranks read the same rows",
                f"{shown} read the same rows at every step (a sampler by the rank within a node, not among all?)",
            )  # fmt: skip
        elif len(self.run.readers) > 1:
            self.verdict.lines["data"] = "ranks read different rows"
            is_small = any(max(seen.values(), default=0) > 1 for seen in self.read)  # few rows exist, or batches repeat
            if min(self.shared, default=0) and not is_small:
                self.verdict.lines["data"] = f"ranks read up to {max(self.shared)} rows in common"
                self.verdict.add(
                    Level.NOTE, "ranks share rows",
                    f"at every step, up to {pluralize(max(self.shared), 'row')} of one rank are read by another too "
                    "(shards that overlap?)",
                )  # fmt: skip
            if self.handed_on and all(self.handed_on) and not is_small:
                self.verdict.add(
                    Level.NOTE, "rows read again by another rank",
                    "at every step, one rank reads the rows that another has read in the step before",
                )  # fmt: skip
        stale = [rank for rank, of in zip(self.run.readers, zip(*self.repeats, strict=True), strict=False) if all(of)]
        if stale and len(stale) < len(self.run.readers):
            self.verdict.add(
                Level.WRONG, "the same rows at every step",
                f"rank {stale[0]} reads the batch of the step before at every step, and other ranks do not",
            )  # fmt: skip
        elif stale:
            self.verdict.add(Level.NOTE, "the same rows at every step", "each step reads the batch of the one before")
        if min(self.within, default=0):
            self.verdict.add(
                Level.NOTE, "the same rows twice in a step",
                f"at every step, {pluralize(min(self.within), 'call')} of the model on one rank has the inputs and the "
                "targets of an earlier call of the step (one micro-batch used for two?)",
            )  # fmt: skip


def _targets(step: Step) -> object:
    """Return what tells a step's targets from those of another rank.

    Ranks may share an input, such as a graph or a grid of coordinates, of which each has other targets. Where the
    targets are not seen, it is the rows of the outputs that have a gradient.
    """
    if seen := [term.targets for call in step.calls for term in call.terms]:
        return seen
    gradients = (g for call in step.calls for _, g in call.used_gradients if g.dim())
    return [g.flatten(1).any(1).tolist() if g.dim() > 1 else g.bool().tolist() for g in gradients]
