"""The calls of a rank, against theory and its declared exceptions."""

from __future__ import annotations

import dataclasses

import pytest

from meshmark.adapters.ddp import DDP
from meshmark.algorithms.local_sgd import LocalSGD
from meshmark.measure.readings import AlikeSteps, Collective, TrafficReading
from meshmark.records.record import Record, Verdict
from meshmark.run.verdict import judge_communication, not_judged
from meshmark.theory.traffic import Flow, OneTimeTraffic, Purpose, TrafficException
from tests.factories import make_flow, make_good, make_traffic_evidence

PLAN = [
    make_flow(num_bytes=1000, most=5),
    make_flow("send", axes="pp", ranks=(0, 2), purpose=Purpose.ACTIVATIONS, num_bytes=64, fewest=4, most=4),
]
Call = tuple[str, tuple[int, ...], int, int]
ASKED: list[Call] = [("all_reduce", (0, 1), 2, 1000), ("send", (0, 2), 4, 64)]


def reading(*calls: Call) -> TrafficReading:
    asked = [Collective(kind=k, group_size=len(r), ranks=r, count=c, num_bytes=n) for k, r, c, n in calls]
    return TrafficReading(asked=asked, issued=[])


def record(
    *calls: Call, plan: list[Flow] | None = PLAN, traffic_exceptions: tuple[TrafficException, ...] = ()
) -> Record:
    """Rank 0 does as planned, rank 1 makes these calls."""
    evidence = make_traffic_evidence(
        readings=[reading(*ASKED), reading(*calls)],
        planned=[PLAN, plan],
        traffic_exceptions=[[], [*traffic_exceptions]],
    )
    return make_good(traffic=evidence)


def verdict(*calls: Call, **how: object) -> Verdict:
    found = judge_communication(record(*calls, **how))  # type: ignore[arg-type]
    assert found is not None and found.suite == "communication"
    return found


def test_the_same_bytes_in_as_many_calls_as_are_allowed_pass() -> None:
    found = verdict(("all_reduce", (0, 1), 5, 1000), ("send", (0, 2), 4, 64))
    assert found.passed and (found.evidence["differences"], found.evidence["compared"]) == (0, 4)
    assert found.summary == "4 flows to the byte, the largest 1,000 bytes of all_reduce in 1 to 5 calls"


@pytest.mark.parametrize(
    "change, told",
    [
        ([("all_reduce", (0, 1), 2, 1004), ASKED[1]], "1,004 bytes in 2 calls, expected 1,000 in 1 to 5 calls"),
        ([("all_reduce", (0, 1), 2, 999), ASKED[1]], "999 bytes in 2 calls, expected 1,000"),
        ([("all_reduce", (0, 1), 6, 1000), ASKED[1]], "1,000 bytes in 6 calls, expected 1,000 in 1 to 5 calls"),
        ([ASKED[0], ("send", (0, 2), 8, 64)], "send over ranks 0, 2 on rank 1: 64 bytes in 8 calls, expected 64 in 4"),
        (
            [ASKED[0], ("send", (0, 1), 4, 64)],
            "over ranks 0, 1 on rank 1: 64 bytes in 4 calls, expected none, and 1 more",
        ),
        ([("all_reduce", (0, 1, 2, 3), 2, 1000), ASKED[1]], "all_reduce over ranks 0, 1, 2, 3 on rank 1: 1,000 bytes"),
        ([("broadcast", (0, 1), 2, 1000), ASKED[1]], "broadcast over ranks 0, 1 on rank 1: 1,000 bytes in 2 calls"),
        (
            [*ASKED, ("all_reduce", (0, 2), 1, 4)],
            "all_reduce over ranks 0, 2 on rank 1: 4 bytes in 1 call, expected none",
        ),
        ([ASKED[0]], "send over ranks 0, 2 on rank 1: none, expected 64 in 4 calls"),
    ],
    ids=["more", "less", "calls", "halves", "other peer", "wrong group", "wrong kind", "scalar", "missing"],
)
def test_what_differs_by_a_byte_a_call_or_a_rank_fails_and_says_what_to_do(change: list[Call], told: str) -> None:
    found = verdict(*change)
    assert not found.passed and told in found.summary and "`Adapter.traffic_exceptions`" in found.summary
    assert found.evidence["rank"] == 1


