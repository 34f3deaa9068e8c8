"""`meshmark history`: series of runs and where they change."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from meshmark.cli.commands import main
from meshmark.records.judged_case import JudgedCase
from meshmark.records.record import SCHEMA, Relaunch
from meshmark.records.record_file import RecordFile, Session
from meshmark.regression.history import Series, change_points, series_of
from meshmark.regression.run_file import TIMES, Run, read_run
from tests.factories import (
    make_case,
    make_environment,
    make_good,
    make_memory,
    make_memory_evidence,
    make_record,
    make_timed,
    make_timing,
    make_verdict,
)

RNG = np.random.default_rng(5)


def run(number: int, value: float = 1.0, metric: str = TIMES[0]) -> Run:
    return Run(
        name=str(number),
        date=f"2026-01-{number // 24 + 1:02}T{number % 24:02}:00:00",
        commit=f"c{number}",
        machine="Abacus",
        versions={"torch": "2.13.0" if number < 20 else "2.14.0"},
        values={"case": {metric: value}},
    )


def history(factor: float, scatter: float = 0.03, count: int = 40) -> list[Run]:
    """Slower by `factor` from run 20 on."""
    seconds = np.exp(scatter * RNG.standard_normal(count)) * np.where(np.arange(count) < 20, 1.0, factor)
    return [run(i, float(s)) for i, s in enumerate(seconds)]


def test_a_slow_down_is_dated_and_named_with_commit_and_versions() -> None:
    (point,) = change_points(series_of(reversed(history(1.15))))
    assert abs(point.index - 20) <= 1
    assert point.after / point.before == pytest.approx(1.15, abs=0.03)
    told = str(dataclasses.replace(point, index=20))
    assert "2026-01-01T20:00:00 c20 case: seconds a step" in told and "after c19; torch 2.13.0 -> 2.14.0" in told


def test_runs_of_the_same_code_change_as_rarely_as_promised_and_odd_ones_are_no_change() -> None:
    alarms = sum(bool(change_points(series_of(history(1.0)))) for _ in range(100))
    assert alarms <= 5  # of 100 at 1 %: more has a chance of 0.1 %
    odd = history(1.0, scatter=0.01)
    odd[10] = run(10, 1.5)
    assert not change_points(series_of(odd))


def test_a_change_of_one_case_among_many_is_found() -> None:
    found = change_points([*series_of(history(1.15)), *(s for _ in range(30) for s in series_of(history(1.0)))])
    assert [abs(point.index - 20) <= 1 for point in found] == [True]


def test_exact_metrics_change_where_their_value_does() -> None:
    runs = [run(i, value, "peak bytes") for i, value in enumerate([5.0, 5.0, 6.0, 6.0, 5.0])]
    assert [(p.index, p.before, p.after) for p in change_points(series_of(runs))] == [(2, 5.0, 6.0), (4, 6.0, 5.0)]


def test_a_constant_series_has_no_change_but_the_one_that_is_there() -> None:
    """Logarithms of equal numbers are not always averaged to one of them."""
    assert not change_points(series_of(run(i, 1.56863) for i in range(40)))
    (point,) = change_points(series_of(run(i, 1.56863 * (1.1 if i >= 20 else 1)) for i in range(40)))
    assert point.index == 20


def test_a_short_series_of_times_has_no_change() -> None:
    runs = [run(i, value) for i, value in enumerate([1.0, 1.0, 2.0])]
    assert change_points(series_of(runs)) == []


def write(folder: Path, day: int, seconds: float, activations: int = 1000, correct: bool = True) -> str:
    about = make_environment(date=f"2026-01-{day:02}T00:00:00+00:00", commit=f"commit{day}")
    memory = make_memory_evidence(readings=[make_memory(), make_memory(activations=activations)])
    ranks = [[seconds * (1 + 0.01 * ((i + day) % 3)) for i in range(8)]] * 2
    file = RecordFile(folder)
    file.append(make_good(environment=about, memory=memory, verdicts=[make_verdict(passed=correct)]))
    again = Relaunch(rank_step_seconds=[[1.01 * s for s in rank] for rank in ranks], rank_starts=[[0.0], [0.2]])
    laps = {"lap_steps": [4, 4], "rank_starts": [[0.0, 0.1], [0.2, 0.0]]}
    timing = make_timing(rank_step_seconds=ranks, relaunches=[again], **laps)
    file.append(make_timed(environment=about, timing=timing))
    file.close()
    return str(folder)


def test_a_folder_is_read_as_its_records_say(tmp_path: Path) -> None:
    """By the light reader, what the records themselves tell."""
    found = read_run(Path(write(tmp_path / "one", 1, 0.1)))
    good, timed = make_good(), make_timed(timing=make_timing())
    assert found.values.keys() == {good.case.id} and found.commit == "commit1"
    metrics = found.values[good.case.id]
    from meshmark.records.record_file import read_records

    record = read_records(tmp_path / "one").records[1]
    assert metrics[TIMES[0]] == pytest.approx(statistics.fmean(record.timing.step_seconds), rel=1e-12)
    assert metrics["peak bytes"] == max(reading.peak.total for reading in good.memory.readings)
    assert metrics["bytes sent"] == 800 and metrics["correct"] == 1.0 and metrics["launch seconds"] == 3.5
    assert timed.case.id == good.case.id


def test_the_command_tells_and_plots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [
        write(tmp_path / str(i), i, 0.1 if i < 8 else 0.15, 1000 if i < 5 else 2000, i != 12) for i in range(1, 13)
    ]
    monkeypatch.setitem(matplotlib.rcParams, "text.usetex", True)  # as a stranger's matplotlibrc asks
    assert main(["history", *folders, str(tmp_path / "none"), "-o", str(tmp_path / "plots")]) == 0
    told = capsys.readouterr()
    assert "12 runs, 1 case, " in told.out and "no records at" in told.err
    assert "2026-01-05T00:00:00+00:00 commit5" in told.out and "peak bytes" in told.out
    assert "2026-01-08T00:00:00+00:00 commit8" in told.out and "seconds a step" in told.out
    assert "2026-01-12T00:00:00+00:00 commit12" in told.out and "correct 1 -> 0" in told.out
    (plot,) = (tmp_path / "plots").iterdir()
    assert "commit8" in plot.read_text()


def test_a_case_of_any_name_is_plotted_and_a_damaged_line_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A formula that is none, names alike but for what no file's name may hold, a name longer than any file's."""
    names = ["$\\nothing{$", "a/b", "a?b", "\x00" + 300 * "x"]
    for i in range(2):
        file = RecordFile(tmp_path / str(i))
        for name in names:
            case = make_case(workload=dataclasses.replace(make_case().workload, name=name))
            memory = make_memory_evidence(readings=[make_memory(activations=1000 * i)])
            file.append(make_good(case=case, memory=memory, environment=make_environment(commit="$\\no{$")))
        file.close()
        good = (tmp_path / str(i) / "records.jsonl").read_text()
        damaged = [json.loads(line) for line in good.splitlines()[:2]]
        damaged[0]["environment"]["versions"], damaged[1]["environment"]["date"] = [], 3
        with (tmp_path / str(i) / "records.jsonl").open("a") as more:
            more.writelines(json.dumps(line) + "\n" for line in damaged)
    folders = [str(tmp_path / str(i)) for i in range(2)]
    assert main(["history", *folders, "-o", str(tmp_path / "plots")]) == 0
    assert len(list((tmp_path / "plots").iterdir())) == len(names)
    capsys.readouterr()
    assert main(["history", *folders, "-o", str(tmp_path / "0" / "records.jsonl")]) == 2
    assert "-o takes a folder" in capsys.readouterr().err


