"""Suite files: what they hand to pytest, and what they refuse. And `plan --run`, which hands on a choice."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshmark.cli import plan_run, suite_file
from meshmark.cli.commands import main
from meshmark.cli.suite_file import CASES, OPTIONS, hold, read_suite, run_file
from meshmark.errors import InputError, ResultsError
from meshmark.models.model_text import describe, described_model
from meshmark.models.transformer import MODELS
from meshmark.plan.rates import rates
from meshmark.plan.search import Search, search
from meshmark.pytest_plugin.selection import add_options
from meshmark.records.record import SCHEMA, Outcome, Record, Status
from meshmark.records.record_file import Attempt, Ending, RecordFile, Session, read_records
from meshmark.regression import releases, side
from meshmark.spec.hardware import gpu
from meshmark.theory.grid import SearchSpace
from meshmark.theory.recipe import recipe
from tests.factories import make_case, make_good, make_memory, make_memory_evidence, make_verdict
from tests.test_orphans import heed_signals, processes_of, wait_until

ROOT = Path(__file__).parent.parent


def test_a_suite_file_is_a_run_of_pytest_for_each_of_its_cases() -> None:
    suite = read_suite(ROOT / "examples" / "suite.toml")
    first, second = suite.runs
    assert first[:4] == (
        "--pyargs",
        "meshmark.suites.test_equivalence",
        "meshmark.suites.test_memory",
        "meshmark.suites.test_communication",
    )
    assert set(first[4:]) == {"--device=cpu", "--results=results/ci", "--adapters=ddp,fsdp2", "--world=2"}
    assert {"--layouts=dp2.zero3.mb3", "--timing-budget=5"} <= set(second)
    compared = ("compare", "baselines/main", "results/ci")
    assert suite.gate == (*compared, "--fail-on", "wrong,bigger:1%,slower:3%")


def test_every_key_is_an_option_of_the_suites() -> None:
    parser = pytest.Parser(_ispytest=True)
    add_options(parser)
    options = {name for group in parser._groups for option in group.options for name in option.names()}
    assert {f"--{key}" for key in (*CASES, *OPTIONS)} <= options


def test_a_check_of_a_script_is_a_command(tmp_path: Path) -> None:
    path = tmp_path / "suite.toml"
    path.write_text(
        '[[checks]]\nscript = "train.py"\nnproc = 2\nobjective = "tokens"\narguments = ["--lr", 0.1]\n'
        '[options]\nresults = "results/ci"\n'
    )
    suite = read_suite(path)
    assert suite.runs == () and suite.gate == ()
    page = "--output=results/ci/check-1-train.md"
    assert suite.checks == (("check", "--nproc=2", "--objective=tokens", page, "train.py", "--lr", "0.1"),)


def test_options_behind_the_file_hold_for_the_gate_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate compared the file's folder, with what an earlier run had left there, and passed."""
    path = tmp_path / "suite.toml"
    path.write_text(
        '[[cases]]\nadapters = "ddp"\nselect = "memory or traffic"\n'
        f'[options]\nresults = "first"\n[gates]\nbaseline = "{tmp_path}"\n'
    )
    runs, gates = list[list[str]](), list[tuple[str, ...]]()
    monkeypatch.setattr(suite_file, "run_pytest", lambda words: runs.append([*words]) or 0)
    monkeypatch.setattr(suite_file, "hold", lambda gate: gates.append(tuple(gate)) or 0)
    assert run_file(path, ["--results", "today", "-k", "not dp4", "-x"]) == 0
    assert gates.pop()[1:3] == (str(tmp_path), "today")
    assert runs.pop()[-3:] == ["-k=(memory or traffic) and (not dp4)", "-x", "--results=today"]
    assert run_file(path) == 0
    assert gates.pop()[1:3] == (str(tmp_path), "first") and "-k=memory or traffic" in runs.pop()
    assert run_file(path, ["--co"]) == 0
    assert runs.pop()[-1] == "--collect-only" and not gates, "what has run earlier is not today's"


