"""Meshmark as it is installed: the wheel and the sdist are built, the wheel goes into a new virtual environment (whose
other packages are this one's, so that nothing is downloaded), and what users do is done there, outside any checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.records.record import Record
from meshmark.records.record_file import read_records
from tests.test_architecture import tracked_files

ROOT = Path(__file__).parent.parent
FIRST = ROOT / "examples" / "first.py"
SUITES = ("-k", "not throughput and not conformance")
CONFTEST = """
import pytest

def pytest_addoption(parser):
    parser.addoption("--theirs", default="as ever")

@pytest.fixture
def runner():
    return "their runner"

@pytest.fixture
def observed(runner):
    return "what they observe"
"""
PYTEST_INI = """
[pytest]
addopts = --import-mode=importlib --strict-markers
testpaths = checks
python_files = check_*.py
python_functions = check_*
filterwarnings = error
"""
CHECK = """
import sys

def check_theirs(runner, observed, pytestconfig):
    assert (runner, observed, pytestconfig.getoption("--theirs")) == ("their runner", "what they observe", "as ever")
    assert pytestconfig.pluginmanager.get_plugin("meshmark") is not None
    assert not pytestconfig.pluginmanager.hasplugin("meshmark.pytest_plugin.plugin")
    assert "torch" not in sys.modules
