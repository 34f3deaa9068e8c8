"""Bulky evidence beside the records: nothing lost, read when it is used, and a complaint where it cannot be."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import tracemalloc
from pathlib import Path

import pytest

from meshmark.errors import EvidenceError
from meshmark.judge.deviation import Deviation, QuantityKind
from meshmark.records import record_file
from meshmark.records.record import EquivalenceEvidence, Record
from meshmark.records.record_file import RecordFile, read_records
from meshmark.report.results import results
from meshmark.run.verdict import judge_equivalence
from meshmark.serial import encode
from tests.factories import make_environment, make_equivalence, make_good, make_record, make_timed


def make_bulky(distance: float = 1e-7) -> Record:
    """As many quantities as a small model has."""
    gradients = [QuantityKind.GRADIENTS.of(f"blocks.{i}.weight") for i in range(120)]
    found = EquivalenceEvidence(
        deviations={q: [Deviation(distance=distance, scale=1.0, factor=1.0)] * 2 for q in gradients},
        noise={q: [1e-7] * 2 for q in gradients},
        factors={"gradients": 3.0},
    )
    return make_good(equivalence=found)


def write(folder: Path, *records: Record) -> list[dict[str, dict[str, object]]]:
    file = RecordFile(folder)
    for record in records:
        file.append(record)
    file.close()
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def test_what_is_bulky_stands_beside_the_line_once(tmp_path: Path) -> None:
    """Two records of one workload share its noise."""
    lines = write(tmp_path, make_bulky(), make_bulky(distance=2e-7), make_timed())
    names = [line["equivalence"][field] for line in lines[:2] for field in ("deviations", "noise")]
    assert names[1] == names[3] and len(set(names)) == 3
    assert {f"evidence/{path.name}" for path in (tmp_path / "evidence").iterdir()} == set(names)
    assert all(len(json.dumps(line)) < 9000 for line in lines), "the deviations alone are fifteen thousand"
    reading = read_records(tmp_path)
    assert reading.records == [make_bulky(), make_bulky(distance=2e-7), make_timed()] and not reading.complaints
    assert judge_equivalence(reading.records[1]) == judge_equivalence(make_bulky(distance=2e-7))


def test_a_second_run_into_the_folder_writes_no_file_again_but_a_damaged_one(tmp_path: Path) -> None:
    write(tmp_path, make_bulky())
    first, second = sorted((tmp_path / "evidence").iterdir())
    before = first.stat().st_mtime_ns
    second.write_bytes(second.read_bytes()[:-20])
    write(tmp_path, make_bulky())
    assert first.stat().st_mtime_ns == before
    assert read_records(tmp_path).records == [make_bulky()] * 2


def test_nothing_is_read_before_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, make_bulky())
    older = json.dumps(encode(make_bulky(distance=3e-7)))  # in the line, as it was once
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write(f"{older}\n")
    read = list[object]()
    monkeypatch.setattr(record_file, "_decoded", lambda *about: read.append(about) or {})
    first, second = read_records(tmp_path).records
    assert not read
    assert len(first.equivalence.noise) == len(second.equivalence.noise) == 0 and len(read) == 2


def test_factors_of_many_quantities_stay_in_the_line_until_they_are_used(tmp_path: Path) -> None:
    factors = {f"gradients/blocks.{i}.weight": 3.0 + i for i in range(20)}
    told = make_good(equivalence=dataclasses.replace(make_equivalence(), factors=factors))
    (line,) = write(tmp_path, told)
    assert line["equivalence"]["factors"] == factors
    (record,) = read_records(tmp_path).records
    assert isinstance(record.equivalence.factors, record_file.Stored)
    assert record == told


def test_evidence_in_the_line_of_an_older_record_is_read_from_there(tmp_path: Path) -> None:
    lines = [json.dumps(encode(record)) for record in (make_timed(), make_bulky(), make_bulky(distance=2e-7))]
    (tmp_path / "records.jsonl").write_text("\n".join(lines))
    assert read_records(tmp_path).records == [make_timed(), make_bulky(), make_bulky(distance=2e-7)]


def _remove(path: Path) -> None:
    path.unlink()


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def _other(path: Path) -> None:
    path.write_bytes(gzip.compress(b'{"loss": [1.0]}'))


def _noise(path: Path) -> None:
    path.write_bytes(b"no gzip at all")


def _inside(path: Path) -> None:
    packed = bytearray(path.read_bytes())
    packed[30] ^= 0xFF
    path.write_bytes(packed)


def _fifo(path: Path) -> None:
    """That nobody writes to: to open it would wait for ever."""
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [_remove, _truncate, _other, _noise, _inside, _fifo, _folder])
def test_evidence_that_cannot_be_had_is_an_error_of_its_own_and_costs_no_record(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    (line,) = write(tmp_path, make_bulky())
    name = str(line["equivalence"]["deviations"])
    damage(tmp_path / name)
    (record,) = read_records(tmp_path).records
    assert record.verdicts == make_bulky().verdicts and record.equivalence.noise == make_bulky().equivalence.noise
    with pytest.raises(EvidenceError, match=name.removeprefix("evidence/").partition(".")[0]):
        len(record.equivalence.deviations)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../../etc/passwd", "evidence/../records.jsonl", "evidence/a.json.gz", "", "evidence/"]
)
def test_a_name_that_no_evidence_has_is_not_followed(tmp_path: Path, name: str) -> None:
    (line,) = write(tmp_path, make_bulky())
    line["equivalence"]["deviations"] = name
    (tmp_path / "records.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps(encode(make_timed()))}\n")
    reading = read_records(tmp_path)
    assert reading.records == [make_timed()]
    assert len(reading.complaints) == 1 and "expected evidence/SHA256.json.gz" in reading.complaints[0]


def test_a_file_that_unpacks_to_more_than_is_read_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, make_bulky())
    monkeypatch.setattr(record_file, "LARGEST", 100)
    with pytest.raises(EvidenceError, match="damaged"):
        len(read_records(tmp_path).records[0].equivalence.deviations)


def test_evidence_of_little_but_brackets_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    """Packed, it is small, and as Python's objects thirty times as large as its text."""
    (line,) = write(tmp_path, make_bulky())
    content = b'{"loss": [' + b"{}," * 3_000_000 + b"{}]}"
    name = record_file.EvidenceFolder(tmp_path)._put(content)
    (tmp_path / "records.jsonl").write_text(
        json.dumps(line | {"equivalence": line["equivalence"] | {"noise": name}}) + "\n"
    )
    (record,) = read_records(tmp_path).records
    tracemalloc.start()
    with pytest.raises(EvidenceError, match="little but brackets"):
        len(record.equivalence.noise)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < record_file.LARGEST + 4 * len(content)


