"""Baselines: what is accepted, and what fails beside one."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshmark.cli.commands import main
from meshmark.environment import ALLOCATOR_VARIABLES
from meshmark.errors import InputError, ResultsError
from meshmark.pytest_plugin.plugin import NoBaselineWarning, UnsureWarning, expect, expect_no_worse
from meshmark.records.judged_case import JudgedCase
from meshmark.records.record import SCHEMA, ConformanceEvidence, Outcome, Record, Relaunch, Status
from meshmark.records.record_file import Attempt, Ending, RecordFile, Session, read_records
from meshmark.regression.baseline import accept, find_baseline
from meshmark.regression.baseline_gate import BaselineGate, baseline_gate, expect_cases, expect_conditions
from meshmark.regression.change import Change
from meshmark.regression.gate import DEFAULT_GATE, parse_gate
from meshmark.spec.known_gap import KnownGap
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

ROOT = Path(__file__).parent.parent
SECONDS = [0.1 + 0.001 * (i % 5) for i in range(40)]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def timed(factor: float = 1.0) -> Record:
    return make_timed(timing=make_timing(rank_step_seconds=[[factor * s for s in SECONDS]]))


def write(*records: Record | Session, folder: str = "results") -> Path:
    file = RecordFile(Path(folder))
    for record in records:
        file.append(record)
    file.close()
    return Path(folder)


def keeper(*records: Record, gate: str = DEFAULT_GATE) -> BaselineGate:
    return baseline_gate(accept(write(*records), "here"), parse_gate(gate))


def test_a_baseline_is_compact_and_says_what_it_was_measured_under(capsys: pytest.CaptureFixture[str]) -> None:
    alike = [Relaunch(rank_step_seconds=[[factor * s for s in SECONDS]]) for factor in (1.001, 0.999, 1.002)]
    again = dataclasses.replace(timed().timing, relaunches=alike)
    write(make_good(), make_timed(timing=again))
    assert main(["baseline", "accept", "results", "--name", "here"]) == 0
    assert "1 case, 2 records; gate with --baseline here" in capsys.readouterr().out
    about = json.loads(Path("baselines/here/baseline.json").read_text())
    assert about["dates"] == ["2026-01-02"] and about["commits"] == ["0123456789ab"]
    assert about["conditions"]["torch"] == ["2.13.0"] and about["conditions"]["machine"] == ["Abacus 3000"]
    kept, original = (read_records(Path(folder)).records for folder in ("baselines/here", "results"))
    assert [r.verdicts for r in kept] == [r.verdicts for r in original]
    assert kept[0].memory == original[0].memory and kept[0].traffic == original[0].traffic
    assert not kept[0].equivalence.deviations
    assert kept[1].timing.step_seconds == pytest.approx(original[1].timing.step_seconds, abs=1e-6)


@pytest.mark.parametrize(
    "record, allow, words",
    [
        (make_good(verdicts=[make_verdict(passed=False)]), "wrong", "equivalence: what decided equivalence"),
        (make_good(outcome=Outcome(status=Status.KILLED)), "wrong", "killed"),
        (make_timed(timing=make_timing(rank_step_seconds=[[0.1, 0.4, 0.1, 0.3]])), "noisy", "±"),
    ],
)
def test_wrong_and_noisy_cases_are_refused_unless_told(record: Record, allow: str, words: str) -> None:
    write(record)
    with pytest.raises(InputError, match=f"--allow {allow}") as refused:
        accept(Path("results"), "here")
    assert words in str(refused.value) and not Path("baselines").exists()
    assert accept(Path("results"), "here", allow=[allow]).is_dir()


def test_a_run_that_has_not_ended_is_no_baseline() -> None:
    """It is running still, or was killed, or its time was up: nothing would miss what it did not come to."""
    here = Attempt(test="suites/test_memory.py::test_memory[ddp]", case=make_good().case.id, conforming=False)
    began = Session(schema=SCHEMA, session="one", command="pytest suites", device="cpu", attempts=[here])
    write(make_good(), began)
    with pytest.raises(InputError, match="test_memory has not ended: let the run end.*--allow unfinished"):
        accept(Path("results"), "here")
    assert not Path("baselines").exists()
    ended = dataclasses.replace(here, ending=Ending.PASSED)
    write(dataclasses.replace(began, exit_code=0, attempts=[ended]))
    assert accept(Path("results"), "here").is_dir()


def test_a_damaged_line_is_told_and_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """It may be the one of a wrong case, which nobody would see again."""
    wrong = make_good(case=make_case("fsdp2"), verdicts=[make_verdict(passed=False)])
    path = write(make_good(), wrong) / "records.jsonl"
    with pytest.raises(InputError, match="--allow wrong"):
        accept(Path("results"), "here")
    path.write_bytes(path.read_bytes()[:-6] + b"\n")
    with pytest.raises(InputError, match=r"records.jsonl line 2: not whole JSON.*delete these lines.*--allow unf"):
        accept(Path("results"), "here")
    assert not Path("baselines").exists()
    assert "meshmark: results: left out records.jsonl line 2: not whole JSON" in capsys.readouterr().err
    assert accept(Path("results"), "here", allow=["unfinished"]).is_dir()
    assert "left out records.jsonl line 2" in capsys.readouterr().err


def test_records_for_other_readers_are_no_damaged_lines() -> None:
    write(make_good())
    JudgedCase(case={"engine": "some"}, verdicts=[]).append_to(Path("results"))
    assert accept(Path("results"), "here").is_dir()


@pytest.mark.parametrize(
    "test, ending, refused",
    [
        ("suites/test_memory.py::test_memory[fsdp2]", Ending.FAILED, True),
        ("suites/test_memory.py::test_memory[fsdp2]", Ending.SKIPPED, False),
        ("suites/test_memory.py::test_memory[fsdp2]", Ending.PASSED, False),
        ("gate[fsdp2]", Ending.FAILED, False),
    ],
)
def test_a_failed_test_without_a_record_is_refused(test: str, ending: Ending, refused: bool) -> None:
    """Not a skipped one, nor a gate's complaint that a case is gone."""
    there = Attempt(test=test, case=make_case("fsdp2").id, conforming=False, ending=ending)
    write(make_good(), Session(schema=SCHEMA, session="one", command="", device="cpu", exit_code=1, attempts=[there]))
    if refused:
        with pytest.raises(InputError, match="test_memory failed, and there is no record of it.*--allow unfinished"):
            accept(Path("results"), "here")
    else:
        assert accept(Path("results"), "here").is_dir()


