"""Judges of clauses: pure functions from the records of their scenarios to findings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from meshmark.conformance.finding import ClauseResult, Finding, all_of, decide, drift_text
from meshmark.judge.deviation import QuantityKind, by_replica, num_replicas
from meshmark.judge.tolerance_model import MULTIPLES, compare, gradient_norms
from meshmark.measure.laps import Interval, mean_interval
from meshmark.passes.clauses import MESSAGE
from meshmark.passes.observe import MOST_LEFT_OUT
from meshmark.records.record import MemoryEvidence, PeerEnd, Record, Status
from meshmark.reference.data import make_batch
from meshmark.spec.precision import NARROW
from meshmark.text import pluralize, some_of
from meshmark.theory.traffic import METERED_STEP

GROWTH_BYTES = 64.0
"""Growth in bytes per step that is tolerated. Correct engines keep nothing; a few bytes are Python's own lists."""
GROWTH_BLOCK = 8
"""Number of steps per block. The minimum of each block is compared with that of the next.

The C library's count fluctuates by kilobytes from step to step, with temporaries of other threads.
"""
WIDER = 0.03
"""Share of a precision's noise. A run whose worst gradient is closer to the truth was computed in a wider
precision.

A correct run reaches half of its noise or more; fp32 under the name of bf16 reaches a ten-thousandth.
"""

LEAST_SAVED = 0.5
"""Least share of the planned savings of activations that recomputation must reach.

Even where kernels save other activations than planned (a GPU's attention), most of them are the same.
"""

Judge = Callable[..., Finding]


def _alone(record: Record, what: str) -> Finding | None:
    """Return a finding for one rank, which cannot be judged, or None for several."""
    return (
        Finding(result=ClauseResult.UNSUPPORTED, evidence=f"one rank {what}") if record.case.world_size == 1 else None
    )


def _within(record: Record, *kinds: QuantityKind) -> Finding:
    """Judge that every compared quantity of these kinds is within its tolerance."""
    tolerance_model = record.equivalence.tolerance_model
    excesses = [e for e in tolerance_model.judge(record.equivalence.deviations) if e[1].kind in kinds]
    if not excesses:
        return decide(False, f"nothing to compare of {', '.join(kinds)}")
    excess, quantity, step = max(excesses)
    factor = tolerance_model.factor_of(quantity)
    evidence = f"worst of {len(excesses)}: {quantity} at step {step}, {excess * factor:.3g} x its noise where "
    evidence += f"{factor:.2f} x is allowed"
    if excess > 1 and record.equivalence.diagnosis:
        evidence += f"; {record.equivalence.diagnosis.text}"
    return decide(excess <= 1, evidence)


def equivalent(record: Record) -> Finding:
    """Judge by the verdict of equivalence."""
    verdict = record.verdict("equivalence")
    if verdict is None:
        return decide(False, "not judged")
    if verdict.undecided:
        return Finding(result=ClauseResult.UNDECIDED, evidence=verdict.summary)
    evidence = verdict.summary if verdict.passed else str(verdict.evidence.get("diagnosis", verdict.summary))
    return decide(verdict.passed, evidence)


def verdict(suite: str, what: str) -> Judge:
    def judge(record: Record) -> Finding:
        verdict = record.verdict(suite)
        if verdict is None:
            reasons = [why for why in record.not_judged if why.startswith(f"{suite}: ")]
            return Finding(result=ClauseResult.UNSUPPORTED, evidence="; ".join(reasons) or f"{suite}: not judged")
        return _alone(record, what) or decide(verdict.passed, verdict.summary)

    return judge


def loss(record: Record) -> Finding:
    return _within(record, QuantityKind.LOSS, QuantityKind.TWIN_LOSS)


def gradients(record: Record) -> Finding:
    return _within(record, *MULTIPLES, *MULTIPLES.values())


def parameters(record: Record) -> Finding:
    if elsewhere := record.equivalence.wrong_start:
        return decide(False, f"{len(elsewhere)} initial values differ, first {elsewhere[0]}")
    return _within(record, QuantityKind.PARAMETERS)


