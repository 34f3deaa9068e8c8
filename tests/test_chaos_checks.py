"""Every check of `make chaos` is seen to fail: each is given what it exists to find, and what is right."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.chaos import campaign, nodes, processes
from benchmarks.chaos.campaign import Results
from benchmarks.chaos.deck import KINDS
from benchmarks.chaos.faults import (
    Ended,
    Fault,
    Filled,
    RankKilled,
    RankStopped,
    ResultsGone,
    ServerKilledImporting,
    ServerStruck,
)
from benchmarks.chaos.nodes import NodeStruck
from benchmarks.chaos.processes import CHILD, MARK
from benchmarks.chaos.session import Session
from meshmark.records.record import Outcome, PeerEnd, Record, Status
from meshmark.records.record_file import RecordFile
from tests.factories import make_good, make_verdict
from tests.test_orphans import wait_until

OK = Outcome(status=Status.OK)
HUNG = Outcome(status=Status.HUNG, rank=1, message="no end within 12 s")
STOPPED = Outcome(status=Status.UNFINISHED, rank=1, message="no end within 12 s: a signal had stopped it")
LOST = Outcome(status=Status.NODE_LOST)
UNFINISHED = Outcome(status=Status.UNFINISHED)
FULL = Outcome(status=Status.NO_SPACE)


def killed(rank: int, number: signal.Signals = signal.SIGKILL, peers: Sequence[PeerEnd] = ()) -> Outcome:
    return Outcome(status=Status.KILLED, rank=rank, message=f"killed by {number.name}", peers=list(peers))


def struck(fault: Fault, expected: str = "", victims: Sequence[int] = ()) -> Fault:
    """Return the fault as it is after it has struck."""
    fault.victims = list(victims)
    if expected:
        fault.expected = expected
    return fault


def kill(when: str = "at work", *, victims: Sequence[int], all_ranks: bool = False) -> Fault:
    return struck(RankKilled(kind="k", number=signal.SIGKILL, when=when, all_ranks=all_ranks), victims=victims)


def server(expected: str) -> Fault:
    return struck(ServerStruck(kind="s", number=signal.SIGKILL), expected)


@pytest.mark.parametrize(
    ("fault", "right", "wrong"),
    [
        (kill(victims=[1]), [killed(1)], [OK, killed(0), killed(1, signal.SIGTERM), HUNG, UNFINISHED]),
        (kill("starting", victims=[0]), [killed(0)], [OK, killed(1)]),
        (kill("done", victims=[1]), [killed(1), OK], [killed(0), HUNG]),
        (
            kill(victims=[0, 1], all_ranks=True),
            [killed(0, peers=[PeerEnd(rank=1, kind="killed")]), killed(1, peers=[PeerEnd(rank=0, kind="ended")])],
            [killed(0), killed(0, peers=[PeerEnd(rank=1, kind="done")]), OK],
        ),
        (struck(RankStopped(kind="s"), victims=[1]), [STOPPED], [OK, killed(1), HUNG, UNFINISHED]),
        (struck(RankStopped(kind="s", seconds=0.5), victims=[1]), [OK], [HUNG, killed(1)]),
        (server("ok"), [OK], [UNFINISHED, HUNG, killed(0)]),
        (server("an outcome outside the case's ranks"), [UNFINISHED, LOST], [OK, HUNG, killed(0)]),
        (ServerKilledImporting(kind="i"), [UNFINISHED], [OK, killed(0), Outcome(status=Status.RAISED)]),
        (struck(Filled(kind="f"), "no space"), [FULL], [OK, UNFINISHED, Outcome(status=Status.RAISED)]),
        (struck(Filled(kind="f"), "ok or no space"), [FULL, OK], [UNFINISHED, killed(0)]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Fault) else "",
)
def test_an_outcome_of_another_name_is_seen(fault: Fault, right: list[Outcome], wrong: list[Outcome]) -> None:
    assert all(fault.is_named(outcome) for outcome in right)
    assert not [outcome for outcome in wrong if fault.is_named(outcome)]


def test_every_kind_of_fault_is_among_these() -> None:
    named = {RankKilled, RankStopped, ServerStruck, ServerKilledImporting, Filled}  # by the test above
    ends = {Ended, ResultsGone, NodeStruck}  # by those below
    assert {type(kind.make()) for kind in KINDS} == named | ends


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    """A session of two cases, both of which have begun."""
    made = Session(tmp_path / "s", ["ddp_0", "ddp_1"])
    (made.folder / "begun").write_text("ddp_0\nddp_1\n")
    yield made
    made.end()


def write(session: Session, *records: Record) -> None:
    with contextlib.closing(RecordFile(session.results)) as file:
        for record in records:
            file.append(record)


def record(name: str, **changes: object) -> Record:
    return make_good(adapter=f"benchmarks.chaos.adapters:{name}", **changes)


def ended_with(session: Session, code: int, output: str = "") -> Session:
    """Give the session a process that has ended with `code`; a negative one is a signal."""
    end = f"import os; os.kill(os.getpid(), {-code})" if code < 0 else f"raise SystemExit({code})"
    session.process = subprocess.Popen([sys.executable, "-c", end])
    session.process.wait()
    (session.folder / "output").write_text(output)
    return session


def complaints(session: Session, **faults: Fault) -> list[str]:
    results = Results()
    campaign._check(session, results, faults)
    return results.complaints


def test_two_cases_with_their_records_are_no_complaint(session: Session) -> None:
    write(session, record("ddp_0"), record("ddp_1"))
    assert complaints(session) == []


def test_a_case_that_left_no_record_is_lost(session: Session) -> None:
    write(session, record("ddp_0"))
    (complaint,) = complaints(session)
    assert "ddp_1: lost" in complaint


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"outcome": killed(0)}, "killed of rank 0"),
        ({"verdicts": [make_verdict(passed=False, summary="off by 3")]}, "off by 3"),
    ],
)
def test_a_case_that_was_left_alone_and_is_wrong(session: Session, changes: dict[str, object], why: str) -> None:
    write(session, record("ddp_0"), record("ddp_1", **changes))
    (complaint,) = complaints(session)
    assert "ddp_1: unharmed, but" in complaint and why in complaint
    assert complaints(session, ddp_1=kill(victims=[0])) == [], "it was struck"


def test_a_torn_line_is_excused_by_a_kill_alone(session: Session) -> None:
    write(session, record("ddp_0"), record("ddp_1"))
    with open(session.results / "records.jsonl", "ab") as file:
        file.write(b'{"case": ')
    assert len(complaints(session)) == 1
    assert complaints(session, ddp_1=Ended(kind="e", number=signal.SIGKILL)) == []
    assert len(complaints(session, ddp_1=Ended(kind="e", number=signal.SIGTERM))) == 1


def test_a_temporary_file_that_is_left(session: Session) -> None:
    write(session, record("ddp_0"), record("ddp_1"))
    (session.temporary / "meshmark-1-x").mkdir()
    (complaint,) = complaints(session)
    assert "left temporary files ['meshmark-1-x']" in complaint


def test_processes_that_are_left(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "_CHILD_SECONDS", 0.2)
    assert campaign._children_left(session, "ddp_1") == [] and ended_with(session, 0).await_end(1)
    left = subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: session.mark, CHILD: "ddp_1"})
    try:
        wait_until(lambda: processes.marked(session.mark, child="ddp_1"), seconds=10)
        (complaint,) = campaign._children_left(session, "ddp_1")
        assert "processes of its ranks are left" in complaint and str(left.pid) in complaint
        assert not session.await_end(0.2)
    finally:
        left.kill()
        left.wait()


@pytest.mark.parametrize(
    ("number", "codes", "wrong"),
    [(signal.SIGKILL, [-9], [0, 1, 2]), (signal.SIGTERM, [], [0, 1, 3, -15, 2])],
    ids=["SIGKILL", "SIGTERM"],
)
def test_an_exit_code_of_another_end(
    session: Session, number: signal.Signals, codes: list[int], wrong: list[int]
) -> None:
    """The 2 of SIGTERM is wrong as well, for no session's line says what was under way."""
    fault = Ended(kind="e", number=number)
    fault.expected = f"exit code {fault.exit_code}"
    for code in codes:
        assert campaign._last_trial(ended_with(session, code), fault, 1.0, survived=True).named
    for code in wrong:
        trial = campaign._last_trial(ended_with(session, code), fault, 1.0, survived=True)
        assert not trial.named and f"got exit code {code}" in trial.complaint


