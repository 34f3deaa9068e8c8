"""Records of engines that generate, and of smaller models: none is lost to a full disk, nor to a line beside it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshmark.cli.commands import main
from meshmark.errors import ResultsError
from meshmark.inference.run import InferenceRecord, read_inference
from meshmark.records.judged_case import CaseVerdict
from meshmark.records.record_file import RecordFile, read_records
from tests.factories import make_record, make_timed
from tests.test_lost_records import disk_with

ROOT = Path(__file__).parent.parent


def record(engine: str = "mine", precision: str = "fp32") -> InferenceRecord:
    return InferenceRecord(
        case={"engine": engine, "variant": "plain", "model": "llama-tiny", "precision": precision},
        verdicts=[CaseVerdict(name="seeds", passed=True, text="the same seed draws the same")],
        date="2026-11-27T00:00:00+00:00",
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_disk_that_was_full_costs_no_later_record(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("no mounts here")
    try:
        written = 0
        with pytest.raises(ResultsError, match="records.jsonl' cannot be written: No space left on device"):
            for written in range(1000):
                record(precision=f"fp{written}").append_to(tmp_path)
        subprocess.run(["mount", "-o", "remount,size=1m", tmp_path], check=True)
        record("another").append_to(tmp_path)
        found = read_inference(tmp_path / "records.jsonl")
        assert len(found) == written + 1 and found[-1] == record("another")
        assert main(["report", str(tmp_path)]) == 0
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_disk_that_fills_up_amid_a_record_leaves_none_of_it(tmp_path: Path) -> None:
    record().append_to(tmp_path)
    before = (tmp_path / "records.jsonl").read_bytes()
    with disk_with(len(before) + 100), pytest.raises(ResultsError, match="cannot be written: .*; what it held before"):
        record("another").append_to(tmp_path)
    assert (tmp_path / "records.jsonl").read_bytes() == before


BAD_LINES = {
    "torn": record("torn").line().encode()[:150],
    "of training, torn": b'{"schema": 4, "case": {"adapter": "ddp", "layout": ',
    "glued": record("torn").line().encode()[:150] + record("glued").line().encode().rstrip(),
    "a byte": b"\xff",
    "null": b"null",
    "a number": b"7",
    "nothing in it": b"{}",
    "deep": b"[" * 100_000,
    "verdict without a result": b'{"case": {"engine": "mine", "variant": "a"}, "verdicts": [{"name": "seeds"}]}',
    "verdict that is null": b'{"case": {"engine": "mine", "variant": "a"}, "verdicts": [null]}',
    "case that is null": b'{"case": {"engine": "mine"}, "verdicts": null}',
    "of a newer Meshmark": b'{"case": {"engine": "mine"}, "verdicts": [], "colour": "red"}',
}


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_and_costs_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, mixed: bool
) -> None:
    path = tmp_path / "records.jsonl"
    lines = [record().line().encode().rstrip(), BAD_LINES[name], record("another").line().encode().rstrip()]
    path.write_bytes(b"\n".join(lines) + b"\n")
    if mixed:
        with contextlib.closing(RecordFile(tmp_path)) as file:
            file.append(make_record())
    complaints = list[str]()
    assert [each.case["engine"] for each in read_inference(path, complaints)] == ["mine", "another"]
    (told,) = complaints
    assert told.startswith("records.jsonl line 2: ")
    with pytest.raises(ResultsError, match="lines that cannot be read: records.jsonl line 2: "):
        read_inference(path)
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert said.count("left out records.jsonl line 2: ") == 1, said
    assert "1 line could not be read" in said
    judged, training = (tmp_path / ("report-inference.md" if mixed else "report.md")), tmp_path / "report.md"
    assert "another" in judged.read_text()
    pages = judged.read_text() + training.read_text()
    assert "## What could not be read" in pages and "records.jsonl line 2: " in pages


def test_a_record_that_no_table_can_show_costs_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = [
        CaseVerdict(name="log probabilities", passed=True, text="", numbers={"odd": 1.0}),
        CaseVerdict(name="greedy tokens", passed=True, text="\ud800"),
    ]
    odd = InferenceRecord(case=record("odd").case, verdicts=verdicts)
    unnamed = InferenceRecord(case={"engine": "unnamed"}, verdicts=[], error="\ud800")
    for each in (odd, unnamed, record()):
        each.append_to(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    assert "left out odd plain llama-tiny fp32 cannot be shown: " in capsys.readouterr().err
    page = (tmp_path / "report.md").read_text()
    assert "| mine" in page and "odd plain llama-tiny fp32 cannot be shown" in page


def test_a_file_without_one_good_record_gives_the_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "records.jsonl").write_bytes(BAD_LINES["verdict without a result"] + b"\n")
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "records.jsonl line 1: CaseVerdict" in said and "holds no record that can be read" in said
    assert not (tmp_path / "report.md").exists()


def test_a_record_goes_to_the_line_after_a_torn_one(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_bytes(BAD_LINES["torn"])
    record().append_to(tmp_path)
    assert read_inference(tmp_path / "records.jsonl", []) == [record()]


def test_a_pipe_in_the_place_of_the_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "records.jsonl")
    code = "from pathlib import Path; from tests.test_judged_case import record; record().append_to(Path('{}'))"
    command = [sys.executable, "-c", code.format(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "is a pipe or a socket" in done.stderr, done.stderr


def test_a_run_in_the_same_process_and_its_records_share_the_file(tmp_path: Path) -> None:
    """As when pytest is given suites of both kinds."""
    with contextlib.closing(RecordFile(tmp_path)) as file:
        file.append(make_record())
        record().append_to(tmp_path)
        file.append(make_timed())
    assert read_inference(tmp_path / "records.jsonl") == [record()]
    assert read_records(tmp_path).records == [make_record(), make_timed()]


def test_a_folder_in_use_is_waited_for_and_then_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys, time; from pathlib import Path; from meshmark.records.record_file import RecordFile\n"
        f"file = RecordFile(Path({str(tmp_path)!r})); print('held', flush=True); time.sleep(float(sys.argv[1]))"
    )
    monkeypatch.setattr("meshmark.records.record_file._PATIENCE_SECONDS", 0.3)
    with subprocess.Popen([sys.executable, "-c", code, "600"], cwd=ROOT, stdout=subprocess.PIPE) as holder:
        assert holder.stdout and holder.stdout.readline()
        with pytest.raises(ResultsError, match="is in use by another run"):
            record().append_to(tmp_path)
        holder.kill()
    monkeypatch.setattr("meshmark.records.record_file._PATIENCE_SECONDS", 60)
    began = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", code, "1"], cwd=ROOT, stdout=subprocess.PIPE) as holder:
        assert holder.stdout and holder.stdout.readline()
        record().append_to(tmp_path)
    assert time.monotonic() - began < 50
    assert read_inference(tmp_path / "records.jsonl") == [record()]