def test_barriers_are_counted_and_told_and_fail_no_case() -> None:
    """They carry no data; a real difference beside them still fails."""
    barriers: list[Call] = [("barrier", (0, 1), 2, 0), ("barrier", (0, 2), 1, 0)]
    found = verdict(*ASKED, *barriers)
    assert found.passed and (found.evidence["barriers"], found.evidence["differences"]) == (3, 0)
    assert "3 barriers" in found.summary
    worse = verdict(ASKED[0], *barriers)
    assert not worse.passed and worse.evidence["differences"] == 1 and "send over ranks 0, 2" in worse.summary


def test_what_is_declared_is_sent_instead_or_besides() -> None:
    kind = make_flow("broadcast", num_bytes=1000, most=5)
    traffic_exceptions = (
        TrafficException(instead_of=(PLAN[0],), sends=(kind,), reason="owners send"),
        TrafficException(sends=(make_flow(ranks=(0, 2), num_bytes=4, most=1),), reason="a scalar"),
    )
    calls: list[Call] = [("broadcast", (0, 1), 1, 1000), ASKED[1], ("all_reduce", (0, 2), 1, 4)]
    found = verdict(*calls, traffic_exceptions=traffic_exceptions)
    assert found.passed and found.evidence["declared"] == "a scalar; owners send"
    assert not verdict(*ASKED, traffic_exceptions=traffic_exceptions).passed, "a declared departure must show"


def test_one_process_has_nothing_to_communicate() -> None:
    evidence = make_traffic_evidence(readings=[reading()], planned=[[]], traffic_exceptions=[[]])
    found = judge_communication(make_good(traffic=evidence))
    assert found is not None and (found.passed, found.summary) == (True, "nothing to communicate")


def test_what_is_not_planned_is_not_judged() -> None:
    assert judge_communication(record(*ASKED, plan=None)) is None
    of_old = make_traffic_evidence(planned=[], traffic_exceptions=[])
    assert judge_communication(make_good(traffic=of_old)) is None


STEADY: list[Call] = ASKED
AGAIN: list[Call] = [("all_reduce", (0, 1), 4, 2000), ("send", (0, 2), 4, 64)]
BUCKETS: list[Call] = [*ASKED, ("broadcast", (0, 1), 2, 156)]
REBUILT = OneTimeTraffic(kind="broadcast", steps=(1,), most_bytes=156, most_calls=2, reason="buckets are made again")


LATE = dataclasses.replace(REBUILT, steps=(2,), least_bytes=156, least_calls=2)
"""As under a static graph, whose buckets are made again in the metered step."""


def stepping(*steps: list[Call], declared: tuple[OneTimeTraffic, ...] = ()) -> Verdict:
    """The verdict on two ranks that do as planned in the metered step, and in other steps what is told of rank 1."""
    groups = [
        AlikeSteps(
            steps=[step],
            issued=[Collective(kind=k, group_size=len(r), ranks=r, count=c, num_bytes=n) for k, r, c, n in calls],
        )
        for step, calls in enumerate(steps)
    ]
    usual = record(*ASKED)
    evidence = dataclasses.replace(usual.traffic, alike_steps=[[], groups], one_time_traffic=[[], list(declared)])
    found = judge_communication(dataclasses.replace(usual, traffic=evidence))
    assert found is not None
    return found


