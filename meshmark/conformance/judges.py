"""How clauses are judged: pure functions from the records of their scenarios to findings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from meshmark.conformance.finding import ClauseResult, Finding
from meshmark.judge.deviation import Drift, QuantityKind
from meshmark.judge.replicas import by_replica, num_replicas
from meshmark.judge.yardstick import FALSE_ALARMS, compare, gradient_norms
from meshmark.reference.data import make_batch
from meshmark.run.passes.fail import MESSAGE
from meshmark.run.record import Record, Status
from meshmark.spec.precision import Dtype

GROWTH_BYTES = 2048.0
"""A step: what memory may grow by. Tables inside gloo and the allocator, which fill slowly, were seen to take 900; one
micro-batch's activations, kept by a loss that is not detached, are a hundred times as much."""
EVALUATION_TOLERANCE = 1e-5
"""Relative, on the loss of evaluation where no noise is measured; dropout left on moves it by a hundred times that."""
SAME = 1e-5
"""Relative, between runs that differ in nothing but rounding; other masks move gradients by half a percent and more."""
TINY = 1e-30
WIDER = 0.03
"""Of a precision's noise: a run whose worst gradient is closer to the truth was computed in a wider one. A correct run
comes to half its noise and more, fp32 under the name of bf16 to a ten-thousandth."""

_SHORT = {Dtype.BF16: "bf16", Dtype.FP16: "fp16"}
"""As `state_dtypes` has the formats that gradients are rounded to."""

Judge = Callable[..., Finding]


def _finding(passed: bool, evidence: str) -> Finding:
    return Finding(result=ClauseResult.PASS if passed else ClauseResult.FAIL, evidence=evidence)


def _alone(record: Record, what: str) -> Finding | None:
    """A finding for one rank, of which nothing can be said."""
    return (
        Finding(result=ClauseResult.UNSUPPORTED, evidence=f"one rank {what}") if record.case.world_size == 1 else None
    )


def _within(record: Record, *kinds: QuantityKind) -> Finding:
    """Every compared quantity of these kinds within its tolerance."""
    yardstick, run = record.equivalence.yardstick, compare(record.equivalence.deviations)
    excesses = [e for e in yardstick.excesses(run) if e[1].kind in kinds]
    if not excesses:
        return _finding(False, f"nothing to compare of {', '.join(kinds)}")
    excess, quantity, step = max(excesses)
    factor = yardstick.factor_of(quantity)
    evidence = f"worst of {len(excesses)}: {quantity} at step {step}, {excess * factor:.3g} x its noise where "
    evidence += f"{factor:.2f} x is allowed"
    if excess > 1 and record.equivalence.diagnosis:
        evidence += f"; {record.equivalence.diagnosis.text}"
    return _finding(excess <= 1, evidence)


def _all_of(*findings: Finding) -> Finding:
    """The first that fails, or all."""
    failed = next((f for f in findings if f.result is not ClauseResult.PASS), None)
    return failed or _finding(True, "; ".join(f.evidence for f in findings))


def equivalent(record: Record) -> Finding:
    """The whole verdict of equivalence."""
    verdict = record.verdict("equivalence")
    if verdict is None:
        return _finding(False, "not judged")
    evidence = verdict.summary if verdict.passed else str(verdict.evidence.get("diagnosis", verdict.summary))
    return _finding(verdict.passed, evidence)


def verdict(suite: str, what: str) -> Judge:
    def judge(record: Record) -> Finding:
        verdict = record.verdict(suite)
        assert verdict is not None
        return _alone(record, what) or _finding(verdict.passed, verdict.summary)

    return judge


def loss(record: Record) -> Finding:
    return _within(record, QuantityKind.LOSS)


def gradients(record: Record) -> Finding:
    return _within(record, QuantityKind.GRADIENTS, QuantityKind.SCALE)


def parameters(record: Record) -> Finding:
    if elsewhere := record.equivalence.wrong_start:
        return _finding(False, f"{len(elsewhere)} initial values differ, first {elsewhere[0]}")
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
    reported = f"{found.num_replicated} tensors reported by several ranks, {_drift_text(found.drifts)}"
    if found.drifts and found.diagnosis:
        reported += f"; {found.diagnosis.text}"
    return _finding(not found.drifts, reported)


def _drift_text(drifts: list[Drift]) -> str:
    if not drifts:
        return "equal bit for bit"
    first = drifts[0]
    return f"{len(drifts)} differ, first {first.quantity} at step {first.step} on ranks {first.ranks}"


def _compared(record: Record, kind: QuantityKind) -> bool:
    """Whether quantities of this kind were, of whichever replica."""
    return any(quantity.kind is kind for quantity in record.equivalence.deviations)


