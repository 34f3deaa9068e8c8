"""What a user knows to fail, in the records of the adapters that it is about."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Collection, Sequence

from meshmark.adapter.contract import Adapter
from meshmark.adapter.registry import known_adapters
from meshmark.run.record import Record
from meshmark.spec.known_gap import KnownGap


def with_gaps(record: Record, gaps: Sequence[tuple[str, KnownGap]]) -> Record:
    """`gaps`: pattern of an adapter's name, and gap. They come before the adapter's own."""
    known = [gap for pattern, gap in gaps if fnmatch.fnmatchcase(record.case.adapter, pattern)]
    if not known:
        return record
    evidence = dataclasses.replace(record.conformance, known_gaps=[*known, *record.conformance.known_gaps])
    return dataclasses.replace(record, conformance=evidence)


def unmatched_gaps(gaps: Sequence[tuple[str, KnownGap]], chosen: Collection[str]) -> list[str]:
    """What a user who mistyped an adapter's name should know; `chosen` may be adapters that no registry has. Of one
    that is there and is not run, nothing is told: several runs share a file."""
    patterns = dict.fromkeys(pattern for pattern, _ in gaps)
    none = [pattern for pattern in patterns if not fnmatch.filter({*known_adapters(), *chosen}, pattern)]
    return [f"--known-gaps: {pattern!r} matches no adapter that is known here" for pattern in none]


def with_gaps_of_now(kept: Record, adapter: type[Adapter], gaps: Sequence[tuple[str, KnownGap]]) -> Record:
    """`kept`, of an earlier run, with those that are known in this one; itself where they are the same."""
    own = list(adapter.known_gaps) if kept.conformance.scenario else []
    bare = dataclasses.replace(kept, conformance=dataclasses.replace(kept.conformance, known_gaps=own))
    found = with_gaps(bare, gaps)
    return kept if found.conformance.known_gaps == kept.conformance.known_gaps else found
