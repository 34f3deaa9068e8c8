"""`meshmark compare`: verdicts, exact bytes, and times with a known rate of false alarms."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshmark.cli.commands import main
from meshmark.errors import InputError, ResultsError
from meshmark.measure.readings import Bytes, Collective, TrafficReading
from meshmark.records.record import (
    SCHEMA,
    ConformanceEvidence,
    LaunchSeconds,
    MemoryEvidence,
    Outcome,
    Record,
    Status,
    TimingEvidence,
    TrafficEvidence,
)
from meshmark.records.record_file import Attempt, Ending, RecordFile, Session
from meshmark.records.request import Task
from meshmark.regression.baseline_gate import baseline_gate
from meshmark.regression.causes import causes
from meshmark.regression.change import Change, ChangeOutcome, Kind
from meshmark.regression.cli import compare_folders
from meshmark.regression.compare import compare
from meshmark.regression.gate import DEFAULT_GATE, parse_gate
from meshmark.regression.samples import STEP, Sample, repeats_scatter
from meshmark.regression.times import ALPHA, holm, time_changes
from tests.factories import (
    make_case,
    make_environment,
    make_good,
    make_memory,
    make_memory_evidence,
    make_timed,
    make_timing,
    make_traffic,
    make_traffic_evidence,
    make_verdict,
)

RNG = np.random.default_rng(7)


def steps(seconds: float, count: int = 32, scatter: float = 0.01) -> list[list[float]]:
    """Return the step times of one rank."""
    return [list(seconds * np.exp(scatter * RNG.standard_normal(count)))]


def timed(seconds: float, **changes: Any) -> Record:  # noqa: ANN401
    return make_timed(timing=make_timing(rank_step_seconds=steps(seconds)), **changes)


def launches(seconds: float, count: int = 4, scatter: float = 0.01) -> list[Record]:
    return [timed(float(seconds * np.exp(scatter * RNG.standard_normal()))) for _ in range(count)]


def rows(before: list[Record], after: list[Record], **options: Any) -> dict[str, Change]:  # noqa: ANN401
    """By metric."""
    return {change.metric: change for change in compare(before, after, **options).changes}


def test_equal_sides_differ_in_nothing() -> None:
    found = rows([make_good(), timed(0.1)], [make_good(), timed(0.1)])
    exact = [change for change in found.values() if change.kind not in (Kind.SLOWER, Kind.SLOWER_START)]
    assert {change.outcome for change in exact} == {ChangeOutcome.SAME}
    names = {
        "equivalence verdict",
        "memory verdict",
        "peak memory",
        "traffic asked for",
        "traffic issued",
        "timed pass",
    }
    assert names <= found.keys()
    assert found["tokens/s"].outcome in (ChangeOutcome.SAME, ChangeOutcome.UNDECIDED)


@pytest.mark.parametrize(
    "one, other, outcome",
    [(True, False, ChangeOutcome.WORSE), (False, True, ChangeOutcome.BETTER), (False, False, ChangeOutcome.SAME)],
)
def test_a_verdict_is_ranked(one: bool, other: bool, outcome: ChangeOutcome) -> None:
    before, after = (make_good(verdicts=[make_verdict(passed=passed)]) for passed in (one, other))
    assert rows([before], [after])["equivalence verdict"].outcome is outcome


def test_a_diagnosis_is_the_evidence_and_what_is_undecided_is_not_worse() -> None:
    wrong = make_verdict(passed=False, evidence={"diagnosis": "gradients not reduced"})
    found = rows([make_good()], [make_good(verdicts=[wrong])])["equivalence verdict"]
    assert (found.before, found.after, found.evidence) == ("yes", "no", "gradients not reduced")
    undecided = make_good(verdicts=[make_verdict(passed=False, undecided=True)])
    assert rows([make_good()], [undecided])["equivalence verdict"].outcome is ChangeOutcome.UNDECIDED


def test_a_crash_is_worse_and_a_full_disk_is_not() -> None:
    for status, outcome in ((Status.KILLED, ChangeOutcome.WORSE), (Status.NO_SPACE, ChangeOutcome.UNDECIDED)):
        ended = make_good(outcome=Outcome(status=status, message="signal 9"), verdicts=[])
        found = rows([make_good()], [ended])["instrumented pass"]
        assert (found.outcome, found.evidence) == (outcome, "signal 9")


def test_any_byte_is_named_by_category_and_rank() -> None:
    grown = make_good(memory=make_memory_evidence(readings=[make_memory(), make_memory(activations=1004)]))
    found = rows([make_good()], [grown])
    peak = found["peak memory"]
    assert (
        peak.outcome is ChangeOutcome.SAME and "backend's thread" in peak.evidence
    )  # within the 8 bytes that are late
    grown = make_good(memory=make_memory_evidence(readings=[make_memory(), make_memory(activations=1040)]))
    found = rows([make_good()], [grown])
    assert found["peak memory"].outcome is ChangeOutcome.WORSE
    assert found["peak memory"].evidence == "activations on rank 1: 1,000 -> 1,040"
    assert not found["peak memory, activations"].gated
    assert found["memory after a step"].outcome is ChangeOutcome.SAME
    assert rows([grown], [make_good()])["peak memory"].outcome is ChangeOutcome.BETTER


def test_bytes_that_only_one_side_has_read_are_no_sameness() -> None:
    """Their rows were left out, and a gate on `bigger` passed without a word."""
    unread = make_good(memory=MemoryEvidence(), traffic=TrafficEvidence())
    found = compare([make_good()], [unread], timed=False)
    undecided = [c.metric for c in found.of(ChangeOutcome.UNDECIDED) if c.kind is Kind.BIGGER]
    assert undecided == ["peak memory", "traffic issued"]
    assert len(parse_gate("bigger:1%,unsure").failing(found.changes)) == 2
    again = compare([unread], [unread], timed=False)
    assert not [change for change in again.changes if change.kind is Kind.BIGGER]


def test_as_many_bytes_for_other_things_are_no_gain() -> None:
    moved = dataclasses.replace(make_memory(), steady=Bytes(parameters=400, optimizer_states=700, other=124))
    found = rows([make_good()], [make_good(memory=make_memory_evidence(readings=[make_memory(), moved]))])
    assert found["memory after a step"].outcome is ChangeOutcome.UNDECIDED
    assert "optimizer_states on rank 1: 800 -> 700" in found["memory after a step"].evidence


def test_traffic_is_named_by_collective_group_and_rank() -> None:
    gathered = Collective(kind="all_gather", group_size=2, ranks=(0, 1), count=1, num_bytes=8)
    more = TrafficReading(asked=[*make_traffic().asked, gathered], issued=make_traffic().issued)
    found = rows([make_good()], [make_good(traffic=make_traffic_evidence(readings=[make_traffic(), more]))])
    assert found["traffic asked for"].outcome is ChangeOutcome.WORSE
    assert found["traffic asked for"].evidence == "all_gather over ranks 0, 1 on rank 1: none -> 8 bytes in 1 call"
    assert found["traffic issued"].outcome is ChangeOutcome.SAME
    calls = TrafficReading(asked=[dataclasses.replace(make_traffic().asked[0], count=4)], issued=make_traffic().issued)
    found = rows([make_good()], [make_good(traffic=make_traffic_evidence(readings=[calls, calls]))])
    assert found["traffic asked for"].outcome is ChangeOutcome.WORSE  # as many bytes, in more calls


def test_repeated_launches_tell_a_slow_down_with_its_interval() -> None:
    found = rows(launches(0.1), launches(0.12))["tokens/s"]
    assert found.outcome is ChangeOutcome.WORSE
    assert found.effect and found.effect.lowest < 1 / 1.2 - 1 < found.effect.highest < 0
    assert found.by == pytest.approx(0.2, abs=0.05)
    assert "4 and 4 launches" in found.evidence and "repeats of this case" in found.evidence
    assert rows(launches(0.12), launches(0.1))["tokens/s"].outcome is ChangeOutcome.BETTER


def test_another_machine_s_scatter_decides_nothing() -> None:
    """A single launch of each side: what is on record is of a machine that is not this one."""
    for large in (1.1, 3.0):
        found = compare([timed(0.1)], [timed(0.1 * large)]).changes
        (rate,) = (change for change in found if change.metric == "tokens/s")
        assert rate.outcome is ChangeOutcome.UNDECIDED and rate.effect and rate.effect.estimate < -0.05
        assert (
            "decides nothing here); to tell how launches scatter on this machine takes 4 more launches" in rate.evidence
        )
        assert not parse_gate("slower").failing(found)


def test_repeats_on_one_machine_decide_nothing_on_another() -> None:
    """Under `--across`, where A is repeated and B is one launch of another machine; until B is repeated too."""

    def here(record: Record) -> Record:
        return dataclasses.replace(record, environment=make_environment(machine="Abacus 4000"))

    before, after = launches(0.1, 5), [here(each) for each in launches(0.2, 5)]
    assert rows(before, after[:1], across=True)["tokens/s"].outcome is ChangeOutcome.UNDECIDED
    assert rows(before, after, across=True)["tokens/s"].outcome is ChangeOutcome.WORSE


def starts(seconds: float, count: int = 4) -> list[Record]:
    return [
        make_good(launch=LaunchSeconds(seconds=3 * seconds + 0.01 * i, build_seconds=seconds + 0.01 * i))
        for i in range(count)
    ]


def test_slower_is_of_steps_and_starts_fail_where_they_are_asked_for_alone() -> None:
    """Unchanged code had failed by "launch seconds worse": how fast a machine starts a process is not the code's."""
    steady, slow = launches(0.1), launches(0.2)
    started = compare([*starts(1.0), *steady], [*starts(2.0), *steady]).changes
    told = {change.metric for change in started if change.outcome is ChangeOutcome.WORSE}
    assert told == {"launch seconds", "build seconds"}, "they are told all the same"
    assert not parse_gate(DEFAULT_GATE).failing(started)
    assert {c.metric for c in parse_gate("slower-start:50%").failing(started)} == told
    stepped = compare([*starts(1.0), *steady], [*starts(1.0), *slow]).changes
    assert [change.metric for change in parse_gate(DEFAULT_GATE).failing(stepped)] == ["tokens/s"]
    assert not parse_gate("slower-start").failing(stepped)


