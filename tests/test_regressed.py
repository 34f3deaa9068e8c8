"""A regression of each kind, planted into a repository of its own, goes the way of a CI job by the commands that a user
types: `meshmark ab` of two commits, a baseline accepted of the good one, `pytest --baseline` of the bad one, and the
page of what failed. All launches are real, of a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshmark.cli.commands import main

ROOT = Path(__file__).parent.parent
ENGINES = """
import time
import torch
from meshmark.adapters.ddp import DDP, DDPEngine
from meshmark.theory.memory import ExtraMemory

BAD = {bad}

class WrongEngine(DDPEngine):
    def finish_gradients(self):
        super().finish_gradients()
        if BAD:
            for parameter in self.module.parameters():
                parameter.grad.mul_(1.01)

class Wrong(DDP):
    engine = WrongEngine

class BiggerEngine(DDPEngine):
    def finish_gradients(self):
        super().finish_gradients()
        if BAD:
            self.hoard = torch.zeros(100_000)

class Bigger(DDP):
    engine = BiggerEngine

    @classmethod
    def extra_memory(cls, case, rank):
        hoard = ExtraMemory(category="steady", num_bytes=400_000.0, reason="declared, so that no plan minds")
        return super().extra_memory(case, rank) + ((hoard,) if BAD else ())

class SlowerEngine(DDPEngine):
    def step(self, batch):
        time.sleep(0.5 if BAD else 0.0)
        return super().step(batch)

class Slower(DDP):
    engine = SlowerEngine
"""
KINDS = ("wrong", "bigger", "slower")
CHOSEN = [word for kind in KINDS for word in ("--adapter", f"mine.py:{kind.title()}")]
CHOSEN += ["--workload", "gpt-mini", "--steps", "3", "--timing-budget", "0"]
CHOSEN += ["-k", "wrong and equivalence or bigger and memory or slower and throughput"]
"""For each, the suite that must fail."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good commit and a bad one."""
    folder = tmp_path_factory.mktemp("regressed")
    run(folder, "git", "init", "-q")
    for bad in (False, True):
        (folder / "mine.py").write_text(ENGINES.format(bad=bad))
        run(folder, "git", "add", "mine.py")
        run(folder, "git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", f"bad: {bad}")
    return folder


def run(folder: Path, *words: str, code: int = 0) -> str:
    """Return the output of a command, which must end with `code`."""
    outside = ("PYTEST_ADDOPTS", "GITHUB_STEP_SUMMARY")
    environment = {name: value for name, value in os.environ.items() if name not in outside}
    environment |= {"PYTHONPATH": str(ROOT), "GITHUB_ACTIONS": "true"}
    program = [sys.executable, "-m"] if words[0] in ("pytest", "meshmark") else []
    done = subprocess.run([*program, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout[-5000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def ab(repository: Path) -> str:
    words = ["--a", "HEAD~1", "--b", "HEAD", "--pairs", "1", "--results", "ab", "--fail-on", "wrong,bigger:1%"]
    return run(repository, "meshmark", "ab", *words, "--", *CHOSEN, code=1)


@pytest.mark.slow
def test_two_commits_in_alternation_tell_what_became_worse(ab: str) -> None:
    failed = [line for line in ab.splitlines() if line.startswith("FAILED by --fail-on")]
    assert any(
        "wrong: wrong-" in line and "equivalence verdict worse: yes -> no; gradient scaled" in line for line in failed
    ), ab
    assert any("bigger: bigger-" in line and "and with it peak memory +" in line for line in failed), ab
    assert not any("slower-" in line for line in failed) and "1 pair; evidence" in ab
    annotations = [line for line in ab.splitlines() if line.startswith("::error title=gate[")]
    assert len(annotations) == 2 and all("meshmark ab --a 'HEAD~1' --b HEAD" in line for line in annotations)
    assert "inf" not in ab and len(max(set(ab.splitlines()) - set(annotations), key=len)) < 400


@pytest.mark.slow
def test_a_gate_fails_each_kind_with_its_evidence_and_its_page_shows_it(
    repository: Path, ab: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    assert main(["baseline", "accept", "ab/a/000", "--name", "main", "--allow", "noisy"]) == 0
    words = ["--pyargs", "meshmark.suites", *CHOSEN, "--baseline", "main", "--results", "now", "-p", "no:cacheprovider"]
    said = run(repository, "pytest", *words, "--fail-on", "wrong,bigger:1%,slower:50%", code=1)
    wrong, bigger = (failure(said, kind) for kind in KINDS[:2])
    assert "gradient scaled (from step 0 on" in wrong[0] and "1.01" in wrong[0]
    assert "worse than baseline" in bigger[0] and "memory" in bigger[0] and "400,000" in "".join(bigger)
    assert "2 failed, 1 passed" in said, "one launch of the baseline shows nothing of how launches scatter here"
    for kind, lines in zip(KINDS[:2], (wrong, bigger), strict=True):
        assert len(lines) <= 10 and f"[{kind}" in lines[-2]
        assert lines[-2].startswith("  again      pytest 'meshmark.suites.test_"), "a path would be this machine's"
        assert lines[-1].startswith(f"  all of it  meshmark show {kind}")
    assert len([line for line in said.splitlines() if line.startswith("::error title=")]) == 2
    for page in ("report.html", "report.md"):
        assert main(["report", "now", "-o", page]) == 0
        told = (repository / page).read_text()
        assert all(words in told for words in ("gradient scaled", "worse than baseline"))


def failure(said: str, kind: str) -> list[str]:
    """The lines of the one test of `kind` that failed."""
    lines = said.partition("= FAILURES =")[2].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"{kind}-dp2"))
    end = next(i for i, line in enumerate(lines) if i > first and not line.startswith("  "))
    return lines[first:end]
