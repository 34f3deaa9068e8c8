"""`meshmark ab` and `bisect`: error rates of the sequential test, and a real repository with planted defects."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from meshmark.cli.commands import _parser as command_line
from meshmark.cli.commands import main
from meshmark.errors import InputError, ResultsError
from meshmark.records.record import SCHEMA, Outcome, Record, Status, TimingEvidence
from meshmark.records.record_file import Attempt, Ending, RecordFile, Session
from meshmark.regression import bisect as bisection
from meshmark.regression import side as sides
from meshmark.regression.alternate import alternate
from meshmark.regression.causes import causes
from meshmark.regression.change import ChangeOutcome, Kind
from meshmark.regression.gate import parse_gate
from meshmark.regression.sequential import evidence, half_width
from meshmark.regression.side import Side
from tests.factories import (
    make_case,
    make_good,
    make_memory,
    make_memory_evidence,
    make_timed,
    make_timing,
    make_verdict,
)

RNG = np.random.default_rng(3)
ALPHA = 0.01


def crossings(mean: float, draw: Callable[[int], np.ndarray], runs: int = 400, pairs: int = 40) -> float:
    """Share of runs whose evidence ever reaches 1/ALPHA, looked at after every pair from the fourth on."""
    found = 0
    for _ in range(runs):
        differences = list(mean + draw(pairs))
        found += any(evidence(differences[:n]) >= 1 / ALPHA for n in range(4, pairs + 1, 2))
    return found / runs


@pytest.mark.parametrize(
    "draw",
    [lambda n: 0.05 * RNG.standard_normal(n), lambda n: 0.05 * RNG.standard_t(3, n)],
    ids=["normal", "outliers"],
)
def test_equal_argumentsare_called_different_as_rarely_as_promised(draw: Callable[[int], np.ndarray]) -> None:
    """A fixed t-test that is looked at as often would cross in about 8 % of runs."""
    assert crossings(0.0, draw) <= ALPHA + 3 * math.sqrt(ALPHA / 400)


def test_a_slow_down_as_large_as_the_scatter_is_found() -> None:
    assert crossings(0.03, lambda n: 0.03 * RNG.standard_normal(n), runs=100) >= 0.9


def test_the_evidence_is_the_published_bayes_factor() -> None:
    """By numerical integration over the effect size: the likelihood ratio of noncentral and central t."""
    from scipy.integrate import quad
    from scipy.stats import nct, norm, t

    differences = [0.01, 0.05, 0.02, 0.04, -0.01]
    n = len(differences)
    observed = np.mean(differences) / np.std(differences, ddof=1) * math.sqrt(n)
    for scales in ([0.5], [0.5, 4.0]):  # the mean of several is a martingale as each is
        expected = 0.0
        for scale in scales:
            ratio = lambda d: nct.pdf(observed, n - 1, d * math.sqrt(n)) * norm.pdf(d, scale=scale)  # noqa: B023, E731
            expected += quad(ratio, -8, 8, points=[0, 1])[0] / t.pdf(observed, n - 1) / len(scales)
        assert evidence(differences, [scale**2 for scale in scales]) == pytest.approx(expected, rel=1e-3)


def test_the_confidence_sequence_ends_where_the_evidence_does() -> None:
    differences = list(0.01 + 0.02 * RNG.standard_normal(20))
    width, mean = half_width(differences, ALPHA), float(np.mean(differences))
    shifted = [d - (mean - width) for d in differences]
    assert evidence(shifted) == pytest.approx(1 / ALPHA, rel=1e-9)
    assert half_width(differences[:2], ALPHA) == math.inf


def side(seconds: float, scatter: float = 0.01, **changes: object) -> Callable[[Path], list[Record]]:
    def measure(_: Path) -> list[Record]:
        own = seconds * math.exp(scatter * RNG.standard_normal())
        return [make_timed(timing=make_timing(rank_step_seconds=[[own] * 8]), **changes)]

    return measure


def test_pairs_end_when_all_is_decided(tmp_path: Path) -> None:
    said: list[str] = []
    for factor, outcome in ((1.2, ChangeOutcome.WORSE), (0.8, ChangeOutcome.BETTER), (1.0, ChangeOutcome.SAME)):
        found = alternate(side(0.1), side(0.1 * factor), tmp_path, most_pairs=60, say=said.append)
        (rate,) = (change for change in found.changes if change.metric == "tokens/s")
        assert rate.outcome is outcome
        assert rate.effect and rate.effect.lowest < 1 / factor - 1 < rate.effect.highest
    assert len(said) < 3 * 60 and "1 of 1 case decided; " in said[-2]
    assert said[-1].startswith("note: both sides ran the same code")


def test_sides_that_ran_other_code_are_not_said_to_have_run_the_same(tmp_path: Path) -> None:
    said: list[str] = []
    other = dataclasses.replace(make_timed().environment, packages_digest="another")
    alternate(side(0.1), side(0.2, environment=other), tmp_path, most_pairs=8, say=said.append)
    assert said and not any("same code" in text for text in said)


def busy(processor: float) -> Callable[[Path], list[Record]]:
    """A side whose clock scatters as on a busy machine, and whose processor time by a few per cent."""

    def measure(_: Path) -> list[Record]:
        clock, own = (math.exp(scatter * RNG.standard_normal()) for scatter in (0.15, 0.03))
        cpu = [[4 * processor * own]] * 2
        return [make_timed(timing=make_timing(rank_step_seconds=[[0.1 * clock] * 8] * 2, rank_cpu_seconds=cpu))]

    return measure


def test_processor_time_decides_where_the_clock_cannot_tell(tmp_path: Path) -> None:
    slower, same = (
        alternate(busy(0.1), busy(0.1 * factor), tmp_path, most_pairs=10, say=lambda _: None) for factor in (1.2, 1.0)
    )
    (failing,) = parse_gate("slower:5%").failing(slower.changes)
    assert failing.metric == "CPU seconds a step" and failing.by > 0.1
    assert not parse_gate("slower:5%").failing(same.changes)
    (unsure,) = (c for c in parse_gate("slower:5%").unsure(same.changes) if c.metric == "tokens/s")
    assert "more pairs, " in unsure.evidence, "and how long they take"


def test_what_cannot_be_told_says_how_many_pairs_it_takes(tmp_path: Path) -> None:
    found = alternate(side(0.1, scatter=0.2), side(0.1, scatter=0.2), tmp_path, most_pairs=5, say=lambda _: None)
    (rate,) = (change for change in found.changes if change.metric == "tokens/s")
    assert rate.outcome is ChangeOutcome.UNDECIDED and "to tell 3% takes about" in rate.evidence


def test_argumentsalternate_and_other_cases_are_an_error(tmp_path: Path) -> None:
    folders: list[str] = []

    def noted(measure: Callable[[Path], list[Record]]) -> Callable[[Path], list[Record]]:
        return lambda folder: (folders.append(folder.parent.name), measure(folder))[1]

    alternate(noted(side(0.1)), noted(side(0.1, 0.3)), tmp_path, most_pairs=4, say=lambda _: None)
    assert folders == ["a", "b", "b", "a"] * 2
    with pytest.raises(ResultsError, match="no case in common"):
        alternate(side(0.1), side(0.1, case=make_case("fsdp2")), tmp_path, most_pairs=4, say=lambda _: None)


def test_a_pair_without_a_case_leaves_the_others(tmp_path: Path) -> None:
    """One hang in the first pair took the case out of all comparisons, and a slower side passed."""
    slower, count = side(0.2), iter(range(99))

    def hangs_once(folder: Path) -> list[Record]:
        hung = make_timed(outcome=Outcome(status=Status.HUNG, rank=0), timing=TimingEvidence())
        return [hung] if next(count) == 0 else slower(folder)

    found = alternate(side(0.1), hangs_once, tmp_path, most_pairs=12, say=lambda _: None)
    assert any(change.kind is Kind.SLOWER for change in parse_gate("slower:3%").failing(found.changes))

    def hangs(_: Path) -> list[Record]:
        return [make_timed(outcome=Outcome(status=Status.HUNG, rank=0), timing=TimingEvidence())]

    never = alternate(side(0.1), hangs, tmp_path, most_pairs=1, say=lambda _: None)
    assert parse_gate("slower:3%").unsure(never.changes)[0].evidence == "in no pair have both sides timed it to the end"


def test_a_side_that_crashes_is_worse(tmp_path: Path) -> None:
    def crashed(_: Path) -> list[Record]:
        timing = dataclasses.replace(make_timing(), rank_step_seconds=[])
        return [make_timed(outcome=Outcome(status=Status.KILLED), timing=timing)]

    found = alternate(side(0.1), crashed, tmp_path, most_pairs=1, say=lambda _: None)
    worse = found.of(ChangeOutcome.WORSE)
    assert [(c.metric, c.after) for c in worse] == [("timed pass", "killed"), ("case", "not timed")]
    assert [str(cause.change.metric) for cause in causes(worse)] == ["timed pass"], "they are one message"


SESSION = """#!/bin/sh
for word; do last=$word; done
mkdir -p "$last" && cp "{records}" "$last" && {end}
"""


@pytest.mark.parametrize("ended", ["kill -9 $$", "exit 2", "exit 3"])
def test_a_side_whose_session_is_cut_off_does_not_pass(
    ended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For want of memory, say. The cases that it had not come to were missing, which `wrong` does not ask for."""
    with contextlib.closing(RecordFile(tmp_path)) as file:
        file.append(make_good())
    for side, end in {"good": "exit 0", "cut": ended}.items():
        python = tmp_path / side / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(SESSION.format(records=tmp_path / "records.jsonl", end=end))
        python.chmod(0o755)
    asked = ["ab", "--pairs", "1", "--fail-on", "wrong", "--a", str(tmp_path / "good")]
    assert main([*asked, "--b", str(tmp_path / "good"), "--", "-k", "x"]) == 0
    assert main([*asked, "--b", str(tmp_path / "cut"), "--", "-k", "x"]) == 2
    assert "before its last test" in capsys.readouterr().err
    timed = 0 if ended == "exit 2" else 2  # the code of a session that its own time limit has ended
    assert main([*asked, "--b", str(tmp_path / "cut"), "--", "-k", "x", "--max-time", "1m"]) == timed