def test_one_step_says_nothing() -> None:
    single = make_timed(timing=make_timing(rank_step_seconds=[[0.1]]))
    double = make_timed(timing=make_timing(rank_step_seconds=[[0.2]]))
    found = rows([single], [double])["tokens/s"]
    assert found.outcome is ChangeOutcome.UNDECIDED
    assert "a single step says nothing" in found.evidence


def test_equal_code_is_called_different_as_rarely_as_promised_and_slow_code_is_found() -> None:
    """Ten cases, four launches a side: of 300 comparisons of equal code as good as none may alarm. 15 % is found in
    98 % of them, by the power of a t-test with 6 degrees of freedom; 10 % would be in 71 %."""
    alarms = found = 0
    for trial in range(300):
        slow = 1.15 if trial % 10 == 0 else 1.0
        pairs = {
            (str(case), STEP): tuple(
                [
                    Sample(seconds=0.1 * factor * float(np.exp(0.02 * RNG.standard_normal())), variance=1e-4)
                    for _ in "1234"
                ]
                for factor in (1.0, slow if case == 0 else 1.0)
            )
            for case in range(10)
        }
        told = time_changes(pairs, {str(case): (1, "tokens") for case in range(10)}, 0.02)
        different = {c.case for c in told if c.outcome in (ChangeOutcome.WORSE, ChangeOutcome.BETTER)}
        alarms += bool(different - {"0"} or (slow == 1.0 and different))
        found += slow > 1.0 and "0" in different
    assert alarms <= 9  # of 300 at 1 %: more has a chance of 0.1 %
    assert found >= 24  # of 30