def test_results_that_are_gone_must_be_told(session: Session) -> None:
    fault = ResultsGone(kind="r", how="moved")
    assert campaign._last_trial(ended_with(session, 4, f"... {fault.words}"), fault, 1.0, survived=True).named
    assert not campaign._last_trial(ended_with(session, 4, "an error"), fault, 1.0, survived=True).named
    assert not campaign._last_trial(ended_with(session, 0, fault.words), fault, 1.0, survived=True).named


class Resumed(Session):
    """A session whose `--resume` runs a command of the test's own in place of pytest."""

    program = ""

    def start(self, prefix: Sequence[str] = (), options: Sequence[str] = (), **environment: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", self.program, str(self.results / "records.jsonl")])


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("", "ddp_1: no record after --resume"),
        ("raise SystemExit(3)", "ended with 3"),
        ("import sys; open(sys.argv[1], 'r+b').write(b' ')", "changed what was written before"),
    ],
)
def test_a_resumed_run_that_does_not_complete(tmp_path: Path, program: str, why: str) -> None:
    session = Resumed(tmp_path / "s", ["ddp_0", "ddp_1"])
    session.program = program
    (session.folder / "output").touch()
    write(session, record("ddp_0"), record("ddp_0"))  # of which the third program breaks the first line
    found = campaign._resume(session, {"ddp_1"}, random.Random(0))
    assert any(why in complaint for complaint in found), found