COMMITS = [
    {"broken": True},
    {},
    {"correct": False},
    {"correct": False, "activations": 2000},
    {"correct": False, "activations": 2000, "seconds": 0.3},
    {"correct": False, "activations": 2000, "seconds": 0.3},
]
"""Defects that each commit after the first plants. They stay in later commits."""


def commit(message: str, planted: dict[str, object]) -> str:
    Path("planted.json").write_text(json.dumps(planted | {"message": message}))
    for words in (["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", message]):
        subprocess.run(["git", *words], check=True)
    return subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A real one; its sessions read what the checkout plants. `benchmarks/bisect.py` runs real ones."""
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)

    def session(side: Side, options: list[str], results: Path) -> list[Record]:
        planted = json.loads((side.folder / "planted.json").read_text())
        if planted.get("broken"):
            raise ResultsError(f"{side.name}: does not build")
        own = planted.get("seconds", 0.1) * math.exp(0.02 * RNG.standard_normal())
        readings = [make_memory(), make_memory(activations=planted.get("activations", 1000))]
        observed = make_good(
            verdicts=[make_verdict(passed=planted.get("correct", True))], memory=make_memory_evidence(readings=readings)
        )
        return [observed, make_timed(timing=make_timing(rank_step_seconds=[[own] * 8]))]

    monkeypatch.setattr(bisection, "run_suites", session)
    return [commit(f"commit {i}", planted) for i, planted in enumerate([{}, *COMMITS])]


@pytest.mark.parametrize(
    "gate, first, words",
    [
        ("wrong", 3, "equivalence verdict worse: yes -> no"),
        ("bigger:1%", 4, "activations on rank 1: 1,000 -> 2,000"),
        ("slower:3%", 5, "tokens/s worse"),
    ],
)
def test_the_first_bad_commit_is_found(
    repository: list[str], gate: str, first: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["bisect", "--good", repository[0], "--bad", repository[-1], "--fail-on", gate, "--", "-k", "x"]
    assert main(asked) == 0
    said = capsys.readouterr().out
    told = said[said.index("first bad:") :]
    assert told.splitlines()[0].startswith(f"first bad: {repository[first][:7]}")
    assert told.splitlines()[0].endswith(f"commit {first}") and words in told
    listed = subprocess.run(["git", "worktree", "list"], check=True, capture_output=True, text=True).stdout
    assert len(listed.splitlines()) == 1  # nothing is left


MERGED = {
    "good": "",
    "a1": "good",
    "b1": "good",
    "a2": "a1",
    "b2": "b1",
    "m1": "b2 a2",
    "c1": "b1",
    "m2": "m1 c1",
    "e": "m2",
}
"""The parents of each commit. Dates are in this order, so that the branches are mixed in a listing by date."""


@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize("first", [name for name in MERGED if name != "good"])
def test_the_first_bad_commit_of_a_history_with_merges_is_found(first: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A good commit says nothing of another branch's commits, which a listing may have before it."""
    made, wrong = dict[str, str](), dict[str, bool]()
    for minute, (name, parents) in enumerate(MERGED.items()):
        wrong[name] = name == first or any(wrong[parent] for parent in parents.split())
        Path("planted.json").write_text(json.dumps({"correct": not wrong[name], "name": name}))
        subprocess.run(["git", "add", "-A"], check=True)
        tree = subprocess.run(["git", "write-tree"], check=True, capture_output=True, text=True).stdout.strip()
        date = f"2026-01-01T00:{minute:02}:00"
        who = {f"GIT_{role}_{what}": "a" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        stem = ["git", "commit-tree", tree, "-m", name, *(word for p in parents.split() for word in ("-p", made[p]))]
        dated = {**os.environ, **who, "GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
        made[name] = subprocess.run(stem, check=True, capture_output=True, text=True, env=dated).stdout.strip()
    asked = ["bisect", "--good", made["good"], "--bad", made["e"], "--fail-on", "wrong", "--launches", "1"]
    assert main([*asked, "--", "-k", "x"]) == 0
    assert f"first bad: {made[first][:7]}" in capsys.readouterr().out


def test_a_commit_is_run_in_the_folder_that_it_was_called_in(
    repository: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that options name are looked for there."""
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "mine.py").write_text("")
    subprocess.run(["git", "add", "below"], check=True)
    commit("a folder", {})
    monkeypatch.chdir(tmp_path / "below")
    with sides.open_side("HEAD", tmp_path / "sides", "A") as side:
        assert (side.folder / "mine.py").is_file() and (side.paths[0] / "planted.json").is_file()
    with pytest.raises(InputError, match="has no folder 'below/', the current folder"):
        with sides.open_side(repository[0], tmp_path / "sides", "A"):
            pass


def test_a_commit_s_own_package_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the working tree's, which `pip install -e` puts on the path by its folder `src`."""
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    bare = commit("nothing", {})
    (tmp_path / "src").mkdir()
    for number in (1, 2):
        (tmp_path / "src" / "library.py").write_text(f"NUMBER = {number}")
        subprocess.run(["git", "add", "src"], check=True)
        commit(f"number {number}", {})
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "src"), "elsewhere"]))
    with sides.open_side("HEAD~1", tmp_path / "sides", "A") as side:
        path = os.pathsep.join([*map(str, side.paths), side.variables["PYTHONPATH"]])
        code = "import library, sys; print(library.NUMBER, *(p for p in sys.path if p.endswith('elsewhere')))"
        told = subprocess.run(
            [sys.executable, "-P", "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
        ).stdout.split()
        assert told[0] == "1" and len(told) == 2
    assert not (tmp_path / "sides" / "A").exists() and not (tmp_path / ".git" / "worktrees").exists()
    with pytest.raises(InputError, match="has no folder src, from which Python imports here"):
        with sides.open_side(bare, tmp_path / "sides", "A"):
            pass


@pytest.fixture
def releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make releases of a package, in a folder that pip takes for its index. From 1.10 on they are wrong. This Python
    cannot install 1.9."""
    monkeypatch.chdir(tmp_path)
    for version in ("1.0", "1.2", "1.9", "1.10", "1.11rc1", "1.11"):
        python = "cp27" if version == "1.9" else "py3"
        with zipfile.ZipFile(tmp_path / f"planted-{version}-{python}-none-any.whl", "w") as wheel:
            info = f"planted-{version}.dist-info"
            wheel.writestr("planted.py", f"correct = {version in ('1.0', '1.2')}")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: planted\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {python}-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path), "DISABLE_PIP_VERSION_CHECK": "1"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)

    def session(side: Side, options: list[str], results: Path) -> list[Record]:
        correct = "True" in (side.paths[0] / "planted.py").read_text()
        return [make_good(verdicts=[make_verdict(passed=correct)])]

    monkeypatch.setattr(bisection, "run_suites", session)


@pytest.mark.slow
@pytest.mark.usefixtures("releases")
def test_the_first_bad_release_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["bisect", "--fail-on", "wrong", "--launches", "1", "--good", "planted==1.0", "--bad"]
    assert main([*asked, "planted==1.11", "--", "-k", "x"]) == 0
    said = capsys.readouterr().out
    assert "first bad: planted==1.10\n" in said and "good: planted==1.2" in said and "1.9" not in said
    for wrong, words in (
        ("planted==0.9", "are they the other way round?"),
        ("other==2", "two releases such as torch==2.12.1 of one package"),
        ("planted==3", "lists no such release for this python; it has 1.2, 1.10, 1.11"),
    ):
        assert main([*asked, wrong, "--", "-k", "x"]) == 2
        assert words in capsys.readouterr().err


def test_what_cannot_be_run_is_passed_over_and_told(repository: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Between the good commit and the bad one behind the broken one, nothing else can be tried."""
    assert main(["bisect", "--good", repository[0], "--bad", repository[1], "--", "-k", "x"]) == 2
    assert "does not build" in capsys.readouterr().err
    subprocess.run(["git", "checkout", "-q", repository[1]], check=True)
    bad = commit("wrong behind the broken one", {"correct": False})
    assert main(["bisect", "--good", repository[0], "--bad", bad, "--", "-k", "x"]) == 1
    said = capsys.readouterr().out
    assert (
        "wrong behind the broken one" in said
        and f"or one of these, which cannot be run or are worse in another way: {repository[1]}" in said
    )


def test_a_commit_that_is_worse_in_another_way_is_passed_over(
    repository: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It says nothing about what is wrong with the bad one."""
    subprocess.run(["git", "checkout", "-q", repository[0]], check=True)
    larger = commit("larger", {"activations": 2000})
    bad = commit("wrong, and no larger", {"correct": False})
    asked = ["bisect", "--good", repository[0], "--bad", bad, "--fail-on", "wrong,bigger:1%", "--", "-k", "x"]
    assert main(asked) == 1
    said = capsys.readouterr().out
    assert "skipped, for it is worse in another way: " in said and "activations on rank 1" in said
    assert "first bad: " in said and "wrong, and no larger" in said[said.index("first bad: ") :] and larger in said


def test_another_repository_in_the_environment_is_left_alone(
    repository: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As git sets it for hooks and `rebase --exec` in a linked worktree: their HEAD was moved to the other commit."""
    monkeypatch.setenv("GIT_DIR", str(Path(".git").resolve()))
    monkeypatch.setenv("GIT_INDEX_FILE", str(Path(".git/index").resolve()))
    head = Path(".git/HEAD").read_text()
    with sides.checkout(repository[0], tmp_path / "place") as place:
        assert (place / ".git").is_dir()
        assert sides.git("-C", str(place), "rev-parse", "HEAD") == repository[0]
    assert Path(".git/HEAD").read_text() == head


def test_submodules_are_checked_out_at_their_commits(
    repository: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their folders were empty, so that Python imported the ones of the working tree on both sides."""

    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a", "-c", "protocol.file.allow=always")
        subprocess.run(["git", *who, *words], check=True, capture_output=True)

    library = tmp_path / "library"
    git("init", "-q", str(library))
    git("-C", str(library), "commit", "-q", "--allow-empty", "-m", "none")
    git("submodule", "add", str(library), "libs")
    git("commit", "-q", "-a", "-m", "old")
    Path("libs/size.py").write_text("SIZE = 2\n")
    git("-C", "libs", "add", "size.py")
    git("-C", "libs", "commit", "-q", "-m", "size")
    git("commit", "-q", "-a", "-m", "new")
    old, new = (sides.git("rev-parse", name) for name in ("HEAD~1", "HEAD"))
    with sides.checkout(old, tmp_path / "old") as place:
        assert (place / "libs" / ".git").is_dir() and not (place / "libs" / "size.py").exists()
    with sides.checkout(new, tmp_path / "new") as place:
        assert (place / "libs" / "size.py").read_text() == "SIZE = 2\n"
    git("update-index", "--cacheinfo", f"160000,{'1' * 40},libs")
    git("commit", "-q", "-m", "one that nobody has")
    with pytest.raises(InputError, match="submodule libs has no commit 111111111111"):
        with sides.checkout(sides.git("rev-parse", "HEAD"), tmp_path / "none"):
            pass
    assert not (tmp_path / "none").exists()


def test_mistakes_are_told(repository: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for asked, words in (
        (["--good", "nowhere", "--bad", "HEAD"], "'nowhere': no commit of the repository here"),
        (["--good", "HEAD", "--bad", repository[0]], "are they the other way round?"),
        (["--good", repository[0], "--bad", repository[2]], "there is nothing to find"),
        (["--good", "HEAD~1", "--bad", "HEAD", "--launches", "0"], "expected at least 1"),
        (["--good", "HEAD~1", "--bad", "HEAD", "--launches", "2"], "at least 3, which show how launches scatter"),
    ):
        assert main(["bisect", *asked, "--", "-k", "x"]) == 2
        assert words in capsys.readouterr().err
    Path(".git/shallow").write_text(f"{repository[2]}\n")  # as `git clone --depth` leaves it
    assert main(["bisect", "--good", repository[0], "--bad", "HEAD", "--", "-k", "x"]) == 2
    assert "this clone is shallow: git fetch --unshallow" in capsys.readouterr().err
    Path(".git/shallow").unlink()
    for options in ([], ["--"]):
        assert main(["ab", "--a", "HEAD", "--b", "HEAD", *options]) == 2
        assert "expected a command after --" in capsys.readouterr().err
    assert main(["ab", "--a", "HEAD", "--b=--target=elsewhere", "--", "-k", "x"]) == 2
    assert "begins with a dash" in capsys.readouterr().err
    assert main(["ab", "--a", "HEAD", "--b", "./no/such/package", "--", "-k", "x"]) == 2
    assert "is no folder with bin/python, no commit of the repository here, and pip cannot" in capsys.readouterr().err


def test_a_gate_on_times_that_nothing_was_timed_for_does_not_pass(
    repository: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def session(side: Side, options: list[str], results: Path) -> list[Record]:
        return [make_good()]

    monkeypatch.setattr("meshmark.regression.ab_cli.run_suites", session)
    asked = ["ab", "--a", "HEAD", "--b", "HEAD", "--fail-on"]
    assert main([*asked, "wrong", "--", "-k", "x"]) == 0
    assert main([*asked, "wrong,slower:3%,unsure", "--", "-k", "x"]) == 2
    assert "no case was timed in both HEAD and HEAD" in capsys.readouterr().err


@pytest.mark.parametrize("side", ["a", "b"])
def test_sessions_of_an_earlier_comparison_are_not_added_to(
    tmp_path: Path, side: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were, and then nothing counted as timed, so that the gate passed."""
    (tmp_path / side).mkdir()
    assert main(["ab", "--a", "HEAD", "--b", "HEAD", "--results", str(tmp_path), "--", "-k", "x"]) == 2
    assert "it holds the sessions of an earlier `meshmark ab`" in capsys.readouterr().err


@pytest.mark.slow
def test_a_command_that_is_ended_leaves_no_worktree(repository: list[str]) -> None:
    """`timeout` and a cancelled job end it by SIGTERM. Both sides were left behind, and git listed them for ever."""
    Path("test_waits.py").write_text(
        "import time\n\ndef test_waits():\n    open('waits', 'w').close()\n    time.sleep(60)\n"
    )
    commit("waits", {})
    asked = ["ab", "--a", "HEAD", "--b", "HEAD", "--", "test_waits.py", "-k", "test_waits"]
    ended = subprocess.Popen(
        [sys.executable, "-m", "meshmark", *asked],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(Path.cwd())},
    )
    deadline = time.monotonic() + 60
    while not list(Path().glob("meshmark-ab-*/A/waits")) and time.monotonic() < deadline:
        time.sleep(0.05)
    ended.terminate()
    _, said = ended.communicate(timeout=30)
    assert (ended.returncode, said.strip()) == (130, "meshmark: interrupted")
    trees = subprocess.run(["git", "worktree", "list"], check=True, capture_output=True, text=True).stdout
    assert len(trees.splitlines()) == 1 and not list(Path().glob("meshmark-ab-*"))


def test_the_commands_of_the_page_are_understood() -> None:
    """tests/test_readme.py runs what stands behind their dashes."""
    page = (Path(__file__).parent.parent / "docs" / "compare.md").read_text()
    commands = [shlex.split(code)[1:] for code in re.findall(r"`(meshmark (?:ab|bisect) [^`]*--[^`]*)`", page)]
    assert {words[0] for words in commands} == {"ab", "bisect"}
    for words in commands:
        parsed = command_line().parse_args(words)
        assert parsed.options[0] == "--" and len(parsed.options) > 2


@pytest.mark.parametrize("text", ["mian", "", "v1.2"])
def test_a_mistyped_branch_installs_no_package_of_that_name(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sides, "_installed", lambda *_: pytest.fail("asked pip"))
    assert main(["ab", "--a", text, "--b", text, "--", "-k", "x"]) == 2
    assert f"{text!r} is no folder with bin/python and no commit" in capsys.readouterr().err


FULL = """#!/bin/sh
for last; do :; done
mkdir -p "$last" && cp records.jsonl "$last"
exit 1
"""


def replaying(folder: Path) -> Side:
    """Return a side whose sessions leave the records that are in `folder`."""
    (folder / "python").write_text(FULL)
    (folder / "python").chmod(0o755)
    return Side(name="A", python=str(folder / "python"), folder=folder)


@pytest.mark.parametrize("status", [Status.NO_SPACE, Status.UNFINISHED])
def test_a_session_that_met_a_fault_of_the_machine_is_no_side(status: Status, tmp_path: Path) -> None:
    """`ab` called two of them the same, and `bisect` took one for good and named the wrong commit."""
    stopped = make_good(outcome=Outcome(status=status, message="room for 3 bytes"), verdicts=[])
    with contextlib.closing(RecordFile(tmp_path)) as file:
        file.append(stopped)
    side = replaying(tmp_path)
    with pytest.raises(ResultsError, match=f"was not judged, for a reason outside of it: {status}: room for 3 bytes"):
        sides.run_suites(side, ["-k", "memory"], tmp_path / "results")


def test_a_session_that_stopped_at_its_first_failure_is_no_side(tmp_path: Path) -> None:
    """With -x in the project's addopts both sides stopped at a known failure, and what came after it passed."""
    case = make_good().case.id
    begun = Attempt(test="test_memory.py::test_memory[ddp]", case=case, conforming=False)
    session = Session(schema=SCHEMA, session="one", command="pytest", device="cpu", attempts=[begun])
    with contextlib.closing(RecordFile(tmp_path)) as file:
        file.append(make_good())
        file.append(session)
    side = replaying(tmp_path)
    with pytest.raises(ResultsError, match=r"ended before 1 test, such as test_memory.py::test_memory.ddp., as by -x"):
        sides.run_suites(side, ["-k", "memory"], tmp_path / "results")
    limited = ["--max-time=1h", "-k", "memory"]
    assert [record.case.id for record in sides.run_suites(side, limited, tmp_path / "limited")] == [case]
    with contextlib.closing(RecordFile(tmp_path)) as file:
        ended = [dataclasses.replace(begun, ending=Ending.FAILED)]
        file.append(dataclasses.replace(session, exit_code=1, attempts=ended))
    assert sides.run_suites(side, ["-k", "memory"], tmp_path / "ended")
