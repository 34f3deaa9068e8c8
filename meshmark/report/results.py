"""Results by case, which combine the records of the instrumented and the timed pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshmark.records.record import Record, Status, decisive
from meshmark.records.request import Task
from meshmark.report.table import Cell
from meshmark.run.throughput import throughput
from meshmark.spec.case import Case


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """Everything known about a case. At least one of the passes exists."""

    case: Case
    observed: Record | None
    timed: Record | None
    proxy: Record | None
    """The instrumented pass of a model small enough to be judged, if this case's model is too large.

    Adapter, layout and precision are the same.
    """

    @property
    def any(self) -> Record:
        record = self.observed or self.timed
        assert record is not None
        return record

    @property
    def skipped(self) -> bool:
        return self.any.outcome.status is Status.SKIPPED

    @property
    def failed(self) -> Record | None:
        """The pass that did not end, or None."""
        ended = (Status.OK, Status.SKIPPED)
        return next((r for r in (self.observed, self.timed) if r and r.outcome.status not in ended), None)

    @property
    def correct(self) -> bool | None:
        """The equivalence verdict. None if nothing decides, as after a pass that was too slow or hit a full disk.

        A small model's failure counts against the large model, but its success does not count for it.
        """
        if self.observed and self.observed.outcome.status.is_defect:
            return False
        if self.observed and (verdict := self.observed.verdict("equivalence")):
            return None if verdict.undecided else verdict.passed
        return False if self._of_proxy is False else None

    @property
    def _of_proxy(self) -> bool | None:
        verdict = self.proxy.verdict("equivalence") if self.proxy else None
        return None if verdict is None or verdict.undecided else verdict.passed

    @property
    def sampled(self) -> bool:
        """True if its correctness is known only from a sample of its steps and noise."""
        return self.observed is not None and self.observed.equivalence.sample is not None

    @property
    def states(self) -> str:
        """Dtypes in which states are kept, weights before moments, such as `float32, float32`."""
        dtypes = self.observed.memory.state_dtypes if self.observed else {}
        return ", ".join(dtypes[name] for name in ("parameters", "optimizer_states") if dtypes.get(name))

    @property
    def states_as_requested(self) -> bool | None:
        """True if masters and moments are as wide as the precision promises. None when nothing was observed.

        A case with narrower states needs less memory and time for another reason than its layout.
        """
        if not self.states or self.observed is None:
            return None
        asked = self.case.precision
        kept = self.observed.memory.state_dtypes
        moments, masters = kept.get("optimizer_states"), kept.get("masters", asked.master)
        wide = asked.master in kept.get("parameters", "").split("+") and (masters == asked.master or not asked.is_mixed)
        return wide and moments in (None, "", asked.states)

    @property
    def slow(self) -> bool:
        """True if the only failure is a pass whose time limit was too short."""
        return self.failed is not None and self.failed.outcome.status is Status.SLOW

    @property
    def blameless(self) -> bool:
        """True if the failure says nothing about the adapter: a time limit that was too short, or a cause outside."""
        return self.failed is not None and not self.failed.outcome.status.is_defect

    @property
    def timed_as_judged(self) -> bool:
        """True if nothing indicates that the timed steps differ from the judged ones."""
        verdict = self.timed.verdict("throughput") if self.timed else None
        return verdict is None or verdict.passed

    @property
    def undisturbed(self) -> bool:
        """True if nothing was observed that makes the rate unrepresentative of this machine."""
        return not (self.timed and self.timed.timing.spoilt)

    @property
    def comparable(self) -> bool:
        """True if its memory and speed may be compared with others'.

        It must train correctly, with equally precise states, and with the same steps when timed.
        """
        wrong = (self.failed and not self.blameless) or not self.timed_as_judged
        return self.correct is not False and not wrong and self.states_as_requested is not False

    @property
    def correctness(self) -> Cell:
        """The answer in words."""
        if self.skipped:
            return Cell(text="not run")
        untimed = self.blameless and self.failed is self.timed
        if self.failed and not (untimed and self.observed):  # what the instrumented pass found stands
            return Cell(text=self.failed.outcome.status, bad=self.failed.outcome.status)
        own = self.observed and self.observed.verdict("equivalence")
        kin = self.proxy.case.workload.name if self.proxy and not own else ""
        if self.correct is None:
            if own and own.undecided:
                return Cell(text="cannot tell", bad="cannot tell")
            return Cell(text=f"not judged (as {kin}: yes)" if self._of_proxy and kin else "not judged")
        where = f" (as {kin})" if kin else ""
        if own and self.sampled:
            where = " (sampled)"
        narrow = f"states in {self.states}" if self.states_as_requested is False else ""
        timed = f"timed pass {self.failed.outcome.status}" if self.failed else ""
        text = ", ".join([("yes" if self.correct else "no") + where, *filter(None, (narrow, timed))])
        if not self.correct:
            return Cell(text=text, bad="no")
        if narrow:
            return Cell(text=text, bad=text.removeprefix(f"yes{where}, "))
        return Cell(text=text, bad=self.failed.outcome.status if self.failed else "")


@dataclass(frozen=True, kw_only=True)
class Tradeoff:
    """A correct case with its peak on the fullest rank and its speed."""

    result: CaseResult
    peak_bytes: int
    per_second: float


def tradeoffs(found: Iterable[CaseResult]) -> list[Tradeoff]:
    """Return the cases of which both memory and speed are known, and may be compared with others'."""
    return [
        Tradeoff(
            result=r,
            peak_bytes=max(reading.peak.total for reading in r.observed.memory.readings),
            per_second=throughput(r.timed).per_second,
        )
        for r in found
        if r.comparable and r.observed and r.observed.memory.readings and r.timed and r.timed.timing.rank_step_seconds
    ]


