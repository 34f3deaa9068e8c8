"""Measurements of `make power` outlive whatever happens to its page, which is made from them alone."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import pytest

from benchmarks import power
from benchmarks.honest import PROBABILITIES, Group, Honest, Tail
from benchmarks.parallel_trials import Part, Parts
from benchmarks.power_page import Power, report
from benchmarks.smallest import Smallest, correct_case, searches, sizes
from benchmarks.trials import Cell, Trial
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.conformance.finding import decide
from meshmark.records.record import Outcome, Status
from meshmark.serial import decode, encode
from meshmark.spec.algorithm import SYNCHRONOUS, algorithm_classes
from meshmark.spec.precision import Precision
from tests.broken import mutants
from tests.broken.mutant import Mutant
from tests.broken.mutants import BROKEN_ADAPTERS, BY_NAME, MUTANTS, sized
from tests.factories import make_environment, make_good, make_record

BY_SUITE, BY_CLAUSE = BY_NAME["ddp_NoReduction"], BY_NAME["ddp_HidesMessage_error"]


def make_power() -> Power:
    tail = Tail(compared=100, beyond=[1] * len(PROBABILITIES), largest=3.0)
    group = Group(
        what="single, mini", seed=3, tolerance_models=2, excesses=[0.5, 0.75], worst="loss", tails={"number": tail}
    )
    return Power(
        trials=[
            Trial(mutant=BY_SUITE, record=make_record(case=BY_SUITE.case)),
            Trial(mutant=BY_CLAUSE, record=make_record(case=BY_CLAUSE.case), finding=decide(False, "hidden")),
        ],
        smallest=[Smallest(kind="WeightDecay", caught=None, survived=0.1, loss=0.0, evidence="nothing was caught")],
        cells=[Cell(adapter="ddp", clause="error", finding=decide(True, "told"), records=[make_record()])],
        real=[make_good()],
        algorithms=[make_good(), make_record()],
        limits=[make_good()],
        honest=Honest(groups=[group]),
        seconds=60.0,
        environment=make_environment(),
    )


def test_what_was_measured_comes_back_from_its_file_and_makes_the_same_page(tmp_path: Path) -> None:
    found = make_power()
    power.save(found, tmp_path / "power" / "measured.json.gz")
    again = power.load(tmp_path / "power" / "measured.json.gz")
    assert again == found
    page = report(again)
    assert page == report(found)
    for told in (
        "**1 of 2 mutants caught",
        "| NoReduction ",
        "| none ",
        "2 launches of algorithms",
        "1 minutes on 2 CPUs (Abacus 3000)",
    ):
        assert told in page
    assert [path.name for path in (tmp_path / "power").iterdir()] == ["measured.json.gz"]


def test_a_fault_in_the_page_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured, output = tmp_path / "measured.json.gz", tmp_path / "power.md"
    monkeypatch.setattr(power, "MEASURED", measured)
    monkeypatch.setattr(power, "measure", lambda names, num_groups: make_power())
    monkeypatch.setattr(power, "try_every_defect", lambda: 0)  # trains for minutes
    with monkeypatch.context() as faulty:
        faulty.setattr(power, "report", lambda found: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            power.main(["-o", str(output)])
    assert not output.exists()
    monkeypatch.delattr(power, "measure")
    assert power.main(["--page", "-o", str(output)]) == 1, "its mutants were not caught"
    assert output.read_text() == report(make_power())
    assert "ddp,fp32,NoReduction,equivalence" in (tmp_path / "mutants.csv").read_text()


def test_a_mutant_that_came_from_another_process_is_the_same() -> None:
    """Its precision equals a preset, which it was, and its name is found again."""
    mutant = next(m for m in MUTANTS if m.in_bf16)
    arrived = pickle.loads(pickle.dumps(mutant))
    assert arrived.in_bf16 and decode(Mutant, encode(arrived)) is mutant


def test_every_correct_run_is_one_that_its_adapter_supports() -> None:
    """One that is skipped shows nothing, and was counted as an alarm."""
    targets = builtin_adapters()
    cases = [*power.real_cases(), *power.limit_cases()]
    refused = {case.id: load_adapter(targets[case.adapter]).supports(case, "cpu", "gloo") for case in cases}
    assert len(refused) > len(BROKEN_ADAPTERS) and not any(refused.values()), refused


def test_every_size_that_is_sought_is_an_adapter_of_its_own_that_takes_the_precision() -> None:
    """And every limit is told once, of each 16-bit precision where no product is split and where some are."""
    for kind, adapter, precision in searches():
        first, *_, last = (getattr(mutants, sized(adapter, kind, by)) for by in sizes(kind, adapter))
        assert first is not last and first.supports(correct_case(adapter, precision), "cpu", "gloo") is None
    cases = list(power.limit_cases())
    assert len({case.id for case in cases}) == len(cases)
    narrow = {(case.precision, case.layout.tp > 1) for case in cases if case.precision.is_mixed}
    assert narrow == {(Precision.BF16, False), (Precision.FP16, False), (Precision.BF16, True)}


def test_what_was_sought_before_there_were_16_bits_is_read_as_it_was_meant() -> None:
    (before,) = make_power().smallest
    told = {name: value for name, value in encode(before).items() if name not in ("adapter", "precision")}
    assert decode(Smallest, told) == before and (before.adapter, before.precision) == ("ddp", Precision.FP32)


def test_what_one_sitting_has_tried_is_not_tried_again_by_the_same_code(tmp_path: Path) -> None:
    here, path = make_environment(), tmp_path / "power" / "parts.jsonl"
    first = Parts(path, here)
    trial, cells = make_power().trials[0], make_power().cells
    tried = Part(code=first.code, name="ddp_NoReduction", seconds=2.0, trial=trial)
    judged = Part(code=first.code, name="ddp", seconds=3.0, cells=cells)
    for part in (tried, judged):
        first.add(part)
    with path.open("a") as file:
        file.write('{"code": ["cut o')
    again = Parts(path, here)
    assert again.get("trial", "ddp_NoReduction") == tried and again.get("cells", "ddp") == judged
    assert again.get("trial", "ddp") is None and again.seconds == 2.5, "in two processes"
    assert len(path.read_text().splitlines()) == 2, (
        "the line that was cut off is gone, or the next would be joined to it"
    )
    dirty = dataclasses.replace(here, commit=f"{here.commit}-dirty")
    Parts(path, dirty).add(dataclasses.replace(tried, code=Parts(path, dirty).code))
    assert Parts(path, dirty).get("trial", "ddp_NoReduction") is None, "changes that no commit holds have no name"
    assert Parts(path, here).get("trial", "ddp_NoReduction") is None


def test_correct_runs_of_one_sitting_are_not_run_again_by_the_same_code(tmp_path: Path) -> None:
    here, path, (before,) = make_environment(), tmp_path / "parts.jsonl", make_power().smallest
    record, group = make_power().real[0], make_power().honest.groups[0]
    first = Parts(path, here)
    for kind, result in (("record", record), ("smallest", before), ("group", group)):
        assert first.once(kind, "one", lambda result=result: result) is result
    again = Parts(path, here)
    for kind, result in (("record", record), ("smallest", before), ("group", group)):
        assert again.once(kind, "one", lambda: pytest.fail("measured again")) == result
        assert again.once(kind, "another", lambda result=result: result) is result


def test_every_algorithm_is_run_right_too_at_least_200_times_in_all() -> None:
    cases = list(power.algorithm_cases())
    assert len(cases) >= 200
    assert {case.workload.algorithm.kind for case in cases} == set(algorithm_classes()) - {SYNCHRONOUS.kind}
    assert len({(case.id, case.workload.seed) for case in cases}) == len(cases)


def test_a_correct_run_of_an_algorithm_that_fails_is_an_alarm() -> None:
    crashed = make_record(outcome=Outcome(status=Status.RAISED, message="no"))
    assert dataclasses.replace(make_power(), algorithms=[crashed]).alarms == [crashed.case.id]
