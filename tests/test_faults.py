"""Faults that others make, and what says that they are at fault: each of these had been blamed on somebody else, had
hung, or had cost a user's files."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from meshmark.cli.commands import main
from meshmark.errors import ClusterError, CorpusError, InputError
from meshmark.launch import folders, processes
from meshmark.launch.rank import _kind
from meshmark.launch.store import run_secret
from meshmark.launch.watchdog import _death
from meshmark.records.record import Status
from meshmark.records.record_file import read_records
from meshmark.reference.data import load_images, read_corpus
from meshmark.regression.baseline import accept
from meshmark.run.assemble import outcome_of_error
from meshmark.text import LIMIT, describe_error
from tests.factories import make_good
from tests.test_compare import write

ROOT = Path(__file__).parent.parent


class Mute(Exception):
    """One that cannot say what it is about."""

    def __str__(self) -> str:
        raise SystemExit(3)


def test_an_error_without_a_text_is_its_rank_s_outcome() -> None:
    assert _kind(Mute()) is Status.RAISED
    assert describe_error(Mute()) == "Mute: (its text cannot be had: SystemExit)"


@pytest.mark.slow
def test_an_error_with_a_text_of_any_length_is_told_at_once() -> None:
    """As long as a tensor that was printed whole: searched for what it means, it had taken a rank to its time limit."""
    error = RuntimeError("NCCL " * 40_000_000)
    started = time.process_time()
    assert _kind(error) is Status.RAISED
    assert len(describe_error(error)) < LIMIT + 100
    assert time.process_time() - started < 60


def test_an_error_without_a_message_has_the_line_that_raised_it() -> None:
    with pytest.raises(AssertionError) as caught:
        fail_without_a_word()
    told = describe_error(caught.value)
    assert told.startswith("AssertionError: `raise AssertionError  # no message` (test_faults.py:"), told
    assert describe_error(ValueError()) == "ValueError: ", "one that nobody raised has no line"


def fail_without_a_word() -> None:
    raise AssertionError  # no message


def test_who_says_that_a_disk_is_full_must_have_filled_one(tmp_path: Path) -> None:
    said = RuntimeError("cannot save: No space left on device")
    assert _kind(said, [tmp_path]) is Status.RAISED
    assert _kind(OSError(28, os.strerror(28)), [tmp_path]) is Status.NO_SPACE


def save_too_much(folder: Path) -> BaseException:
    """Return what `torch.save` raises when it cannot write its file, which then stays in `folder`."""
    with pytest.raises(RuntimeError) as caught:
        torch.save({"weight": torch.zeros(2**19)}, folder / "state.pt")
    return caught.value


def test_a_checkpoint_larger_than_files_may_be_is_no_fault_of_the_adapter(tmp_path: Path) -> None:
    """`torch.save` loses the error's number, and says that it is not where it expected to be."""
    checkpoint, other = tmp_path / "checkpoint" / "step", tmp_path / "other"
    checkpoint.mkdir(parents=True)
    other.mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        error = save_too_much(checkpoint)
        wrapped = ValueError("cannot save")
        wrapped.__cause__ = error
        assert "unexpected pos" in str(error)
        assert _kind(error, [other, checkpoint.parent]) is Status.NO_SPACE
        assert _kind(wrapped, [checkpoint.parent]) is Status.NO_SPACE
        assert _kind(error, [other]) is Status.RAISED, "nothing that it wrote is as large as files may be"
        assert _kind(ValueError("cannot save"), [checkpoint.parent]) is Status.RAISED
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert _kind(error, [checkpoint.parent]) is Status.RAISED, "files may be of any size"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_checkpoint_that_a_full_disk_cuts_off_is_no_fault_of_the_adapter(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no mounts here")
    try:
        error = save_too_much(tmp_path)
        assert "No space left" not in f"{error} {error.__cause__} {error.__context__}"
        assert _kind(error, [tmp_path]) is Status.NO_SPACE
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_what_is_said_of_a_disk_that_is_full_is_believed(tmp_path: Path) -> None:
    """As C++ says it, which has no error number."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no mounts here")
    try:
        assert _kind(RuntimeError("No space left on device"), [tmp_path]) is Status.NO_SPACE
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_secret_that_is_not_text_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MESHMARK_RDZV_SECRET", raising=False)
    run_secret()
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    file.write_bytes(bytes(range(128, 256)))
    with pytest.raises(ClusterError, match="is not text: remove it"):
        run_secret()


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Two classes, of one image each."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.new("L", (4, 4)).save(tmp_path / name / "1.png")
    return tmp_path


def test_a_pipe_among_images_is_not_waited_for(images: Path) -> None:
    os.mkfifo(images / "a" / "2.png")
    with pytest.raises(CorpusError, match="2.png is no file"):
        load_images(str(images))


def test_images_are_decoded_by_pillow_alone(images: Path) -> None:
    """PostScript would be given to a program."""
    Image.new("L", (4, 4)).save(images / "a" / "2.eps")
    with pytest.raises(CorpusError, match=r"2.eps cannot be read as an image \(BMP, .*\): cannot identify image"):
        load_images(str(images))


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom"])
def test_a_corpus_without_an_end_is_refused(device: str) -> None:
    with pytest.raises(CorpusError, match=f"'{device}' is no regular file"):
        read_corpus(device)


@pytest.fixture
def baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(Path("results"), [make_good()])
    return accept(Path("results"), "here")


def test_a_baseline_that_is_replaced_leaves_its_user_s_files(baseline: Path) -> None:
    (baseline / "notes.md").write_text("why this machine")
    (baseline / "plots").mkdir()
    write(Path("more"), [make_good()] * 3)
    accept(Path("more"), "here", replace=True)
    assert (baseline / "notes.md").read_text() == "why this machine" and (baseline / "plots").is_dir()
    assert len(read_records(baseline).records) == 3
    assert [path.name for path in Path("baselines").iterdir()] == ["here"]


def test_a_baseline_s_records_are_whole_at_any_time(baseline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replacement that is cut off anywhere leaves the old ones or the new ones."""
    kept, remove = (baseline / "records.jsonl").read_bytes(), shutil.rmtree

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    def removed(folder: Path, **options: bool) -> None:
        remove(folder, **options)
        if Path(folder) == Path("baselines/here"):
            raise KeyboardInterrupt

    for step in ("replace", "rename", "rmdir"):
        monkeypatch.setattr(Path, step, killed)
    monkeypatch.setattr(shutil, "rmtree", removed)
    write(Path("more"), [make_good()] * 3)
    with pytest.raises(KeyboardInterrupt):
        accept(Path("more"), "here", replace=True)
    assert (baseline / "records.jsonl").read_bytes() == kept


def test_a_link_in_the_place_of_a_baseline_is_not_followed(baseline: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    baseline.rename(elsewhere)
    baseline.symlink_to(elsewhere)
    with pytest.raises(InputError, match="is a link"):
        accept(Path("results"), "here", replace=True)
    assert (elsewhere / "records.jsonl").exists()


def test_a_link_where_a_baseline_is_prepared_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user of the folder had left it, to a victim's folder: its evidence was removed, its records replaced."""
    monkeypatch.chdir(tmp_path)
    victim = tmp_path / "victim"
    write(victim, [make_good()])
    (victim / "evidence").mkdir(exist_ok=True)
    before = (victim / "records.jsonl").read_bytes()
    Path("baselines").mkdir()
    Path("baselines/.here.part").symlink_to(victim)
    write(Path("results"), [make_good()] * 2)
    assert accept(Path("results"), "here").is_dir() and not Path("baselines/here").is_symlink()
    assert (victim / "records.jsonl").read_bytes() == before and (victim / "evidence").is_dir()
    assert len(read_records(Path("baselines/here")).records) == 2


@pytest.mark.parametrize("name", ["report.md", "report-memory.svg", "report-conformance.md"])
def test_a_report_is_not_written_through_a_link(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever gives somebody a folder of records could have her replace a file of hers by lines of his."""
    write(tmp_path / "results", [make_good()])
    target = tmp_path / "authorized_keys"
    target.write_text("hers")
    (tmp_path / "results" / name).symlink_to(target)
    assert main(["report", str(tmp_path / "results")]) == 2
    assert target.read_text() == "hers" and "is a link" in capsys.readouterr().err


def test_a_report_is_written_into_no_other_user_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "results", [make_good()])
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(tmp_path).st_uid + 1)
    assert main(["report", str(tmp_path / "results")]) == 2
    assert "belongs to another user: name a page elsewhere with -o" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "results"), "-o", str(tmp_path / "page.md")]) == 0


@pytest.mark.parametrize("name", ["page.md", "old.bak"])
def test_a_page_replaces_no_records_through_a_link_or_under_another_name(name: str, tmp_path: Path) -> None:
    write(tmp_path, [make_good()])
    records = (tmp_path / "records.jsonl").rename(tmp_path / "old.bak")
    (tmp_path / "page.md").symlink_to(records)
    before = records.read_bytes()
    assert main(["report", str(records), "-o", str(tmp_path / name)]) == 2
    assert records.read_bytes() == before


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device here")
@pytest.mark.parametrize("command", [["schema"], ["compare", "results", "results"], ["show", "ddp"]])
def test_output_that_cannot_be_written_is_no_failed_gate(baseline: Path, command: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "meshmark", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    assert done.returncode == 2, done.stderr
    assert done.stderr == f"meshmark: what it found cannot be written: {os.strerror(28)}\n"


@pytest.mark.parametrize(("share", "status"), [(1.0, Status.UNFINISHED), (100.0, Status.RAISED)])
def test_a_thread_that_the_user_s_limit_forbids_is_no_fault_of_the_adapter(
    share: float, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter is at fault where the same words come and the limit is far away."""
    most = int(share * processes._num_threads(os.getuid()))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (most, most))
    for error in (RuntimeError("can't start new thread"), BlockingIOError(11, "Resource temporarily unavailable")):
        assert _kind(error) is status


@pytest.mark.parametrize(("refused", "status"), [(3, Status.UNFINISHED), (0, Status.RAISED)])
@pytest.mark.parametrize(("listed", "folder"), [("0::/a/b", "a"), ("0::/a/b", "a/b"), ("8:pids:/box", "pids/box")])
def test_a_process_that_a_container_s_limit_forbids_is_no_fault_of_the_adapter(
    listed: str, folder: str, refused: int, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "mounted" / folder
    group.mkdir(parents=True)
    (group / "pids.events").write_text(f"max {refused}\n")
    (tmp_path / "listed").write_text(f"1:cpu:/\n{listed}\n")
    groups = list(processes._control_groups(tmp_path / "mounted", tmp_path / "listed"))
    monkeypatch.setattr(processes, "_control_groups", lambda: groups)
    assert _kind(BlockingIOError(11, "Resource temporarily unavailable")) is status


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    assert _death(-40) == (Status.KILLED, "killed by signal 40")
    assert _death(-9)[1].startswith("killed by SIGKILL")


@pytest.mark.parametrize(("free", "status"), [(0, Status.NO_SPACE), (2**40, Status.UNFINISHED)])
def test_an_unforeseen_error_on_a_full_disk_is_told_as_no_space(
    free: int, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_free_bytes", lambda _: free)
    assert outcome_of_error(ValueError("max() arg is an empty sequence")).status is status