def test_a_process_that_a_checked_script_leaves_holds_no_run_up(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Such as a server: it held the pipe open that the verdict was read from."""
    leaves = 'import subprocess, sys\nsubprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])\n'
    (tmp_path / "leaves.py").write_text(f"{leaves}raise SystemExit('no')\n")
    path = tmp_path / "suite.toml"
    path.write_text(f'[[checks]]\nscript = "{tmp_path}/leaves.py"\n[options]\nresults = "{tmp_path}/results"\n')
    started = time.monotonic()
    assert run_file(path) == 1
    assert time.monotonic() - started < 300, "it waited for the process"
    assert "ended 1 process of the script" in capfd.readouterr().err


@pytest.mark.slow
def test_a_script_that_trains_wrong_fails_the_run_and_github_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    path, right = tmp_path / "suite.toml", ROOT / "tests" / "scripts" / "single_process.py"
    options = f'[options]\nresults = "{tmp_path / "results"}"\n'
    path.write_text(f'[[checks]]\nscript = "{right}"\n{options}')
    assert run_file(path) == 0
    uneven = ROOT / "examples" / "scripts" / "uneven.py"
    wrong = f'[[checks]]\nscript = "{uneven}"\nnproc = 2\nobjective = "tokens"\n'
    path.write_text(f'[[checks]]\nscript = "{right}"\n{wrong}{options}')
    assert run_file(path) == 1
    out = capfd.readouterr().out
    assert out.count("RIGHT: single_process.py") == 2 and "WRONG: uneven.py" in out
    assert "::error title=check[2-uneven]::WRONG: uneven.py" in out
    assert "check[2-uneven]" in (tmp_path / "summary").read_text()
    pages = [page.name for page in sorted((tmp_path / "results").iterdir())]
    assert pages == ["check-1-single_process.md", "check-2-uneven.md"]
    path.write_text(f'[[checks]]\nscript = "{tmp_path / "absent.py"}"\n{options}')
    assert run_file(path) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a table [[cases]]"),
        ("checks = 1", "checks is '1', expected a table [[checks]]"),
        ("[[checks]]\nnproc = 2", "[[checks]] number 1: script is missing"),
        ("[[checks]]\nscript = 'a.py'\nworld = 2", "unknown key in {path}: [[checks]] number 1 'world'"),
        ("[[checks]]\nscript = 'a.py'\n[gates]\nbaseline = 'x'", "[gates] compares the results of [[cases]]"),
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
        ("[[cases]]\n[gates]\nfail-on = 'wrong'", "[gates]: baseline is missing"),
        ("[[cases]]\n[gates]\nbaseline = 'x'\nfail-on = 'slow:3%'", "--fail-on 'slow:3%', at 'slow:3%'"),
        ("options = 1\n[[cases]]", "options is '1', expected a table [options]"),
        ('[[cases]]\ncorpus = "a\\u0000b"', "[[cases]] number 1: corpus is 'a\\x00b', expected no NUL in it"),
        ('[[cases]]\nselect = ["ok", "\\u0000"]', "[[cases]] number 1: select is '\\x00', expected no NUL"),
        ('[[cases]]\n[gates]\nbaseline = "\\u0000"', "[gates]: baseline is '\\x00', expected no NUL"),
        ("[[cases]]\n[gates]\nbaseline = ['a', 'b']", "[gates]: baseline is \"['a', 'b']\", expected one text"),
        ("[[cases]]\n[gates]\nbaseline = []", "[gates]: baseline is '[]', expected one text"),
        ("[[cases]]\n[options]\nresults = ''", "[options]: results is '', expected one text"),
        ("[[cases]]\nworld = true", "[[cases]] number 1: world is 'True', expected a text, a number or a list"),
        ("[[cases]]\nconformance = 3", "[[cases]] number 1: conformance is '3', expected true or false"),
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


def test_a_selection_of_all_runs_and_one_s_own_must_both_match(tmp_path: Path) -> None:
    path = tmp_path / "suite.toml"
    path.write_text("[options]\nselect = 'not tp4'\nresume = true\n[[cases]]\n[[cases]]\nselect = ['a', 'b']\n")
    first, second = read_suite(path).runs
    assert first[-2:] == ("--resume", "-k=not tp4")
    assert second[-1] == "-k=(not tp4) and (a or b)"


def test_a_tuning_of_a_list_is_an_option_each(tmp_path: Path) -> None:
    path = tmp_path / "suite.toml"
    path.write_text("[[cases]]\ntuning = ['none', 'compile,fused']\n")
    assert read_suite(path).runs[0][-2:] == ("--tuning=none", "--tuning=compile,fused")


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((0, 1), 1), ((1, 4), 4), ((5, 0), 5), ((-9, 1), -9)])
def test_the_worst_run_decides(
    codes: tuple[int, ...], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "suite.toml").write_text("[[cases]]\n" * len(codes) + "conformance = true\nselect = ['a', 'b']\n")
    ended, typed = iter(codes), list[list[str]]()

    def run(command: list[str]) -> tuple[int, str]:
        typed.append(command)
        return next(ended), ""

    monkeypatch.setattr(suite_file, "_run_process", run)
    assert suite_file.run_suite(argparse.Namespace(suite=tmp_path / "suite.toml", pytest=["-x"])) == expected
    assert [words[-1] for words in typed] == ["-x"] * len(codes)
    assert typed[-1][-4:] == ["meshmark.suites", "--conformance", "-k=a or b", "-x"]


def test_nothing_of_the_working_directory_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a stranger's: his pytest.py ran as whoever called `meshmark run` there, and nothing else did."""
    (tmp_path / "meshmark").mkdir()
    for name in ("pytest.py", "pip.py", "torch.py", "meshmark/__init__.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert suite_file.run_pytest(["--version"]) == 0
    assert suite_file.run_check(["check", "--output=page.md", "no-such-script.py"]) == 2
    with pytest.raises(InputError, match="pip cannot install"):
        side._installed("./no/such/package", tmp_path / "target")
    with pytest.raises(InputError, match="cannot be listed"):
        releases._versions("no-such-package-of-nobody", early=False)
    with pytest.raises(ResultsError, match="ended with 0 and no record"):
        side.run_suites(side.Side(name="a", folder=tmp_path), ["--version"], tmp_path / "results")
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


RUNS = {
    "run": "from meshmark.cli import suite_file; suite_file.run_pytest(['-q', 'suites'])",
    "ab": "from pathlib import Path; from meshmark.regression.side import Side, run_suites; "
    "run_suites(Side(name='a', folder=Path.cwd()), ['suites'], Path('results'))",
}


@pytest.mark.parametrize("command", RUNS)
def test_a_command_that_is_killed_takes_its_run_along(command: str, tmp_path: Path) -> None:
    """SIGKILL of `meshmark ab` left its pytest session running."""
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--results')\n"
    )
    (tmp_path / "suites" / "test_waits.py").write_text(
        "import pathlib, time\n\ndef test_waits():\n    pathlib.Path('waits').touch()\n    time.sleep(120)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MESHMARK_TEST": str(tmp_path)}
    quiet = subprocess.DEVNULL
    code = [sys.executable, "-c", RUNS[command]]
    running = subprocess.Popen(code, cwd=tmp_path, env=environment, stdout=quiet, stderr=quiet)
    try:
        wait_until((tmp_path / "waits").exists, seconds=60)
        running.kill()
        running.wait(timeout=60)
        wait_until(lambda: not processes_of(str(tmp_path)), seconds=10)
    finally:
        for process in processes_of(str(tmp_path)):
            process.kill()


def test_what_ends_the_command_ends_its_run_in_good_order(tmp_path: Path) -> None:
    """SIGTERM left pytest running, with the results folder in use; Ctrl-C killed it before it said how it ended."""
    (tmp_path / "test_waits.py").write_text(
        "import pathlib, time\n\n"
        "def test_waits():\n"
        "    try:\n        pathlib.Path('waits').touch()\n        time.sleep(120)\n"
        "    finally:\n        time.sleep(1)\n        pathlib.Path('cleaned').touch()\n"
    )
    (tmp_path / "conftest.py").write_text(
        "import pytest\nfrom meshmark.errors import signals_end_like_ctrl_c\n\n"
        "@pytest.fixture(autouse=True)\n"
        "def heeding():\n    with signals_end_like_ctrl_c():\n        yield\n"
    )
    code = "from meshmark.cli import suite_file; suite_file.run_pytest(['-q', 'test_waits.py'])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MESHMARK_TEST": str(tmp_path)}
    running = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=heed_signals,
    )
    try:
        wait_until((tmp_path / "waits").exists, seconds=60)
        running.send_signal(signal.SIGTERM)
        running.wait(timeout=60)
        assert (tmp_path / "cleaned").exists() and not processes_of(str(tmp_path))
    finally:
        for process in processes_of(str(tmp_path)):
            process.kill()


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


