"""Tests that fail without a record, or are not run at all, are in the report all the same."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from meshmark.cli.commands import main
from meshmark.records.record import SCHEMA, Status
from meshmark.records.record_file import Attempt, Ending, Reading, RecordFile, Session, latest_attempts, read_records
from meshmark.report.render import write_report
from tests.factories import make_good
from tests.test_suites import ROOT, suites

OUTSIDE = ROOT / "tests" / "broken" / "outside.py"
NOTHING = "Nothing: every case"


def report(folder: Path) -> str:
    assert main(["report", str(folder)]) == 0
    return (folder / "report.md").read_text()


def attempt(test: str = "suites/test_x.py::test_x[a b]", ending: Ending = Ending.FAILED, **changes: str) -> Attempt:
    told = {"message": "OSError: no", "command": f"pytest {shlex.quote(test)}"} if ending is Ending.FAILED else {}
    return Attempt(test=test, case=changes.pop("case", "some-case"), conforming=False, ending=ending, **told)


def session(*attempts: Attempt, name: str = "one", exit_code: int | None = 1, device: str = "cpu") -> Session:
    return Session(
        schema=SCHEMA,
        session=name,
        command="pytest suites -k 'a or b'",
        device=device,
        exit_code=exit_code,
        attempts=list(attempts),
    )


def page_of(tmp_path: Path, *sessions: Session) -> str:
    reading = Reading(records=[make_good()], complaints=[], sessions=list(sessions))
    write_report(reading, tmp_path / "page.md", "meshmark report")
    return (tmp_path / "page.md").read_text()


@pytest.fixture(scope="module")
def without_noise(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run whose instrumented pass fails outside its ranks, as its noise floor cannot be kept: folder and output."""
    folder = tmp_path_factory.mktemp("it's $HOME")
    (folder / "noise").write_text("a file of the user's in the way")
    chosen = "(equivalence or memory or throughput) and not conformance"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MESHMARK_NOISE")
        done = suites("--adapters", "ddp", "--workload", "gpt-mini", "--results", folder, "-k", chosen)
    assert done.returncode == 1, done.stdout
    return folder, done.stdout


def test_a_failure_outside_the_ranks_is_the_record_of_its_case(without_noise: tuple[Path, str]) -> None:
    folder, said = without_noise
    observed, timed = read_records(folder).records
    assert (observed.outcome.status, timed.outcome.status) == (Status.UNFINISHED, Status.OK)
    assert observed.outcome.message.startswith("FileExistsError: ")
    assert "in write_noise" in observed.outcome.traceback
    assert "unfinished: FileExistsError: " in said and "on rank None" not in said


def test_it_is_in_the_report_and_no_verdict(without_noise: tuple[Path, str]) -> None:
    page = report(without_noise[0])
    assert NOTHING not in page
    head = page.splitlines()[2]
    assert head.startswith("**Correctness was not judged in this run**")
    assert "ended by what stands outside their ranks: `ddp-dp2.mb4-gpt-mini-fp32`" in head
    assert "wrong or failed" not in head
    assert "; 2 tests failed" in head
    assert "| **unfinished** " in page
    assert "**ddp-dp2.mb4-gpt-mini-fp32** (observe): unfinished: " in page and "FileExistsError: " in page
    assert "2 tests failed:" in page and "test_throughput[" not in page.partition("## Where the time")[0]


@pytest.mark.slow
@pytest.mark.usefixtures("own_noise")
def test_the_printed_command_repeats_one_test_in_a_shell(without_noise: tuple[Path, str]) -> None:
    """Brackets, quotes, blanks and a dollar sign and all."""
    page = report(without_noise[0])
    command = next(line for line in page.splitlines() if line.startswith("pytest 'suites/test_equivalence.py::"))
    bin_folder = Path(sys.executable).parent
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
    )
    assert re.search(r"^FAILED suites/test_equivalence.py::test_equivalence\[ddp-dp2", done.stdout, re.M), done.stdout
    assert re.search(r"^=+ 1 failed in ", done.stdout, re.M), done.stdout
    assert len(read_records(without_noise[0]).sessions) == 4, "the same results folder: two lines a session"


def test_the_command_of_the_records_can_be_pasted_too(without_noise: tuple[Path, str]) -> None:
    folder, _ = without_noise
    command = shlex.split(read_records(folder).records[0].environment.command)
    assert command[0] == "pytest" and str(folder) in command
    assert "(equivalence or memory or throughput) and not conformance" in command