def evaluation(record: Record) -> Finding:
    if not _compared(record, QuantityKind.EVALUATION):
        return Finding(result=ClauseResult.UNSUPPORTED, evidence="the adapter has no evaluation")
    # Training goes on as if it had not been.
    return _all_of(_within(record, QuantityKind.EVALUATION), equivalent(record))


def uneven(record: Record) -> Finding:
    layout, workload = record.case.layout, record.case.workload
    counts = [
        int(micro.weights.sum())
        for step in range(record.steps)
        for rank in range(layout.dp)
        for micro in make_batch(workload, step).shard(rank, layout.dp).micro_batches(layout.num_micro_batches)
    ]
    found = equivalent(record)
    return _finding(
        found.result is ClauseResult.PASS, f"{min(counts)} to {max(counts)} tokens a micro-batch; {found.evidence}"
    )


def clipping(record: Record) -> Finding:
    limit = record.case.workload.optimizer.clip_norm or math.inf
    replicas = by_replica(record.equivalence.deviations, num_replicas(record.case))
    norms = [norm for own in replicas for norm in gradient_norms(own)]
    active = _finding(min(norms) > limit, f"norms {min(norms):.3g} to {max(norms):.3g} clipped to {limit:g}")
    told = _compared(record, QuantityKind.NORM)
    reported = _within(record, QuantityKind.NORM) if told else _finding(True, "the norm is not reported")
    return _all_of(_within(record, QuantityKind.PARAMETERS), reported, active)


def frozen(record: Record) -> Finding:
    workload = record.case.workload
    fixed = {
        q: steps
        for q, steps in record.equivalence.deviations.items()
        if q.kind is QuantityKind.PARAMETERS and not workload.trains(q.name)
    }
    moved = [q for q, steps in fixed.items() if any(d.distance for d in steps)]
    stayed = _finding(bool(fixed) and not moved, f"{len(fixed)} frozen parameters, {len(moved)} of them moved")
    return _all_of(stayed, equivalent(record))


def masters(record: Record) -> Finding:
    kept = record.memory.state_dtypes.get("parameters") or record.unmeasured.get("memory", "nothing")
    wide = _finding(record.case.precision.master in kept.split("+"), f"parameters kept in {kept}")
    return _all_of(wide, _within(record, QuantityKind.PARAMETERS))


def declared_precision(record: Record) -> Finding:
    """Gradients within their precision's noise and no rounder than asked; moments, and the bytes of states and of the
    reduction, as declared."""
    precision = record.case.precision
    kept = record.memory.state_dtypes.get("optimizer_states") or record.unmeasured.get("memory", "nothing")
    moments = _finding(kept == precision.states, f"moments in {kept}")
    reported = record.memory.state_dtypes.get("gradients", "")
    found = record.equivalence
    ratios = found.yardstick.ratios(compare(found.deviations))
    gradient_ratios = [ratio for ratio, quantity, _ in ratios if quantity.kind is QuantityKind.GRADIENTS]
    rough = max(gradient_ratios, default=0.0)
    really = _finding(rough > WIDER, f"gradients at most {rough:.1e} x the noise of {precision}")
    asked = {_SHORT[precision.reduction]} if _rounds(record) else {"", "float32"}
    reduced = _finding(reported in asked, f"every value of every gradient is a {reported} number")
    judged = [v for v in record.verdicts if v.suite in ("memory", "communication")]
    return _all_of(moments, reduced, really, *(_finding(v.passed, v.summary) for v in judged), gradients(record))


def _rounds(record: Record) -> bool:
    """Whether the precision asks for gradients that are rounded, on their way to other ranks."""
    return record.case.precision.narrows_reduction and record.case.layout.dp > 1


def reduced(record: Record) -> Finding:
    """As declared, where there is a reduction."""
    if not _rounds(record):
        return Finding(result=ClauseResult.UNSUPPORTED, evidence="no gradient is reduced")
    return declared_precision(record)