"""


@dataclass(frozen=True, kw_only=True)
class Installed:
    """An environment with Meshmark in it."""

    bin: Path
    files: set[str]
    """Files of the wheel."""
    source_files: set[str]
    """Files of the source distribution."""

    def run(self, folder: Path, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of the environment in `folder`; the checkout is on no path."""
        return run([str(self.bin / command), *arguments], folder)


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    outside = ("PYTHONPATH", "PYTEST_ADDOPTS", "PYTEST_PLUGINS", "GROUP_RANK", "SLURM_STEP_NUM_NODES")
    env = {name: value for name, value in os.environ.items() if name not in outside}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def done(command: list[str], folder: Path) -> str:
    finished = run(command, folder)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Built in a copy of what git tracks, for setuptools leaves its traces, and picks up those of builds before."""
    tmp = tmp_path_factory.mktemp("wheel")
    source = tmp / "source"
    for path in tracked_files():
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    for link in ("adapters", "suites"):
        (source / "meshmark" / link).symlink_to(os.readlink(ROOT / "meshmark" / link))
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    done([sys.executable, "-c", build, str(tmp)], source)
    wheel = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
        "-w",
        str(tmp),
    ]
    examples = [str(source / "examples" / name) for name in ("meshmark-mine", "meshmark-easgd")]
    done([*wheel, str(source), *examples], tmp)
    done(["git", "init", "-q"], tmp)  # a repository around the environment, whose commits are not Meshmark's
    done(["git", "-c", "user.name=they", "-c", "user.email=they", "commit", "-q", "--allow-empty", "-m", "theirs"], tmp)
    done([sys.executable, "-m", "venv", "--without-pip", str(tmp / "venv")], tmp)
    python = tmp / "venv" / "bin" / "python"
    site = Path(done([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], tmp).strip())
    (site / "shared.pth").write_text(sysconfig.get_path("purelib"))
    wheels = [str(file) for file in tmp.glob("*.whl")]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    done([*pip, "--ignore-installed", *wheels], tmp)
    _, _, script = (Path(sysconfig.get_path("scripts")) / "pytest").read_text().partition("\n")
    python.with_name("pytest").write_text(f"#!{python}\n{script}")
    python.with_name("pytest").chmod(0o755)
    (bundle,) = tmp.glob("*.tar.gz")
    with tarfile.open(bundle) as tar:
        source_files = {name.partition("/")[2] for name in tar.getnames()}
    with zipfile.ZipFile(next(tmp.glob("meshmark-*.whl"))) as archive:
        return Installed(bin=python.parent, files=set(archive.namelist()), source_files=source_files)


def only_record(results: Path) -> Record:
    (record,) = read_records(results).records
    return record


def test_the_wheel_holds_the_package_and_nothing_else(installed: Installed) -> None:
    """Each file of the package, of the folders behind its links too, the planner's rates and the page's template."""
    tracked = {str(path.relative_to(ROOT)) for path in tracked_files()}
    places = {"meshmark/": "meshmark/", "adapters/": "meshmark/adapters/", "suites/": "meshmark/suites/"}
    expected = {
        inside + name.removeprefix(folder)
        for name in tracked
        for folder, inside in places.items()
        if name.startswith(folder) and name.endswith((".py", ".json", ".jsonl", ".html", ".css", ".js"))
    }
    assert {"meshmark/plan/rates/h100.json", "meshmark/suites/conftest.py"} <= expected
    assert {name for name in installed.files if ".dist-info/" not in name} == expected
    assert expected <= installed.source_files


@pytest.mark.slow
def test_an_adapter_of_ones_own_is_run_in_an_empty_folder(installed: Installed, tmp_path: Path) -> None:
    """The page docs/adapter.md from its example to the report. The commit of the repository around is not ours."""
    shutil.copyfile(FIRST, tmp_path / "mine.py")
    asked = ["--pyargs", "meshmark.suites", "--adapter", "mine.py:First", "--workload", "gpt-mini", "--results", "out"]
    said = installed.run(tmp_path, "python", "-m", "pytest", *asked, *SUITES)
    assert said.returncode == 0, said.stdout + said.stderr
    record = only_record(tmp_path / "out")
    assert record.case.id == "first-dp2.mb4-gpt-mini-fp32"
    assert [verdict.passed for verdict in record.verdicts] == [True, True, True]
    assert record.environment.commit == ""
    reported = installed.run(tmp_path, "meshmark", "report", "out")
    assert reported.returncode == 0, reported.stderr
    assert "| first " in (tmp_path / "out" / "report.md").read_text()


def test_every_framework_that_an_adapter_needs_has_an_extra_and_is_in_all() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    """Apart from what pip alone does not install, and from adapters with an environment of their own."""
    adapters = [load_adapter(target) for target in builtin_adapters().values()]
    required = {r for adapter in adapters if not adapter.virtual_environment for r in adapter.requires}
    needed = {r.distribution for r in required if not r.command} - {"torch"}
    assert needed and needed <= extras.keys()
    assert needed <= set(re.split(r"[\[\],]", extras["all"][0]))


def test_the_page_on_adapters_shows_the_example_as_it_is() -> None:
    assert f"```python\n{FIRST.read_text()}```\n" in (ROOT / "docs" / "adapter.md").read_text()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Somebody else's, with fixtures, options and settings of its own."""
    (tmp_path / "checks").mkdir()
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text(PYTEST_INI)
    (tmp_path / "checks" / "check_theirs.py").write_text(CHECK)
    return tmp_path


@pytest.mark.slow
def test_an_installed_adapter_is_run_in_somebody_elses_repository(installed: Installed, repository: Path) -> None:
    """`pip install meshmark-mine` is all that it takes; the example's three suites pass."""
    asked = ["--pyargs", "meshmark.suites", "--adapters", "mine", "--workload", "gpt-mini", "--results", "out"]
    said = installed.run(repository, "pytest", *asked, *SUITES)
    assert (said.returncode, "3 passed" in said.stdout) == (0, True), said.stdout + said.stderr
    verdicts = {verdict.suite: verdict.passed for verdict in only_record(repository / "out").verdicts}
    assert verdicts == {"equivalence": True, "memory": True, "communication": True}


