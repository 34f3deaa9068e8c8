"""The summary that a run of the suites ends with."""

from __future__ import annotations

import dataclasses

import pytest

from meshmark.pytest_plugin.session_log import MOST_CASES, MOST_DEFECTS, MOST_LEFT_OUT, summary
from meshmark.records.record import Record
from meshmark.records.record_file import Attempt, Ending
from tests.factories import make_case, make_good, make_timed, make_verdict


def attempts_of(records: list[Record]) -> list[Attempt]:
    return [
        Attempt(test=f"{suite}[{record.case.id}]", case=record.case.id, conforming=False, ending=Ending.PASSED)
        for record in records
        for suite in ("equivalence", "memory")
    ]


def test_a_case_that_is_right_has_one_row_with_memory_and_speed() -> None:
    records = [make_good(), make_timed()]
    lines = summary(attempts_of(records), records)
    assert lines[0].split() == ["case", "correct", "memory", "traffic", "peak", "/", "rank", "speed"]
    assert lines[1].split()[:4] == [records[0].case.id, "yes", "as", "planned"] and lines[2] == ""
    assert lines[3:] == ["not judged: memory: the peak of other steps than step 2"]
    assert lines[1].endswith("/s")


def test_what_is_wrong_comes_first_and_is_said_in_words() -> None:
    good = make_good()
    wrong = make_good(case=make_case("fsdp2"), verdicts=[make_verdict(passed=False), make_verdict("memory")])
    attempts = attempts_of([good, wrong])
    failed = dataclasses.replace(attempts[2], ending=Ending.FAILED, message="a gradient is scaled\nhow much")
    lines = summary([*attempts[:2], failed, attempts[3]], [good, wrong])
    assert lines[1].split()[:2] == [wrong.case.id, "no"]
    assert lines[-1] == "- a gradient is scaled"


def test_a_long_run_ends_in_at_most_a_screen() -> None:
    cases = [make_case(f"adapter{number}") for number in range(100)]
    records = [make_good(case=case) for case in cases]
    attempts = [
        dataclasses.replace(attempt, ending=Ending.FAILED, message=f"defect {number}")
        for number, attempt in enumerate(attempts_of(records))
    ]
    lines = summary(attempts, records)
    assert len(lines) <= MOST_CASES + MOST_DEFECTS + MOST_LEFT_OUT + 7
    assert f"and {100 - MOST_CASES} more cases; correct: {100 - MOST_CASES} yes" in lines
    assert lines[-1] == f"- and {200 - MOST_DEFECTS} more, above"


@pytest.mark.parametrize("ending, text", [(Ending.PASSED, "1 yes"), (Ending.FAILED, "1 NO")])
def test_clauses_are_counted_by_adapter(ending: Ending, text: str) -> None:
    attempt = Attempt(test="resume", case="ddp-dp2", conforming=True, ending=ending, message="differs")
    assert f"clauses of ddp-dp2: {text}" in summary([attempt], [])


def test_cases_that_this_session_did_not_run_are_left_out() -> None:
    other = make_good(case=make_case("fsdp2"))
    lines = summary(attempts_of([make_good()]), [make_good(), other])
    assert not any(other.case.id in line for line in lines)


def test_what_was_wrong_before_is_told_beside_what_is_right_now() -> None:
    good, wrong = make_good(), make_good(verdicts=[make_verdict(passed=False)])
    lines = summary(attempts_of([good]), [wrong, good])
    assert lines[1].split()[:2] == [good.case.id, "yes"]
    assert f"right now, but wrong in an earlier run of the same code, which counts: {good.case.id}" in lines
