"""Long runs: what the results folder holds is not run again, and a run whose time is up ends in good order."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import subprocess
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshmark import environment
from meshmark.adapters import ADAPTERS
from meshmark.cli.options import duration
from meshmark.errors import InputError
from meshmark.judge.deviation import Assess
from meshmark.launch.cluster import ClusterSpec
from meshmark.pytest_plugin import session_log
from meshmark.records import record as sources
from meshmark.records.record import ConformanceEvidence, Outcome, Record, Status
from meshmark.records.record_file import Ending, RecordFile, read_records
from meshmark.records.request import Task
from meshmark.run.resume import KEPT, KeptRecords
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.known_gap import KnownGap
from meshmark.spec.workload import workload
from tests.factories import make_case, make_good
from tests.test_suites import suites

CASE = make_case("ddp", workload=workload("gpt-mini"))
TARGET = ADAPTERS["ddp"]


class Launched(Exception):
    """A pass was started."""


def never(*arguments: object, **named: object) -> None:
    raise Launched


def runner(folder: Path, told: list[Any], *held: Record, **options: Any) -> Runner:  # noqa: ANN401
    launcher: Any = SimpleNamespace(cluster=SimpleNamespace(spec=ClusterSpec(), room=None), launch=never)
    chosen = RunOptions(**{"observed_steps": 3, **options})
    return Runner(launcher, {"ddp": TARGET}, chosen, folder, lambda *each: told.append(each), KeptRecords(held))


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    """Made here and now, by a clean checkout."""
    monkeypatch.setattr(environment, "_commit", lambda: "0123456789ab")
    here = environment.describe("cpu", "gloo", 1)
    return make_good(
        case=CASE,
        adapter=TARGET,
        steps=3,
        warmup=0,
        timing_budget_seconds=0.0,
        environment=here,
        conformance=ConformanceEvidence(),
        sources=[],
    )


def test_what_is_held_is_not_run_again_and_said_so(tmp_path: Path, record: Record) -> None:
    told: list[Any] = []
    with_it = runner(tmp_path, told, record)
    assert with_it.observe(CASE) is record and with_it.observed(CASE) is record
    ((what, case, shown),) = told
    assert (what, case, shown.remarks) == (Task.OBSERVE, CASE, [KEPT])
    with_it.close()
    assert (tmp_path / "records.jsonl").read_bytes() == b"", "it stands there already"


OTHER: dict[str, dict[str, Any]] = {
    "another commit": {"environment": {"commit": "ba9876543210"}},
    "changes that no commit holds": {"environment": {"commit": "0123456789ab-dirty"}},
    "another machine": {"environment": {"machine": "Abacus 3000"}},
    "fewer cores": {"environment": {"num_cpus": 999}},
    "another torch": {"environment": {"versions": {"torch": "1.0"}}},
    "other steps": {"steps": 5},
    "another adapter of the name": {"adapter": "meshmark.adapters.ddp:DDPStatic"},
    "another case": {"case": make_case("ddp")},
    "a full disk": {"outcome": Outcome(status=Status.NO_SPACE)},
    "too slow": {"outcome": Outcome(status=Status.SLOW)},
    "killed, maybe by the machine": {"outcome": Outcome(status=Status.KILLED, rank=0, message="killed by SIGKILL")},
    "hung": {"outcome": Outcome(status=Status.HUNG, rank=0)},
    "out of memory": {"outcome": Outcome(status=Status.OOM, rank=0)},
}


@pytest.mark.parametrize("changes", OTHER.values(), ids=OTHER.keys())
def test_what_differs_in_anything_is_run(tmp_path: Path, record: Record, changes: dict[str, Any]) -> None:
    around = dataclasses.replace(record.environment, **changes.get("environment", {}))
    other = dataclasses.replace(record, **{**changes, "environment": around})
    with closing(runner(tmp_path, [], other)) as running:
        found = running.observe(CASE)
    assert found is not other and "Launched" in found.outcome.message


def test_gaps_are_those_of_now(tmp_path: Path, record: Record) -> None:
    """A file of known gaps is written after the failure was seen, and what stands in it may be taken out again."""
    gap = KnownGap(clause="memory", symptom="activations", reason="known")
    with closing(runner(tmp_path, [], record, known_gaps=(("dd*", gap),))) as running:
        with_gap = running.observe(CASE)
    assert with_gap.conformance.known_gaps == [gap] and with_gap.memory == record.memory
    assert [r.conformance.known_gaps for r in read_records(tmp_path).records] == [[gap]], "pages read it"
    with closing(runner(tmp_path, [], with_gap)) as running:
        assert running.observe(CASE).conformance.known_gaps == []


@pytest.mark.parametrize("task", [Task.OBSERVE, Task.TIME])
def test_what_was_not_judged_does_not_stand_for_what_is(tmp_path: Path, record: Record, task: Task) -> None:
    """It was run with `--assess off`."""
    timed = {"task": task, "steps": 10, "warmup": 3} if task is Task.TIME else {}
    unjudged = dataclasses.replace(record, verdicts=[], **timed)
    for assess, kept in ((Assess.OFF, True), (None, False)):
        with closing(runner(tmp_path / str(assess), [], unjudged, assess=assess)) as running:
            found = running.time(CASE) if task is Task.TIME else running.observe(CASE)
        assert (found is unjudged) is kept


def test_a_rate_that_is_to_be_known_better_is_measured_again(tmp_path: Path, record: Record) -> None:
    made = dataclasses.replace(record, task=Task.TIME, steps=10, warmup=3, timing_budget_seconds=0.5)
    for budget, kept in ((2.0, made), (20.0, None)):  # of four launches
        with closing(
            runner(tmp_path / str(budget), [], record, timing_budget_seconds=budget, assess=Assess.OFF)
        ) as running:
            assert KeptRecords([made]).of(running.request(Task.TIME, CASE), record.environment) is kept
            assert running.observe(CASE) is record, "no rate is its business"


def test_a_crash_is_held_and_a_checkout_with_changes_holds_nothing(
    tmp_path: Path, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed = dataclasses.replace(record, outcome=Outcome(status=Status.RAISED, rank=0, message="x"))
    with closing(runner(tmp_path / "a", [], crashed)) as running:
        assert running.observe(CASE) is crashed
    monkeypatch.setattr(environment, "_commit", lambda: "0123456789ab-dirty")
    dirty = dataclasses.replace(record, environment=environment.describe("cpu", "gloo", 1))
    with closing(runner(tmp_path / "b", [], dirty)) as running:
        assert running.observe(CASE) is not dirty


@pytest.mark.parametrize("target", ["mine.py:Mine", "mine.adapters:Mine"])
def test_code_that_no_commit_tells_is_run(tmp_path: Path, record: Record, target: str) -> None:
    """A package of a user's changes as a file does, and has its entry point meanwhile."""
    with closing(runner(tmp_path, [])) as running:
        request = dataclasses.replace(running.request(Task.OBSERVE, CASE), adapter=target)
        assert KeptRecords([record]).of(running.request(Task.OBSERVE, CASE), record.environment) is record
        assert KeptRecords([dataclasses.replace(record, adapter=target)]).of(request, record.environment) is None


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("30m", 1800), ("2h", 7200)])
def test_times(text: str, seconds: int) -> None:
    assert duration("--max-time", text) == seconds


