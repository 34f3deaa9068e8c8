"""Temporary files of a run in its results: private, its own, and the only ones that it removes."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshmark.adapter.registry import load_adapter
from meshmark.adapters import ADAPTERS
from meshmark.conformance.scenario import SCENARIOS, plain_cells
from meshmark.conformance.scenario_runner import ScenarioRunner
from meshmark.errors import ResultsError
from meshmark.launch import folders
from meshmark.launch.cluster import Cluster, ClusterSpec, Scratch, _scratch_of_here
from meshmark.launch.launch import ForkserverLauncher
from meshmark.records.record import Status
from meshmark.run.runner import Runner, RunOptions
from tests.test_cluster import free_port, two_nodes
from tests.test_suites import suites


def users_own(results: Path) -> Path:
    """A file of the user's in a folder of a name that a run could want."""
    own = results / "checkpoints" / "mine.pt"
    own.parent.mkdir(parents=True)
    own.write_text("a week of training")
    return own


@pytest.mark.slow
def test_a_run_leaves_the_user_s_own_checkpoints_alone(tmp_path: Path) -> None:
    own = users_own(tmp_path)
    done = suites("--adapters", "single", "--workload", "gpt-mini", "-k", "throughput", "--results", tmp_path)
    assert done.returncode == 0, done.stdout
    assert own.read_text() == "a week of training"


def test_what_is_saved_is_private_and_removed_and_nothing_else_is(launcher: ForkserverLauncher, tmp_path: Path) -> None:
    own = users_own(tmp_path)
    (tmp_path / "scratch-old").mkdir()  # of another run, which may still need it
    base = plain_cells("ddp", load_adapter(ADAPTERS["ddp"]), 2)[0]
    runner = Runner(launcher, ADAPTERS, RunOptions(), tmp_path)
    assert ScenarioRunner(runner).perform(SCENARIOS["save"], base).outcome.status is Status.OK
    (scratch,) = (folder for folder in tmp_path.glob("scratch-*") if folder.name != "scratch-old")
    assert stat.S_IMODE(scratch.stat().st_mode) == 0o700
    assert [file for file in scratch.rglob("*") if file.is_file()]
    runner.close()
    assert not scratch.exists()
    assert (tmp_path / "scratch-old").is_dir()
    assert own.read_text() == "a week of training"


def test_what_a_killed_run_has_left_is_removed_and_a_living_one_s_is_not(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    gone, living = (tmp_path / f"{_scratch_of_here()}{pid}-x" for pid in (ended.pid, os.getppid()))
    elsewhere, link = (
        tmp_path / f"scratch-elsewhere-1-{ended.pid}-x",
        tmp_path / f"{_scratch_of_here()}{ended.pid}-link",
    )
    for folder in (gone, living, elsewhere):
        folder.mkdir()
    link.symlink_to(living)
    with Cluster(ClusterSpec()) as cluster:
        Scratch(tmp_path, cluster).remove()
    assert [path.exists() for path in (gone, living, elsewhere, link)] == [False, True, True, True]


@pytest.mark.parametrize("results", [["shared", "shared"], ["one", "two"]], ids=["shared", "apart"])
def test_nodes_agree_on_the_name(tmp_path: Path, results: list[str]) -> None:
    """Nodes that do not share their results get, and remove, a folder each."""
    rdzv, found = f"127.0.0.1:{free_port()}", dict[int, Scratch]()

    def node(rank: int) -> None:
        with Cluster(ClusterSpec(nnodes=2, node_rank=rank, rdzv=rdzv)) as cluster:
            found[rank] = Scratch(tmp_path / results[rank], cluster)

    nodes = [threading.Thread(target=node, args=(rank,)) for rank in range(2)]
    for each in nodes:
        each.start()
    for each in nodes:
        each.join(timeout=60)
    assert found[0].folder.name == found[1].folder.name
    folders = {found[rank].folder for rank in range(2)}
    assert folders == {tmp_path / name / found[0].folder.name for name in results}
    missing = [] if results[0] == results[1] else [1]
    assert found[0].missing == found[1].missing == missing
    assert all(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in folders)
    found[1].remove()
    assert found[0].folder.is_dir(), "node 1 removed what node 0 made"
    found[0].remove()
    assert not any(folder.exists() for folder in folders)


@pytest.mark.slow
@pytest.mark.usefixtures("own_noise")
def test_two_nodes_save_and_resume_in_one_folder(tmp_path: Path) -> None:
    own = users_own(tmp_path / "shared")
    chosen = [
        "--adapters",
        "ddp",
        "--conformance",
        "-k",
        "conformance and resume",
        "--results",
        str(tmp_path / "shared"),
    ]
    for code, output in two_nodes(tmp_path, *chosen):
        assert code == 0 and "1 passed" in output, output
    kept = ["checkpoints", "evidence", "noise", "records.jsonl"]
    assert sorted(path.name for path in (tmp_path / "shared").iterdir()) == kept
    assert own.read_text() == "a week of training"


def test_what_is_saved_for_nodes_that_do_not_see_it_is_skipped_and_no_verdict(tmp_path: Path) -> None:
    """With the reason; nothing is launched."""
    asked = list[str]()
    launcher: Any = SimpleNamespace(cluster=SimpleNamespace(spec=ClusterSpec(), numbers=[0, 1]), launch=asked.append)
    base = plain_cells("ddp", load_adapter(ADAPTERS["ddp"]), 2)[0]
    runner = Runner(launcher, ADAPTERS, RunOptions(), tmp_path)
    runner.scratch._blind = [1]
    outcome = ScenarioRunner(runner).perform(SCENARIOS["save"], base).outcome
    assert outcome.status is Status.SKIPPED and "node 1 does not see node 0's results: --results" in outcome.message
    assert not asked
    runner.close()


def test_results_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with Cluster(ClusterSpec()) as cluster, pytest.raises(ResultsError, match="name another with --results"):
        Scratch(tmp_path / "file" / "results", cluster)


def test_sockets_of_data_loaders_fit_into_a_rank_s_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the length from which on a warning says that they do not."""
    most = next(n for n in range(1, 200) if folders.socket_warning(Path("/".ljust(n, "x")))) - 1
    assert 40 <= most <= 60
    with tempfile.TemporaryDirectory() as root:
        for length, fits in ((most, True), (most + 1, False)):
            temporary = Path(root) / ("x" * (length - len(root) - 1))
            temporary.mkdir()
            assert (folders.socket_warning(temporary) is None) == fits
            monkeypatch.setattr(tempfile, "tempdir", str(temporary))
            with folders.private_folder() as own:
                inner = tempfile.mkdtemp(prefix="pymp-", dir=own)  # as multiprocessing's `get_temp_dir` makes it
                with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
                    if not fits:
                        stack.enter_context(pytest.raises(OSError, match="too long"))
                    listener.bind(tempfile.mktemp(prefix="listener-", dir=inner))
