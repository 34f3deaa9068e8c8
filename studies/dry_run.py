"""Single ranks of worlds of thousands, each alone on this machine, held against theory as suites/test_scale.py does it;
but for peaks, which no plan knows of shards that are mostly padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshmark.models.module import parameter_shapes
from meshmark.records.record import Record, Status
from meshmark.run.runner import Runner
from meshmark.run.verdict import (
    COUNT_BYTES,
    STATE_TOLERANCE,
    MemoryTotal,
    judge_communication,
    memory_categories,
    memory_totals,
)
from meshmark.spec.case import Case


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Outcome of one case, in words."""

    case: Case
    ranks: list[int]
    """That the world was seen from."""
    traffic: str
    memory: str
    seconds: float
    failures: list[str]
    """Why theory and this run do not agree."""


def dry_run(runner: Runner, case: Case) -> DryRun:
    """Memory and traffic of single ranks against theory. Raises `SystemExit` where a rank did not come to its end."""
    record = runner.observe_alone(case)
    if record.outcome.status is not Status.OK:
        raise SystemExit(f"{case.id}: {record.outcome.status}: {record.outcome.message}\n{record.outcome.traceback}")
    sent, held = judge_communication(record), list(_held(record))
    assert sent, f"theory plans no traffic of {case.id}"
    wrong = [one for one in held if one.error > STATE_TOLERANCE]
    failures = [f"{one.where}: {one.measured:,.0f} bytes, planned {one.planned:,.0f}" for one in wrong]
    return DryRun(
        case=case,
        ranks=record.fake_ranks,
        traffic="to the byte" if sent.passed else f"{sent.evidence['differences']} flows differ",
        memory=f"{max(one.error for one in held):.2%}",
        seconds=record.launch.seconds,
        failures=failures if sent.passed else [sent.summary, *failures],
    )


def _held(record: Record) -> Iterator[MemoryTotal]:
    """Yield what the memory suite compares, without peaks. The optimizer's step counts, one tensor each, are not
    planned: beside one of a thousand shards they are not small."""
    memory = record.memory
    for rank, reading, plan, declared in zip(
        record.fake_ranks, memory.readings, memory.planned, memory.extra_memory, strict=True
    ):
        assert plan, f"theory plans no memory of {record.case.id}"
        for name, measured, planned in memory_categories(reading, plan, declared, with_activations=True):
            counts = (
                COUNT_BYTES * len(parameter_shapes(record.case.workload.model)) if name == "optimizer_states" else 0
            )
            yield MemoryTotal(category=name, rank=rank, measured=measured, planned=planned, late=counts)
        totals = memory_totals(rank, reading, plan, declared, on_cpu=True)
        yield from (held for held in totals if held.category != "peak")