def test_a_name_that_is_taken_keeps_what_it_holds() -> None:
    write(make_good())
    accept(Path("results"), "here")
    before = Path("baselines/here/records.jsonl").read_bytes()
    with pytest.raises(InputError, match="is there already"):
        accept(Path("results"), "here")
    Path("baselines/papers").mkdir()
    with pytest.raises(InputError, match="is there already"):  # nobody's baseline
        accept(Path("results"), "papers", replace=True)
    with pytest.raises(InputError, match="expected letters"):
        accept(Path("results"), "../up")
    assert Path("baselines/here/records.jsonl").read_bytes() == before
    write(timed())
    accept(Path("results"), "here", replace=True)
    assert len(read_records(Path("baselines/here")).records) == 2


def test_a_baseline_is_found_by_name_from_folders_below() -> None:
    write(make_good(), folder="baselines/here")
    Path("below").mkdir()
    assert find_baseline("here", Path("below").absolute()).samefile("baselines/here")
    assert find_baseline("baselines/here", Path.cwd()).samefile("baselines/here")
    with pytest.raises(ResultsError, match=r"no baseline 'there': baselines/ holds here; `meshmark baseline accept"):
        find_baseline("there", Path.cwd())


def test_a_results_folder_with_the_name_of_a_baseline_is_not_taken_for_it() -> None:
    for folder in ("here", "baselines/here"):
        write(make_good(), folder=folder)
    with pytest.raises(ResultsError, match=r"baseline 'here' is .*here or .*baselines/here: name one of them by its"):
        find_baseline("here", Path.cwd())
    for path in ("./here", str(Path("here").absolute())):
        assert find_baseline(path, Path.cwd()).samefile("here")
    assert find_baseline("baselines/here", Path.cwd()).samefile("baselines/here")


