"""The clauses of conformance: requirements for any framework, and the scenarios that test them.

Records on disk can be judged again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from meshmark.conformance import judges, randomness
from meshmark.conformance.finding import ClauseResult, Defect, Finding
from meshmark.conformance.scenario import SCENARIOS
from meshmark.records.record import Record, Status


@dataclass(frozen=True, kw_only=True)
class Clause:
    """One requirement."""

    name: str
    statement: str
    scenarios: tuple[str, ...]
    """Scenarios whose records `judge` takes, in this order."""
    judge: judges.Judge


def judge_clause(clause: Clause, records: Mapping[str, Record]) -> Finding:
    """Return the finding of `clause` from the records of its scenarios, by name."""
    needed = [records[name] for name in clause.scenarios]
    found = _obstacle(needed) or clause.judge(*needed)
    if found.result is ClauseResult.FAIL and found.defect is None:
        defects = (defect for record in needed for defect in _defects(record, found.evidence))
        found = replace(found, defect=next(defects, None))
    covering = [g for g in needed[0].conformance.known_gaps if g.covers(needed[0].case, clause.name)]
    gap = next((g for g in covering if g.symptom in found.evidence), covering[0] if covering else None)
    if gap is None or found.result in (ClauseResult.UNSUPPORTED, ClauseResult.UNDECIDED, ClauseResult.TOLD):
        return found
    if found.result is ClauseResult.FAIL and gap.symptom not in found.evidence:
        return found  # another failure than the known one
    result = ClauseResult.STALE_GAP if found.result is ClauseResult.PASS else ClauseResult.KNOWN_GAP
    return Finding(result=result, evidence=f"{gap.reason} ({found.evidence})", link=gap.link)


def point_back(name: str, found: Finding, earlier: Mapping[str, Finding]) -> Finding:
    """Return `found`, shortened to one line if a clause before `name` fails because of the same defect."""
    for other, before in earlier.items():
        if other == name:
            break
        if found.defect and before.defect and before.result is found.result and before.defect.explains(found.defect):
            return replace(found, evidence=f"as in clause {other}: {found.defect.title}")
    return found


def _defects(record: Record, evidence: str) -> Iterator[Defect]:
    """Yield the defects of `record` that the evidence of a failure mentions."""
    plain, diagnosis = record.conformance.scenario == "plain", record.equivalence.diagnosis
    if diagnosis and diagnosis.text in evidence:
        yield Defect(kind=diagnosis.fault, detail=diagnosis.detail, plain=plain)
    for verdict in record.verdicts:
        if not verdict.passed and verdict.suite != "equivalence" and verdict.summary in evidence:
            what = verdict.evidence.get("category") or verdict.evidence.get("kind") or verdict.summary
            yield Defect(kind=f"{verdict.suite}: {what}", detail=verdict.summary, plain=plain)


def _obstacle(records: list[Record]) -> Finding | None:
    """Return a finding if there is nothing to judge, because a scenario was skipped or did not end, otherwise None."""
    for record in records:
        outcome = record.outcome
        if outcome.status is Status.SKIPPED:
            return Finding(result=ClauseResult.UNSUPPORTED, evidence=outcome.message)
        slow, timed_out = outcome.status is Status.SLOW, outcome.status in (Status.SLOW, Status.HUNG)
        if outcome.status is not Status.OK and (slow or SCENARIOS[record.conformance.scenario].ends is Status.OK):
            where = "" if outcome.rank is None else f" on rank {outcome.rank}"
            message = f"{record.conformance.scenario}: {outcome.status}{where}: {outcome.message}"
            kind = outcome.status if timed_out else f"{outcome.status}: {outcome.message}"
            defect = Defect(kind=kind, detail=outcome.message, plain=record.conformance.scenario == "plain")
            return Finding(
                result=ClauseResult.UNDECIDED if slow else ClauseResult.FAIL, evidence=message, defect=defect
            )
    return None


CLAUSES: dict[str, Clause] = {
    clause.name: clause
    for clause in (
        Clause(
            name="loss", statement="The loss of every step is the global mean.", scenarios=("plain",), judge=judges.loss
        ),
        Clause(
            name="gradients",
            statement="Every gradient of every step is right.",
            scenarios=("plain",),
            judge=judges.gradients,
        ),
        Clause(
            name="parameters",
            statement="The start is the prescribed one, and every update is right.",
            scenarios=("plain",),
            judge=judges.parameters,
        ),
        Clause(
            name="replicas",
            statement="What several ranks hold is equal bit for bit, after every step.",
            scenarios=("plain",),
            judge=judges.replicas,
        ),
        Clause(
            name="sharding",
            statement="Ranks hold the bytes of states that the layout promises, no more.",
            scenarios=("plain",),
            judge=judges.verdict("memory", "has nothing to shard"),
        ),
        Clause(
            name="traffic",
            statement="A step sends the bytes that theory asks for.",
            scenarios=("plain",),
            judge=judges.verdict("communication", "sends nothing"),
        ),
        Clause(
            name="evaluation",
            statement="Evaluation computes the loss that training does, and leaves no trace.",
            scenarios=("clipping",),
            judge=judges.evaluation,
        ),
        Clause(
            name="accumulation",
            statement="N micro-batches equal one large batch.",
            scenarios=("accumulation",),
            judge=judges.equivalent,
        ),
        Clause(
            name="uneven tokens",
            statement="Ranks and micro-batches with unequal numbers of tokens weigh by token.",
            scenarios=("uneven",),
            judge=judges.uneven,
        ),
        Clause(
            name="clipping",
            statement="Clipping by the global norm is right while active, and so is the norm reported.",
            scenarios=("clipping",),
            judge=judges.clipping,
        ),
        Clause(
            name="decay groups",
            statement="Norms and biases without weight decay, in a group of their own.",
            scenarios=("groups",),
            judge=judges.equivalent,
        ),
        Clause(
            name="frozen",
            statement="Frozen parameters stay bit for bit, the others train as they should.",
            scenarios=("frozen",),
            judge=judges.frozen,
        ),
        Clause(
            name="unfrozen",
            statement="Parameters that are unfrozen while training train from that step on.",
            scenarios=("unfrozen",),
            judge=judges.frozen,
        ),
        Clause(
            name="schedule",
            statement="Every step uses its own learning rate.",
            scenarios=("schedule",),
            judge=judges.equivalent,
        ),
        Clause(
            name="tied embeddings",
            statement="Embedding and head share a weight, across pipeline stages too.",
            scenarios=("tied",),
            judge=judges.equivalent,
        ),
        Clause(
            name="unused",
            statement="A step leaves parameters that it does not use, and their moments, alone.",
            scenarios=("unused",),
            judge=judges.equivalent,
        ),
        Clause(
            name="dropout",
            statement="Dropout is as strong as asked, fresh in every step and on every "
            "data-parallel rank, one on tensor-parallel ranks, and off in evaluation.",
            scenarios=("dropout",),
            judge=randomness.dropout,
        ),
        Clause(
            name="recomputation",
            statement="Computing activations again changes nothing but what is held.",
            scenarios=("plain", "recompute"),
            judge=judges.recomputes,
        ),
        Clause(
            name="recomputed dropout",
            statement="Computing activations again draws the masks of the forward pass again.",
            scenarios=("dropout", "recomputed dropout"),
            judge=randomness.draws_again,
        ),
        Clause(
            name="bf16 masters",
            statement="In bf16, updates below a bf16 ulp are not lost: masters are fp32.",
            scenarios=("bf16",),
            judge=judges.masters,
        ),
        Clause(
            name="bf16 states",
            statement="In bf16, moments, gradients and reduction are as precise as declared.",
            scenarios=("bf16",),
            judge=judges.declared_precision,
        ),
        Clause(
            name="bf16 reduction",
            statement="Asked to reduce gradients in bf16, it does; moments stay as precise as declared.",
            scenarios=("bf16 reduction",),
            judge=judges.reduced,
        ),
        Clause(
            name="fp16 overflow",
            statement="An overflow on one rank skips the step on all, and leaves no trace.",
            scenarios=("fp16",),
            judge=judges.overflow,
        ),
        Clause(
            name="resume",
            statement="Save, load in fresh processes and go on equals never having stopped.",
            scenarios=("save", "resume"),
            judge=judges.resumes,
        ),
        Clause(
            name="reshard",
            statement="The same on another world size.",
            scenarios=("save", "reshard"),
            judge=judges.resumes,
        ),
        Clause(
            name="recovery",
            statement="A rank is killed, all start again from the last checkpoint: as if none had been.",
            scenarios=("lost rank", "recovery"),
            judge=judges.recovers,
        ),
        Clause(
            name="determinism",
            statement="Whether two runs are equal bit for bit. It is reported, not required.",
            scenarios=("schedule", "save"),
            judge=judges.deterministic,
        ),
        Clause(
            name="memory growth",
            statement=f"No memory is kept from step to step over {SCENARIOS['endure'].steps}.",
            scenarios=("endure",),
            judge=judges.endures,
        ),
        Clause(
            name="error",
            statement="An error on one rank ends the case with its message; its peers end too, and do not hang.",
            scenarios=("error",),
            judge=judges.ends,
        ),
    )
}
