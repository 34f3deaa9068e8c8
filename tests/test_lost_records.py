"""Whatever fails outside a rank, every case that was begun has its record, or the run ends and says why it has none."""

from __future__ import annotations

import contextlib
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshmark.errors import ResultsError
from meshmark.judge.tolerance_model import NoiseFloor
from meshmark.launch.cluster import Cluster, ClusterSpec
from meshmark.launch.launch import ForkserverLauncher
from meshmark.passes.noise import write_noise
from meshmark.records.record import Status
from meshmark.records.record_file import Ending, RecordFile, line_of, read_records
from meshmark.run.runner import Runner, RunOptions
from tests.factories import make_record, make_timed
from tests.test_suites import ROOT, suites

LIARS = ROOT / "tests" / "broken" / "tells_wrong.py"


@contextlib.contextmanager
def disk_with(num_bytes: int) -> Iterator[None]:
    """No file grows beyond `num_bytes`: the part of a write that fits is done, as on a disk that fills up."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_what_an_adapter_does_outside_its_ranks_is_the_outcome_of_its_case_alone(tmp_path: Path) -> None:
    names = ("ExitsInRecipe", "ExitsInModules", "RaisesInSupports", "TellsNumPy", "ExitsWell")
    chosen = [argument for name in names for argument in ("--adapter", f"{LIARS}:{name}")]
    done = suites(*chosen, "--workload", "gpt-mini", "-k", "communication", "--results", tmp_path)
    found = {record.case.adapter: record for record in read_records(tmp_path).records}
    assert list(found) == [name.lower() for name in names], done.stdout
    assert found["exitsinrecipe"].outcome.status is Status.OK
    assert found["exitsinrecipe"].unmeasured == {"memory": "Adapter.recipe raised SystemExit: planted in recipe"}
    for name, words in {
        "exitsinmodules": "SystemExit: planted in modules",
        "raisesinsupports": "ArithmeticError: planted in supports",
        "tellsnumpy": "its record cannot be read again: ",
    }.items():
        assert found[name].outcome.status is Status.UNFINISHED
        assert found[name].outcome.message.startswith(words)
    assert found["exitswell"].outcome.status is not Status.OK
    assert "IndexError" not in found["exitswell"].outcome.message
    assert "1 passed" in done.stdout and "INTERNALERROR" not in done.stdout


@pytest.mark.slow
def test_a_results_folder_that_is_moved_ends_the_run_which_says_where_its_records_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results"
    monkeypatch.setenv("MESHMARK_TEST_RESULTS", str(results))
    chosen = ("--adapter", f"{LIARS}:MovesResults", "--conformance", "-k", "decay or tied or clipping")
    done = suites(*chosen, "--results", results)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
    assert f"{str(results / 'records.jsonl')!r} was moved or removed while this run was writing to it" in done.stdout
    assert repr(str(tmp_path / "moved" / "records.jsonl")) in done.stdout
    (record,) = read_records(tmp_path / "moved").records
    assert record.case.adapter == "movesresults"
    (session,) = read_records(results).sessions
    assert session.exit_code == pytest.ExitCode.USAGE_ERROR
    assert [attempt.ending for attempt in session.attempts].count(Ending.UNFINISHED) >= 1, "no case ran after it"


@pytest.mark.parametrize("when", ["before a record", "after the last"])
def test_a_file_that_was_moved_is_told_with_its_new_place(tmp_path: Path, when: str) -> None:
    (tmp_path / "old").mkdir()
    file = RecordFile(tmp_path / "old")
    file.append(make_record())
    (tmp_path / "old").rename(tmp_path / "new")
    with pytest.raises(ResultsError, match="was moved or removed .*'.*new/records.jsonl'"):
        file.append(make_timed()) if when == "before a record" else file.close()
    expected = [make_record(), make_timed()] if when == "before a record" else [make_record()]
    assert read_records(tmp_path / "new").records == expected


def test_a_file_that_was_removed_is_written_anew_under_a_name_that_is_told(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "results")
    file.append(make_record())
    shutil.rmtree(tmp_path / "results")
    with pytest.raises(ResultsError, match="was moved or removed") as told:
        file.append(make_timed())
    (rescued,) = (tmp_path / "results").glob("records-*.jsonl")
    assert str(rescued) in str(told.value)
    assert read_records(rescued).records == [make_record(), make_timed()]


def test_a_file_that_another_took_the_place_of_is_left_alone(tmp_path: Path) -> None:
    file = RecordFile(tmp_path)
    (tmp_path / "records.jsonl").unlink()
    (tmp_path / "records.jsonl").write_text("another's\n")
    with pytest.raises(ResultsError, match="was replaced"):
        file.append(make_record())
    assert (tmp_path / "records.jsonl").read_text() == "another's\n"
    assert [len(read_records(path).records) for path in tmp_path.glob("records-*.jsonl")] == [1]


def test_a_disk_that_fills_up_amid_a_line_leaves_none_of_it(tmp_path: Path) -> None:
    file = RecordFile(tmp_path)
    file.append(make_record())
    whole = len(line_of(make_record()))
    with disk_with(whole + 100), pytest.raises(ResultsError, match="cannot be written: .*; what it held before is kep"):
        file.append(make_timed())
    assert file.path.stat().st_size == whole
    file.append(make_timed())  # there is room again
    file.close()
    assert read_records(tmp_path).records == [make_record(), make_timed()]
    assert not read_records(tmp_path).complaints


def test_half_a_noise_floor_is_removed_at_once_and_by_the_next_run(tmp_path: Path) -> None:
    with disk_with(10), pytest.raises(OSError):
        write_noise(tmp_path / "noise" / "key.json", NoiseFloor(runs=[]))
    assert not list((tmp_path / "noise").iterdir())
    write_noise(tmp_path / "noise" / "key.json", NoiseFloor(runs=[]))
    (tmp_path / "noise" / "key.1.2.partial").write_text("of a run that was killed")
    with Cluster(ClusterSpec()) as cluster:
        Runner(ForkserverLauncher(cluster), {}, RunOptions(), tmp_path).close()
    assert [path.name for path in (tmp_path / "noise").iterdir()] == ["key.json"]
