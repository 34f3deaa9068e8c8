"""Suite files: what they hand to pytest, and what they refuse. And `plan --run`, which hands on a choice."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import pytest

from meshmark import plan_run, suite_file
from meshmark.cli import main
from meshmark.plan.rates import rates
from meshmark.plan.search import Search, search
from meshmark.selection import add_options
from meshmark.spec.hardware import gpu
from meshmark.spec.model_spec import MODELS
from meshmark.spec.model_text import describe, described_model
from meshmark.suite_file import CASES, OPTIONS, read_suite
from meshmark.theory.grid import SearchSpace
from meshmark.theory.recipe import recipe

ROOT = Path(__file__).parent.parent


def test_a_suite_file_is_a_run_of_pytest_for_each_of_its_cases() -> None:
    first, second = read_suite(ROOT / "examples" / "suite.toml").runs
    assert first[:4] == (
        "--pyargs",
        "meshmark.suites.test_equivalence",
        "meshmark.suites.test_memory",
        "meshmark.suites.test_communication",
    )
    assert set(first[4:]) == {"--device=cpu", "--results=results/ci", "--adapters=ddp,fsdp2", "--world=2"}
    assert {"--layouts=dp2.zero3.mb2", "--timing-budget=5"} <= set(second)


def test_every_key_is_an_option_of_the_suites() -> None:
    parser = pytest.Parser(_ispytest=True)
    add_options(parser)
    options = {name for group in parser._groups for option in group.options for name in option.names()}
    assert {f"--{key}" for key in (*CASES, *OPTIONS)} <= options


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a table [[cases]]"),
        ("[cases]\nworld = 2", "expected a table [[cases]]"),
        ("[[cases]]\nwrold = [2]", "unknown key in {path}: [[cases]] number 1 'wrold': did you mean 'world'"),
        ("[[cases]]\n[options]\nworld = 2", "unknown key in {path}: [options] 'world'"),
        ("[[cases]]\n[gate]\nbaseline = 'x'", "unknown key in {path} 'gate': did you mean 'gates'?"),
        (
            "[[cases]]\nsuites = ['memroy']",
            "unknown suite in {path}: [[cases]] number 1 'memroy': did you mean 'memory'",
        ),
        ("[[cases]]\nworld = {a = 1}", "world is \"{{'a': 1}}\", expected a text, a number or a list of them"),
        ("[[cases]]\nworld = [", "cannot read {path}"),
        ("options = 1\n[[cases]]", "options is '1', expected a table [options]"),
    ],
)
def test_what_a_suite_file_may_not_say(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "suite.toml"
    path.write_text(text)
    assert main(["run", str(path)]) == 2
    assert message.format(path=path) in capsys.readouterr().err
    assert main(["run", str(tmp_path / "none.toml")]) == 2


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((0, 1), 1), ((1, 4), 4), ((5, 0), 5), ((-9, 1), -9)])
def test_the_worst_run_decides(
    codes: tuple[int, ...], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "suite.toml").write_text("[[cases]]\n" * len(codes) + "conformance = true\nselect = ['a', 'b']\n")
    ended, typed = iter(codes), list[list[str]]()

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        typed.append(command)
        return subprocess.CompletedProcess(command, next(ended))

    monkeypatch.setattr(subprocess, "run", run)
    assert suite_file.run_suite(argparse.Namespace(suite=tmp_path / "suite.toml", pytest=["-x"])) == expected
    assert [words[-1] for words in typed] == ["-x"] * len(codes)
    assert typed[-1][-4:] == ["meshmark.suites", "--conformance", "-k=a or b", "-x"]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_model_s_description_is_read_back(name: str) -> None:
    read = described_model(describe(MODELS[name]))
    assert {**vars(read), "name": ""} == {**vars(MODELS[name]), "name": ""}


def planned(num_gpus: int, stages: tuple[int, ...]) -> Search:
    space = SearchSpace(num_gpus=num_gpus, global_batch=8, axes=("dp",), zero_stages=stages)
    return search(MODELS["gpt-mini"], space, gpu("cpu"), recipe("fsdp2"), rates("cpu"))


def test_a_plan_hands_the_first_layout_that_its_adapter_takes_to_pytest(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(2, (0,))
    assert found.prediction.grid.recompute[found.ranked].any()
    words = plan_run.suite_arguments(found, "ddp")
    best = found.prediction.grid.layout(int(found.ranked[0]))
    assert {f"--layouts={best.id}", "--adapters=ddp", "--global-batch=8", "--precision=bf16"} <= set(words)
    model = next(word for word in words if word.startswith("--model=")).removeprefix("--model=")
    assert described_model(model).num_parameters == MODELS["gpt-mini"].num_parameters
    assert main(["plan", "--gpus", "2", "--run"]) == 2
    assert "--run needs a --framework that has an adapter: " in capsys.readouterr().err


def test_a_plan_that_cannot_be_run_here_says_what_to_type_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_run, "_RANKS_A_CORE", 0)
    with pytest.raises(ValueError, match=r"8 ranks are more than .* pytest --pyargs meshmark.suites --adapters=fsdp2"):
        plan_run.suite_arguments(planned(8, (3,)), "fsdp2")
    with pytest.raises(ValueError, match="--run: gpipe trains none of the plan's layouts: gpipe does not support"):
        plan_run.suite_arguments(planned(8, (3,)), "gpipe")