def test_a_resumed_run_that_completes(tmp_path: Path) -> None:
    session = Resumed(tmp_path / "s", ["ddp_0", "ddp_1"])
    write(session, record("ddp_0"), record("ddp_1"))
    assert campaign._resume(session, {"ddp_1"}, random.Random(0)) == []
    write(session, record("ddp_0", outcome=killed(0)))
    (complaint,) = campaign._resume(session, {"ddp_1"}, random.Random(0))
    assert "ddp_0: resumed, but killed" in complaint


@pytest.mark.parametrize("what", ["link cut", "node 1 killed"])
def test_a_lost_node_must_be_told(tmp_path: Path, what: str) -> None:
    fault = NodeStruck(kind="n", what=what)
    pair = [Session(tmp_path / f"node{rank}", ["ddp_0", "ddp_1"]) for rank in (0, 1)]
    (pair[0].folder / "begun").write_text("ddp_0\nddp_1\n")
    write(pair[0], record("ddp_0"), record("ddp_1", outcome=LOST))
    for each in pair:
        ended_with(each, 4, "Exit: node 1 was lost")
    assert nodes._misnamed(pair, fault, "ddp_1") == []
    ended_with(pair[0], 1, "Exit: node 1 was lost")
    assert "node 0 ended with 1" in nodes._misnamed(pair, fault, "ddp_1")[0]
    ended_with(pair[0], 4, "Exit: some error")
    assert "node 0 ended with 4" in nodes._misnamed(pair, fault, "ddp_1")[0]
    ended_with(pair[0], 4, "Exit: node 1 was lost")
    write(pair[0], record("ddp_0", outcome=killed(0)), record("ddp_1"))
    found = nodes._misnamed(pair, fault, "ddp_1")
    assert any("ddp_0 was killed" in each for each in found) and any("expected node lost, got ok" in e for e in found)
    (pair[1].temporary / "meshmark-2-y").mkdir()
    assert "left temporary files" in nodes._misnamed(pair, fault, "ddp_1")[-1]