def test_a_plan_s_layout_trains_a_workload_of_the_user_s_own() -> None:
    """Its model and its batches are its own, and so no option asks for others."""
    file = Path(__file__).parent.parent / "examples" / "workloads" / "two_towers.py"
    own = plan_run._user_workload(["--workload", f"{file}:TwoTowers", "-k", "equivalence"])
    assert own and own.id.startswith("twotowers.") and plan_run._user_workload(["--steps", "3"]) is None
    words = plan_run.suite_arguments(planned(2, (3,)), "fsdp2", own)
    assert not any(word.startswith(("--model", "--global-batch")) for word in words)
    assert any(word.startswith("--layouts=dp2.zero3") for word in words)
    with pytest.raises(ValueError, match="--run: --workload names 2 workloads"):
        plan_run._user_workload([f"--workload={file}:TwoTowers,gpt-tiny"])


def test_a_plan_that_cannot_be_run_here_says_what_to_type_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_run, "_RANKS_A_CORE", 0)
    with pytest.raises(ValueError, match=r"8 ranks are more than .* pytest --pyargs meshmark.suites --adapters=fsdp2"):
        plan_run.suite_arguments(planned(8, (3,)), "fsdp2")
    with pytest.raises(ValueError, match="--run: gpipe trains none of the plan's layouts: gpipe does not support"):
        plan_run.suite_arguments(planned(8, (3,)), "gpipe")