def dropout(record: Record) -> Finding:
    samples, drifts = record.conformance.samples, record.equivalence.drifts
    losses = [np.array(s["losses"]) for s in samples if any(s["losses"])]
    first, draws = samples[0], np.concatenate(losses)
    reference = np.array(first["reference"])
    again = sum(len(own) - len(set(own)) for own in losses)
    alike = sum(float(np.sum(a == b)) for i, a in enumerate(losses) for b in losses[:i])
    chance = len(draws) // 16  # float32 has some 1e5 numbers in the spread of the losses: a pair may be equal
    z = statistics.NormalDist().inv_cdf(1 - FALSE_ALARMS / 8)
    away = _away(draws, reference)
    spread = math.log(max(draws.std(ddof=1), TINY) / max(reference.std(ddof=1), TINY))
    # The logarithm of a sample's standard deviation scatters by 1 / sqrt(2 (n - 1)), if its draws are near normal.
    spread /= math.sqrt(0.5 / (len(draws) - 1) + 0.5 / (len(reference) - 1))
    along, size = (_away(np.array(first[n]), np.array(first[f"reference_{n}"])) for n in ("along", "size"))
    few = student(z, len(first["size"]) - 1)
    shift = first["evaluation"][0] / first["exact"][0] - 1
    return _all_of(
        _finding(again <= chance, f"{again} of {len(draws)} losses came twice on a rank"),
        _finding(alike <= chance, f"{int(alike)} losses equal on different data-parallel ranks"),
        _finding(
            abs(away) < z and abs(spread) < z,
            f"mean {away:+.1f} and spread {spread:+.1f} standard errors from plain PyTorch's, {z:.1f} allowed",
        ),
        _finding(
            abs(along) < few and abs(size) < few,
            f"gradients {along:+.1f} in multiple and {size:+.1f} in size of "
            f"the exact ones, {few:.1f} standard errors allowed",
        ),
        _finding(not drifts, f"gradients reported by several ranks {_drift_text(drifts)}"),
        _finding(abs(shift) < EVALUATION_TOLERANCE, f"evaluation without dropout off by {shift:.1e}"),
    )


def recomputes(record: Record) -> Finding:
    """Ranks hold what is planned, which without recomputation they could not."""
    held = record.verdict("memory")
    assert held is not None
    planned = any(states and states.activations for states in record.memory.planned)
    if "memory" not in record.unmeasured and not planned:
        return equivalent(record)
    return _all_of(equivalent(record), _finding(held.passed, held.summary))


def draws_again(kept: Record, recomputed: Record) -> Finding:
    """The first step's forward pass draws the same masks from the same seed; so must its gradient, if its backward pass
    draws them again."""
    loss = abs(recomputed.training.losses[0] / kept.training.losses[0] - 1)
    gradients = [
        abs(recomputed.conformance.samples[0][name][0] / kept.conformance.samples[0][name][0] - 1)
        for name in ("along", "size")
    ]
    return _all_of(
        _finding(loss < SAME, f"loss of the first step {loss:.1e} from that without recomputation"),
        _finding(max(gradients) < SAME, f"its gradients {max(gradients):.1e}"),
    )


def _away(draws: NDArray[np.float64], reference: NDArray[np.float64]) -> float:
    """The difference of two means in standard errors."""
    error = math.sqrt(draws.var(ddof=1) / len(draws) + reference.var(ddof=1) / len(reference))
    return float(draws.mean() - reference.mean()) / max(error, TINY)


def student(z: float, freedom: int) -> float:
    """Where Student's t is as unlikely as a normal variable beyond `z` (Abramowitz and Stegun, 26.7.5)."""
    return float(z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2))


def overflow(record: Record) -> Finding:
    moved = [int(s["moved"][0]) for s in record.conformance.samples]
    skipped = _finding(not any(moved), f"parameters moved by the overflowing step, by rank: {moved}")
    return _all_of(skipped, equivalent(record))


def endures(record: Record) -> Finding:
    """The least in use in the last third of the steps, over the least in the second: peaks that come and go cancel."""
    third = record.steps // 3
    apart = record.steps - 2 * third
    growth = [
        (min(live[-third:]) - min(live[third : 2 * third])) / apart
        for live in (sample["live_bytes"] for sample in record.conformance.samples)
    ]
    return _finding(max(growth) <= GROWTH_BYTES, f"{max(growth):+,.0f} bytes a step over {record.steps} steps")


def deterministic(first: Record, second: Record) -> Finding:
    """Reported, not required."""
    steps = [
        i for i, (a, b) in enumerate(zip(first.conformance.digests, second.conformance.digests, strict=True)) if a != b
    ]
    same = (
        f"bitwise equal over {len(first.conformance.digests) - 1} steps"
        if not steps
        else f"differs from step {steps[0] - 1} on"
    )
    return _finding(True, f"two runs: {same}")


def resumes(never_stopped: Record, resumed: Record) -> Finding:
    later = never_stopped.conformance.digests[-len(resumed.conformance.digests) :]
    same = "bitwise equal to" if later == resumed.conformance.digests else "not bitwise equal to"
    found = equivalent(resumed)
    return _finding(found.result is ClauseResult.PASS, f"{same} a run that never stopped; {found.evidence}")


def ends(record: Record) -> Finding:
    outcome, last = record.outcome, record.case.world_size - 1
    right = outcome.status is Status.RAISED and outcome.rank == last and MESSAGE in outcome.message
    reported = f"{outcome.status} on rank {outcome.rank} after {record.launch.seconds:.1f} s: {outcome.message}"
    return _finding(right, reported)
