"""`meshmark show` tells all of one case; `meshmark schema` describes every record that is committed."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from meshmark.cli.commands import main
from meshmark.records.record import SCHEMA, Outcome, Record, Status
from meshmark.records.record_file import RecordFile, migrate
from meshmark.records.schema import schema
from meshmark.serial import encode
from tests.factories import make_case, make_good, make_timed

ROOT = Path(__file__).parent.parent
jsonschema = pytest.importorskip("jsonschema", reason="in the dev extra: pip install jsonschema")
COMMITTED = sorted(ROOT.glob("baselines/*/records.jsonl"))


def complaints(value: Any) -> list[str]:  # noqa: ANN401
    kind = jsonschema.Draft202012Validator(
        {**schema(), "anyOf": [{"$ref": "#/$defs/Record"}, {"$ref": "#/$defs/Session"}]}
    )
    one = kind.evolve(
        schema={**schema()["$defs"]["Record" if "case" in value else "Session"], "$defs": schema()["$defs"]}
    )
    return [error.message for error in one.iter_errors(value)]


@pytest.mark.slow
@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.parent.name)
def test_the_schema_describes_every_committed_record(path: Path) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines
    for line in lines[:: max(1, len(lines) // 4)]:
        assert not complaints(migrate(line)), "as a reader has it, whatever schema it was written in"


@pytest.mark.slow
def test_the_schema_describes_records_of_every_kind_and_refuses_others() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    for record in (make_good(), make_timed(), make_good(outcome=Outcome(status=Status.HUNG, rank=0, stacks={0: "x"}))):
        value = json.loads(json.dumps(encode(record)))
        assert not complaints(value)
        assert complaints({**value, "steps": "five"}) and complaints({**value, "task": "dance"})
        value.pop("environment")
        assert complaints(value) == ["'environment' is a required property"]


def test_the_schema_knows_every_field_and_says_what_may_change(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(schema())) and f"Format {SCHEMA}" in printed["description"]
    fields = printed["$defs"]["Record"]["properties"]
    assert set(encode(make_good())) == set(fields) and "module:Class" in fields["adapter"]["description"]


def leave(folder: Path, *records: Record) -> Path:
    with closing(RecordFile(folder)) as file:
        for record in records:
            file.append(record)
    return folder


def test_show_says_that_the_case_comes_before_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # without a folder results/
    leave(tmp_path / "mine", make_good())
    for given in (["mine"], ["mine", "ddp"]):
        assert main(["show", *given]) == 2
        assert "give the case first: meshmark show CASE mine" in capsys.readouterr().err


def test_show_tells_what_is_recorded_of_a_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hung = Outcome(status=Status.HUNG, rank=1, message="no end\x1b[31m", stacks={1: "File a.py, line 7"})
    leave(tmp_path, make_good(), make_timed(), make_good(case=make_case("gpipe"), outcome=hung))
    assert main(["show", "ddp", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("ddp-dp2.mb2-mini-fp32\n\nobserve: ok") and "\ntime: ok" in told and "gpipe" not in told
    assert "equivalence    passed: what decided equivalence" in told and "peak, rank 0   2.66 KiB: parameters" in told
    assert "/s (1 launch)" in told and "commit 0123456789ab, by pytest suites" in told
    assert main(["show", "gpipe-dp2.mb2-mini-fp32", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "hung on rank 1" in told and "File a.py, line 7" in told and "\x1b" not in told


def test_show_prefers_the_one_case_that_begins_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(tmp_path, make_good(), make_good(case=make_case("fabric-ddp")))
    assert main(["show", "ddp-dp2", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("ddp-dp2.mb2-mini-fp32\n")


@pytest.mark.parametrize(
    ("asked", "message"),
    [("mini", "is part of 2 cases: ddp-dp2.mb2-mini-fp32, gpipe"), ("dpd-dp2", "do you mean ddp-dp2.mb2-mini-fp32")],
)
def test_show_of_no_case_or_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: str, message: str
) -> None:
    leave(tmp_path, make_good(), make_good(case=make_case("gpipe")))
    assert main(["show", asked, str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