def test_holm_goes_on_while_tests_fall() -> None:
    """Holm's bounds by hand: 0.01 is below 0.05 / 4, 0.012 below 0.05 / 3, and 0.04 is above 0.05 / 2."""
    chances = {("a", ""): 0.01, ("b", ""): 0.04, ("c", ""): 0.012, ("d", ""): 0.03}
    decided = holm(chances, 0.05)
    assert {key[0] for key, (fell, _) in decided.items() if fell} == {"a", "c"}
    assert decided["b", ""][1] == decided["d", ""][1] == 0.05 / 2
    assert 0 < ALPHA <= 0.05


def test_scatter_is_never_less_than_steps_show() -> None:
    lucky = [Sample(seconds=0.1, variance=0.01), Sample(seconds=0.1, variance=0.01)]
    found = repeats_scatter([lucky], "{}")
    assert found and found.variance == 0.01
    assert repeats_scatter([lucky[:1]], "{}") is None


def test_launch_and_build_seconds_are_tested_too() -> None:
    def built(seconds: float) -> list[Record]:
        return [
            make_good(launch=LaunchSeconds(seconds=3.0 + 0.01 * i, build_seconds=seconds + 0.01 * i)) for i in range(4)
        ]

    found = rows(built(1.0), built(2.0))
    assert found["build seconds"].outcome is ChangeOutcome.WORSE
    assert found["launch seconds"].outcome is ChangeOutcome.SAME