def test_an_adapter_that_fails_before_the_launch_leaves_a_record_too(tmp_path: Path) -> None:
    chosen = ["--adapter", f"{OUTSIDE}:NoEnvironment", "--workload", "gpt-mini", "-k", "throughput"]
    done = suites(*chosen, "--results", tmp_path)
    assert done.returncode == 1, done.stdout
    (record,) = read_records(tmp_path).records
    assert record.outcome.status is Status.UNFINISHED
    assert record.outcome.message == "LookupError: planted in the environment"


def test_a_run_without_one_record_has_a_report_that_says_so(tmp_path: Path) -> None:
    matrix = ("equivalence", "memory", "communication", "throughput")
    failed = [attempt(f"suites/test_{suite}.py::test_{suite}[some-case]") for suite in matrix]
    clause = dataclasses.replace(attempt("suites/test_conformance.py::test_conformance[some]"), conforming=True)
    with contextlib.closing(RecordFile(tmp_path)) as file:
        file.append(session(*failed, clause))
    page = report(tmp_path)
    assert page.splitlines()[2] == "**No case left a record**: `some-case`."
    assert NOTHING not in page
    first, *others = (f"`suites/test_{suite}.py::test_{suite}[some-case]`" for suite in matrix)
    assert f"{first}: OSError: no; the same: {', '.join(others)}\n" in page
    clauses = (tmp_path / "report-conformance.md").read_text()
    assert "No scenario left a record" in clauses and "OSError: no" in clauses


def test_tests_that_were_not_run_are_named(tmp_path: Path) -> None:
    done = suites(
        "--adapter",
        f"{OUTSIDE}:NoRefusal",
        "--workload",
        "gpt-mini",
        "--results",
        tmp_path,
        "-x",
        "-k",
        "equivalence or throughput",
    )
    assert done.returncode == 1, done.stdout
    page = report(tmp_path)
    assert NOTHING not in page
    assert "This run ended early, with exit code 1:" in page and "-k 'equivalence or throughput'" in page
    assert "- `suites/test_throughput.py::test_throughput[norefusal-dp2.mb4-gpt-mini-fp32]`: unfinished" in page
    assert "1 test failed:" in page


def test_a_case_without_a_record_is_in_the_headline(tmp_path: Path) -> None:
    page = page_of(tmp_path, session(attempt(ending=Ending.UNFINISHED), exit_code=2))
    assert "unfinished, without a record: `some-case`" in page.splitlines()[2]


def test_a_run_that_was_killed_names_the_cases_that_it_did_not_reach(tmp_path: Path) -> None:
    """Its first line alone is there: those of its tests that left records are known by them."""
    recorded = attempt("suites/a.py::t", Ending.UNFINISHED, case=make_good().case.id)
    page = page_of(tmp_path, session(recorded, attempt("suites/b.py::t", Ending.UNFINISHED), exit_code=None))
    assert NOTHING not in page
    assert "This run did not end (killed?):" in page
    assert "`suites/b.py::t`: unfinished" in page and "suites/a.py::t" not in page


def test_what_a_later_run_mended_is_not_told_any_more(tmp_path: Path) -> None:
    mended = [session(attempt()), session(attempt(ending=Ending.PASSED), name="two", exit_code=0)]
    assert NOTHING in page_of(tmp_path, *mended)
    assert NOTHING not in page_of(tmp_path, *reversed(mended))


def test_neither_another_device_nor_a_run_that_broke_off_mends_a_test(tmp_path: Path) -> None:
    elsewhere = session(attempt(ending=Ending.PASSED), name="two", exit_code=0, device="cuda")
    broken_off = session(attempt(ending=Ending.UNFINISHED), name="three", exit_code=2)
    assert NOTHING not in page_of(tmp_path, session(attempt()), elsewhere)
    ((last, by),) = latest_attempts([session(attempt()), broken_off], conforming=False)
    assert (last.ending, by.session) == (Ending.FAILED, "one")


def test_the_line_of_the_end_replaces_that_of_the_beginning(tmp_path: Path) -> None:
    file = RecordFile(tmp_path)
    file.append(session(attempt(ending=Ending.UNFINISHED), exit_code=None))
    file.append(session(attempt(ending=Ending.PASSED), exit_code=0))
    file.close()
    ((last, _),) = latest_attempts(read_records(tmp_path).sessions, conforming=False)
    assert last.ending is Ending.PASSED