@pytest.mark.slow
def test_an_installed_algorithm_is_trained_and_judged(installed: Installed, repository: Path) -> None:
    """An algorithm and its engine come by entry points alone; the core has no word of them."""
    asked = ["--pyargs", "meshmark.suites", "--adapters", "easgd", "--workload", "gpt-mini-sgd-easgd2"]
    said = installed.run(repository, "pytest", *asked, "--results", "out", *SUITES)
    assert (said.returncode, "3 passed" in said.stdout) == (0, True), said.stdout + said.stderr
    lines = (repository / "out" / "records.jsonl").read_text().splitlines()
    (record,) = (line for line in map(json.loads, lines) if "case" in line)  # this environment has not the algorithm
    assert record["case"]["workload"]["algorithm"] == {"kind": "easgd", "period": 2, "moving_rate": 0.25}
    assert {verdict["suite"]: verdict["passed"] for verdict in record["verdicts"]} == dict.fromkeys(
        ("equivalence", "memory", "communication"), True
    )


def test_their_own_run_is_left_alone(installed: Installed, repository: Path) -> None:
    """No plugin, no option, no torch."""
    assert "1 passed" in done([str(installed.bin / "pytest")], repository)
    refused = installed.run(repository, "pytest", "--world", "2")
    assert (refused.returncode, "unrecognized arguments: --world" in refused.stderr) == (4, True)


def test_importing_the_entry_point_takes_no_time_and_no_torch(installed: Installed, tmp_path: Path) -> None:
    """Beyond pytest, which is there by then; the fastest of three processes, for others may be busy."""
    code = (
        "import sys, time, pytest; before = set(sys.modules); start = time.perf_counter()\n"
        "import meshmark.pytest_plugin.entry; print(time.perf_counter() - start, *sorted(set(sys.modules) - before))"
    )
    runs = [done([str(installed.bin / "python"), "-c", code], tmp_path).split() for _ in range(3)]
    assert {tuple(modules) for _, *modules in runs} == {
        ("meshmark", "meshmark.moved", "meshmark.pytest_plugin", "meshmark.pytest_plugin.entry")
    }
    assert min(float(seconds) for seconds, *_ in runs) < 0.05


@pytest.mark.slow
def test_an_option_of_theirs_that_clashes_is_named_with_its_file(installed: Installed, repository: Path) -> None:
    (repository / "conftest.py").write_text(CONFTEST.replace("--theirs", "--device"))
    said = installed.run(repository, "pytest", "--pyargs", "meshmark.suites")
    assert said.returncode == 4
    told = (
        f"--device is an option of Meshmark's and of {repository / 'conftest.py'}: run Meshmark's suites from another"
    )
    assert said.stderr.startswith(f"ERROR: {told}"), said.stderr


def test_a_clash_among_their_own_is_left_to_pytest(installed: Installed, repository: Path) -> None:
    (repository / "conftest.py").write_text(CONFTEST.replace("--theirs", "--maxfail"))
    said = installed.run(repository, "pytest")
    assert (said.returncode, "Meshmark's" in said.stderr, "maxfail" in said.stderr) == (1, False, True)


@pytest.mark.slow
def test_the_command_line_works_in_an_empty_folder(installed: Installed, tmp_path: Path) -> None:
    """Nothing is read from a checkout, and adapters of installed distributions are listed."""
    asked = ["doctor", "cases --adapters ddp,mine", "plan --model llama-8b --gpus 64 --gpu h100"]
    with ThreadPoolExecutor() as pool:
        doctor, cases, plan = pool.map(
            lambda arguments: done([str(installed.bin / "meshmark"), *arguments.split()], tmp_path), asked
        )
    assert re.search(r"^  mine +dp, ZeRO 1; bf16, fp16, fp32, fp64; ready$", doctor, re.MULTILINE)
    *chosen, told, count = cases.splitlines()
    assert chosen == ["ddp-dp2.mb3-gpt-tiny-fp32", "mine-dp2.zero1.mb3-gpt-tiny-fp32"]
    assert told.endswith("2 are chosen") and count == "2 cases"
    assert re.search(r"^dp64\.\S+ +\d+ +[\d.]+ +[\d.]+%", plan, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []
