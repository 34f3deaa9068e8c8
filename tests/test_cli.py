"""The command line, in this process; mistakes of the user's end with 2 and one line."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from meshmark.adapter.registry import builtin_adapters
from meshmark.cli.commands import main
from meshmark.records.record import SCHEMA
from meshmark.records.record_file import RecordFile, Session, line_of
from tests.factories import make_good, make_timed

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setenv("COLUMNS", "200")


def write(folder: Path) -> None:
    file = RecordFile(folder)
    file.append(make_good())
    file.append(make_timed())
    file.close()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            ["--help"],
            ["doctor", "cases", "report", "--pyargs meshmark.suites --adapters ddp,fsdp2 --world 2,4 -k equivalence"],
        ),
        (
            ["cases", "--help"],
            [
                "--adapters",
                "shell pattern",
                "one: nothing is parallel",
                "fp64, fp32, bf16, fp16",
                "gpt-tiny, llama-mini",
            ],
        ),
        (["report", "--help"], ["DIR", "folder with records.jsonl", "default: DIR/report.md"]),
        (["doctor", "--help"], ["usage: meshmark doctor"]),
    ],
    ids=lambda value: " ".join(value[:1]),
)
def test_help_teaches(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for word in words:
        assert word in said


@pytest.mark.parametrize("arguments", [[], ["dance"], ["report"]])
def test_a_wrong_usage_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: meshmark" in capsys.readouterr().err


def test_cases_of_an_unknown_device_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cases", "--device", "tpu"]) == 2
    assert "unknown device 'tpu'" in capsys.readouterr().err


def test_doctor_names_every_adapter_and_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    lines = {line.split()[0]: line for line in said.splitlines()}
    assert set(builtin_adapters()) <= set(lines)
    assert f"torch {torch.__version__}" in lines["versions"]
    assert "gloo" in lines["backends"]
    assert "one process" in lines["single"] and "fp64" in lines["single"]
    assert "dp, ZeRO 3;" in lines["fsdp2"] and lines["fsdp2"].endswith("ready")
    names, told = builtin_adapters(), [line for line in said.splitlines() if line.startswith("  ")]
    assert {line.index(line.split()[1]) for line in told if line.split()[0] in names} == {max(map(len, names)) + 3}


def test_doctor_says_what_would_be_skipped_and_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshmark.adapter.contract import Requirement
    from meshmark.adapter.registry import load_adapter

    needs = (Requirement(module="no_such_module", distribution="no-such"),)
    monkeypatch.setattr(load_adapter(builtin_adapters()["ddp"]), "requires", needs)
    assert main(["doctor"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  ddp "))
    assert line.endswith("skipped: no-such is not installed: pip install no-such")


def test_cases_lists_the_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--adapters", "single,ddp,fsdp2", "--world", "2,4", "--precision", "fp32,bf16"]
    assert main(["cases", *chosen]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "10 cases"
    assert lines[0] == "single-one.mb3-gpt-tiny-fp32"
    assert {"ddp-dp4.mb3-gpt-tiny-bf16", "fsdp2-dp2.zero3.mb3-gpt-tiny-fp32"} <= set(lines)


def test_cases_says_what_would_be_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cases", "--adapters", "gpipe", "--precision", "fp16"]) == 0
    said = capsys.readouterr().out
    assert "gpipe-pp2.mb4-gpt-tiny-fp16" in said
    assert "skipped: gpipe does not support precision fp16" in said


def test_report_writes_the_page_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/report.md: 2 records\n"
    assert (tmp_path / "report.md").read_text().startswith("# Meshmark report")
    assert (tmp_path / "report-memory.svg").is_file()


def test_report_writes_elsewhere_and_notes_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in it")
    output = tmp_path / "out" / "page.md"
    assert main(["report", str(tmp_path / "in it"), "-o", str(output)]) == 0
    assert f"meshmark report '{tmp_path}/in it' -o {output}" in output.read_text()
    assert not list((tmp_path / "in it").glob("*.md"))


def test_report_compares_with_a_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "now")
    write(tmp_path / "before")
    assert main(["report", str(tmp_path / "now"), "--baseline", str(tmp_path / "before")]) == 0
    page = (tmp_path / "now" / "report.md").read_text()
    assert f"meshmark report {tmp_path}/now --baseline {tmp_path}/before" in page
    assert "median / baseline's" in page


def test_a_missing_baseline_ends_with_2_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    assert main(["report", str(tmp_path), "--baseline", str(tmp_path / "nowhere")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("meshmark: no baseline") and said.count("\n") == 1


def test_a_page_replaces_no_records_and_no_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One wrong name behind -o, and they were gone, with code 0."""
    write(tmp_path)
    records, script = tmp_path / "records.jsonl", tmp_path / "train.py"
    script.write_text("print('mine')\n")
    kept = records.read_text()
    assert main(["report", str(tmp_path), "-o", str(records)]) == 2
    assert main(["compare", str(tmp_path), str(tmp_path), "-o", str(records)]) == 2
    assert main(["check", "-o", str(script), str(script)]) == 2
    assert (records.read_text(), script.read_text()) == (kept, "print('mine')\n")
    assert "it holds records, which a page would replace" in capsys.readouterr().err


