"""Judges a timed pass: that its steps are those whose gradients and updates were judged."""

from __future__ import annotations

from meshmark.judge.deviation import QuantityKind
from meshmark.run.record import Record, Verdict

_MEND = "`step` must do what `backward` and `update` do, however little of it is read"


def judge_throughput(record: Record) -> Verdict | None:
    """The losses of all steps, and the parameters after the last, are in every launch bit for bit those of the verified
    path: the steps that were judged, and as many more by the same `backward` and `update`; and ranks that hold the same
    hold the same after the last timed step. None where nothing was told of either.

    Where bits differ, another such pass has told whether this engine ever computes the same bits twice. If it does, the
    timed path is another one. If it does not (atomic additions, threads), bits say nothing, and the losses of the steps
    that were judged must agree as two correct runs do: each within the tolerance model's tolerance of the truth, and so
    within twice that of one another. Under a parameter server, which replica comes first is chance: from the first
    fetch on, two correct runs agree in nothing, and the losses before it are those that are compared.
    """
    timing, drifts = record.timing, record.equivalence.drifts
    path, losses = timing.observed, record.training.losses
    if drifts:
        first = drifts[0]
        return _verdict(f"replicas differ after timed steps: {first.quantity} on ranks {first.ranks}; {_MEND}", record)
    if path is None or not timing.digests:
        return None
    launches = [(losses, timing.digests), *((one.losses, one.digests) for one in timing.relaunches)]
    differences = [
        f"{told} in launch {number} of {len(launches)}" if len(launches) > 1 else told
        for number, told_of_launch in enumerate((path.differences(*launch) for launch in launches), 1)
        for told in told_of_launch
    ]
    if not differences:
        compared = min(len(losses), len(path.losses))
        marks = " and ".join(str(done) for done in _compared(record))
        each = f", in each of {len(launches)} launches" if len(launches) > 1 else ""
        summary = f"bit for bit what was judged: {compared} losses, parameters after {marks} steps{each}"
        return _verdict(summary, record, passed=True)
    until_chance = record.case.workload.algorithm.steps_until_chance
    if path.repeats is not False and until_chance is None:
        return _verdict(f"not what was judged: {differences[0]}; {_MEND}", record)
    tolerance_model = record.equivalence.tolerance_model
    num_steps = min(len(losses), path.num_judged, len(losses) if until_chance is None else until_chance)
    of_loss = [quantity for quantity in tolerance_model.noise if quantity.kind is QuantityKind.LOSS]  # of every replica
    tolerances = [
        2 * max(tolerance_model.tolerance(quantity, step) for quantity in of_loss) for step in range(num_steps)
    ]
    excess, step = max(
        (abs(own - other) / tolerance, i)
        for launch, _ in launches
        for i, (own, other, tolerance) in enumerate(zip(launch, path.losses, tolerances, strict=False))
    )
    what = f"losses, no two runs of which agree bit for bit, are {excess:.2f} of the tolerance apart at step {step}"
    return _verdict(what if excess <= 1 else f"not what was judged: {what}; {_MEND}", record, passed=excess <= 1)


def _compared(record: Record) -> list[int]:
    """After how many steps the parameters of both paths are known."""
    path = record.timing.observed
    return [done for done in record.timing.digests if path and path.digest(done) is not None]


def _verdict(summary: str, record: Record, *, passed: bool = False) -> Verdict:
    timing = record.timing
    last = max(timing.digests, default=0)
    evidence: dict[str, float | int | str] = {
        "losses_compared": min(len(record.training.losses), len(timing.observed.losses) if timing.observed else 0),
        "parameters_compared_after": max(_compared(record), default=0),
        "steps": last,
        "parameters_after_last_step": timing.digests.get(last, ""),
    }
    return Verdict(suite="throughput", passed=passed, summary=summary, evidence=evidence)