def test_evidence_of_a_large_model_over_many_steps_is_read() -> None:
    """By the sizes of its quantities: gradients, parameters and both distances from the twin, of 3,000 tensors."""
    each = Deviation(distance=1.2345678901234567e-07, scale=13.519434039097748, factor=1.0000000000000013)
    few = {QuantityKind.GRADIENTS.of(f"blocks.{i}.attention.query.weight"): [each] * 50 for i in range(30)}
    text = json.dumps(encode(few))
    assert len(text) / 30 * 3000 * 4 < record_file.LARGEST
    assert record_file._loads(text)


def test_large_evidence_does_not_stay_but_for_the_fields_of_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, *(make_bulky(distance=(i + 1) * 1e-7) for i in range(6)))
    records = read_records(tmp_path).records
    monkeypatch.setattr(record_file, "_kept", kept := record_file._Kept())
    for small, left in ((True, 6 + 1), (False, 3)):
        monkeypatch.setattr(record_file._Kept, "_MOST_BYTES", 2**24 if small else 10)
        for record in records:
            assert record.equivalence.deviations and record.equivalence.noise
        assert len(kept._found) == left
    read = list[object]()
    monkeypatch.setattr(record_file, "_decoded", lambda *about: read.append(about) or {})
    for _ in range(3):
        assert records[-1].equivalence.deviations and records[-1].equivalence.noise
    assert not read


def test_where_no_evidence_can_be_written_it_stays_in_the_line(tmp_path: Path) -> None:
    (tmp_path / "evidence").write_text("a file of the user's")
    write(tmp_path, make_bulky())
    assert read_records(tmp_path).records == [make_bulky()]
    assert (tmp_path / "evidence").read_text() == "a file of the user's"


def test_a_line_is_written_when_its_evidence_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not a name, when the power may go in between."""
    done, fsync = list[str](), os.fsync

    def noted(file: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        fsync(file)

    monkeypatch.setattr(os, "fsync", noted)
    write(tmp_path, make_bulky())
    assert done[-1] == "records.jsonl" and done.count("evidence") == 2 and len(done) == 5
    assert not list((tmp_path / "evidence").glob(".*")), "partial files are gone"


def test_the_latest_of_several_records_of_one_pass_is_all_that_a_report_reads(tmp_path: Path) -> None:
    again = make_record(steps=7)
    write(tmp_path, make_record(), make_timed(), make_good(), again)
    assert read_records(tmp_path, latest=True).records == [again, make_timed(), make_good()]
    assert len(read_records(tmp_path).records) == 4


def test_a_wrong_record_of_the_same_code_is_kept_before_the_latest(tmp_path: Path) -> None:
    """Readers of the latest records alone said that the case was right."""
    wrong = make_good(verdicts=[dataclasses.replace(make_good().verdicts[0], passed=False)])
    others = dataclasses.replace(wrong, environment=make_environment(commit="fedcba987654"))
    write(tmp_path, others, wrong, make_good(steps=6), make_good())
    assert read_records(tmp_path, latest=True).records == [wrong, make_good()]
    assert [result.correct for result in results(read_records(tmp_path, latest=True).records)] == [False]
