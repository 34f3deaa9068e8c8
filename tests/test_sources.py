"""A record tells of which code of the user's own it is: her repository's commit, and digests of her files."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshmark import environment
from meshmark.environment import describe, project_of
from meshmark.launch.cluster import _facts
from meshmark.records import record as sources
from meshmark.records.record import Record, sources_of
from meshmark.records.record_file import RecordFile, read_records
from meshmark.records.request import Request, Task
from meshmark.regression.run_file import read_run
from meshmark.run.resume import KeptRecords
from meshmark.spec.workload import workload
from tests.factories import make_case, make_good

CASE = make_case("mine", workload=workload("gpt-mini"))
DATE = "2024-02-03T04:05:06+00:00"


def git(*words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", f"user.date={DATE}"]
    subprocess.run(["git", *who, *words], check=True, env={"GIT_COMMITTER_DATE": DATE, "PATH": "/usr/bin:/bin"})


def look_again() -> None:
    """As the next process does."""
    project_of.cache_clear()
    sources._SOURCES.clear()


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with an adapter and what it imports, both committed; Meshmark is installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "_commit", lambda: "")
    look_again()
    git("init", "-q")
    for name in ("mine.py", "beside.py"):
        (tmp_path / name).write_text("x = 1\n")
    git("add", "mine.py", "beside.py")
    git("commit", "-q", "-m", "mine")
    return tmp_path / "mine.py"


def test_code_that_changes_while_it_runs_is_not_known(mine: Path) -> None:
    """Ranks run the new version, and are judged by the class that was loaded before."""

    def of_mine() -> sources.Source:
        (found,) = sources.sources_of("mine.py:Mine", CASE.workload)
        return found

    first = of_mine()
    assert first.is_known and of_mine() == first
    mine.write_text("x = 2\n")
    assert not of_mine().sha256 and not of_mine().is_known
    git("commit", "-q", "-a", "-m", "changed")
    assert not of_mine().is_known, "this process has loaded the version before"
    look_again()
    assert of_mine().is_known and of_mine().commit != first.commit


def request() -> Request:
    return Request(
        case=CASE,
        adapter="mine.py:Mine",
        task=Task.OBSERVE,
        device="cpu",
        backend="gloo",
        steps=3,
        time_limit_seconds=60.0,
    )


def record() -> Record:
    here = describe("cpu", "gloo", 1)
    told = sources_of("mine.py:Mine", CASE.workload)
    made = make_good(case=CASE, adapter="mine.py:Mine", steps=3, warmup=0, timing_budget_seconds=0.0, sources=told)
    return dataclasses.replace(made, environment=here)


def test_what_changed_in_an_adapter_or_beside_it_is_run_again(mine: Path) -> None:
    held = KeptRecords([record()])
    assert held.of(request(), describe("cpu", "gloo", 1)) is not None, "the same code"
    for name in ("mine.py", "beside.py"):
        (mine.parent / name).write_text("x = 2\n")
        look_again()
        assert held.of(request(), describe("cpu", "gloo", 1)) is None, f"{name} changed"
        assert KeptRecords([record()]).of(request(), describe("cpu", "gloo", 1)) is None, "changes that no commit holds"
        git("checkout", "-q", name)
    git("rm", "-q", "--cached", "mine.py")
    git("commit", "-q", "-m", "not tracked")
    look_again()
    assert KeptRecords([record()]).of(request(), describe("cpu", "gloo", 1)) is None, "no commit holds it"


def test_a_module_that_is_not_tracked_is_not_known(mine: Path) -> None:
    """An adapter may import it. After a change that made it wrong, `--resume` kept what had passed."""
    (mine.parent / "below").mkdir()
    (mine.parent / "below" / "helper.py").write_text("x = 1\n")
    look_again()
    (before,) = record().sources
    assert not before.is_known and KeptRecords([record()]).of(request(), describe("cpu", "gloo", 1)) is None
    (mine.parent / "below" / "helper.py").write_text("x = 2\n")
    look_again()
    assert record().sources != [before]


@pytest.mark.parametrize("is_clone", [False, True])
def test_an_imported_module_that_git_ignores_or_another_repository_has_is_run_again(
    mine: Path, monkeypatch: pytest.MonkeyPatch, is_clone: bool
) -> None:
    """A framework's clone in the project's folder: after a change that made it wrong, `--resume` kept a pass."""
    folder = mine.parent / "third"
    (package := folder / f"framework_{is_clone}").mkdir(parents=True)
    (module := package / "__init__.py").write_text("x = 1\n")
    mine.write_text(f"import {package.name}\n")
    if is_clone:
        subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    else:
        (mine.parent / ".gitignore").write_text("third/\n")
        git("add", ".gitignore")
    git("commit", "-q", "-a", "-m", "imports it")
    monkeypatch.syspath_prepend(str(folder))
    look_again()
    before = record()
    assert before.sources[0].is_known
    assert KeptRecords([before]).of(request(), describe("cpu", "gloo", 1)) is not None
    module.write_text("x = 2\n")
    look_again()
    assert KeptRecords([before]).of(request(), describe("cpu", "gloo", 1)) is None


@pytest.mark.parametrize(
    "imports",
    [
        "from .impl import x\n",
        "from . import impl\n",
        "import beside\n",
        "import importlib\nimportlib.import_module('far')\n",
    ],
)
def test_what_an_imported_module_imports_counts(mine: Path, monkeypatch: pytest.MonkeyPatch, imports: str) -> None:
    """A framework that not the adapter's file imports, but one that it imports, as in a package."""
    (far := mine.parent.with_name(f"{mine.parent.name}-far")).mkdir()
    (far / "far.py").write_text("x = 1\n")
    (mine.parent / "impl.py").write_text("import far\n")
    (mine.parent / "beside.py").write_text("import far\n")
    mine.write_text(imports)
    git("add", "impl.py")
    git("commit", "-q", "-a", "-m", "a package")
    monkeypatch.syspath_prepend(str(far))
    monkeypatch.syspath_prepend(str(mine.parent))
    for name in ("far", "beside", "impl"):  # of the test before
        monkeypatch.delitem(sys.modules, name, raising=False)
    look_again()
    before = record()
    assert KeptRecords([before]).of(request(), describe("cpu", "gloo", 1)) is not None
    (far / "far.py").write_text("x = 2\n")
    look_again()
    assert KeptRecords([before]).of(request(), describe("cpu", "gloo", 1)) is None