def test_a_gate_compares_what_the_runs_left_and_fails_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runs are not done: their records are there already, those of the second folder with a wrong one."""
    monkeypatch.chdir(tmp_path)
    leave(tmp_path / "baselines" / "good", make_good())
    leave(tmp_path / "now", make_good())
    leave(tmp_path / "bad", make_good(verdicts=[make_verdict(passed=False)]))
    monkeypatch.setattr(suite_file, "run_pytest", lambda words: 0)
    text = "[[cases]]\n[options]\nresults = 'now'\n[gates]\nbaseline = 'good'\nfail-on = ['wrong', 'bigger:1%']\n"
    for results, code in (("now", 0), ("bad", 1)):
        Path("suite.toml").write_text(text.replace("now", results))
        assert main(["run", "suite.toml"]) == code
        said = capsys.readouterr().out
        assert f"meshmark compare baselines/good {results} --fail-on wrong,bigger:1%" in said
        assert ("FAILED by --fail-on wrong" in said) is (code == 1)


def test_pages_and_github_show_what_the_gate_found_until_it_finds_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No test of the suites fails by it: only the baseline knows that a correct run holds more than it did."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    monkeypatch.setattr(suite_file, "run_pytest", lambda words: 0)
    good, larger = (
        make_good(memory=make_memory_evidence(readings=[make_memory(activations=size)])) for size in (1000, 9000)
    )
    gone = make_good(case=make_case("fsdp2"))
    lost = Outcome(status=Status.SKIPPED, message="fsdp2 is not installed")
    skipped = make_good(case=gone.case, outcome=lost, verdicts=[])
    leave(tmp_path / "baselines" / "good", good, gone)
    leave(tmp_path / "now", gone, larger, skipped)
    Path("suite.toml").write_text(
        "[[cases]]\n[options]\nresults = 'now'\n[gates]\nbaseline = 'good'\nfail-on = 'bigger:1%,missing'\n"
    )
    assert main(["run", "suite.toml"]) == 1
    told = [f"gate[{good.case.id}]", "worse than baseline baselines/good: peak memory worse", "fsdp2 is not installed"]
    said = capsys.readouterr().out
    assert len([line for line in said.splitlines() if line.startswith("::error title=gate[")]) == 2
    assert main(["compare", "baselines/good", "now", "--fail-on", "bigger:1%"]) == 1
    assert "::error title=gate[" in capsys.readouterr().out
    for page in ("page.md", "page.html"):
        assert main(["report", "now", "-o", page]) == 0
        assert not [words for words in told if words not in Path(page).read_text()]
    assert not [words for words in told if words not in Path("summary.md").read_text()]
    leave(tmp_path / "now", good, gone)
    assert main(["run", "suite.toml"]) == 0
    assert main(["report", "now", "-o", "page.md"]) == 0 and "gate[" not in Path("page.md").read_text()


def test_a_gate_does_not_repeat_a_test_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    wrong = make_good(verdicts=[make_verdict(passed=False), make_verdict("memory"), make_verdict("communication")])
    failed = Attempt(test="t", case=wrong.case.id, conforming=False, ending=Ending.FAILED, message="by 2", command="x")
    leave(tmp_path / "baselines" / "good", make_good())
    leave(tmp_path / "now", wrong, Session(schema=SCHEMA, session="1", command="x", device="cpu", attempts=[failed]))
    compared = ("compare", "baselines/good", "now", "--fail-on", "wrong")
    assert [hold(compared), hold(compared)] == [1, 1]
    assert "FAILED by --fail-on wrong" in capsys.readouterr().out
    found = read_records(tmp_path / "now", latest=True).sessions
    assert [(a.test, str(a.ending)) for each in found for a in each.attempts] == [("t", "failed")]
    assert not Path("summary.md").exists(), "the gate has not passed, and what failed is told"


def test_a_gate_adds_no_annotation_to_that_of_the_test_of_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory that misses its plan has grown beyond the baseline too; what was sent has not. Pages tell both."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    good, larger = (
        make_good(memory=make_memory_evidence(readings=[make_memory(activations=size)])) for size in (1000, 9000)
    )
    leave(tmp_path / "baselines" / "good", good)
    for suite, told in (("memory", 0), ("communication", 1)):
        test = f"suites/test_{suite}.py::test_{suite}[x]"
        failed = Attempt(test=test, case=good.case.id, conforming=False, ending=Ending.FAILED, message="x")
        leave(
            tmp_path / suite, larger, Session(schema=SCHEMA, session="1", command="x", device="cpu", attempts=[failed])
        )
        assert hold(("compare", "baselines/good", suite, "--fail-on", "bigger:1%")) == 1
        assert capsys.readouterr().out.count("::error title=gate[") == told
        assert "peak memory worse" in Path("summary.md").read_text()
        assert main(["report", suite, "-o", "page.md"]) == 0 and "peak memory worse" in Path("page.md").read_text()


def leave(folder: Path, *lines: Record | Session) -> None:
    """In a folder's records."""
    with contextlib.closing(RecordFile(folder)) as file:
        for line in lines:
            file.append(line)
