"""Known gaps in a file of a user's: what it may hold, and what becomes of tests."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from meshmark.conformance.clauses import CLAUSES, judge_clause
from meshmark.conformance.finding import ClauseResult
from meshmark.conformance.gap_file import read_gaps
from meshmark.errors import InputError
from meshmark.pytest_plugin.plugin import StaleGapWarning, expect, expect_not_wrong
from meshmark.records.record import Record
from meshmark.run.assemble import unmatched_gaps, with_gaps
from meshmark.spec.known_gap import KnownGap
from tests.factories import make_case, make_good, make_verdict
from tests.test_conformance import GAP, plain, plain_conformance

ROOT = Path(__file__).parent.parent
GOOD = """[[gap]]
adapter = "dd*"
clause = "memory"
symptom = "activations"
reason = "known"
"""


def known(tmp_path: Path, text: str = GOOD) -> tuple[tuple[str, KnownGap], ...]:
    (tmp_path / "gaps.toml").write_text(text)
    return read_gaps(tmp_path / "gaps.toml")


def record(tmp_path: Path, summary: str, passed: bool = False) -> Record:
    verdict = make_verdict("memory", passed=passed, summary=summary)
    return with_gaps(make_good(verdicts=[verdict]), known(tmp_path))


def test_a_known_failure_is_expected_and_another_one_fails(tmp_path: Path) -> None:
    with pytest.raises(pytest.xfail.Exception, match="memory: known .activations: 3 bytes"):
        expect(record(tmp_path, "activations: 3 bytes"), "memory")
    with pytest.raises(pytest.fail.Exception, match="gradients: 3 bytes") as failed:
        expect(record(tmp_path, "gradients: 3 bytes"), "memory")
    assert failed.type is pytest.fail.Exception  # of which an expected failure is one kind
    with pytest.warns(StaleGapWarning, match="take the gap out"):
        expect(record(tmp_path, "fine", passed=True), "memory")
    others = with_gaps(make_good(case=make_case("fsdp2")), known(tmp_path))
    assert not others.conformance.known_gaps


def test_a_pattern_that_is_no_adapter_s_is_told(tmp_path: Path) -> None:
    mine, mistyped = known(tmp_path, GOOD.replace("dd*", "mine*")), known(tmp_path, GOOD.replace("dd*", "deepsped*"))
    assert not unmatched_gaps([*known(tmp_path), *mine], ["mine2"]), "ddp is known, though it is not run here"
    (told,) = unmatched_gaps([*mine, *mistyped, *mistyped], ["mine2"])
    assert told == "--known-gaps: 'deepsped*' matches no adapter that is known here"


def test_the_speed_of_a_run_that_is_known_to_be_wrong_is_expected_to_fail_too(tmp_path: Path) -> None:
    gaps = known(tmp_path, GOOD.replace("memory", "equivalence"))
    verdict = make_verdict(passed=False, summary="off", evidence={"diagnosis": "activations scaled"})
    with pytest.raises(pytest.xfail.Exception, match="known"):
        expect_not_wrong(with_gaps(make_good(verdicts=[verdict]), gaps))


def test_a_user_s_gap_stands_beside_the_adapter_s(tmp_path: Path) -> None:
    """Each with its own symptom."""
    wrong = dataclasses.replace(plain(conformance=plain_conformance(known_gaps=[GAP])), verdicts=[])
    failing = {"plain": with_gaps(wrong, known(tmp_path, GOOD.replace("memory", GAP.clause)))}
    assert [gap.symptom for gap in failing["plain"].conformance.known_gaps] == ["activations", GAP.symptom]
    clause = dataclasses.replace(CLAUSES[GAP.clause], judge=lambda *_: _failed(GAP.symptom))
    assert judge_clause(clause, failing).result is ClauseResult.KNOWN_GAP
    clause = dataclasses.replace(clause, judge=lambda *_: _failed("activations"))
    assert judge_clause(clause, failing).evidence.startswith("known")
    clause = dataclasses.replace(clause, judge=lambda *_: _failed("neither"))
    assert judge_clause(clause, failing).result is ClauseResult.FAIL


def _failed(evidence: str):  # noqa: ANN202
    from meshmark.conformance.finding import decide

    return decide(False, evidence)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[gaps]]", "unknown table in {path} 'gaps': did you mean 'gap'"),
        ("gap = 3", "expected a table [[gap]]"),
        (GOOD.replace("clause", "clasue"), "unknown key in {path}: [[gap]] number 1 'clasue': did you mean 'clause'"),
        (GOOD.replace('"memory"', '"memroy"'), "unknown clause or suite in {path}: [[gap]] number 1 'memroy'"),
        (GOOD.replace('"activations"', '" "'), "symptom is ' ', expected a text; else any failure would match"),
        (GOOD + "zero-stages = [5]", "zero-stages is [5], expected a list of (0, 1, 2, 3)"),
        ("x = ", "cannot read {path}"),
    ],
)
def test_a_mistake_is_told_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words.format(path=tmp_path / "gaps.toml"))):
        known(tmp_path, text)


def test_the_files_that_the_pages_show_are_read(tmp_path: Path) -> None:
    ((pattern, gap),) = read_gaps(ROOT / "examples" / "known-gaps.toml")
    assert (pattern, gap.clause, gap.zero_stages) == ("mine*", "memory", (0,))
    page = (ROOT / "docs" / "ci.md").read_text()
    (shown,) = re.findall(r"```toml\n(\[\[gap\]\].*?)```", page, re.DOTALL)
    ((pattern, gap),) = known(tmp_path, shown)
    assert (pattern, gap.clause, gap.zero_stages) == ("deepspeed*", "unused", (3,))