def test_damaged_lines_are_told_once_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [write(tmp_path / str(i), i, 0.1) for i in (1, 2, 3)]
    with (tmp_path / "1" / "records.jsonl").open("a") as file:
        file.write('{"schema": 4, "ca\n[]\n\n{"schema": 99}\n')
    good = (tmp_path / "2" / "records.jsonl").read_text()
    (tmp_path / "2" / "records.jsonl").write_text(good[:-6])
    assert main(["history", *folders]) == 0
    first, second = capsys.readouterr().err.splitlines()
    assert f"meshmark: {folders[0]}: left out 3 lines that cannot be read, first records.jsonl line 3: not wh" in first
    assert f"meshmark: {folders[1]}: left out 1 line that cannot be read, first records.jsonl line 2: not wh" in second


def test_lines_that_no_history_is_of_are_no_complaint(tmp_path: Path) -> None:
    folder = Path(write(tmp_path / "one", 1, 0.1))
    JudgedCase(case={"engine": "some"}, verdicts=[]).append_to(folder)
    with contextlib.closing(RecordFile(folder)) as file:
        file.append(Session(schema=SCHEMA, session="one", command="pytest suites", device="cpu"))
        file.append(make_record())
    assert read_run(folder).left_out == "" and len(read_run(folder).values) == 1


def test_one_run_is_no_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "one", 1, 0.1)
    assert main(["history", one]) == 2
    assert "a history takes at least 2" in capsys.readouterr().err
    assert main(["history", one, one, "--case", "nothing"]) == 2
    assert "no case of 2 runs holds it" in capsys.readouterr().err


def test_a_series_is_one_metric_of_one_case() -> None:
    assert series_of([run(1), run(0)]) == [
        Series(case="case", metric=TIMES[0], runs=[run(0), run(1)], values=[1.0, 1.0])
    ]


def test_a_line_that_is_nested_without_end_is_left_out(tmp_path: Path) -> None:
    with contextlib.closing(RecordFile(tmp_path)) as file:
        file.append(make_good())
    with (tmp_path / "records.jsonl").open("a") as lines:
        lines.write('{"schema": 4, "a": ' + "[" * 200_000 + "\n")
    assert list(read_run(tmp_path).values) == [make_good().case.id]
