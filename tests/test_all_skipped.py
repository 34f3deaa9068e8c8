"""A run in which every case was skipped fails and says why; one case that was run is enough. Nothing is launched: the
inner runs have cases of their own, and tests that end as they are told."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parent.parent
PLAIN = ("--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider")
CONFTEST = """
from meshmark.spec.case import Case, InvalidLayout
from meshmark.spec.layout import Layout
from meshmark.spec.workload import workload

pytest_plugins = ["meshmark.pytest_plugin.plugin"]

def pytest_meshmark_cases(config, selection):
    tiny = workload("gpt-tiny")
    misfit = InvalidLayout(adapter="fsdp2", workload=tiny, layout=Layout(dp=3), reason="8 is not divisible by 3")
    return [Case(adapter="ddp", workload=tiny, layout=Layout(dp=2)), misfit]
"""
WAYS = """
import pytest

def test_way(case):
    if {way!r} == "skipped":
        pytest.skip("it is not installed: pip install it")
    if {way!r} == "known gap":
        pytest.xfail("as its adapter says")
"""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No options from outside. The inner pytest forgets what it imports, and PyTorch must not be imported twice."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    for file in sorted((ROOT / "adapters").glob("*.py")):
        importlib.import_module(f"adapters.{file.stem}".removesuffix(".__init__"))


def run(pytester: pytest.Pytester, way: str, *options: str) -> pytest.RunResult:
    pytester.makeconftest(CONFTEST)
    file = pytester.makepyfile(WAYS.format(way=way))
    return pytester.runpytest_inprocess(*PLAIN, "--results", "results", *options, str(file))


def test_it_fails_and_says_why_of_each_adapter_and_what_to_do(pytester: pytest.Pytester) -> None:
    result = run(pytester, "skipped")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*every case was skipped*", "ddp, 1 test: it is not installed: pip install it"])
    result.stdout.fnmatch_lines(["fsdp2, 1 test: 8 is not divisible by 3", "*meshmark doctor*--allow-skipped*"])
    assert '"exit_code":1' in (pytester.path / "results" / "records.jsonl").read_text().replace(" ", "")


@pytest.mark.parametrize("way", ["passed", "known gap"])
def test_one_case_that_was_run_is_enough(pytester: pytest.Pytester, way: str) -> None:
    """Nothing is changed of a run that is skipped in part."""
    result = run(pytester, way)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.no_fnmatch_line("*every case was skipped*")


def test_an_empty_part_is_a_mistake_and_runs_nothing(pytester: pytest.Pytester) -> None:
    result = run(pytester, "passed", "--shard", "")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--shard '': expected a whole number*"])


@pytest.mark.parametrize("options", [("--allow-skipped",), ("--shard", "2/2")], ids=["allowed", "part"])
def test_it_passes_where_that_is_allowed_or_only_a_part_is_run(
    pytester: pytest.Pytester, options: tuple[str, ...]
) -> None:
    """The reasons stand there all the same."""
    result = run(pytester, "skipped", *options)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["*every case was skipped*"])
    result.stdout.no_fnmatch_line("*--allow-skipped*")