def test_right_in_fewer_steps_is_not_the_same() -> None:
    """What a longer run judged wrong may come after the last step of a shorter one."""
    found = rows([make_good()], [make_good(steps=make_good().steps - 1)])
    change = found["equivalence verdict"]
    assert change.outcome is ChangeOutcome.UNDECIDED and "give both the same --steps" in change.evidence
    assert parse_gate("wrong,unsure").failing([change])
    longer = rows([make_good()], [make_good(steps=make_good().steps + 1)])
    assert longer["equivalence verdict"].outcome is ChangeOutcome.SAME


def test_clauses_are_compared() -> None:
    def clause(status: Status) -> Record:
        about = ConformanceEvidence(scenario="plain", base=make_case())
        return make_good(task=Task.OBSERVE, conformance=about, outcome=Outcome(status=status, message="gone"))

    found = rows([clause(Status.OK)], [clause(Status.KILLED)])
    worse = [metric for metric, change in found.items() if change.outcome is ChangeOutcome.WORSE]
    assert any(metric.startswith("clause ") for metric in worse)


def test_clauses_that_only_one_side_has_checked_are_missing() -> None:
    """B may have other clauses, or none: neither may pass a gate that asks for what A had."""

    def clause(scenario: str) -> Record:
        about = ConformanceEvidence(scenario=scenario, base=make_case())
        return make_good(task=Task.OBSERVE, conformance=about, outcome=Outcome(status=Status.OK))

    both = [make_good(), clause("plain")]
    for theirs in ([make_good()], [make_good(), clause("clip")]):
        changes = compare(both, theirs).changes
        (gone,) = parse_gate("missing").failing(changes)
        assert gone.metric == "clauses" and "checked in A alone" in gone.evidence
        assert not parse_gate("wrong").failing(changes)
    assert not parse_gate("missing").failing(compare(both, both).changes)


def test_what_kernels_allocate_for_themselves_is_compared() -> None:
    def using(num_bytes: int) -> Record:
        reading = dataclasses.replace(make_memory(), workspace_bytes=num_bytes)
        return make_good(memory=make_memory_evidence(readings=[reading, make_memory()]))

    found = rows([using(100)], [using(10_000)])["peak memory with workspaces of kernels"]
    assert found.outcome is ChangeOutcome.WORSE and parse_gate("bigger:1%").failing([found])
    assert "peak memory with workspaces of kernels" not in rows([make_good()], [make_good()])


def test_a_case_whose_timed_pass_did_not_end_well_is_not_timed() -> None:
    hung = make_timed(outcome=Outcome(status=Status.HUNG, rank=0), timing=TimingEvidence())
    found = compare([make_good(), make_timed()], [make_good(), hung])
    (gone,) = parse_gate("slower:3%,missing").failing(found.changes)
    assert gone.metric == "case" and gone.after == "not timed"


