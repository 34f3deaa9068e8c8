"""Code that frameworks compile and load again is in folders that no other user of the machine can write to."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshmark.errors import InputError
from meshmark.launch.cluster import Cluster, ClusterSpec
from meshmark.launch.folders import VARIABLES, cache_variables, private_base, users_caches
from meshmark.launch.launch import ForkserverLauncher, Launcher, TorchrunLauncher, process_environment
from meshmark.records.request import Task
from meshmark.run.runner import Runner, RunOptions
from tests.factories import make_case

ROOT = Path(__file__).parent.parent
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folders")
NOBODY = 65534


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files that all users can write to."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def is_private(folder: Path) -> bool:
    """Whether it, or a folder above it, is this user's and closed to all others."""
    return any(
        each.stat().st_uid == os.geteuid() and not stat.S_IMODE(each.stat().st_mode) & 0o077
        for each in (folder, *folder.parents)
    )


def test_caches_and_temporary_files_are_private_and_stay_from_run_to_run(shared: Path) -> None:
    found = process_environment(ClusterSpec(), Task.OBSERVE)
    folders = [Path(found[name]) for name in (*VARIABLES, "TMPDIR")]
    assert len(set(folders)) == len(VARIABLES) + 1
    for folder in folders:
        assert folder.is_dir() and is_private(folder) and shared in folder.parents
    assert cache_variables({}) == {name: found[name] for name in (*VARIABLES, "TMPDIR")}


@needs_root
def test_a_folder_that_another_user_made_first_is_not_used(shared: Path) -> None:
    taken = private_base(shared)
    shutil.rmtree(taken)
    taken.mkdir(mode=0o700)
    os.chown(taken, NOBODY, NOBODY)
    base = private_base(shared)
    assert base != taken and is_private(base)
    assert private_base(shared) == base, "one a process"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o755])
def test_a_folder_that_others_can_open_is_not_used(shared: Path, mode: int) -> None:
    opened = private_base(shared)
    opened.chmod(mode)
    assert private_base(shared) != opened and is_private(private_base(shared))


def test_a_link_is_not_followed(shared: Path, tmp_path: Path) -> None:
    base = private_base(shared)
    base.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    base.symlink_to(elsewhere)
    assert private_base(shared).resolve() != elsewhere


def test_a_fresh_folder_goes_with_its_process(shared: Path) -> None:
    private_base(shared).chmod(0o777)
    code = "from meshmark.launch.folders import cache_variables; print(cache_variables({})['TRITON_CACHE_DIR'])"
    environment = {**os.environ, "TMPDIR": str(shared), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    folder = Path(done.stdout.strip())
    assert shared in folder.parents and private_base(shared) not in folder.parents
    assert not folder.exists() and not folder.parent.exists()


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_users_own_folder_stays(shared: Path, tmp_path: Path, variable: str) -> None:
    mine = tmp_path / "mine"
    assert cache_variables({variable: str(mine)})[variable] == str(mine)
    assert stat.S_IMODE(mine.stat().st_mode) == 0o700
    mine.chmod(0o755)
    (tmp_path / "link").symlink_to(mine)
    assert cache_variables({variable: str(tmp_path / "link")})[variable] == str(tmp_path / "link")


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_a_users_folder_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    mine.chmod(mode)
    with pytest.raises(InputError, match=f"TRITON_CACHE_DIR='{mine}' has mode {mode:04o}: others can put code there"):
        cache_variables({"TRITON_CACHE_DIR": str(mine)})


@needs_root
@pytest.mark.usefixtures("shared")
def test_another_users_folder_or_link_is_refused(tmp_path: Path) -> None:
    mine, theirs, link = tmp_path / "mine", tmp_path / "theirs", tmp_path / "link"
    for folder in (mine, theirs):
        folder.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    link.symlink_to(mine)
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    for folder in (theirs, link):
        with pytest.raises(InputError, match=f"is user {NOBODY}'s"):
            cache_variables({"TORCHINDUCTOR_CACHE_DIR": str(folder)})


@pytest.mark.slow
def test_a_session_is_refused_before_anything_runs(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    command = [sys.executable, "-m", "pytest", "suites", "--results", str(tmp_path / "results"), "--collect-only"]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "TORCHINDUCTOR_CACHE_DIR" in done.stderr and "others can put code there" in done.stderr


@pytest.mark.slow
def test_a_name_that_another_user_takes_first_is_no_adapter_s_fault(tmp_path: Path) -> None:
    """The launcher itself imports `torch._dynamo`, which makes that folder: traffic was *NOT as planned*."""
    (tmp_path / f"torchinductor_{getpass.getuser()}").touch()
    command = [sys.executable, "-m", "pytest", "suites/test_communication.py", "--adapters", "ddp"]
    options = ["--workload", "gpt-mini", "--results", str(tmp_path / "results"), "-p", "no:cacheprovider"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout


def test_no_folder_for_temporary_files_is_a_mistake_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    with pytest.raises(InputError, match="No usable temporary directory .*: name a folder .* in TMPDIR"):
        users_caches({})


@pytest.mark.slow
def test_a_temporary_folder_that_pytorch_cannot_open_is_refused(tmp_path: Path) -> None:
    """Every case of the session had failed, each by a `UnicodeEncodeError`."""
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(folder)
    command = [sys.executable, "-m", "pytest", "suites", "--results", str(tmp_path / "results"), "--collect-only"]
    environment = {**os.environb, b"TMPDIR": folder}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
    assert "caf\\xe9', which is not UTF-8" in done.stderr and "name another one in TMPDIR" in done.stderr


@pytest.fixture(params=[ForkserverLauncher, pytest.param(TorchrunLauncher, marks=pytest.mark.slow)])
def own_launcher(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    """One that starts its processes after `shared` has set the folder for temporary files."""
    with Cluster(ClusterSpec()) as cluster, contextlib.closing(request.param(cluster)) as started:
        yield started


def test_ranks_compile_into_private_folders_and_leave_none_behind(
    shared: Path, own_launcher: Launcher, tmp_path: Path
) -> None:
    """Whatever a framework puts under TMPDIR goes with the launch."""
    runner = Runner(own_launcher, {"tells": "tests.broken.outcomes:TellsFolders"}, RunOptions(), tmp_path / "results")
    told = runner.time(make_case("tells")).outcome.message
    runner.close()
    assert told.startswith("AssertionError: "), told
    temporary, inductor = map(Path, told.removeprefix("AssertionError: ").split(os.pathsep))
    assert inductor.is_dir() and is_private(inductor) and inductor.is_relative_to(shared)
    assert temporary.parent == shared and not temporary.exists()
    assert [folder.name for folder in shared.iterdir()] == [f"meshmark_caches_{os.geteuid()}"]