@pytest.mark.parametrize(
    "steps, declared, told",
    [
        ([STEADY] * 5, (), ""),
        ([STEADY, BUCKETS, STEADY, STEADY, STEADY], (REBUILT,), ""),
        ([[("all_reduce", (0, 1), 7, 1000), ("send", (0, 2), 4, 64)], *[STEADY] * 4], (), ""),  # other buckets
        ([STEADY, STEADY, BUCKETS, STEADY, STEADY], (LATE,), ""),
        ([STEADY, STEADY, BUCKETS, BUCKETS, STEADY], (LATE,), "broadcast over ranks 0, 1 on rank 1 in step 3"),
        ([[*STEADY, ("barrier", (0, 1), 1, 0)], *[STEADY] * 4], (), ""),
        (
            [STEADY, BUCKETS, STEADY, STEADY, STEADY],
            (),
            "broadcast over ranks 0, 1 on rank 1 in step 1: 156 bytes in 2",
        ),
        ([STEADY, STEADY, STEADY, BUCKETS, STEADY], (REBUILT,), "broadcast over ranks 0, 1 on rank 1 in step 3"),
        ([STEADY, [*ASKED, ("broadcast", (0, 1), 2, 157)], STEADY], (REBUILT,), "broadcast over ranks 0, 1 on rank 1"),
        ([STEADY, [*ASKED, ("broadcast", (0, 1), 3, 156)], STEADY], (REBUILT,), "broadcast over ranks 0, 1 on rank 1"),
        ([STEADY, STEADY, STEADY, AGAIN, STEADY], (), "all_reduce over ranks 0, 1 on rank 1 in step 3: 2,000 bytes"),
        ([AGAIN, *[STEADY] * 4], (), "all_reduce over ranks 0, 1 on rank 1 in step 0: 2,000 bytes in 4 calls"),
        ([STEADY[1:], *[STEADY] * 4], (), "all_reduce over ranks 0, 1 on rank 1 in step 0: none, in step 2 1,000"),
        ([STEADY, *[STEADY] * 3, [("all_reduce", (0, 1), 3, 1000), STEADY[1]]], (), "all_reduce over ranks 0, 1"),
    ],
)
def test_all_steps_send_what_the_metered_step_sends_and_what_is_declared(
    steps: list[list[Call]], declared: tuple[OneTimeTraffic, ...], told: str
) -> None:
    found = stepping(*steps, declared=declared)
    assert found.passed == (not told), found
    assert not told or (found.summary.startswith(told) and "`Adapter.one_time_traffic`" in found.summary)


def test_steps_in_which_an_algorithm_sends_otherwise_are_left_out_and_said_to_be() -> None:
    """Local SGD of period 2 averages in steps 0, 2, 4: what it does in steps 1 and 3 is not planned."""
    usual = record(*ASKED)
    odd = AlikeSteps(steps=[1, 3], issued=[])
    even = AlikeSteps(steps=[0, 2, 4], issued=reading(*ASKED).asked)
    traffic = dataclasses.replace(usual.traffic, alike_steps=[[even, odd]] * 2, one_time_traffic=[])
    trained = dataclasses.replace(usual.case.workload, algorithm=LocalSGD(period=2))
    local = dataclasses.replace(usual, case=dataclasses.replace(usual.case, workload=trained), traffic=traffic, steps=5)
    assert judge_communication(local).passed  # type: ignore[union-attr]
    assert "communication: steps 1, 3, whose planned traffic differs" in not_judged(local, DDP)
    assert not any(text.startswith("communication: steps") for text in not_judged(usual, DDP) if "others" in text)


def test_what_is_not_planned_fails_where_its_steps_differ() -> None:
    usual = record(*ASKED, plan=None)
    groups = [
        AlikeSteps(steps=[2, 3], issued=reading(*ASKED).asked),
        AlikeSteps(steps=[4], issued=reading(*AGAIN).asked),
    ]
    found = judge_communication(
        dataclasses.replace(
            usual, traffic=dataclasses.replace(usual.traffic, alike_steps=[groups], one_time_traffic=[])
        )
    )
    assert found is not None and not found.passed