def test_nothing_fails_beside_an_equal_record() -> None:
    found = keeper(make_good(), timed())
    for suite in ("equivalence", "memory", "communication"):
        expect_no_worse(make_good(), suite, found)
    with pytest.warns(UnsureWarning, match="tokens/s cannot tell"):
        expect_no_worse(timed(1.01), "throughput", found)
    sure = dataclasses.replace(found, gate=parse_gate("wrong,slower:3%,unsure"))
    with pytest.raises(pytest.fail.Exception, match="tokens/s cannot tell"):
        expect_no_worse(timed(1.01), "throughput", sure)


def test_each_kind_of_regression_fails_its_own_test_with_its_evidence() -> None:
    found = keeper(make_good(), *(timed(1 + 0.01 * i) for i in range(5)))
    bigger = make_good(memory=make_memory_evidence(readings=[make_memory(), make_memory(activations=2000)]))
    with pytest.raises(pytest.fail.Exception, match=r"peak memory worse: .*activations on rank 1: 1,000 -> 2,000"):
        expect_no_worse(bigger, "memory", found)
    expect_no_worse(bigger, "communication", found)
    chatty = make_good(traffic=make_traffic_evidence(readings=[make_traffic(), make_traffic(num_bytes=800)]))
    with pytest.raises(pytest.fail.Exception, match=r"traffic asked for worse: .*all_reduce over ranks 0, 1 on rank 1"):
        expect_no_worse(chatty, "communication", found)
    with pytest.raises(pytest.fail.Exception, match=r"tokens/s worse: .*-66"):
        expect_no_worse(timed(3.0), "throughput", found)
    wrong = make_good(verdicts=[make_verdict(passed=False)])
    with pytest.raises(pytest.fail.Exception, match="equivalence verdict worse: yes -> no"):
        expect_no_worse(wrong, "equivalence", found)


def failing(found: BaselineGate, record: Record) -> list[Change]:
    return found.gate.failing(found.changes(record, "throughput"))


def test_more_timed_cases_share_the_chance_of_a_false_alarm() -> None:
    found = keeper(make_good(), *(timed(1 + 0.03 * i) for i in range(5)))
    slow = timed(1.8)
    assert failing(found, slow)
    assert not failing(dataclasses.replace(found, num_timed=100_000), slow)


def test_a_baseline_of_one_launch_fails_no_rate() -> None:
    """How far its launches scatter on this machine nobody has seen."""
    assert not failing(keeper(make_good(), timed()), timed(3.0))


def test_a_baseline_of_another_machine_fails_no_rate() -> None:
    found = keeper(make_good(), *(timed(1 + 0.01 * i) for i in range(5)))
    slow = dataclasses.replace(timed(3.0), environment=make_environment(machine="Abacus 4000"))
    assert failing(found, timed(3.0)) and not failing(found, slow)


def test_a_case_that_the_baseline_lacks_is_told() -> None:
    found = keeper(make_good())
    other = make_good(case=make_case("fsdp2"))
    with pytest.warns(NoBaselineWarning, match="it is not gated"):
        expect_no_worse(other, "memory", found)
    with pytest.raises(ResultsError, match=f"holds no case of this session \\(.*\\): it holds {make_case().id};"):
        expect_cases(found, [other.case.id])
    expect_cases(found, [other.case.id, make_case().id])


def test_another_case_of_the_same_name_is_told_and_no_pass() -> None:
    """As after a change of a workload of one's own: the gate compared nothing, and said nothing."""
    other = make_case()
    other = dataclasses.replace(other, workload=dataclasses.replace(other.workload, seed=other.workload.seed + 1))
    assert other.id == make_case().id
    found = keeper(make_good())
    with pytest.warns(UnsureWarning, match="the same name stands for another workload"):
        expect_no_worse(make_good(case=other), "memory", found)
    with pytest.raises(pytest.fail.Exception, match="the same name stands for another workload"):
        strict = dataclasses.replace(found, gate=parse_gate("wrong,unsure"))
        expect_no_worse(make_good(case=other), "memory", strict)


def test_a_case_that_the_baseline_has_not_timed_is_not_called_as_fast() -> None:
    found = keeper(make_good())
    with pytest.warns(UnsureWarning, match="the baseline has not timed it"):
        expect_no_worse(timed(1.0), "throughput", found)
    sure = dataclasses.replace(found, gate=parse_gate("wrong,slower:3%,unsure"))
    with pytest.raises(pytest.fail.Exception, match="speed cannot tell"):
        expect_no_worse(timed(1.0), "throughput", sure)
    untimed = dataclasses.replace(found, gate=parse_gate("wrong,bigger:1%"))
    expect_no_worse(timed(1.0), "throughput", untimed)


def test_a_known_gap_excuses_the_verdict_and_not_the_growth_of_bytes() -> None:
    """It was xfailed before the baseline was asked."""
    gap = KnownGap(clause="memory", symptom="activations", reason="keeps a table")
    declared: dict[str, Any] = {
        "conformance": ConformanceEvidence(known_gaps=[gap]),
        "verdicts": [make_verdict(), make_verdict("memory", passed=False, summary="activations on rank 0")],
    }
    before = make_good(**declared)
    found = baseline_gate(accept(write(before), "here", allow=("wrong",)), parse_gate(DEFAULT_GATE))
    with pytest.raises(pytest.xfail.Exception, match="keeps a table"):
        expect(before, "memory", found)
    bigger = make_good(**declared, memory=make_memory_evidence(readings=[make_memory(activations=2000)] * 2))
    with pytest.raises(pytest.fail.Exception, match="peak memory worse"):
        expect(bigger, "memory", found)


def test_other_conditions_are_refused() -> None:
    found = keeper(make_good())
    expect_conditions(found, make_environment(backend="", versions={"torch": "2.13.0", "pandas": "9"}))
    with pytest.raises(ResultsError, match=r"machine: Abacus 3000 there, Abacus 4000 here.*--across"):
        expect_conditions(found, make_environment(machine="Abacus 4000"))
    untimed = dataclasses.replace(found, gate=parse_gate("wrong,bigger:1%"))
    expect_conditions(untimed, make_environment(machine="Abacus 4000", num_cpus=3))
    with pytest.raises(ResultsError, match="torch: 2.13.0 there, 2.14.0 here"):
        expect_conditions(untimed, make_environment(versions={"torch": "2.14.0"}))


@pytest.mark.slow
def test_pytest_refuses_a_baseline_of_other_conditions_or_cases() -> None:
    """Before anything is launched; `--across` lets the conditions pass, and the cases still are others."""
    keeper(make_good())
    code = (
        "import sys, pytest\n"
        "common = '--pyargs meshmark.suites --adapters ddp --collect-only -q -p no:cacheprovider'.split()\n"
        "for more in (['--baseline', 'none'], ['--baseline', 'here'], ['--baseline', 'here', '--across'],\n"
        "    ['--baseline', 'here', '--fail-on', 'missing'], ['--fail-on', 'wrong']):\n"
        "    print(int(pytest.main([*common, *more])), file=sys.stderr)\n"
    )
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    said = done.stdout + done.stderr
    assert said.count("\n4\n") == 5, said
    for words in (
        "no baseline 'none': baselines/ holds here",
        "measured under other conditions",
        "holds no case of",
        "--fail-on missing: a session with --baseline compares each case as it ends",
        "--fail-on and --across are for a comparison",
    ):
        assert words in said


def test_a_baseline_of_other_allocator_settings_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    here = make_environment(device="cuda")
    found = keeper(make_good(environment=here, kernels={"allocator": "PyTorch's defaults"}))
    expect_conditions(found, here)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    with pytest.raises(ResultsError, match="allocator: PyTorch's defaults there, PYTORCH_CUDA_ALLOC_CONF=max_split"):
        expect_conditions(found, here)
    told = json.loads((found.folder / "baseline.json").read_text())
    assert told["conditions"]["allocator"] == ["PyTorch's defaults"]