@pytest.mark.parametrize("kinds", ["slower-start:10%", "bigger", "bigger,missing"])
def test_a_gate_of_what_nobody_measured_is_refused(
    tmp_path: Path, kinds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = make_good(memory=MemoryEvidence(), traffic=TrafficEvidence(), launch=LaunchSeconds())
    for name in ("a", "b"):
        with contextlib.closing(RecordFile(tmp_path / name)) as file:
            file.append(bare)
    asked = ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--fail-on"]
    assert main([*asked, kinds]) == 2
    assert "in both" in capsys.readouterr().err
    assert main([*asked, f"wrong,{kinds}"]) == (2 if "slower" in kinds else 0)


def test_a_release_of_python_that_only_mends_is_no_other_condition() -> None:
    def of(version: str) -> list[Record]:
        return [make_good(environment=make_environment(versions={"python": version}))]

    assert compare(of("3.11.7"), of("3.11.14")).changes
    with pytest.raises(ResultsError, match="python: 3.11 in A, 3.12 in B"):
        compare(of("3.11.7"), of("3.12.1"))


def test_a_missing_case_is_told_and_can_fail() -> None:
    other = make_good(case=make_case("fsdp2"))
    found = compare([make_good(), other], [make_good()])
    assert found.only_before == [other.case.id]
    assert [change.case for change in parse_gate("missing").failing(found.changes)] == [other.case.id]
    assert not parse_gate("wrong").failing(found.changes)


def test_a_name_that_stands_for_another_workload_compares_with_nothing() -> None:
    case = make_case()
    other = dataclasses.replace(case, workload=dataclasses.replace(case.workload, seed=1))
    (change,) = compare([make_good(case=case)], [make_good(case=other)]).changes
    assert change.outcome is ChangeOutcome.UNDECIDED and "another workload" in change.evidence


def test_no_case_in_common_is_an_error_that_names_both() -> None:
    one, other = make_good(), make_good(case=make_case("fsdp2"))
    with pytest.raises(ResultsError, match=rf"no case in common: A holds {one.case.id}, B {other.case.id}"):
        compare([one], [other])


@pytest.mark.parametrize(
    "change, words",
    [
        ({"machine": "Abacus 4000"}, "machine: Abacus 3000 in A, Abacus 4000 in B"),
        ({"versions": {"torch": "2.14.0"}}, "torch: 2.13.0 in A, 2.14.0 in B"),
        ({"omp_num_threads": "2"}, "OMP_NUM_THREADS: 1 in A, 2 in B"),
    ],
)
def test_other_conditions_are_refused_unless_asked_for(change: dict[str, Any], words: str) -> None:
    one = make_good(environment=make_environment(omp_num_threads="1"))
    other = make_good(environment=make_environment(**{"omp_num_threads": "1", **change}))
    with pytest.raises(ResultsError, match="--across") as refused:
        compare([one], [other])
    assert words in str(refused.value)
    assert compare([one], [other], across=True).conditions
    commit = make_good(environment=make_environment(omp_num_threads="1", commit="fedcba"))
    assert not compare([one], [commit]).conditions


def test_what_no_machine_changes_is_gated_on_any(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Verdicts and bytes are; times of another machine are neither compared nor told. Other versions are refused."""
    elsewhere = make_environment(machine="Abacus 4000")
    grown = make_memory_evidence(readings=[make_memory(), make_memory(activations=2000)])
    before = write(tmp_path / "before", [make_good(), timed(0.1)])
    after = write(
        tmp_path / "after", [make_good(environment=elsewhere, memory=grown), timed(0.2, environment=elsewhere)]
    )
    assert main(["compare", before, after, "--fail-on", "wrong,bigger:1%,slower:3%"]) == 2
    assert "--fail-on wrong,bigger:1%, without slower" in capsys.readouterr().err
    assert main(["compare", before, after, "--fail-on", "wrong,bigger:1%"]) == 1
    said = capsys.readouterr().out
    assert "FAILED by --fail-on bigger" in said and "conditions differ: machine" in said and "tokens/s" not in said
    newer = write(tmp_path / "newer", [make_good(environment=make_environment(versions={"torch": "2.14.0"}))])
    assert main(["compare", before, newer, "--fail-on", "wrong,bigger:1%"]) == 2
    assert "without slower" not in capsys.readouterr().err
    assert main(["compare", before, before, "--fail-on", "wrong,bigger:1%"]) == 0
    assert "tokens/s" not in capsys.readouterr().out, "nor on one machine: a busy one would tell of what nobody gates"


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "expected at least one of"),
        ("wrong,fatter:1%", "at 'fatter:1%' (character 7): expected wrong, bigger, slower, missing"),
        ("bigger:1", "'1' is no share; expected a per cent, such as bigger:3%"),
        ("wrong:1%", "wrong has no size"),
        ("slower:3%,slower:4%", "stands there twice"),
    ],
)
def test_a_gate_that_cannot_be_read_says_where(text: str, words: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_gate(text)
    assert words in str(refused.value)


def test_a_gate_lets_small_and_unsure_changes_pass() -> None:
    grown = make_good(memory=make_memory_evidence(readings=[make_memory(), make_memory(activations=1020)]))
    changes = compare([make_good()], [grown]).changes
    assert [change.metric for change in parse_gate("bigger").failing(changes)] == ["peak memory"]
    assert [change.metric for change in parse_gate("bigger:0.7%").failing(changes)] == ["peak memory"]
    assert not parse_gate("bigger:1%").failing(changes)  # 20 of 2,724 bytes
    assert not parse_gate("slower:0%").failing(compare([timed(0.1)], [timed(0.101)]).changes)


def write(folder: Path, records: list[Record]) -> str:
    file = RecordFile(folder)
    for record in records:
        file.append(record)
    file.close()
    return str(folder)


def test_the_command_tells_writes_and_sets_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = make_good(verdicts=[make_verdict(passed=False, evidence={"diagnosis": "gradients not reduced"})])
    good, bad = write(tmp_path / "good", [make_good()]), write(tmp_path / "bad", [wrong])
    page = tmp_path / "out" / "page.md"
    assert main(["compare", good, bad, "--fail-on", "wrong,bigger:1%", "-o", str(page)]) == 1
    said = capsys.readouterr().out
    assert (
        f"FAILED by --fail-on wrong: {wrong.case.id}: equivalence verdict worse: yes -> no; gradients not reduced"
        in said
    )
    assert "| equivalence verdict" in page.read_text()
    assert main(["compare", good, bad]) == 0
    assert main(["compare", good, good, "--fail-on", "wrong,bigger:1%,missing"]) == 0
    assert main(["compare", good, good, "--fail-on", "wrong,slower:3%"]) == 2
    assert "no case was timed in both" in capsys.readouterr().err
    both = write(tmp_path / "timed", [make_good(), timed(0.1)])
    assert main(["compare", both, both, "--fail-on", "wrong,bigger:1%,slower:3%,missing"]) == 0
    capsys.readouterr()
    assert main(["compare", good, str(tmp_path / "none")]) == 2
    assert "no records at" in capsys.readouterr().err
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "records.jsonl").write_text('{"schema": 99}\n')
    assert main(["compare", good, str(tmp_path / "old")]) == 2
    assert f"schema 99, this Meshmark reads 1 to {SCHEMA}; a newer one wrote it: upgrade" in capsys.readouterr().err


def leave(folder: Path, *records: Record | Session) -> Path:
    file = RecordFile(folder)
    for record in records:
        file.append(record)
    file.close()
    return folder


@functools.cache
def timed_once(seconds: float) -> Record:
    """The same steps wherever the same rate is asked for."""
    return timed(seconds)


def at(commit: str, date: str, seconds: float = 0.1) -> Record:
    around = make_environment(project_commit=commit, date=date)
    return dataclasses.replace(timed_once(seconds), environment=around)


def test_launches_of_other_commits_are_not_pooled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is run into by every job holds many commits."""
    before = leave(tmp_path / "a", *(at("old", f"2026-01-0{i}", 0.3) for i in range(1, 6)), at("good", "2026-02-01"))
    after = leave(tmp_path / "b", at("good", "2026-02-02"), at("bad", "2026-02-03"))
    (rate,) = (c for c in compare_folders(before, after, None).changes if c.metric == "tokens/s")
    assert rate.before == rate.after and rate.evidence.startswith("1 and 1 launch, ")
    assert f"{before}: left out 5 records of other code (old); what counts is the last, good" in capsys.readouterr().err


def test_a_baseline_is_no_part_of_what_is_run_beside_it(tmp_path: Path) -> None:
    """The tutorial accepts a folder, and runs into it once more."""
    first, second = at("x", "2026-02-01"), at("x", "2026-02-02", 0.2)
    baseline, results = leave(tmp_path / "a", first), leave(tmp_path / "b", first, second)
    (rate,) = (c for c in compare_folders(baseline, results, None).changes if c.metric == "tokens/s")
    assert rate.evidence.startswith("1 and 1 launch, ")


def test_what_a_gate_cannot_tell_is_seen_and_can_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    sides = [str(leave(tmp_path / name, at(name, "2026-02-01", s))) for name, s in (("a", 0.1), ("b", 0.12))]
    assert main(["compare", *sides, "--fail-on", "slower:3%"]) == 0
    said = capsys.readouterr().out
    assert "CANNOT TELL: " in said and "takes 4 more launches, about " in said
    assert "::warning title=Meshmark cannot tell::" in said
    assert "tokens/s cannot tell" in (tmp_path / "summary.md").read_text()
    assert main(["compare", *sides, "--fail-on", "slower:3%,unsure"]) == 1
    assert "FAILED by --fail-on unsure: " in capsys.readouterr().out


def test_one_cause_is_one_message() -> None:
    """A second copy of gradients is more bytes at every instant, and more than the plan, in two cases."""
    one, other = make_case("ddp"), make_case("fsdp2")
    good = [make_good(case=case) for case in (one, other)]
    reading, instants = make_memory(), ("steady", "states", "peak")
    more = {at: dataclasses.replace(getattr(reading, at), gradients=9000) for at in instants}
    grown = [dataclasses.replace(reading, **more)] * 2
    verdicts = [make_verdict(suite, passed=suite != "memory") for suite in ("equivalence", "memory", "communication")]
    evidence = make_memory_evidence(readings=grown)
    bad = [make_good(case=case, memory=evidence, verdicts=verdicts) for case in (one, other)]
    failing = parse_gate(DEFAULT_GATE).failing(compare(good, bad).changes)
    assert len(failing) > 4, "by metric"
    (cause,) = causes(failing)
    assert "gradients on rank 0" in str(cause) and "and with it" in str(cause)
    assert "memory verdict yes -> no" in str(cause) and f"the same in 1 other case: {other.id}" in str(cause)


def test_what_crashes_is_one_message() -> None:
    crashed = make_good(outcome=Outcome(status=Status.RAISED, message="x"), verdicts=[])
    (cause,) = causes(c for c in compare([make_good()], [crashed]).changes if c.outcome is not ChangeOutcome.SAME)
    assert cause.change.metric == "instrumented pass"


def test_other_settings_of_the_allocator_are_other_conditions() -> None:
    """They move what is reserved: a difference would not be the code's. Records of old, which hold none, compare."""
    plain, own = ({"allocator": text} for text in ("PyTorch's defaults", "PYTORCH_ALLOC_CONF=expandable_segments:True"))
    with pytest.raises(ResultsError, match=r"allocator: PyTorch's defaults in A, PYTORCH_ALLOC_CONF=expandable"):
        compare([make_good(kernels=plain)], [make_good(kernels=own)])
    mixed = [make_good(kernels=plain), make_good(kernels=own, case=make_case("gpipe"))]
    with pytest.raises(ResultsError, match=r"allocator: .* and PyTorch's defaults in A"):
        compare(mixed, [make_good(kernels=plain), make_good(kernels=plain, case=make_case("gpipe"))])
    across = compare([make_good(kernels=plain)], [make_good(kernels=own)], across=True)
    assert list(across.conditions) == ["allocator"]
    assert not compare([make_good(kernels=own)], [make_good(kernels=own)]).conditions
    assert not compare([make_good(kernels={})], [make_good(kernels=own)]).conditions


@pytest.mark.parametrize("status", [Status.NO_SPACE, Status.UNFINISHED, Status.SLOW])
def test_two_sides_that_met_a_fault_of_the_machine_are_not_the_same(status: Status) -> None:
    """Neither says anything about the code, and the gate passed as if both did."""
    stopped = make_good(outcome=Outcome(status=status, message="the disk is full"), verdicts=[])
    (change,) = compare([stopped], [stopped]).changes
    assert change.outcome is ChangeOutcome.UNDECIDED
    assert parse_gate("wrong,unsure").failing([change]) and not parse_gate("wrong").failing([change])
    skipped = make_good(outcome=Outcome(status=Status.SKIPPED), verdicts=[])
    assert {change.outcome for change in compare([skipped], [skipped]).changes} == {ChangeOutcome.SAME}


def test_a_test_that_b_did_not_end_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The case's other suites left its record, so that a run that was killed passed the gate."""
    case = make_good().case.id
    left = Attempt(test="suites/test_memory.py::test_memory[ddp]", case=case, conforming=False)
    others = dataclasses.replace(left, case=make_case("fsdp2").id)  # A has no such case
    began = Session(schema=SCHEMA, session="one", command="pytest suites", device="cpu", attempts=[left, others])
    before, after = leave(tmp_path / "a", make_good()), leave(tmp_path / "b", make_good(), began)
    compared = ["compare", str(before), str(after), "--fail-on"]
    assert main([*compared, "wrong,missing"]) == 1
    assert f"FAILED by --fail-on missing: {case}: test_memory worse: run -> not ended" in capsys.readouterr().out
    assert main([*compared, "wrong"]) == 0
    ended = [dataclasses.replace(attempt, ending=Ending.PASSED) for attempt in began.attempts]
    leave(after, dataclasses.replace(began, exit_code=0, attempts=ended, code="0123456789ab"))
    assert main([*compared, "wrong,missing"]) == 0
    again = dataclasses.replace(began, session="two", code="0123456789ab")
    leave(after, again)
    assert main([*compared, "wrong,missing"]) == 0, "the same code has finished it before"
    leave(after, dataclasses.replace(again, session="three", code="ba9876543210"))
    assert main([*compared, "wrong,missing"]) == 1, "other code has not"


def test_a_damaged_baseline_gates_nothing_silently(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A torn line, or the markers of a merge, may stand where a case was."""
    for name in ("a", "b"):
        with contextlib.closing(RecordFile(tmp_path / name)) as file:
            file.append(make_good())
    asked = ["compare", str(tmp_path / "a"), str(tmp_path / "b")]
    assert main([*asked, "--fail-on", "wrong"]) == 0
    with (tmp_path / "a" / "records.jsonl").open("a") as file:
        file.write("<<<<<<< HEAD\n")
    assert main([*asked, "--fail-on", "wrong"]) == 2
    assert "1 line cannot be read" in capsys.readouterr().err
    with pytest.raises(ResultsError, match="so that a gate would leave out cases"):
        baseline_gate(tmp_path / "a", parse_gate("wrong"))
    assert main(asked) == 0, "without a gate it is told"


def test_a_gate_does_not_pass_an_older_record_for_a_failed_test_whose_own_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B had a right run, then a wrong one whose line was cut off."""
    failed = Attempt(
        test="suites/test_memory.py::test_memory[ddp]", case=make_good().case.id, conforming=False, ending=Ending.FAILED
    )
    ended = Session(schema=SCHEMA, session="two", command="pytest suites", device="cpu", attempts=[failed], exit_code=1)
    before, after = leave(tmp_path / "a", make_good()), leave(tmp_path / "b", make_good(), ended)
    compared = ["compare", str(before), str(after)]
    assert main([*compared, "--fail-on", "wrong"]) == 0
    whole = (after / "records.jsonl").read_text()
    (after / "records.jsonl").write_text(whole.splitlines()[0][:200] + "\n" + whole)
    assert main([*compared, "--fail-on", "wrong"]) == 2
    said = capsys.readouterr().err
    assert f"1 test failed, such as {failed.case}, and 1 line cannot be read, any of which may be its record" in said
    assert main(compared) == 0, "without a gate, damaged lines are told"


def test_a_case_that_was_not_timed_is_missing_where_times_count() -> None:
    """A gate of `slower,missing,unsure` passed it without a word, as long as another case was timed."""
    found = compare([make_good(), timed(0.1)], [make_good()])
    assert [change.after for change in parse_gate("slower,missing").failing(found.changes)] == ["not timed"]
    assert not parse_gate("missing").failing(compare([make_good(), timed(0.1)], [make_good()], timed=False).changes)