def frontier(points: Iterable[Tradeoff]) -> list[Tradeoff]:
    """Return the cases that no other beats in both memory and speed, the leanest first."""
    best: list[Tradeoff] = []
    for point in sorted(points, key=lambda p: (p.peak_bytes, -p.per_second)):
        if not best or point.per_second > best[-1].per_second:
            best.append(point)
    return best


def results(records: Iterable[Record]) -> list[CaseResult]:
    """Return one result per case, in order of first appearance. Of several records of one pass, one is `decisive`."""
    every: dict[tuple[Key, Task], list[Record]] = {}
    cases: dict[Key, Case] = {}
    for record in records:
        if record.task in (Task.PROFILE, Task.FAKE_WORLD):  # sections of their own
            continue
        every.setdefault((_key(record), record.task), []).append(record)
        cases.setdefault(_key(record), record.case)
    latest = {key: decisive(of_one_pass) for key, of_one_pass in every.items()}
    judged: dict[tuple[str, str, str], Record] = {}  # of several, one that failed decides
    for record in latest.values():
        verdict = record.verdict("equivalence")
        if verdict is not None and (_kinship(record.case) not in judged or not verdict.passed):
            judged[_kinship(record.case)] = record
    return [
        CaseResult(
            case=case,
            observed=latest.get((key, Task.OBSERVE)),
            timed=latest.get((key, Task.TIME)),
            proxy=judged.get(_kinship(case)),
        )
        for key, case in cases.items()
    ]


def newest(records: Sequence[Record]) -> Record:
    """Return the newest record, or the last of several with the same time."""
    return max(reversed(records), key=lambda record: record.environment.date)


Key = tuple[str, str, str | None]
"""Key of results within one folder: case, device, corpus."""


def _key(record: Record) -> Key:
    return record.case.id, record.environment.device, record.case.workload.corpus


def _kinship(case: Case) -> tuple[str, str, str]:
    return case.adapter, case.layout.id, " ".join(case.computed)
