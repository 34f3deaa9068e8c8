"""Records as nobody should write them: each is rendered on its own or named in a complaint; none takes the report."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshmark.cli.commands import main
from meshmark.records.record import Outcome, Record, Status
from meshmark.records.record_file import Attempt, Ending, RecordFile, Session
from meshmark.report import table
from meshmark.serial import encode
from tests.factories import make_case, make_environment, make_good, make_timed, make_verdict, make_workload
from tests.hostile_texts import HOSTILE, kinds, texts
from tests.test_evidence import make_bulky

Json = dict[str, Any]
Odd = Callable[[Json, Json], None]
"""Spoils an instrumented and a timed record of one case."""


def put(*path: str | int, value: object) -> Odd:
    """In both records, where there is such a place."""

    def spoil(*records: Json) -> None:
        for record in records:
            inner: Any = record
            try:
                for step in path[:-1]:
                    inner = inner[step]
                inner[path[-1]] = value
            except (IndexError, KeyError):
                continue

    return spoil


def deep(depth: int) -> Any:  # noqa: ANN401
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


ODD: dict[str, Odd] = {
    "no step": put("timing", "rank_step_seconds", value=[]),
    "no step of any rank": put("timing", "rank_step_seconds", value=[[], []]),
    "ragged steps": put("timing", "rank_step_seconds", value=[[0.5], [0.5, 0.5]]),
    "steps of one rank too few": put("timing", "rank_step_seconds", value=[[0.5, 0.5]]),
    "steps in no time": put("timing", "rank_step_seconds", value=[[0.0, 0.0], [0.0, 0.0]]),
    "steps before their time": put("timing", "rank_step_seconds", value=[[-1.0, 0.5], [-1.0, 0.5]]),
    "endless steps": put("timing", "rank_step_seconds", value=[[1e308, 1e308]] * 2),
    "steps that are no number": put("timing", "rank_step_seconds", value=[[None, None]] * 2),
    "steps of text": put("timing", "rank_step_seconds", value=[["a"]]),
    "steps of depth": put("timing", "rank_step_seconds", value=deep(500)),
    "no peak": put("timing", "matmul_flops_per_second", value=[]),
    "a peak of nothing": put("timing", "matmul_flops_per_second", value=[0.0, 0.0]),
    "a peak that is no number": put("timing", "matmul_flops_per_second", value=[None]),
    "no losses": put("training", "losses", value=[]),
    "losses that are no number": put("training", "losses", value=[None]),
    "losses of truth": put("training", "losses", value=[True, False]),
    "no memory": put("memory", "readings", value=[]),
    "memory of one rank": put("memory", "readings", value=[encode(make_good())["memory"]["readings"][0]]),
    "no plan": put("memory", "planned", value=[]),
    "half a plan": put("memory", "planned", value=[None]),
    "remainders of nobody": put("memory", "extra_memory", value=[]),
    "bytes below zero": put("memory", "readings", 0, "peak", "activations", value=-(10**30)),
    "bytes without end": put("memory", "readings", 0, "peak", "other", value=10**400),
    "half a byte": put("memory", "readings", 0, "peak", "other", value=0.5),
    "no traffic": put("traffic", "readings", value=[]),
    "traffic of one rank": put("traffic", "readings", value=[{"asked": [], "issued": []}]),
    "an unknown collective": put("traffic", "readings", 0, "asked", 0, "kind", value="gossip"),
    "a group of none": put("traffic", "readings", 0, "asked", 0, "group_size", value=0),
    "no verdict": put("verdicts", value=[]),
    "a verdict without evidence": put("verdicts", 0, "evidence", value={}),
    "evidence of text": put("verdicts", 0, "evidence", "ratio", value="high"),
    "evidence that is null": put("verdicts", 0, "evidence", value=None),
    "a factor of text": put("verdicts", 0, "evidence", "detection_limit", value="low"),
    "an error of text": put("verdicts", 1, "evidence", "relative_error", value="much"),
    "verdicts of nothing": put("verdicts", 0, "suite", value=""),
    "many verdicts of one suite": lambda a, b: a.update(verdicts=a["verdicts"] * 50),
    "no environment": put("environment", value={}),
    "an environment of nobody": put("environment", "machine", value=""),
    "a machine that is null": put("environment", "machine", value=None),
    "memory of no machine": put("environment", "memory_bytes", value=-1),
    "no date": put("environment", "date", value=""),
    "a device of tomorrow": put("environment", "device", value="tpu"),
    "a status of tomorrow": put("outcome", "status", value="splendid"),
    "stacks by text": put("outcome", "stacks", value={"zero": "x"}),
    "a rank of nobody": put("outcome", "rank", value=-7),
    "a task of tomorrow": put("task", value="dance"),
    "a layout that fits nothing": put("case", "layout", "dp", value=3),
    "a layout of none": put("case", "layout", "dp", value=0),
    "a layout of depth": put("case", "layout", value=deep(500)),
    "micro-batches below zero": put("case", "layout", "num_micro_batches", value=-2),
    "a model without layers": put("case", "workload", "model", "num_layers", value=0),
    "a model without width": put("case", "workload", "model", "hidden", value=0),
    "a model of everything": put("case", "workload", "model", "vocab_size", value=10**30),
    "a model by number": put("case", "workload", "model", value=7),
    "a batch of none": put("case", "workload", "global_batch", value=0),
    "an optimizer of tomorrow": put("case", "workload", "optimizer", value={"kind": "lucky"}),
    "a precision of tomorrow": put("case", "precision", value="fp1"),
    "no adapter": put("case", "adapter", value=""),
    "seconds before the launch": put("launch", "seconds", value=-1e300),
    "seconds that are no number": put("launch", "seconds", value=None),
    "states of nothing": put("memory", "state_dtypes", value={"parameters": ""}),
    "evidence in a file that is not there": put("equivalence", "deviations", value=f"evidence/{'0' * 64}.json.gz"),
    "evidence elsewhere": put("equivalence", "deviations", value="../../etc/passwd"),
    "evidence of depth": put("equivalence", "noise", value=deep(500)),
    "deviations of no quantity": put("equivalence", "deviations", value={"colour/red": []}),
    "a field of tomorrow": put("colour", value="red"),
    "no case": lambda a, b: a.pop("case"),
    "half a character": put("case", "workload", "corpus", value="c\udcff.txt"),
    "a name of half a character": put("case", "adapter", value="\ud800"),
    "formulas": put("case", "workload", "name", value=r"$\frac{1}{$ $$"),
    "a name without end": put("case", "workload", "name", value="w" * 10**6),
    "a message without end": lambda a, b: a.update(outcome={"status": "raised", "message": "m" * 10**7}),
    "a log without end": lambda a, b: a.update(outcome={"status": "killed", "log_tail": "log\n" * 10**6}),
}
"""By what is odd about them."""

LINES = {
    "deep JSON": '{"schema": 2, "case": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "deep objects": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "no JSON": "\x00\xff not JSON",
    "a list": "[]",
    "a number without end": '{"schema": ' + "9" * 10_000 + "}",
    "a session of text": json.dumps({"schema": 2, "session": 3}),
    "attempts of depth": json.dumps({"schema": 2, "session": "s", "attempts": deep(500)}),
    "no schema": "{}",
}


def report(folder: Path, *options: str) -> tuple[str, str]:
    """The page, and the page of clauses; the command must succeed and leave a page that every reader takes."""
    assert main(["report", str(folder), *options]) == 0
    pages = [folder / "report.md", folder / "report-conformance.md"]
    return tuple(page.read_bytes().decode() if page.is_file() else "" for page in pages)  # type: ignore[return-value]


def leave(folder: Path, *records: Record | Session) -> Path:
    file = RecordFile(folder)
    for record in records:
        file.append(record)
    file.close()
    return folder / "records.jsonl"


def test_each_odd_record_is_shown_or_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of them in one folder, among good ones: these keep their rows."""
    good = [make_case(adapter=name) for name in ("first", "last")]
    path = leave(tmp_path, make_good(case=good[0]), make_timed(case=good[0]))
    names = {}
    with path.open("a") as file:
        for number, (what, spoil) in enumerate(ODD.items()):
            names[what] = f"odd{number}x"
            pair = [encode(make(case=make_case(adapter=names[what]))) for make in (make_good, make_timed)]
            spoil(*pair)
            file.writelines(f"{json.dumps(record)}\n" for record in pair)
        file.writelines(f"{line}\n" for line in LINES.values())
    leave(tmp_path, make_good(case=good[1]), make_timed(case=good[1]))
    page, _ = report(tmp_path, "--baseline", str(tmp_path))
    for name in ("first", "last"):
        assert page.count(f"\n| {name} ") >= 5, "the good ones stand in every table"
    said = page + capsys.readouterr().err
    numbers = {number for number in range(1, 1000) if f"records.jsonl line {number}: " in said}
    lost = [
        what
        for number, (what, name) in enumerate(names.items())
        if name not in said and not {2 * number + 3, 2 * number + 4} & numbers
    ]
    renamed = {"no adapter", "a name of half a character"}
    assert set(lost) <= renamed, "neither shown nor named"
    assert len({2 * len(ODD) + 3 + i for i in range(len(LINES))} & numbers) == len(LINES)
    assert len(page) < 3_000_000, "what has no end is clipped"


