"""The records file: whole lines, one writer, and every good line kept."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import gzip
import json
import os
import tracemalloc
from pathlib import Path

import pytest

from meshmark.errors import InputError, ResultsError
from meshmark.records import record_file
from meshmark.records.judged_case import JudgedCase, read_newest
from meshmark.records.record import SCHEMA, TrainingCurves
from meshmark.records.record_file import RecordFile, line_of, read_records
from meshmark.regression.run_file import read_run
from meshmark.serial import encode
from tests.factories import (
    make_equivalence,
    make_good,
    make_memory_evidence,
    make_record,
    make_timed,
    make_timing,
    make_traffic_evidence,
)


def write(folder: Path, *records: object) -> Path:
    file = RecordFile(folder)
    for record in records:
        file.append(record)  # type: ignore[arg-type]
    file.close()
    return file.path


def test_what_was_appended_is_read_in_order(tmp_path: Path) -> None:
    records = [make_record(), make_timed(), make_record(steps=9)]
    path = write(tmp_path, *records)
    reading = read_records(tmp_path)
    assert reading.records == records
    assert reading.complaints == []
    assert read_records(path) == reading, "the file itself will do for its folder"


def test_a_record_is_one_self_describing_line(tmp_path: Path) -> None:
    (line,) = write(tmp_path, make_record()).read_text().splitlines()
    value = json.loads(line)
    assert value["schema"] == SCHEMA
    assert value["case"]["workload"]["model"]["hidden"] == 16


def test_a_record_is_on_disk_before_the_file_is_closed(tmp_path: Path) -> None:
    """Ctrl-C and crashes leave what was appended."""
    file = RecordFile(tmp_path)
    file.append(make_record())
    assert read_records(tmp_path).records == [make_record()]
    file.close()


def test_a_second_session_appends(tmp_path: Path) -> None:
    write(tmp_path, make_record())
    write(tmp_path, make_timed())
    assert len(read_records(tmp_path).records) == 2


def test_folders_are_made(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b", make_record())
    assert (tmp_path / "a" / "b" / "records.jsonl").is_file()


def test_a_truncated_last_line_costs_that_line_alone(tmp_path: Path) -> None:
    path = write(tmp_path, make_record(), make_timed(), make_record(steps=9))
    path.write_bytes(path.read_bytes()[:-100])
    reading = read_records(tmp_path)
    assert reading.records == [make_record(), make_timed()]
    (complaint,) = reading.complaints
    assert complaint.startswith("records.jsonl line 3: not whole JSON")
    assert "cut off" in complaint


def test_the_first_record_after_a_truncated_line_is_not_glued_to_it(tmp_path: Path) -> None:
    path = write(tmp_path, make_record(), make_record())
    path.write_bytes(path.read_bytes()[:-100])
    write(tmp_path, make_timed())
    reading = read_records(tmp_path)
    assert reading.records == [make_record(), make_timed()]
    assert len(reading.complaints) == 1 and "line 2" in reading.complaints[0]


def test_reopening_a_whole_file_adds_no_line(tmp_path: Path) -> None:
    path = write(tmp_path, make_record())
    before = path.read_bytes()
    write(tmp_path)
    assert path.read_bytes() == before


def test_bytes_cut_inside_a_character_are_a_bad_line_not_a_crash(tmp_path: Path) -> None:
    path = write(tmp_path, make_record())
    path.write_bytes(path.read_bytes() + '{"schema": 1, "adapter": "ü'.encode()[:-1])
    reading = read_records(tmp_path)
    assert (len(reading.records), len(reading.complaints)) == (1, 1)


@pytest.mark.parametrize(
    "line, words",
    [
        (json.dumps(encode(make_record()) | {"schema": 99}), ["schema 99", f"reads 1 to {SCHEMA}"]),
        (json.dumps({"colour": "red"}), ["schema None", f"reads 1 to {SCHEMA}"]),
        ("[1, 2]", ["schema None"]),
        ("null", ["schema None"]),
        (json.dumps(encode(make_record()) | {"colour": "red"}), ["Record has no field colour"]),
        (json.dumps(encode(make_record()) | {"task": "dance"}), ["'dance'"]),
        (json.dumps({"schema": SCHEMA}), ["case"]),
        (json.dumps(encode(make_record()) | {"equivalence": {"noise": []}}), ["line 2"]),
        (json.dumps(encode(make_record()) | {"case": []}), ["line 2"]),
        (json.dumps(encode(make_record())).replace('"steps": 2', '"steps": Infinity'), ["line 2"]),
    ],
    ids=[
        "other schema",
        "no schema",
        "list",
        "null",
        "unknown field",
        "bad enum",
        "no case",
        "list for dict",
        "list for case",
        "infinite int",
    ],
)
def test_a_line_that_cannot_be_read_is_named_with_its_reason(tmp_path: Path, line: str, words: list[str]) -> None:
    """And the lines around it are kept."""
    good = json.dumps(encode(make_record()))
    (tmp_path / "records.jsonl").write_text(f"{good}\n{line}\n{good}\n")
    reading = read_records(tmp_path)
    assert reading.records == [make_record()] * 2
    (complaint,) = reading.complaints
    for word in ["records.jsonl line 2", *words]:
        assert word in complaint


def test_a_complaint_is_a_sentence_not_a_quoted_string(tmp_path: Path) -> None:
    """`str` of a KeyError is the repr of its message."""
    good = encode(make_record())
    (tmp_path / "records.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(good | {"colour": "red"}) + "\n")
    assert read_records(tmp_path).complaints == ["records.jsonl line 2: Record has no field colour"]


def test_a_missing_folder_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="no records at '.*nowhere': No such file.*pytest suites --results DIR"):
        read_records(tmp_path / "nowhere")


def test_a_folder_without_records_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="no records at '.*records.jsonl': No such file"):
        read_records(tmp_path)


def test_an_empty_file_is_said_to_be_empty(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").touch()
    with pytest.raises(ResultsError, match="holds no record that can be read: it is empty"):
        read_records(tmp_path)


def test_a_file_without_one_good_line_gives_the_reasons(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text('{"schema": 0}\n{"sch')
    with pytest.raises(ResultsError, match="no record that can be read: .*line 1: schema 0.*; .*line 2: not whole"):
        read_records(tmp_path)


def test_a_results_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """Permissions would not do here: tests may run as root."""
    (tmp_path / "results").touch()
    with pytest.raises(ResultsError, match="results folder '.*results': File exists; name another with --results"):
        RecordFile(tmp_path / "results")


def test_a_results_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResultsError, match="Not a directory; name another with --results"):
        RecordFile(tmp_path / "file" / "results")


def test_a_records_file_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").mkdir()
    with pytest.raises(ResultsError, match="Is a directory; name another with --results"):
        RecordFile(tmp_path)


def test_a_records_file_that_is_a_pipe_is_refused_rather_than_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "records.jsonl")
    for read in (RecordFile, read_records, read_run):
        with pytest.raises(InputError, match="is a pipe or a socket; remove it"):
            read(tmp_path)


def test_a_line_that_is_too_long_is_told_and_not_held(tmp_path: Path) -> None:
    """A packed file of a megabyte may hold a line of a gigabyte of blanks."""
    good = [json.dumps(encode(record)).encode() + b"\n" for record in (make_record(), make_timed())]
    blanks = gzip.compress(b" " * 2**25) * 5
    path = tmp_path / "records.jsonl.gz"
    path.write_bytes(gzip.compress(good[0]) + blanks + gzip.compress(b"\n" + good[1]))
    tracemalloc.start()
    reading = read_records(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert reading.records == [make_record(), make_timed()]
    assert reading.complaints == ["records.jsonl.gz line 2: the line has more than 32 MiB, as no record has"]
    assert peak < 3 * record_file.LONGEST_LINE


def test_what_lies_behind_a_long_line_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_file, "LONGEST_LINE", 20_000)
    monkeypatch.setattr(record_file, "_PIECE", 1000)
    factors = {f"gradients/blocks.{i}.weight": 3.0 + i for i in range(20)}
    told = make_good(equivalence=dataclasses.replace(make_equivalence(), factors=factors))
    for size in (19_998, 20_000, 20_001, 54_321):
        path = tmp_path / str(size) / "records.jsonl"
        path.parent.mkdir()
        path.write_text(f"{' ' * size}\n{json.dumps(encode(told))}\n")
        reading = read_records(path)
        assert reading.records == [told]
        assert len(reading.complaints) == (size >= 20_000)
        complaints = list[str]()
        read_newest(path, JudgedCase, complaints)
        assert complaints == reading.complaints


@pytest.mark.parametrize("line", [b" " * 1000 + b"\n", b" " * 1000, b"x\n"])
def test_a_packed_file_is_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes) -> None:
    """Of bytes, also within a long line, or of lines of which each would make a complaint."""
    monkeypatch.setattr(record_file, "MOST_UNPACKED", 2**20)
    monkeypatch.setattr(record_file, "LONGEST_LINE", 50_000)
    path = tmp_path / "records.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(encode(make_record())).encode() + b"\n" + line * 3000))
    with pytest.raises(ResultsError, match="unpacks to more than 1 MiB.*unpack it by gunzip"):
        read_records(path)
    path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
    assert read_records(path.with_suffix("")).records == [make_record()]


def test_complaints_beyond_a_number_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_file, "_MOST_COMPLAINTS", 2)
    with write(tmp_path, make_record()).open("a") as file:
        file.write("x\n" * 1002)
    first, second, more = read_records(tmp_path).complaints
    assert "line 2: not whole JSON" in first and "line 3" in second
    assert more == "records.jsonl: 1,000 more lines cannot be read"


def test_a_line_or_evidence_that_no_reader_takes_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = make_timed(timing=make_timing(rank_step_seconds=[[0.123456789] * 3000]))
    assert len(line_of(record)) > 20_000
    monkeypatch.setattr(record_file, "LONGEST_LINE", 20_000)
    for evidence in (None, record_file.EvidenceFolder(tmp_path)):
        with pytest.raises(ValueError, match="a line of .* bytes, expected at most 20,000"):
            line_of(record, evidence)


def test_a_second_writer_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    first = RecordFile(tmp_path)
    with pytest.raises(ResultsError, match="in use by another run; name another with --results"):
        RecordFile(tmp_path)
    first.append(make_record())
    first.close()
    write(tmp_path, make_timed())
    assert len(read_records(tmp_path).records) == 2


def test_a_file_system_without_locks_is_not_said_to_be_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(ResultsError, match=r"without locks \(No locks available\); name another with --results"):
        RecordFile(tmp_path)


def test_a_line_that_does_not_reach_the_disk_is_said_not_to(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").symlink_to("/dev/full")
    file = RecordFile(tmp_path)
    with pytest.raises(ResultsError, match="records.jsonl' cannot be written: No space left on device"):
        file.append(make_record())
    file.close()


def test_readers_do_not_wait_for_the_writer(tmp_path: Path) -> None:
    write(tmp_path, make_record())
    writer = RecordFile(tmp_path)
    assert len(read_records(tmp_path).records) == 1
    writer.close()


def test_step_seconds_add_up_to_the_time_until_the_last_rank_s_end() -> None:
    """Two laps; in the second, rank 1 starts later."""
    ranks, starts = [[0.5, 0.25, 1.0], [0.25, 0.75, 1.0]], [[0.0, 0.0], [0.0, 0.125]]
    timing = make_timing(rank_step_seconds=ranks, rank_starts=starts, lap_steps=[2, 1])
    assert timing.step_seconds == [0.5, 0.5, 1.125]


def test_a_line_of_schema_1_is_read_into_the_parts_of_today(tmp_path: Path) -> None:
    """Its fields lay side by side."""
    today = encode(make_record())
    moved = {"readings": {"memory": "memory", "traffic": "traffic"}, "planned": {"memory": "planned_states"}}
    moved["planned"]["traffic"], moved["seconds"] = "planned_traffic", {"launch": "launch_seconds"}
    parts = ("launch", "training", "equivalence", "memory", "traffic", "timing", "conformance")
    old = {name: value for name, value in today.items() if name not in parts} | {"schema": 1}
    for part in parts:
        old |= {moved.get(name, {}).get(part, name): value for name, value in today[part].items()}
    lacked = (
        "rank_starts",
        "lap_steps",
        "peak_flops_per_second",
        "observed",
        "left_out",
        "sample",
        "ways",
    )
    of_timing = ("rank_cpu_seconds", "device_memory", "power", "spoilt", "relaunches")
    of_traffic = ("places", "reach", "planned_reach", "one_time_traffic", "alike_steps")
    del old["traffic_exceptions"]
    old["remainders"] = old.pop("extra_memory")
    for name in (
        *lacked,
        *of_timing,
        *of_traffic,
        "rounded",
        "moved",
        "gathering_bytes",
        "compile_seconds",
        "explain_seconds",
        "sources",
    ):
        del old[name]
    del old["live_bytes"], old["not_judged"]
    old["matmul_flops_per_second"] = [1e9, 1e9]  # which it had
    old["planned_traffic"] = [{"all_reduce": 400.0}] * 2  # another plan
    lacking = make_record(
        sources=[],
        launch=dataclasses.replace(make_record().launch, compile_seconds=0.0, explain_seconds=0.0),
        equivalence=dataclasses.replace(
            make_record().equivalence, sample=None, rounded=[], gathering_bytes=[], moved=[], ways={}
        ),
        training=TrainingCurves(losses=[5.5, 5.25], norms=[2.0, None]),
        timing=make_timing(
            rank_starts=[],
            lap_steps=[],
            peak_flops_per_second=None,
            device_memory=[],
            power=[],
            spoilt=[],
            relaunches=[],
        ),
        memory=make_memory_evidence(live_bytes=[]),
        traffic=make_traffic_evidence(
            planned=[],
            traffic_exceptions=[],
            one_time_traffic=[],
            alike_steps=[],
            places=[],
            reach=None,
            planned_reach=None,
        ),
        not_judged=[],
    )
    assert "losses" in old and "equivalence" not in old, "side by side"
    lines = [json.dumps(old), json.dumps({"schema": 1, "session": "s", "command": "c", "device": "cpu"})]
    (tmp_path / "records.jsonl").write_text("\n".join(lines))
    reading = read_records(tmp_path)
    assert reading.complaints == [] and reading.records == [lacking]
    assert [session.session for session in reading.sessions] == ["s"]


def test_a_verdict_is_found_by_its_suite() -> None:
    record = make_record()
    verdict = record.verdict("memory")
    assert verdict is not None and verdict.suite == "memory"
    assert record.verdict("beauty") is None
