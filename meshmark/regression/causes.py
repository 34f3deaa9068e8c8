"""One planted cause, one message: changes that follow from another are told with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshmark.regression.change import Change, ChangeOutcome, Kind
from meshmark.regression.exact import INSTANTS
from meshmark.regression.verdicts import ENDINGS
from meshmark.text import pluralize

_MOST_NAMED = 6
"""Metrics, or cases, that a message spells out."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """What became worse, or cannot be told, in one case or in several alike."""

    change: Change
    """The one that says most: of bytes the instant at which the fewest categories grew."""
    others: list[Change]
    """Of the same case, which follow."""
    cases: list[str]
    """Others in which the same changes say the same."""

    def __str__(self) -> str:
        told = str(self.change)
        if self.others:
            told += f"; and with it {_some([_short(other) for other in self.others])}"
        if self.cases:
            told += f"; the same in {pluralize(len(self.cases), 'other case')}: {_some(self.cases)}"
        return told


def causes(changes: Iterable[Change]) -> list[Cause]:
    """In the order of the first change of each."""
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
    """Of a case that no longer comes to its end, everything follows from that."""
    found = dict(groups)
    for case in crashed:
        own = [key for key in found if key[0] == case]
        gathered = [change for key in own for change in found[key]]
        found[own[0]] = gathered
        for key in own[1:]:
            del found[key]
    return found


def _subject(change: Change) -> str:
    """What a change is about: memory, communication, training or speed; a clause is a subject of its own."""
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
    """The smaller, the more it says."""
    return change.metric not in ENDINGS, len(change.moved) or _MOST_NAMED


def _signature(change: Change) -> tuple[str, ...]:
    """What a change has in common with that of another case by the same cause; times have nothing."""
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
