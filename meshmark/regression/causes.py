"""Group changes by cause, so that changes that follow from another are reported with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshmark.regression.change import Change, ChangeOutcome, Kind
from meshmark.regression.exact import INSTANTS
from meshmark.regression.verdicts import ENDINGS
from meshmark.text import pluralize

_MOST_NAMED = 6
"""Number of metrics, or cases, that a message lists."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A group of changes for the worse, or undecided ones, in one case or in several alike."""

    change: Change
    """The most informative change. For bytes, the instant at which the fewest categories grew."""
    others: list[Change]
    """Other changes of the same case that follow from it."""
    cases: list[str]
    """Other cases with the same changes."""

    def __str__(self) -> str:
        told = str(self.change)
        if self.others:
            told += f"; and with it {_some([_short(other) for other in self.others])}"
        if self.cases:
            told += f"; the same in {pluralize(len(self.cases), 'other case')}: {_some(self.cases)}"
        return told


def causes(changes: Iterable[Change]) -> list[Cause]:
    """Return the causes, ordered by the first change of each."""
    groups: dict[tuple[str, str], list[Change]] = {}
    crashed = dict[str, None]()
    for change in changes:
        if change.metric in ENDINGS and change.outcome is ChangeOutcome.WORSE:
            crashed[change.case] = None
        groups.setdefault((change.case, _subject(change)), []).append(change)
    found: dict[tuple[object, ...], Cause] = {}
    for (case, _), group in _under_crashes(groups, crashed).items():
        first = min(group, key=_rank)
        others = [change for change in group if change is not first]
        same = (*_signature(first), *sorted(_signature(other) for other in others))
        if earlier := found.get(same):
            found[same] = Cause(change=earlier.change, others=earlier.others, cases=[*earlier.cases, case])
        else:
            found[same] = Cause(change=first, others=others, cases=[])
    return list(found.values())


def _under_crashes(
    groups: dict[tuple[str, str], list[Change]], crashed: Iterable[str]
) -> dict[tuple[str, str], list[Change]]:
    """Merge all changes of a case that no longer runs to its end into one group, because they follow from that."""
    found = dict(groups)
    for case in crashed:
        own = [key for key in found if key[0] == case]
        gathered = [change for key in own for change in found[key]]
        found[own[0]] = gathered
        for key in own[1:]:
            del found[key]
    return found


def _subject(change: Change) -> str:
    """Return what a change is about: memory, communication, training or speed. Each clause is its own subject."""
    if change.kind in (Kind.SLOWER, Kind.SLOWER_START):
        return str(change.kind)
    if change.metric.startswith("clause "):
        return change.metric
    if change.metric.startswith(("traffic", "communication")):
        return "communication"
    if change.metric.startswith(("memory", *INSTANTS.values())):
        return "memory"
    return "training" if change.kind is Kind.WRONG else change.metric


def _rank(change: Change) -> tuple[int, int]:
    """Return a sort key, smaller for a more informative change."""
    return change.metric not in ENDINGS, len(change.moved) or _MOST_NAMED


def _signature(change: Change) -> tuple[str, ...]:
    """Return a key that changes with the same cause share across cases. Times never share it."""
    if change.kind in (Kind.SLOWER, Kind.SLOWER_START, Kind.MISSING):
        return (change.case, change.metric)
    return (change.metric, str(change.outcome), *(change.moved or (change.evidence.partition(":")[0],)))


def _short(change: Change) -> str:
    if change.effect and change.effect.lowest == change.effect.highest:
        return f"{change.metric} {change.effect}"
    return f"{change.metric} {change.before} -> {change.after}" if change.before != change.after else change.metric


def _some(texts: list[str]) -> str:
    more = f" and {len(texts) - _MOST_NAMED} more" if len(texts) > _MOST_NAMED else ""
    return f"{', '.join(texts[:_MOST_NAMED])}{more}"
