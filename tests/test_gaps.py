"""Each reproducer still shows its framework's defect, and each known gap of an adapter names a reproducer."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gap_versions
from benchmarks.gap_versions import read_outcome
from meshmark.adapter.registry import inference_adapters, known_adapters, load_adapter
from meshmark.adapters.deepspeed.operators import missing
from meshmark.cli.commands import main
from meshmark.conformance.reproducers import (
    Outcome,
    Reproducer,
    Trial,
    keep_trials,
    read_reproducer,
    read_reproducers,
    read_trials,
    versions_that_show,
)
from meshmark.environment import interpreter_of
from meshmark.errors import InputError, UnknownNameError
from meshmark.inference.process import load_engine
from studies import docs_site, pages
from tests.ranks import run_reproducer

REPRODUCERS = read_reproducers()


def _is_slow(reproducer: Reproducer) -> bool:
    """Return whether its framework takes long to be imported, or to be compiled.

    `deepspeed.init_distributed` compiles an operator on a CPU, for a minute, unless a script has emptied its table.
    """
    slow_imports = {"accelerate", "lightning-fabric", "transformers"}
    slow_imports |= {"deepspeed"} if "deepspeed.moe" in reproducer.source else set()
    compiles = "deepspeed.init_distributed" in reproducer.source and "__compatible_ops__" not in reproducer.source
    return bool(reproducer.framework in slow_imports or reproducer.operators or reproducer.environment or compiles)


@pytest.mark.parametrize(
    "reproducer",
    [pytest.param(each, id=each.name, marks=[pytest.mark.slow] * _is_slow(each)) for each in REPRODUCERS],
)
def test_a_reproducer_shows_its_defect(reproducer: Reproducer) -> None:
    """One that no longer does has found a version where it is mended: the adapter may do without its way around it."""
    if reproducer.environment:
        _shows_in_its_environment(reproducer)
        return
    for name in reproducer.versions:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed")
    if reproducer.gpu and not torch.cuda.is_available():
        pytest.skip("this machine has no GPU")
    if reproducer.processor and reproducer.processor not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"this CPU has no {reproducer.processor}")
    if reproducer.operators and (reason := missing(*reproducer.operators)):
        pytest.skip(reason)
    ends = run_reproducer(reproducer.path, reproducer.num_processes, reproducer.operators)
    assert any(end.startswith("expected: ") and "; got: " in end for end in ends), f"it shows nothing: {ends}"


def _shows_in_its_environment(reproducer: Reproducer) -> None:
    python = interpreter_of(reproducer.environment)
    if not python.exists():
        pytest.skip(f"make env NAME={reproducer.environment}")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(reproducer.num_processes)]
    command = [python, *(launcher if reproducer.launcher != "python" else []), reproducer.path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    outcome, said = gap_versions.read_outcome(done.returncode, done.stdout + done.stderr)
    assert outcome is Outcome.SHOWS, f"it shows nothing: {said}"


def test_no_reproducer_is_long() -> None:
    """A maintainer reads it at a glance: fewer than 40 lines with code."""
    lengths = {each.name: sum(bool(line.strip()) for line in each.source.splitlines()) for each in REPRODUCERS}
    assert {name: length for name, length in lengths.items() if length >= 40} == {}


def test_a_known_gap_of_an_engine_names_a_reproducer() -> None:
    names = {each.name for each in REPRODUCERS}
    gaps = [gap for target in inference_adapters().values() for gap in load_engine(target).known_gaps]
    assert gaps and [gap.reason for gap in gaps if gap.reproducer not in names] == []


@pytest.mark.parametrize("name, target", known_adapters().items())
def test_a_known_gap_names_a_reproducer_of_an_installed_distribution(name: str, target: str) -> None:
    names = {each.name for each in REPRODUCERS}
    assert [gap.reason for gap in load_adapter(target).known_gaps if gap.reproducer not in names] == []


def test_a_page_of_its_own_has_the_scripts(tmp_path: Path) -> None:
    assert main(["gaps", "--framework", "transformers", "-o", str(tmp_path / "gaps.md")]) == 0
    page = (tmp_path / "gaps.md").read_text()
    (only,) = (each for each in REPRODUCERS if each.framework == "transformers")
    assert only.source in page


def test_the_page_replaces_no_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records, link = tmp_path / "records.jsonl", tmp_path / "gaps.md"
    records.write_text("{}\n")
    link.symlink_to(records)
    for output in (records, link):
        assert main(["gaps", "--framework", "transformers", "-o", str(output)]) == 2
        assert "it holds records" in capsys.readouterr().err
    assert records.read_text() == "{}\n"


def trial(framework: str, outcome: Outcome, torch: str = "2.13.0") -> Trial:
    versions = {"deepspeed": framework, "torch": torch}
    return Trial(reproducer=ONE.name, digest=ONE.digest, versions=versions, outcome=outcome, last_line="")


ONE = next(each for each in REPRODUCERS if each.name == "deepspeed_one_cycle_betas")
PINNED = ONE.versions["deepspeed"]


@pytest.mark.parametrize(
    "trials, said",
    [
        ([], f"shows in {PINNED}"),
        ([("0.9.0", Outcome.SHOWS)], f"shows in 0.9.0 to {PINNED}"),
        ([("0.9.0", Outcome.SHOWS), ("0.10.0", Outcome.SHOWS)], f"shows in 0.9.0 to {PINNED} (3 versions tried)"),
        ([("0.9.0", Outcome.GONE), ("0.8.0", Outcome.SHOWS)], f"shows in 0.8.0, {PINNED}; not in 0.9.0"),
        ([("0.9.0", Outcome.CANNOT_RUN)], f"shows in {PINNED}; could not be run in 0.9.0"),
        ([(PINNED, Outcome.GONE, "9.0")], f"shows in {PINNED}; not in {PINNED} with torch 9.0"),
    ],
)
def test_only_versions_that_were_run_are_reported(trials: list[tuple[str, Outcome]], said: str) -> None:
    assert versions_that_show(ONE, [trial(*each) for each in trials]) == said


def test_a_trial_of_another_script_says_nothing(tmp_path: Path) -> None:
    kept = [trial("0.9.0", Outcome.SHOWS), trial("0.8.0", Outcome.GONE)]
    keep_trials([kept[0], dataclasses.replace(kept[1], digest="0")], tmp_path / "tried")
    assert read_trials([ONE], tmp_path / "tried") == {ONE.name: kept[:1]}
    keep_trials([trial("0.9.0", Outcome.GONE)], tmp_path / "tried")
    assert [each.outcome for each in read_trials([ONE], tmp_path / "tried")[ONE.name]] == [Outcome.GONE]


@pytest.mark.parametrize(
    "code, printed, outcome",
    [
        (1, "W1 x\nexpected: 1; got: 2\ntorch ChildFailedError: x", Outcome.SHOWS),
        (0, "done", Outcome.GONE),
        (1, "  File x\nImportError: no such name\n", Outcome.CANNOT_RUN),
        (124, "", Outcome.CANNOT_RUN),
    ],
)
def test_an_error_is_not_taken_for_the_defect(code: int, printed: str, outcome: Outcome) -> None:
    assert read_outcome(code, printed)[0] is outcome


def test_a_script_that_cannot_run_is_kept_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command really runs a script, whose package is there but lacks what it imports."""
    (tmp_path / "broken.py").write_text("from torch import no_such_name\n")
    broken = dataclasses.replace(ONE, name="broken")
    monkeypatch.setattr(Reproducer, "path", property(lambda each: tmp_path / "broken.py"))
    monkeypatch.setattr(gap_versions, "keep_trials", lambda trials: None)
    done = gap_versions.try_one(broken, sys.executable, None)
    assert done and done.outcome is Outcome.CANNOT_RUN and "no_such_name" in done.last_line