def test_a_defect_of_a_command_is_no_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python's own code, 1, says that a gate failed, or that a script trains wrong."""
    monkeypatch.setattr("meshmark.cli.commands._doctor", lambda: {}["missing"])
    assert main(["doctor"]) == 2
    assert "KeyError: 'missing'" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_what_an_output_cannot_encode_is_escaped(tmp_path: Path, encoding: str) -> None:
    """A comparison ended with 1, as if something had got worse. A name of a file or in a record may be any bytes."""
    name = "a\udcffb" if encoding == "utf-8" else "ü"
    line = line_of(make_good()).decode()
    for folder in ("before", "after"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "records.jsonl").write_text(line)
    other = line.replace(f'"adapter": "{make_good().case.adapter}"', f'"adapter": {json.dumps(name)}')
    (tmp_path / "before" / "records.jsonl").write_text(line + other)
    command = [sys.executable, "-m", "meshmark", "compare", "before", "after", "--fail-on", "wrong"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 0 and b"only in A" in done.stdout, done.stderr.decode()


def test_report_takes_the_file_for_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    assert main(["report", str(tmp_path / "records.jsonl")]) == 0
    assert (tmp_path / "report.md").is_file()


def test_report_names_the_lines_that_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    with open(tmp_path / "records.jsonl", "a") as file:
        file.write('{"schema": 1, "ca')
    assert main(["report", str(tmp_path)]) == 0, "a run that was cut off and resumed always has such a line"
    said = capsys.readouterr().err
    assert said.startswith("meshmark: left out records.jsonl line 3: not whole JSON")
    assert "1 line could not be read and stand in no table" in said
    assert "- records.jsonl line 3: not whole JSON" in (tmp_path / "report.md").read_text()


def test_report_of_records_that_cannot_be_read_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the line about the session can be read."""
    bad = '{"schema": 999, "case": {}}\n{"schema": 1, "ca'
    (tmp_path / "records.jsonl").write_text(bad)
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "line 1: schema 999" in said and "line 2: not whole JSON" in said
    session = Session(schema=SCHEMA, session="one", command="pytest suites", device="cpu")
    (tmp_path / "records.jsonl").write_text(line_of(session).decode() + bad)
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "left out records.jsonl line 2: schema 999" in said and "line 3: not whole JSON" in said
    assert f"no record of {str(tmp_path)!r} can be read (2 lines, named above)" in said


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["report", "nowhere"], ["no records at 'nowhere'", "pytest suites --results DIR"]),
        (["cases", "--adapters", "dpd"], ["unknown adapter 'dpd': did you mean 'ddp'"]),
        (["cases", "--workload", "gpt-tny"], ["unknown workload 'gpt-tny': did you mean 'gpt-tiny'"]),
        (["cases", "--precision", "fp23"], ["unknown precision 'fp23': did you mean 'fp32'"]),
        (["cases", "--world", "two"], ["--world 'two': expected a whole number"]),
        (["cases", "--world", "0"], ["--world '0': expected a whole number of at least 1"]),
        (["cases", "--adapters", "ddp", "--world", "5"], ["24 sequences is not divisible by dp 5"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_mistake_ends_with_2_and_one_line(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("meshmark: ") and said.err.count("\n") == 1
    for word in words:
        assert word in said.err


def test_an_output_that_cannot_be_written_ends_with_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    (tmp_path / "file").touch()
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "file" / "page.md")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("meshmark: ") and said.count("\n") == 1 and "page.md" in said


def test_spaces_after_commas_are_forgiven_as_in_pytest(capsys: pytest.CaptureFixture[str]) -> None:
    """`pytest suites --adapters 'ddp, fsdp2'` takes them."""
    assert main(["cases", "--adapters", "ddp, fsdp2"]) == 0
    assert capsys.readouterr().out.endswith("2 cases\n")


@pytest.mark.parametrize(
    "command",
    [
        "report /dev/zero",
        "show ddp /dev/zero",
        "run /dev/zero",
        "predict /dev/zero -o out.csv",
        "history /dev/zero /dev/zero",
        "compare /dev/zero results",
        "compare results /dev/zero",
    ],
)
def test_a_device_is_no_file_to_read(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may have no end."""
    write(tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 2
    assert "'/dev/zero' is a device; name a file" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["gaps", pytest.param("schema", marks=pytest.mark.slow), "show ddp results"])
def test_a_closed_output_is_no_failed_gate(command: str, tmp_path: Path) -> None:
    write(tmp_path / "results")
    run = subprocess.run(["sh", "-c", f"{sys.executable} -m meshmark {command} >&-"], cwd=tmp_path, capture_output=True)
    assert (run.returncode, run.stderr) == (0, b"")


@pytest.mark.slow
def test_a_reader_who_has_enough_is_no_error() -> None:
    command = f"{sys.executable} -m meshmark plan --model llama-8b --gpus 64 --gpu h100 --top 1000 | head -1"
    ended = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "") and "llama-8b" in ended.stdout


