"""What a run tells GitHub: a line an annotation, a page a job, whatever a message holds."""

from __future__ import annotations

from meshmark.report.github import annotation_lines, step_summary
from meshmark.run.session import Attempt, Ending
from tests.hostile_texts import HOSTILE, kinds, texts


def attempt(ending: Ending = Ending.FAILED, message: str = "wrong by 100%\nof all", test: str = "t[a,b:c]") -> Attempt:
    return Attempt(test=test, case="case", conforming=False, ending=ending, message=message, command="pytest t -k case")


def test_a_failure_is_an_annotation_of_one_line() -> None:
    (line,) = annotation_lines([attempt(Ending.PASSED), attempt()])
    assert line == "::error title=t[a%2Cb%3Ac]::wrong by 100%25 of all Again: pytest t -k case"
    assert len(annotation_lines([attempt()] * 50)) == 10, "as many as GitHub shows"
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