@pytest.mark.parametrize("text", ["", "m", "0m", "-5m", "1.5h", "9999999s", "soon", "1d"])
def test_times_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="--max-time .*: expected a time such as 90s, 30m or 2h"):
        duration("--max-time", text)


@pytest.mark.parametrize(
    ("up", "told"), [(True, "the time was up"), (False, "the run was ended before its time was up")]
)
def test_why_tests_were_not_run_is_not_made_up(up: bool, told: str) -> None:
    """`-x` and a signal leave some too."""
    said: list[str] = []
    stash = pytest.Stash()
    stash[session_log._LEFT] = {"t": None}
    if up:
        stash[session_log._UP] = True
    reporter = SimpleNamespace(section=said.append, write_line=said.append)
    config: Any = SimpleNamespace(stash=stash, option=SimpleNamespace(collectonly=False))
    session_log._list_tests_not_run(reporter, config)
    assert said[:2] == [f"not run: {told}", "t"]


@pytest.mark.slow
def test_a_run_whose_time_is_up_keeps_its_records_and_names_the_rest(tmp_path: Path) -> None:
    """It ends between tests. One case of each adapter comes first."""
    chosen = ("--adapters", "single,ddp", "--world", "2,4", "--workload", "gpt-mini", "--results", tmp_path)
    listed = suites(*chosen, "--max-time", "1h", "--collect-only", "-q", "-k", "equivalence").stdout
    cases = re.findall(r"test_equivalence\[(\w+-\w+)", listed)
    assert cases == ["single-one", "ddp-dp2", "ddp-dp4"]
    done = suites(*chosen, "--max-time", "1s", "-k", "equivalence and not single")
    assert done.returncode == 2, done.stdout
    assert "--max-time 1s is up; 1 test not run" in done.stdout and "--resume goes on from here" in done.stdout
    assert "test_equivalence[ddp-dp4.mb2-gpt-mini-fp32]" in done.stdout.partition("not run: the time was up")[2]
    reading = read_records(tmp_path)
    assert [record.case.layout.dp for record in reading.records] == [2]
    endings = [attempt.ending for attempt in reading.sessions[-1].attempts]
    assert endings == [Ending.PASSED, Ending.UNFINISHED] and reading.sessions[-1].exit_code == 2
    RecordFile(tmp_path).close()