@pytest.mark.parametrize("reader", ["true", pytest.param("head -1", marks=pytest.mark.slow)])
def test_a_gate_fails_also_where_its_reader_has_enough(reader: str, tmp_path: Path) -> None:
    """Under `pipefail`, as in GitHub's jobs, it passed."""
    (tmp_path / "raises.py").write_text("raise SystemExit('no')\n")
    (tmp_path / "suite.toml").write_text('[[checks]]\nscript = "raises.py"\n' * 2)
    command = f"{sys.executable} -m meshmark run suite.toml | {reader}"
    ended = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=tmp_path, capture_output=True, timeout=120)
    assert ended.returncode == 1
    assert len(list((tmp_path / "results").glob("check-*-raises.md"))) == 2, "both checks were run"


@pytest.mark.parametrize("command", ["check script.py", "ab --a HEAD --b HEAD -- -k x"])
def test_a_command_without_a_folder_for_temporary_files_blames_nobody(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a container that is read-only: 1 says that the script trains wrong, or that B is worse."""
    (tmp_path / "script.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    assert main(command.split()) == 2
    assert "No usable temporary directory" in capsys.readouterr().err


def test_help_imports_nothing_that_takes_long() -> None:
    """0.3 s is asked for, of which Python itself takes a third; seconds are too noisy to test, imports are not."""
    program = (
        "import sys; from meshmark.cli.commands import main\n"
        "try: main(['--help'])\n"
        "finally: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "usage: meshmark" in done.stdout
    assert not {"torch", "numpy", "pandas", "matplotlib"} & set(done.stderr.split())


@pytest.mark.parametrize(
    "command",
    ["submit --results closed/sub", "run suite.toml", "baseline accept results --name n1 --allow unfinished"],
)
def test_a_folder_that_cannot_be_written_is_a_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """/proc is one for root, too."""
    (tmp_path / "closed").symlink_to("/proc")
    (tmp_path / "baselines").symlink_to("/proc")
    (tmp_path / "raises.py").touch()
    (tmp_path / "suite.toml").write_text('[options]\nresults = "closed/run"\n[[checks]]\nscript = "raises.py"\n')
    with contextlib.closing(RecordFile(tmp_path / "results")) as file:
        file.append(make_good())
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("meshmark: ") and "No such file or directory" in said and "Traceback" not in said, said
