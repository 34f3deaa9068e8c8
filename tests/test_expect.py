"""Messages of failing tests, and their order."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence

import pytest

from meshmark.conformance.clauses import CLAUSES, judge_clause, point_back
from meshmark.conformance.finding import ClauseResult
from meshmark.conformance.scenario import SCENARIOS, Scenario
from meshmark.conformance.scenario_runner import ScenarioRunner
from meshmark.judge.deviation import Drift, Quantity
from meshmark.judge.faults import Diagnosis, Fault
from meshmark.measure import flight_recorder
from meshmark.pytest_plugin.plugin import expect, expect_clause
from meshmark.records.record import Outcome, Record, Status
from meshmark.report.conformance import columns
from meshmark.report.failure_text import MOST_LINES
from meshmark.run.verdict import judge_equivalence
from meshmark.spec.case import Case
from tests.factories import make_case, make_good, make_verdict
from tests.test_conformance import GAP, WRONG, plain, plain_conformance, plain_equivalence

BASE = make_case()
REDUCTION = Diagnosis(fault=Fault.NOT_REDUCED, step=0, names=["head.norm.bias"], num_names=30, detail="no rank reduced")
HALF = Diagnosis(fault=Fault.SCALED, step=0, names=["head.norm.bias"], num_names=30, detail="0.5 = 1/dp")


def failure(call: Callable[[], None]) -> str:
    with pytest.raises(pytest.fail.Exception) as raised:
        call()
    return str(raised.value.msg)


def wrong(scenario: str = "plain", diagnosis: Diagnosis = REDUCTION, drifts: Sequence[Drift] = ()) -> Record:
    wrong_gradient = {Quantity.parse("gradients/head.norm.bias"): [WRONG] * 2}
    deviations = plain_equivalence().deviations | wrong_gradient
    record = plain(
        conformance=plain_conformance(scenario=scenario, base=BASE),
        equivalence=plain_equivalence(diagnosis=diagnosis, deviations=deviations, drifts=list(drifts)),
    )
    return dataclasses.replace(record, verdicts=[judge_equivalence(record), *record.verdicts[1:]])


def test_the_diagnosis_comes_first() -> None:
    lines = failure(lambda: expect(wrong(), "equivalence")).splitlines()
    assert lines[0] == f"{BASE.id}: {REDUCTION.text}"
    assert lines[1].startswith("  how much") and "x its noise" in lines[1]
    assert lines[2].startswith("  where") and "gradients/head.norm.bias, step 1" in lines[2]
    assert re.search(r"off +\d+ of \d+ comparisons", lines[3])
    assert len(lines) <= MOST_LINES


def test_without_a_diagnosis_the_summary_does() -> None:
    record = make_good()
    verdict = dataclasses.replace(record.verdicts[1], passed=False)
    lines = failure(lambda: expect(dataclasses.replace(record, verdicts=[verdict]), "memory")).splitlines()
    assert lines[0] == f"{record.case.id}: {verdict.summary}"


def test_bytes_say_where_how_much_and_what_to_mend() -> None:
    facts = {
        "category": "activations",
        "rank": 1,
        "measured_bytes": 2000.0,
        "planned_bytes": 1000.0,
        "declared": "cats",
    }
    verdict = make_verdict("memory", passed=False, summary="activations: 2,000 bytes; mend it; or that", evidence=facts)
    lines = failure(lambda: expect(dataclasses.replace(make_good(), verdicts=[verdict]), "memory")).splitlines()
    assert lines[0].endswith(": activations: 2,000 bytes")
    assert [line.split(maxsplit=1)[0] for line in lines[1:]] == ["where", "how", "declared", "mend", "mend"]
    assert "activations on rank 1" in lines[1] and "+1,000 bytes of 1,000" in lines[2]


def test_a_crash_inside_a_meter_is_placed_in_the_code_that_was_metered() -> None:
    frames = [("meshmark/launch/rank.py", "run"), ("engine.py", "step"), ("meshmark/measure/meters.py", "observe")]
    stack = "".join(f'  File "/site/{file}", line 3, in {name}\n' for file, name in frames)
    outcome = Outcome(status=Status.RAISED, rank=1, message="ValueError: no", traceback=stack)
    text = failure(lambda: expect(dataclasses.replace(make_good(), outcome=outcome), "memory"))
    assert re.search(r"where +/site/engine.py:3 in step", text)
    adapter = dataclasses.replace(outcome, traceback=stack.replace("measure/meters", "adapters/ddp"))
    text = failure(lambda: expect(dataclasses.replace(make_good(), outcome=adapter), "memory"))
    assert re.search(r"where +/site/meshmark/adapters/ddp.py:3 in observe", text)


def test_a_crash_says_where_and_a_hang_where_each_rank_stands() -> None:
    trace = 'Traceback:\n  File "a.py", line 3, in outer\n  File "b.py", line 7, in inner\n' + "ValueError: no\n" * 50
    raised = Outcome(status=Status.RAISED, rank=1, message="ValueError: no\nsecond line", traceback=trace)
    lines = failure(lambda: expect(make_good(outcome=raised, verdicts=[]), "equivalence")).splitlines()
    assert lines[0].endswith("raised on rank 1: ValueError: no") and "second line" in lines[1]
    assert "b.py:7 in inner" in lines[2] and len(lines) == 3
    library = f'File "{json.__file__}", line 5 in wait'
    stacks = {
        r: f'Thread 0x1 (most recent call first):\n  {library}\n  File "own{r}.py", line 9 in step' for r in range(9)
    }
    hung = Outcome(status=Status.HUNG, message="no end within 8 s", stacks=stacks)
    lines = failure(lambda: expect(make_good(outcome=hung, verdicts=[]), "equivalence")).splitlines()
    assert lines[1].endswith("in wait < own0.py:9 in step") and 4 < len(lines) <= MOST_LINES


def hung_over_nccl(*collectives: str) -> list[str]:
    """Return the text of a pass that hung, by what each rank was communicating. The stacks are those of an H200, where
    the thread that reads the flight recorder stands before the main thread."""
    reader = f'Thread 0x1 (most recent call first):\n  File "{flight_recorder.__file__}", line 58 in dump\n'
    main = 'Current thread 0x2 (most recent call first):\n  File "/site/engine.py", line 9 in backward\n'
    title = "The last collective that ended, and those under way:"
    stacks = {rank: f"{reader}\n{main}\n\n{title}\n{lines}" for rank, lines in enumerate(collectives)}
    hung = Outcome(status=Status.HUNG, rank=1, message="no end within 20 s", stacks=stacks)
    return failure(lambda: expect(make_good(outcome=hung, verdicts=[]), "equivalence")).splitlines()


def collective(number: int, sizes: str, state: str = "scheduled", call: str = "nccl:all_reduce") -> str:
    return f"{call}, number {number} of group 0 default_pg, of {sizes}: {state}\n"


def test_a_hang_says_which_collective_differs_between_ranks() -> None:
    ended = collective(7, "Float [42880]", "completed")
    gradients, odd = collective(8, "Float [42880]"), collective(8, "Float [7]")
    lines = hung_over_nccl(ended + gradients, ended + odd + collective(9, "Float [42880]"))
    assert (
        lines[1].split()
        == (
            "differs collective 8 of group 0 default_pg: nccl:all_reduce of Float [42880] on rank 0, "
            "nccl:all_reduce of Float [7] on rank 1"
        ).split()
    )
    assert lines[2].split() == ["rank", "0", "/site/engine.py:9", "in", "backward"]
    lines = hung_over_nccl(ended, ended + gradients)
    assert lines[1].split()[0] == "missing" and lines[1].endswith("on rank 1, not called on rank 0")


@pytest.mark.parametrize(
    "second",
    [
        collective(3, "Float [5]", "completed") + collective(4, "Float [6]"),
        collective(3, "Float [5]", "completed")
        + "nccl:send 0->1, number 9 of group 0 default_pg, of Float [2]: scheduled\n",
        "nothing was communicated\n",
    ],
    ids=["agree", "sends", "silent"],
)
def test_collectives_on_which_ranks_agree_are_not_named(second: str) -> None:
    first = collective(3, "Float [5]", "completed") + (collective(4, "Float [6]") if "number 4" in second else "")
    assert not [line for line in hung_over_nccl(first, second) if line.split()[0] in ("differs", "missing")]


def test_a_failure_is_ten_lines_whatever_it_holds() -> None:
    long = "\n".join(f"line {i} " + "x" * 10_000 for i in range(1000))
    outcome = Outcome(status=Status.EXITED, rank=0, message=long, log_tail=long)
    told = failure(lambda: expect(make_good(outcome=outcome, verdicts=[]), "memory"))
    assert len(told.splitlines()) <= MOST_LINES and len(told) < 5000
    many = make_verdict("memory", passed=False, summary="; ".join(f"mend {i}" for i in range(30)))
    told = failure(lambda: expect(dataclasses.replace(make_good(), verdicts=[many]), "memory"))
    assert len(told.splitlines()) == MOST_LINES


def test_too_slow_fails_and_says_so() -> None:
    slow = make_good(outcome=Outcome(status=Status.SLOW, rank=0, message="no end within 8 s, but ..."), verdicts=[])
    assert "slow on rank 0: no end within 8 s, but" in failure(lambda: expect(slow, "equivalence"))


class Kept(ScenarioRunner):
    """Its records are from before."""

    def __init__(self, *records: Record) -> None:
        self.records = {record.conformance.scenario: record for record in records}
        self.scenarios = SCENARIOS
        self._judged = {}

    def perform(self, scenario: Scenario, base: Case) -> Record:
        return self.records[scenario.name]


def told(runner: Kept, clause: str) -> str:
    return failure(lambda: expect_clause(runner, BASE, CLAUSES[clause])).partition(f"{clause}: ")[2]


def test_a_defect_is_told_once_and_then_pointed_to() -> None:
    """A defect of the plain run shows in its variations too, with other numbers."""
    again = dataclasses.replace(REDUCTION, detail="the same, with four micro-batches")
    runner = Kept(wrong(), wrong("accumulation", again), wrong("groups", HALF), wrong("tied", HALF))
    assert REDUCTION.text in told(runner, "gradients")
    assert told(runner, "accumulation") == "as in clause gradients: missing reduction"
    assert HALF.text in told(runner, "decay groups"), "another defect"
    assert told(runner, "tied embeddings") == "as in clause decay groups: gradient scaled"
    assert REDUCTION.text in told(runner, "gradients"), "asked again, it does not point to itself"


def test_defects_of_one_class_that_are_not_in_the_plain_run_are_told_apart_by_their_details() -> None:
    third = dataclasses.replace(HALF, detail="0.3333")
    runner = Kept(wrong("accumulation", HALF), wrong("groups", third))
    assert HALF.text in told(runner, "accumulation")
    assert third.text in told(runner, "decay groups")


def test_bytes_that_are_not_as_planned_are_told_once_by_what_they_are() -> None:
    def unlike(scenario: str, kind: str) -> Record:
        verdict = make_verdict("communication", passed=False, summary=f"{scenario}: too much", evidence={"kind": kind})
        record = plain(conformance=plain_conformance(scenario=scenario, base=BASE))
        kept = [v for v in record.verdicts if v.suite != "communication"]
        return dataclasses.replace(record, verdicts=[*kept, verdict])

    runner = Kept(unlike("plain", "all_reduce"), unlike("bf16", "all_reduce"))
    assert told(runner, "traffic") == "plain: too much"
    assert told(runner, "bf16 states") == "as in clause traffic: communication: all_reduce"
    runner = Kept(unlike("plain", "all_gather"), unlike("bf16", "all_reduce"))
    told(runner, "traffic")
    assert told(runner, "bf16 states") == "bf16: too much", "another kind"


def ended(scenario: str, status: Status, message: str) -> Record:
    return plain(
        outcome=Outcome(status=status, rank=1, message=message),
        verdicts=[],
        conformance=plain_conformance(scenario=scenario, base=BASE),
    )


def test_an_exception_that_ends_every_scenario_is_told_once() -> None:
    runner = Kept(
        ended("plain", Status.RAISED, "ValueError: no"),
        ended("accumulation", Status.RAISED, "ValueError: no"),
        ended("groups", Status.RAISED, "KeyError: 'x'"),
    )
    assert told(runner, "loss") == "plain: raised on rank 1: ValueError: no"
    assert told(runner, "gradients") == "as in clause loss: raised: ValueError: no"
    assert told(runner, "accumulation") == "as in clause loss: raised: ValueError: no"
    assert "KeyError" in told(runner, "decay groups")


def test_replicas_fail_by_the_defect_that_made_them_drift() -> None:
    drifts = [Drift(quantity=Quantity.parse("gradients/a"), step=0, ranks=[1])]
    runner = Kept(wrong(drifts=drifts))
    told(runner, "gradients")
    assert told(runner, "replicas") == "as in clause gradients: missing reduction"


def test_the_table_tells_it_once_too() -> None:
    (column,) = columns([wrong(), wrong("accumulation")])
    assert REDUCTION.text in column.findings["gradients"].evidence
    short = column.findings["accumulation"]
    assert (short.result, short.evidence) == (ClauseResult.FAIL, "as in clause gradients: missing reduction")


def test_a_scenario_that_was_too_slow_decides_nothing_and_is_no_gap() -> None:
    slow = ended("plain", Status.SLOW, "no end within 8 s, but still coming on")
    found = judge_clause(
        CLAUSES["loss"], {"plain": dataclasses.replace(slow, conformance=plain_conformance(known_gaps=[GAP]))}
    )
    assert found.result is ClauseResult.UNDECIDED and "still coming on" in found.evidence
    assert judge_clause(CLAUSES["error"], {"error": ended("error", Status.SLOW, "x")}).result is ClauseResult.UNDECIDED
    assert "slow on rank 1" in told(Kept(slow), "loss"), "it is a failure all the same"
    failing = judge_clause(CLAUSES["gradients"], {"plain": wrong()})
    assert point_back("gradients", failing, {"loss": found}) is failing
