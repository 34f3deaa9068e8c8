"""Output for GitHub: a line an annotation, a page a job, whatever a message holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshmark.records.record_file import Attempt, Ending
from meshmark.report.github import annotation_lines, report_to_github, step_summary, warn_github
from tests.hostile_texts import HOSTILE, kinds, texts


def attempt(
    ending: Ending = Ending.FAILED, message: str = "wrong by 100%\nof all", test: str = "t[a,b:c]", case: str = "case"
) -> Attempt:
    return Attempt(test=test, case=case, conforming=False, ending=ending, message=message, command="pytest t -k case")


def test_a_failure_is_an_annotation_of_one_line() -> None:
    (line,) = annotation_lines([attempt(Ending.PASSED), attempt()])
    assert line == "::error title=t[a%2Cb%3Ac]::wrong by 100%25 of all Again: pytest t -k case"
    many = [attempt(case=f"case {number}") for number in range(50)]
    assert len(annotation_lines(many)) == 10, "as many as GitHub shows"
    for text in (*HOSTILE.values(), "x\n::error::no", "\r\n::set-output name=a::b"):
        (line,) = annotation_lines([attempt(message=text, test=text)])
        assert line.startswith("::error title=") and len(line.splitlines()) == 1 and line.isprintable()


def test_the_page_of_a_job_counts_and_names_failures_with_their_commands() -> None:
    page = step_summary([attempt(Ending.PASSED), attempt(Ending.PASSED), attempt(), attempt(Ending.UNFINISHED)])
    assert "2 passed, 1 failed, 1 unfinished." in page and "- `t[a,b:c]`: wrong by 100% of all" in page
    assert texts(page, "fence") == ["pytest t -k case\n"]
    assert step_summary([attempt(Ending.PASSED)]) == "## Meshmark\n\n1 passed.\n"
    for text in HOSTILE.values():
        page = step_summary([attempt(message=text, test=text)])
        assert not kinds(page) & {"link_open", "image", "html_block", "html_inline"}


def test_a_page_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changed the exit code of a gate, and left a traceback."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "nowhere" / "page"))
    lines = list[str]()
    report_to_github([attempt()], lines.append)
    warn_github(["a case"], lines.append)
    assert [line.partition(" ")[0] for line in lines] == ["::error", "::warning", "::warning", "::warning"]
    assert "cannot be written: No such file or directory" in lines[1]


def test_one_defect_is_told_once() -> None:
    """A pass that crashed fails the test of every suite that reads it, and a wrong run that of its speed too."""
    crash, wrong = "case: raised on rank 1: no\n  where      a.py", "other: scaled\n  {}"
    failed = [attempt(message=crash, test=f"test_{suite}") for suite in ("equivalence", "memory", "communication")]
    failed += [attempt(message=wrong.format(i), test=f"other_{i}", case="other") for i in ("equivalence", "throughput")]
    first, second = annotation_lines([attempt(Ending.PASSED), *failed])
    assert first.startswith(
        "::error title=test_equivalence::case: raised on rank 1: no where a.py The same: test_memory, "
    )
    assert second.startswith("::error title=other_equivalence::") and "other_throughput" in second
    page = step_summary(failed)
    assert "5 failed." in page and page.count("raised on rank 1") == 1
    assert "; the same: `test_memory`, `test_communication`" in page
    assert texts(page, "fence") == ["pytest t -k case\npytest t -k case\n"]