def test_the_command_prints_what_an_adapter_fails_by(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gaps", "--adapter", "deepspeed"]) == 0
    printed = capsys.readouterr().out
    assert "ZeRO-3 updates an unused parameter" in printed and "clauses that fail by it: unused (deepspeed" in printed
    assert "horovod" not in printed.replace("horovod)", "")


@pytest.mark.parametrize("option, value", [("--adapter", "deepsped"), ("--framework", "megatron")])
def test_an_unknown_name_is_an_error(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gaps", option, value]) == 2
    assert value in capsys.readouterr().err


BLOCK = '# /// script\n# dependencies = ["torch==2.13.0"]\n# [tool.meshmark]\n{fields}# ///\n'


@pytest.mark.parametrize(
    "text, error",
    [
        ("import torch\n", "expected a block"),
        (BLOCK.format(fields='# title = "a"\n'), "lacks framework, symptom, cause, processes"),
        (BLOCK.format(fields='# titel = "a"\n'), "titel"),
    ],
)
def test_a_script_without_its_metadata_is_an_error(tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "script.py").write_text(text)
    with pytest.raises((InputError, UnknownNameError), match=error):
        read_reproducer(tmp_path / "script.py")


def test_the_site_folds_every_script_of_the_page() -> None:
    """One script a fold: a pattern that takes several at once would leave all of them open."""
    text = docs_site._SCRIPT.sub(docs_site._folded, pages.gaps())
    folds = re.findall(r'^\?\?\? example "Script\. Run it with: (.*)"$', text, re.MULTILINE)
    assert len(folds) == len(read_reproducers()) and "\n```python" not in text