REQUIRES = """
from meshmark.adapter.contract import Requirement
from meshmark.adapters.ddp import DDP
from meshmark.records.record import sources_of


class Mine(DDP):
    requires = (Requirement(module="{name}", distribution="{name}"),)
"""


def test_a_distribution_that_an_adapter_requires_counts(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be imported by a name that is made when the adapter runs."""
    (site := mine.parent.with_name(f"{mine.parent.name}-far") / "site-packages").mkdir(parents=True)
    name = "required_here"
    (told := site / f"{name}-1.0.dist-info").mkdir()
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (told / "RECORD").write_text(f"{name}.py,,\n{told.name}/RECORD,,\n")
    (site / f"{name}.py").write_text("x = 1\n")
    mine.write_text(REQUIRES.format(name=name))
    git("commit", "-q", "-a", "-m", "requires it")
    monkeypatch.syspath_prepend(str(site))
    look_again()
    before = record().sources[0]
    (site / f"{name}.py").write_text("x = 22\n")
    look_again()
    environment._digest.cache_clear()
    assert record().sources[0].sha256 != before.sha256


def test_nodes_are_compared_by_an_adapters_whole_code(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A framework of another version on one node was held against the adapter."""
    monkeypatch.syspath_prepend(str(mine.parent))
    mine.write_text(REQUIRES.format(name="absent_here") + "import helper_of_mine\n")
    (helper := mine.parent / "helper_of_mine.py").write_text("x = 1\n")
    told = []
    for text in ("x = 1\n", "x = 2\n", "x = 1\n"):
        helper.write_text(text)
        sources.code_digest_of.cache_clear()
        told.append(sources.code_digest_of("mine.py:Mine"))
    assert told[0] == told[2] != told[1] and told[0]
    facts = _facts(dataclasses.replace(request(), adapter=f"{mine}:Mine"))
    assert facts["version of absent_here"] == "none" and facts["code of the adapter and of what it imports"]


def test_the_repository_is_recorded_and_dates_a_history(mine: Path, tmp_path: Path) -> None:
    with_commit = record()
    head = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout[:12]
    assert (with_commit.environment.project_commit, with_commit.environment.project_date) == (head, DATE)
    (source,) = with_commit.sources
    assert (source.target, source.commit, len(source.sha256)) == ("mine.py:Mine", head, 64)
    file = RecordFile(tmp_path / "results")
    file.append(with_commit)
    file.close()
    assert read_records(tmp_path / "results").records == [with_commit]
    run = read_run(tmp_path / "results")
    assert (run.commit, run.when[0]) == (head, DATE)
    mine.write_text("x = 2\n")
    look_again()
    dirty = record()
    assert dirty.environment.project_commit.startswith(f"{head}-dirty.")
    mine.write_text("x = 3\n")
    look_again()
    assert record().environment.project_commit != dirty.environment.project_commit, "other changes"


def test_outside_a_repository_files_are_told_by_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    look_again()
    (tmp_path / "mine.py").write_text("x = 1\n")
    (source,) = sources_of("mine.py:Mine", CASE.workload)
    assert source.sha256 and not source.commit and not source.is_known
    assert describe("cpu", "gloo", 1).project_commit == ""
    assert sources_of("meshmark.adapters.ddp:DDP", CASE.workload) == [], "the commit of Meshmark tells it"


def test_records_of_schema_3_are_read(tmp_path: Path) -> None:
    file = RecordFile(tmp_path)
    file.append(make_good())
    file.close()
    path = tmp_path / "records.jsonl"
    old = json.loads(path.read_text())
    del old["environment"]["project_commit"], old["environment"]["project_date"], old["sources"]
    path.write_text(json.dumps(old | {"schema": 3}) + "\n")
    assert read_records(tmp_path).records[0].sources == []