def replicas(record: Record) -> Finding:
    if alone := _alone(record, "has no replicas"):
        return alone
    if num_replicas(record.case) > 1:
        differ = f"by {record.case.workload.algorithm.kind}, replicas may differ"
        return Finding(result=ClauseResult.UNSUPPORTED, evidence=differ)
    found = record.equivalence
    if not found.num_replicated:
        return Finding(result=ClauseResult.UNSUPPORTED, evidence="no tensor is held by two ranks")
    reported = f"{pluralize(found.num_replicated, 'tensor')} reported by several ranks, {drift_text(found.drifts)}"
    if found.drifts and found.diagnosis:
        reported += f"; {found.diagnosis.text}"
    return decide(not found.drifts, reported)


def _compared(record: Record, kind: QuantityKind) -> bool:
    """Return whether quantities of this kind were compared on any replica."""
    return any(quantity.kind is kind for quantity in record.equivalence.deviations)


def evaluation(record: Record) -> Finding:
    if not _compared(record, QuantityKind.EVALUATION):
        return Finding(result=ClauseResult.UNSUPPORTED, evidence="the adapter has no evaluation")
    # Training must continue as if there had been no evaluation.
    return all_of(_within(record, QuantityKind.EVALUATION), equivalent(record))


def uneven(record: Record) -> Finding:
    layout, workload = record.case.layout, record.case.workload
    counts = [
        int(micro.weights.sum())
        for step in range(record.steps)
        for rank in range(layout.dp)
        for micro in make_batch(workload, step).shard(rank, layout.dp).micro_batches(layout.num_micro_batches)
    ]
    differ = decide(min(counts) < max(counts), f"{min(counts)} to {max(counts)} tokens a micro-batch")
    return all_of(differ, equivalent(record))


def clipping(record: Record) -> Finding:
    limit = record.case.workload.optimizer.clip_norm or math.inf
    replicas = by_replica(record.equivalence.deviations, num_replicas(record.case))
    norms = [norm for own in replicas for norm in gradient_norms(own)]
    clipped = f"norms {min(norms):.3g} to {max(norms):.3g} clipped to {limit:g}"
    told = _compared(record, QuantityKind.NORM)
    reported = _within(record, QuantityKind.NORM) if told else decide(True, "the norm is not reported")
    found = all_of(_within(record, QuantityKind.PARAMETERS), reported, decide(True, clipped))
    if found.result is ClauseResult.PASS and max(norms) <= limit:
        why = (
            f"gradients have norms of {min(norms):.3g} to {max(norms):.3g}, and none is clipped to {limit:g}: give the "
        )
        return Finding(result=ClauseResult.UNSUPPORTED, evidence=why + "workload's optimizer a lower clip_norm")
    return found


def frozen(record: Record) -> Finding:
    """Judge that parameters keep their bits while they are frozen, and train as they should otherwise."""
    workload = record.case.workload
    fixed = {
        q: steps[: workload.unfreeze_step]
        for q, steps in record.equivalence.deviations.items()
        if q.kind is QuantityKind.PARAMETERS and not workload.trains_at_first(q.name)
    }
    moved = [q for q, steps in fixed.items() if any(d.distance for d in steps)]
    names, why = some_of([q.name for q in moved]), record.equivalence.diagnosis
    told = f" ({names}{f'; {why.detail}' if why else ''})" if moved else ""
    stayed = decide(bool(fixed) and not moved, f"{len(fixed)} frozen parameters, {len(moved)} of them moved{told}")
    return all_of(stayed, equivalent(record))


def masters(record: Record) -> Finding:
    """Judge that the values of every parameter use the masters' precision.

    A single tensor's dtype does not show this.
    """
    dtypes, asked = record.memory.state_dtypes, record.case.precision.master
    kept = dtypes.get("parameters") or record.unmeasured.get("memory", "nothing")
    used = dtypes.get("masters", asked)  # records of before do not tell
    return all_of(
        decide(asked in kept.split("+"), f"parameters kept in {kept}"),
        decide(used == asked, f"values of parameters are {used} numbers"),
        _within(record, QuantityKind.PARAMETERS),
    )


def declared_precision(record: Record) -> Finding:
    """Judge that gradients and moments have the declared precision.

    Gradients must be within their precision's noise and not rounder than requested, each tensor compared with the
    twin's if there is one. Moments, and the bytes of states
    and of the reduction, must be as declared.
    """
    precision = record.case.precision
    kept = record.memory.state_dtypes.get("optimizer_states") or record.unmeasured.get("memory", "nothing")
    moments = decide(kept == precision.states, f"moments in {kept}")
    reported = record.memory.state_dtypes.get("gradients", "")
    found = record.equivalence
    ratios = found.tolerance_model.ratios(compare(found.deviations))
    gradient_ratios = [ratio for ratio, quantity, _ in ratios if quantity.kind is QuantityKind.GRADIENTS]
    rough = max(gradient_ratios, default=0.0)
    really = decide(rough > WIDER, f"gradients at most {rough:.1e} x the noise of {precision}")
    asked = {NARROW[precision.reduction]} if _rounds(record) else {"", "float32"}
    if not _sums(record):  # where weights are cast, products leave values of the low format, and so they stay
        asked.add(NARROW.get(precision.compute, ""))
    reduced = decide(reported in asked, f"every value of every gradient is a {reported} number")
    rounded = f"{len(found.rounded)}, as {found.rounded[0]}" if found.rounded else "none"
    alone = decide(not found.rounded, f"gradients of narrow numbers where the twin's are not: {rounded}")
    judged = [v for v in record.verdicts if v.suite in ("memory", "communication")]
    return all_of(moments, reduced, alone, really, *(decide(v.passed, v.summary) for v in judged), gradients(record))


def _rounds(record: Record) -> bool:
    """Return whether the precision rounds gradients before they are sent to other ranks."""
    return record.case.precision.narrows_reduction and record.case.layout.dp > 1


def _sums(record: Record) -> bool:
    """Return whether a gradient is a sum over several micro-batches or ranks."""
    return record.case.layout.dp * record.case.layout.num_micro_batches > 1


def reduced(record: Record) -> Finding:
    """Judge the declared precision if there is a reduction."""
    if not _rounds(record):
        return Finding(result=ClauseResult.UNSUPPORTED, evidence="no gradient is reduced")
    return declared_precision(record)


def recomputes(kept: Record, recomputed: Record) -> Finding:
    """Judge that ranks hold what is planned and, on any device, less than the same run without recomputation."""
    held = recomputed.verdict("memory")
    planned = [decide(held.passed, held.summary)] if held else []
    return all_of(equivalent(recomputed), *planned, *_saved(kept.memory, recomputed.memory))


def _saved(kept: MemoryEvidence, recomputed: MemoryEvidence) -> list[Finding]:
    """Return findings by rank: activations saved by recomputation compared with the planned savings, if planned."""
    if not 0 < len(kept.readings) == len(recomputed.readings):
        return [decide(False, "memory was not read on every rank")]
    found = []
    for rank, (before, after) in enumerate(zip(kept.readings, recomputed.readings, strict=True)):
        if before.held is None or after.held is None:
            found.append(decide(False, f"rank {rank}: no backward pass was seen"))
            continue
        spared = before.held.activations - after.held.activations
        plans = [evidence.planned[rank] for evidence in (kept, recomputed)]
        whole, least = (plan.activations if plan else None for plan in plans)
        asked = 1.0
        if whole is not None and least is not None:
            # Below zero where blocks are so small that the random state which a checkpoint keeps is larger.
            asked = min(LEAST_SAVED * (whole - least), (whole - least) / LEAST_SAVED)
        found.append(decide(spared >= asked, f"rank {rank} spares {spared:,} bytes of {before.held.activations:,}"))
    return found


def overflow(record: Record) -> Finding:
    moved = [int(s["moved"][0]) for s in record.conformance.samples]
    skipped = decide(not any(moved), f"parameters moved by the overflowing step, by rank: {moved}")
    if (tried := record.training.left_out) >= MOST_LEFT_OUT:
        told = f"after it, {tried} attempts at later steps overflow as well, and none is taken"
        why = "are the gradients of a skipped step cleared, and does the loss scale fall?"
        return all_of(skipped, decide(False, f"{told} ({why})"))
    return all_of(skipped, equivalent(record))


def endures(record: Record) -> Finding:
    """Judge that memory does not grow between blocks of steps, from the metered step on.

    Growth is a mean over blocks, with its interval. A buffer that is allocated once affects one block and widens the
    interval; a leak affects all blocks.
    """
    growth = max(
        (_growth(sample["live_bytes"][METERED_STEP:]) for sample in record.conformance.samples),
        key=lambda interval: interval.mean - interval.half_width,
    )
    evidence = f"{growth.mean:+,.0f} ± {growth.half_width:,.0f} bytes a step over {record.steps} steps"
    return decide(growth.mean - growth.half_width <= GROWTH_BYTES, evidence)


def _growth(live: Sequence[float]) -> Interval:
    """Return the growth per step on one rank."""
    blocks = range(0, len(live) - GROWTH_BLOCK + 1, GROWTH_BLOCK)
    least = [min(live[start : start + GROWTH_BLOCK]) for start in blocks]
    return mean_interval([(after - before) / GROWTH_BLOCK for before, after in itertools.pairwise(least)])


def deterministic(first: Record, second: Record) -> Finding:
    """Report whether two runs are bitwise equal. This is not required."""
    digests = first.conformance.digests
    steps = [i for i, (a, b) in enumerate(zip(digests, second.conformance.digests, strict=True)) if a != b]
    same = f"bitwise equal over {len(digests) - 1} steps" if not steps else f"differs from step {steps[0] - 1} on"
    return Finding(result=ClauseResult.TOLD, evidence=f"two runs: {same}")


def resumes(never_stopped: Record, resumed: Record) -> Finding:
    later = never_stopped.conformance.digests[-len(resumed.conformance.digests) :]
    same = "bitwise equal to" if later == resumed.conformance.digests else "not bitwise equal to"
    found = equivalent(resumed)
    return decide(found.result is ClauseResult.PASS, f"{same} a run that never stopped; {found.evidence}")


def recovers(lost: Record, recovered: Record) -> Finding:
    outcome, last = lost.outcome, lost.case.world_size - 1
    killed = outcome.status is Status.KILLED and outcome.rank == last
    told = decide(killed, f"rank {outcome.rank} was lost: {outcome.status}")
    return all_of(told, equivalent(recovered)) if killed else told


def ends(record: Record) -> Finding:
    """Judge that the error is reported, and that under gloo no peer had to be ended.

    Gloo's peers notice the end because their connections break. NCCL's ranks wait until they are killed, and torchrun
    kills them at once.
    """
    outcome, last = record.outcome, record.case.world_size - 1
    right = outcome.status is Status.RAISED and outcome.rank == last and MESSAGE in outcome.message
    hung = [peer.rank for peer in outcome.peers if peer.kind == "ended"]
    reported = f"{outcome.status} on rank {outcome.rank} after {record.launch.seconds:.1f} s: {outcome.message}"
    if record.environment.backend == "gloo" and hung:
        return decide(False, f"{reported}; ranks {hung} went on until the launcher ended them")
    return decide(right, "; ".join([reported, *map(_peer_text, outcome.peers)]))


def _peer_text(peer: PeerEnd) -> str:
    if peer.kind == "done":
        return f"rank {peer.rank} came to its end without it"
    how = "ended by itself" if peer.by_itself else "was ended"
    return f"rank {peer.rank} {how}" + ("" if peer.seconds is None else f" {peer.seconds:.1f} s later ({peer.kind})")