def test_code_that_an_adapter_imports_from_another_folder_is_part_of_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as an editable installation, of which neither a version nor the adapter's commit tells a change."""
    for folder in ("mine", "elsewhere/library"):
        (tmp_path / folder).mkdir(parents=True)
    adapter, library = tmp_path / "mine" / "adapter.py", tmp_path / "elsewhere" / "library" / "scale.py"
    adapter.write_text("import torch\n\ndef build():\n    from library.scale import FACTOR\n")
    (library.parent / "__init__.py").touch()
    library.write_text("FACTOR = 1.0\n")
    without = sources._digest(adapter)[0]
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    first = sources._digest(adapter)[0]
    library.write_text("FACTOR = 1.5\n")
    second = sources._digest(adapter)[0]
    kernel = library.parent / "kernel.so"
    kernel.write_bytes(b"compiled")
    third = sources._digest(adapter)[0]
    kernel.write_bytes(b"rebuilt")
    assert len({without, first, second, third, sources._digest(adapter)[0]}) == 5
    assert without == hashlib.sha256(adapter.read_bytes()).hexdigest(), "torch is installed: its version tells"


def test_a_configuration_beside_the_adapter_is_part_of_its_commit(tmp_path: Path) -> None:
    """Though git does not track it."""
    (tmp_path / "adapter.py").write_text("import json\n")
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    found = {sources._commit(tmp_path / "adapter.py")}
    for text in ("1", "2"):
        (tmp_path / "settings.json").write_text(text)
        found.add(sources._commit(tmp_path / "adapter.py"))
    assert len(found) == 3
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "bench.json").write_text("{}")
    assert sources._commit(tmp_path / "adapter.py") in found, "what a run leaves elsewhere is no code"


def test_a_module_that_is_compiled_beside_the_adapter_is_part_of_its_commit(tmp_path: Path) -> None:
    """Git ignores what is built in place."""
    (tmp_path / "adapter.py").write_text("import kernel\n")
    (tmp_path / ".gitignore").write_text("*.so\n")
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    bare = sources._commit(tmp_path / "adapter.py")
    (tmp_path / "kernel.so").write_bytes(b"compiled")
    built = sources._commit(tmp_path / "adapter.py")
    (tmp_path / "kernel.so").write_bytes(b"rebuilt")
    assert len({bare, built, sources._commit(tmp_path / "adapter.py")}) == 3 and "dirty" not in bare
