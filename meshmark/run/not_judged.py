"""Says what of a case was not judged, so that silence is not taken for a good result."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from meshmark.adapter.contract import Adapter
from meshmark.run.record import Record
from meshmark.theory.traffic import METERED_STEP


def not_judged(record: Record, adapter: type[Adapter]) -> list[str]:
    """Return, in words, what the verdicts of an observed pass leave out; nothing where they leave out nothing."""
    if record.fake_ranks:
        ranks, world = ", ".join(map(str, record.fake_ranks)), record.case.world_size
        return [f"everything but memory and traffic of ranks {ranks}: the world of {world} was fake", *_memory(record)]
    return [*_equivalence(record, adapter), *_memory(record), *_communication(record)]


def _equivalence(record: Record, adapter: type[Adapter]) -> Iterator[str]:
    if record.verdict("equivalence") is None:
        yield "equivalence: nothing was compared with float64"
        return
    sample = record.equivalence.sample
    if sample and sample.steps < record.steps:
        yield f"equivalence: {_steps(range(sample.steps, record.steps))}, of which no float64 truth was computed"
    if record.case.precision.is_mixed and adapter.arithmetic is None:
        yield (
            "equivalence: errors below the precision's own rounding, for the adapter declares no arithmetic, and there "
            "is no twin"
        )


def _memory(record: Record) -> Iterator[str]:
    evidence = record.memory
    if record.verdict("memory") is None:
        yield "memory: no closed form plans what ranks hold"
    yield from _ranks(record, "memory", len(evidence.readings))
    if evidence.readings and all(plan is None or plan.activations is None for plan in evidence.planned):
        yield "memory: activations, which are not planned"
    if unknown := [record.ranks[i] for i, reading in enumerate(evidence.readings) if not reading.ends_known]:
        where = ", ".join(map(str, unknown))
        yield f"memory: activations and peak on ranks {where}, where it is not known which storages had ended"
    if evidence.readings and not (evidence.live_bytes and len(evidence.live_bytes[0]) > METERED_STEP + 2):
        yield f"memory: growth a step as an interval, which takes {METERED_STEP + 3} steps"
    if evidence.readings and record.environment.device != "cpu":
        yield "memory: activations and peak, which are planned of a CPU's kernels alone"
    if evidence.readings and record.steps > 1:
        yield f"memory: the peak of other steps than step {METERED_STEP}"


def _communication(record: Record) -> Iterator[str]:
    evidence = record.traffic
    if record.verdict("communication") is None:
        yield "communication: no closed form plans what ranks send"
    yield from _ranks(record, "communication", len(evidence.readings))
    if not evidence.readings or record.case.world_size == 1:
        return
    repeats = record.case.workload.algorithm.traffic_repeats
    found: dict[str, list[int]] = {}
    for rank in range(record.case.world_size):
        groups = evidence.alike_steps[rank] if rank < len(evidence.alike_steps) else []
        read = {step for group in groups for step in group.steps} | {METERED_STEP}
        others = [step for step in range(record.steps) if step != METERED_STEP]
        unread = [step for step in others if step not in read]
        unlike = [step for step in others if step in read and not repeats(record.case, rank, step)]
        for steps, why in ((unread, "of which it is not known what was sent"), (unlike, "in which others are due")):
            if steps:
                found.setdefault(f"{_steps(steps)}, {why}", []).append(rank)
    for text, ranks in found.items():
        where = "" if len(ranks) == record.case.world_size else f" (ranks {', '.join(map(str, ranks))})"
        yield f"communication: {text}{where}"


def _ranks(record: Record, suite: str, count: int) -> Iterator[str]:
    if count < record.case.world_size and suite not in record.unmeasured:
        yield f"{suite}: {record.case.world_size - count} of {record.case.world_size} ranks, which were not read"


def _steps(steps: Collection[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"


_SEEN = {
    ("memory", "smallest_buffer_bytes"): "a buffer of {:,.0f} bytes that stays",
    ("memory", "smallest_leak_bytes"): "a leak of {:,.0f} bytes a step",
    ("communication", "smallest_message_bytes"): "a message of {:,.0f} bytes in any step",
    ("communication", "smallest_setup_message_bytes"): "one of {:,.0f} in a step that sets up",
}


def smallest_seen(records: Sequence[Record]) -> str:
    """Return the smallest excess that every one of these records' verdicts would have failed, in words."""
    found: dict[tuple[str, str], float] = {}
    for record in records:
        for verdict in record.verdicts:
            for key in _SEEN:
                if key[0] == verdict.suite and key[1] in verdict.evidence:
                    found[key] = max(found.get(key, 0.0), float(verdict.evidence[key[1]]))
    return ", ".join(text.format(found[key]) for key, text in _SEEN.items() if key in found)
