"""Steps on throttled links: what was measured is as computed, and what is not is told."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.throttled import ADAPTERS, MODEL, WORKERS
from meshmark.spec.workload import workload
from studies import throttled
from studies.throttled import Measured, broken, sent_bytes, steps

LIMITS = (80, 20, 5)
PARAMETERS = 4 * workload(MODEL).model.num_parameters


def test_bytes_are_the_closed_forms_of_gloo() -> None:
    sent = {name: sent_bytes(name) / PARAMETERS for name in ADAPTERS}
    exact = {"synchronous": 1.5, "local-sgd2": 0.75, "dsgd-ring": 2.0, "dsgd-one-peer": 1.0}
    assert {name: sent[name] for name in exact} == exact
    assert sent["error-feedback-top-k10"] == pytest.approx(3 * 0.2, rel=0.02)
    assert sent["error-feedback-sign"] == pytest.approx(3 / 32, rel=0.1)
    assert sent["double-squeeze-sign"] == pytest.approx((3 + 2) / 32, rel=0.1), "a broadcast along a tree"


def as_computed() -> list[Measured]:
    def seconds(name: str, limit: int) -> float:
        ways = 2 if name.startswith("dsgd") else 1
        return 0.02 + (ways * 8 * sent_bytes(name) / (limit * 1e6 * throttled.PAYLOAD) if limit else 0)

    return [Measured(algorithm=n, megabits=m, seconds=seconds(n, m)) for m in (0, *LIMITS) for n in ADAPTERS]


def test_what_is_not_as_computed_is_told() -> None:
    found = as_computed()
    assert not broken(steps(found))

    def slowed(name: str, factor: float) -> list[str]:
        changed = [
            dataclasses.replace(row, seconds=row.seconds * factor)
            if (row.algorithm, row.megabits) == (name, 5)
            else row
            for row in found
        ]
        return broken(steps(changed))

    assert [line.partition(":")[0] for line in slowed("synchronous", 1.3)] == ["synchronous at 5 Mbit/s"]
    told = slowed("dsgd-one-peer", 0.05)
    assert told[-1] == "at 5 Mbit/s dsgd-one-peer is the soonest, where error-feedback-sign is computed to be"
    assert not slowed("synchronous", 1.1)
    assert slowed("dsgd-ring", 0.5), "as if both ways of a pair went at once, which gloo does not do"


def test_what_was_measured_here_is_as_computed() -> None:
    """The committed table agrees with the computed steps, and with the order of the fastest."""
    rows = throttled.measured()
    at = steps(rows)
    assert set(at) == set(LIMITS) and all(set(by_name) == set(ADAPTERS) for by_name in at.values())
    assert sum(step.held for by_name in at.values() for step in by_name.values()) >= 10, (
        "those at 20 and 5 Mbit/s that send whole parameters"
    )
    assert not broken(at)
    assert f"by {WORKERS} ranks" in throttled.section() and "1.85 times, by formula\n1.99" in throttled.section()