@pytest.mark.slow
@pytest.mark.parametrize("what", ODD)
def test_an_odd_record_alone_with_a_good_one(tmp_path: Path, what: str) -> None:
    """No other's oddness is what keeps the report alive, and it is not the last whose machine the page is of."""
    pair = [encode(make(case=make_case(adapter="odd"))) for make in (make_good, make_timed)]
    ODD[what](*pair)
    good = encode(make_good(case=make_case(adapter="good")))
    (tmp_path / "records.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in (good, *pair)))
    page, _ = report(tmp_path)
    assert "| good " in page


def hostile_records(text: str) -> list[Record | Session]:
    """`text` wherever a record holds one."""
    workload = make_workload(name=text or "w", corpus=text or None)
    case = make_case(adapter=text, workload=workload)
    machine = make_environment(
        machine=text, system=text, commit=text, command=text, versions={text: text}, backend=text
    )
    verdicts = [
        make_verdict(suite, passed=False, summary=text, evidence={**make_verdict(suite).evidence, text: text})
        for suite in ("equivalence", "memory", "communication")
    ]
    outcome = Outcome(status=Status.RAISED, rank=0, message=text, traceback=text, log_tail=text, stacks={0: text})
    judged = make_good(case=case, environment=machine, verdicts=verdicts)
    failed = make_timed(case=case, environment=machine, outcome=outcome)
    skipped = make_good(
        case=dataclasses.replace(case, adapter=f"{text}2"), outcome=Outcome(status=Status.SKIPPED, message=text)
    )
    clause = dataclasses.replace(judged.conformance, scenario="plain", base=case)
    attempts = [
        Attempt(test=text, case=text, conforming=kind, ending=Ending.FAILED, message=text, command=text)
        for kind in (False, True)
    ]
    session = Session(schema=2, session=text, command=text, device=text, corpus=text, exit_code=1, attempts=attempts)
    return [judged, failed, skipped, dataclasses.replace(failed, conformance=clause), session]


def _harmless(tag: str) -> bool:
    """Nothing but what folds evidence away."""
    return bool(re.fullmatch(r"(<details><summary>[^<>]*</summary>|</details>)\n?", tag))


AT_FIRST = 12
"""Texts that `make test` tries; `make test-slow` has the others."""


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, marks=[pytest.mark.slow] if place >= AT_FIRST else [], id=name)
        for place, (name, text) in enumerate(HOSTILE.items())
    ],
)
def test_a_hostile_text_makes_no_markup_anywhere(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages have the headings, links and tags that they would have with a harmless text in its place; also one as
    short, which would take fewer tables on a page of any width."""
    monkeypatch.setattr(table, "WIDTH", 10**6)
    for name, said in (("hostile", text), ("harmless", "x" if text.strip() else text)):
        leave(tmp_path / name, *hostile_records(said))
    for page, harmless in zip(report(tmp_path / "hostile"), report(tmp_path / "harmless"), strict=True):
        assert page and kinds(page) <= kinds(harmless), kinds(page) - kinds(harmless)
        for kind in ("heading_open", "tr_open", "td_open", "link_open", "image", "fence", "html_block", "html_inline"):
            assert len(texts(page, kind)) == len(texts(harmless, kind)), kind
        assert all(_harmless(tag) for tag in texts(page, "html_block")), texts(page, "html_block")


def test_evidence_that_is_gone_costs_the_clauses_that_need_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And no verdict; the page and the command say which."""
    record = make_bulky()
    about = dataclasses.replace(record.conformance, scenario="plain", base=record.case)
    leave(tmp_path, record, dataclasses.replace(record, conformance=about))
    for path in (tmp_path / "evidence").iterdir():
        path.unlink()
    page, clauses = report(tmp_path)
    assert "trains correctly" in page and "could not be read" not in page
    assert "## What could not be read" in clauses and "cannot be judged: EvidenceError" in clauses
    assert "cannot be judged: EvidenceError" in capsys.readouterr().err


def test_no_other_command_falls_over_an_odd_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is compared, or left out by name."""
    monkeypatch.chdir(tmp_path)
    path = leave(tmp_path / "good", make_good(), make_timed())
    (tmp_path / "odd").mkdir()
    gate = ("--fail-on", "wrong,bigger:1%,slower:3%,missing", "--across")
    allowed = ("--allow", "noisy", "--allow", "wrong", "--replace")
    fell = list[str]()
    for what, spoil in ODD.items():
        pair = [encode(make()) for make in (make_good, make_timed)]
        spoil(*pair)
        (tmp_path / "odd" / "records.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in pair))
        for words in (
            ("compare", "good", "odd", *gate),
            ("compare", "odd", "good", *gate),
            ("baseline", "accept", "odd", "--name", "odd", *allowed),
            ("show", "dp2", "odd"),
            ("history", "good", "odd"),
        ):
            try:
                assert main(words) in (0, 1, 2)
            except Exception as error:
                fell.append(f"{what}: {' '.join(words[:3])}: {error!r:.200}")
    assert not fell, "\n".join(fell)
    assert path.read_bytes().count(b"\n") == 2
    capsys.readouterr()


def test_numbers_that_are_none_are_no_reason_to_draw_nothing(tmp_path: Path) -> None:
    odd = make_timed(timing=dataclasses.replace(make_timed().timing, rank_step_seconds=[[math.nan]] * 2))
    leave(tmp_path, make_good(), odd)
    assert "![Memory at the peak, by category](report-memory.svg)" in report(tmp_path)[0]
