"""Parts of a matrix: each case in one; and their records in one folder, each once."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.cluster.page import page
from benchmarks.cluster.row import Row, Whole, begin, finish, keep, kept, whole_of
from meshmark.cli.commands import main
from meshmark.cli.options import part
from meshmark.cli.submit import Submission, _gather
from meshmark.errors import InputError
from meshmark.pytest_plugin.selection import in_part
from meshmark.records.record import SCHEMA, Outcome, Status
from meshmark.records.record_file import Attempt, Ending, RecordFile, Session, line_of, merge, read_records
from tests.factories import make_case, make_good, make_timed
from tests.test_evidence import make_bulky

ROOT = Path(__file__).parent.parent


def test_parts_are_the_whole_and_a_case_is_in_one() -> None:
    cells = ["a", "a", None, "b", "c", "a", "d", "b", "e"]
    chosen = [in_part(cells, number, 3) for number in (1, 2, 3)]
    assert all(sum(each) == 1 for each in zip(*chosen, strict=True)), "each test in one"
    parts = [{cell for cell, mine in zip(cells, each, strict=True) if mine} for each in chosen]
    assert parts == [{"a", None, "d"}, {"b", "e"}, {"c"}]


def test_a_part_of_the_suites_is_some_of_their_cases() -> None:
    """All tests of each of its cases."""
    command = [sys.executable, "-m", "pytest", "suites", "--collect-only", "-q", "-p", "no:cacheprovider"]
    chosen = ["--adapters", "ddp,fsdp2,gpipe", "--shard", "2/2"]
    done = subprocess.run([*command, *chosen], cwd=ROOT, capture_output=True, text=True, check=True)
    cases = [line.partition("[")[2] for line in done.stdout.splitlines() if "::" in line]
    assert cases and set(Counter(cases).values()) == {4} and "deselected" in done.stdout, done.stdout


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "/", "1/0", "a/b", "1/2/3"])
def test_a_part_that_cannot_be(text: str) -> None:
    with pytest.raises(InputError, match="--shard"):
        part("--shard", text)


def test_records_of_parts_come_together_once(tmp_path: Path) -> None:
    """Also when some come later, and with the evidence that stands beside them."""
    good = make_good(case=make_case("ddp"))
    told = Session(schema=SCHEMA, session="one", command="pytest", device="cpu", exit_code=0)
    for name, lines in {"task-1": [told, good], "task-2": [make_timed()]}.items():
        file = RecordFile(tmp_path / name)
        for line in lines:
            file.append(line)
        file.close()
    parts = [tmp_path / "task-1", tmp_path / "task-2"]
    first = merge(parts[:1], tmp_path)
    assert [r.case for r in first.records] == [good.case] and first.sessions == [told]
    assert first.records[0].equivalence.deviations == good.equivalence.deviations
    again = merge(parts, tmp_path)
    assert len(again.records) == 2 and len(again.sessions) == 1 and not again.complaints
    with (tmp_path / "task-2" / "records.jsonl").open("a") as half:
        half.write('{"schema": 2, "case"')
    assert len(merge(parts, tmp_path).records) == 2
    assert "task-2: records.jsonl line 2: not whole JSON" in merge(parts, tmp_path).complaints[0]


def test_a_part_whose_evidence_is_damaged_does_not_keep_the_others(tmp_path: Path) -> None:
    for number in (1, 2):
        file = RecordFile(tmp_path / f"task-{number}")
        file.append(dataclasses.replace(make_bulky(), case=make_case(f"a{number}")))
        file.close()
    for evidence in (tmp_path / "task-1" / "evidence").iterdir():
        evidence.write_bytes(b"no")
    merged = merge([tmp_path / "task-1", tmp_path / "task-2"], tmp_path)
    assert [record.case.adapter for record in merged.records] == ["a2"]
    assert any("task-1" in complaint and "evidence" in complaint for complaint in merged.complaints)


def test_a_record_that_is_lost_to_damaged_evidence_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = Submission(folder=tmp_path, tasks=1, nodes=1, tasks_per_node=1, options=(), pytest=())
    with contextlib.closing(RecordFile(tmp_path / "task-1")) as file:
        file.append(make_bulky())
        file.append(Session(schema=SCHEMA, session="one", command="pytest", device="cpu", exit_code=0))
    for evidence in (tmp_path / "task-1" / "evidence").iterdir():
        evidence.write_bytes(b"no")
    assert _gather(asked, []) == 2
    assert "evidence" in capsys.readouterr().err


SBATCH = """#!/bin/sh
for last; do :; done
echo "$@" >> $HERE/asked
tasks=$(echo "$@" | sed 's/.*--array=\\([0-9,]*\\).*/\\1/' | tr ',' ' ')
for t in $tasks; do cp $HERE/left-$t-$(wc -l < $HERE/asked) $HERE/out/task-$t/records.jsonl; done
echo 7
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands that leave what tasks of SLURM would have; `make cluster-test` has the real ones."""
    for name, text in {"sbatch": SBATCH, "squeue": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("HERE", str(tmp_path))
    monkeypatch.setattr("meshmark.cli.submit._POLL_SECONDS", 0.0)
    return tmp_path


def leave(slurm: Path, task: int, attempt: int, exit_code: int | None, status: Status) -> None:
    folder = slurm / f"{task}-{attempt}"
    file = RecordFile(folder)
    file.append(dataclasses.replace(make_good(case=make_case(f"a{task}")), outcome=Outcome(status=status)))
    file.append(Session(schema=SCHEMA, session=f"{task}{attempt}", command="pytest", device="cpu", exit_code=exit_code))
    file.close()
    os.rename(folder / "records.jsonl", slurm / f"left-{task}-{attempt}")


def test_what_was_cut_off_is_submitted_again_and_all_is_gathered(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(slurm, 1, 1, 0, Status.OK)
    leave(slurm, 2, 1, None, Status.NODE_LOST)
    leave(slurm, 2, 2, 0, Status.OK)
    assert (
        main(["submit", "--tasks", "2", "--results", str(slurm / "out"), "--sbatch=-p gpu", "--", "--world", "2"]) == 0
    )
    asked = (slurm / "asked").read_text().splitlines()
    assert [line.split()[1:4] for line in asked] == [["--array=1,2", "-p", "gpu"], ["--array=2", "-p", "gpu"]]
    said = capsys.readouterr().out
    assert "submitted again, to go on: tasks 2" in said and "2 records of 2 tasks" in said, said
    assert {r.case.adapter: r.outcome.status for r in read_records(slurm / "out").records} == {
        "a1": Status.OK,
        "a2": Status.OK,
    }


def test_what_never_comes_to_its_end_is_told(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(slurm, 1, 1, None, Status.OK)
    (slurm / "out" / "task-1").mkdir(parents=True)
    (slurm / "out" / "task-1" / "output").write_text("slurmstepd: error: the end\n")
    assert main(["submit", "--tasks", "1", "--retries", "0", "--results", str(slurm / "out")]) == 2
    assert "task 1 did not come to its end:\nslurmstepd: error: the end" in capsys.readouterr().err


def leave_skips(slurm: Path, task: int, status: Status) -> None:
    """A part that pytest ended with 0, though each of its tests was skipped, as it counts."""
    leave(slurm, task, 1, 0, status)
    record = read_records(slurm / f"left-{task}-1").records[0]
    attempt = Attempt(test=f"test[{task}]", case=record.case.id, conforming=False)
    about = Session(schema=SCHEMA, session=f"{task}1", command="pytest", device="cpu", attempts=[attempt])
    ended = dataclasses.replace(attempt, ending=Ending.SKIPPED)
    with (slurm / f"left-{task}-1").open("wb") as file:
        for line in (about, record, dataclasses.replace(about, exit_code=0, attempts=[ended])):
            file.write(line_of(line))


def test_a_job_whose_parts_were_all_skipped_shows_nothing(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each part passes, for another may have run something. It ended with 0."""
    leave_skips(slurm, 1, Status.SKIPPED)
    leave_skips(slurm, 2, Status.SKIPPED)
    asked = ["submit", "--tasks", "2", "--retries", "0", "--results"]
    assert main([*asked, str(slurm / "out")]) == 1
    assert "every case of every part was skipped: nothing was judged" in capsys.readouterr().err
    (slurm / "asked").unlink()
    shutil.rmtree(slurm / "out")
    assert main([*asked, str(slurm / "out"), "--", "--allow-skipped"]) == 0


def test_a_job_without_tests_shows_nothing_though_its_folder_has_records(slurm: Path) -> None:
    """Records of the job before stood for it."""
    leave(slurm, 1, 1, 0, Status.OK)
    asked = ["submit", "--retries", "0", "--results", str(slurm / "out")]
    assert main(asked) == 0
    (slurm / "sbatch").write_text(SBATCH.replace("cp ", "cat ").replace(" $HERE/out", " >> $HERE/out"))
    (slurm / "left-1-2").write_bytes(
        line_of(Session(schema=SCHEMA, session="empty", device="cpu", command="pytest -k none", exit_code=5))
    )
    assert main(asked) == 1


def test_a_known_gap_is_no_skip(slurm: Path) -> None:
    """pytest counts an expected failure among what is skipped, and its record says that it was run."""
    leave_skips(slurm, 1, Status.SKIPPED)
    leave_skips(slurm, 2, Status.OK)
    assert main(["submit", "--tasks", "2", "--retries", "0", "--results", str(slurm / "out")]) == 0


def test_a_part_without_tests_has_ended(tmp_path: Path) -> None:
    """It left no session, so that `meshmark submit` took it for cut off, and submitted it again."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "suites",
        "-q",
        "-p",
        "no:cacheprovider",
        "--adapters",
        "ddp",
        "--world",
        "2",
    ]
    chosen = ["-k", "equivalence and not ddp", "--shard", "2/2", "--results", str(tmp_path)]
    done = subprocess.run([*command, *chosen], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 5, done.stdout
    assert read_records(tmp_path).sessions[-1].exit_code == 5


FLAKY = """#!/bin/sh
echo >> $HERE/polls
case $(wc -l < $HERE/polls) in
    1) echo 7;;
    2) echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1;;
    3) echo 7;;
    *) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1;;
esac
"""


def test_a_controller_that_is_away_for_a_moment_ends_no_job(slurm: Path) -> None:
    """The job was taken for ended, and submitted again beside the one that still ran."""
    (slurm / "squeue").write_text(FLAKY)
    leave(slurm, 1, 1, 0, Status.OK)
    assert main(["submit", "--tasks", "1", "--retries", "0", "--results", str(slurm / "out")]) == 0
    assert len((slurm / "polls").read_text().splitlines()) == 4


def test_a_job_that_nobody_can_follow_is_told(
    slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (slurm / "squeue").write_text("#!/bin/sh\necho away >&2; exit 1\n")
    monkeypatch.setattr("meshmark.cli.submit._SILENT_SECONDS", 0.0)
    leave(slurm, 1, 1, 0, Status.OK)
    assert main(["submit", "--tasks", "1", "--results", str(slurm / "out")]) == 2
    assert "away; job 7 may still run" in capsys.readouterr().err


def test_what_ended_is_gathered_where_a_job_cannot_be_submitted_again(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(slurm, 1, 1, 0, Status.OK)
    leave(slurm, 2, 1, None, Status.NODE_LOST)
    (slurm / "sbatch").write_text(SBATCH + '[ $(wc -l < $HERE/asked) = 1 ] || { echo "too many jobs" >&2; exit 1; }\n')
    assert main(["submit", "--tasks", "2", "--results", str(slurm / "out")]) == 2
    said = capsys.readouterr()
    assert "too many jobs" in said.err and "2 records of 2 tasks" in said.out
    assert len(read_records(slurm / "out").records) == 2


def test_whoever_stops_following_a_job_learns_that_it_goes_on(
    slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("meshmark.cli.submit.time.sleep", stop)
    leave(slurm, 1, 1, 0, Status.OK)
    assert main(["submit", "--tasks", "1", "--results", str(slurm / "out")]) == 130
    assert "job 7 goes on: `scancel 7` ends it" in capsys.readouterr().err


def test_an_earlier_job_does_not_stand_for_one_that_never_began(slurm: Path) -> None:
    leave(slurm, 1, 1, 0, Status.OK)
    asked = ["submit", "--retries", "0", "--results", str(slurm / "out")]
    assert main(asked) == 0
    (slurm / "sbatch").write_text("#!/bin/sh\necho 8\n")
    assert main(asked) == 2


def test_a_dry_run_prints_what_would_be_submitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["submit", "--tasks", "3", "--nodes", "2", "--dry-run", "--results", str(tmp_path / "run")]
    assert main([*options, "--", "--world", "4", "-k", "ddp or fsdp2"]) == 0
    said = capsys.readouterr().out
    for words in (
        "#SBATCH --nodes=2",
        "--world 4 -k 'ddp or fsdp2'",
        "--shard $SLURM_ARRAY_TASK_ID/3",
        "--array=1,2,3",
    ):
        assert words in said, said
    assert not (tmp_path / "run").exists()
    (tmp_path / "script").write_text(said.rpartition("\n\n")[0])
    subprocess.run(["bash", "-n", tmp_path / "script"], check=True)
    assert main([*options, "--", "--results", "elsewhere"]) == 2
    assert "--results is what `meshmark submit` itself gives" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option, value, said",
    [
        ("--sbatch", "'", "cannot be split into options: No closing quotation"),
        ("--tasks", "100000000", "expected at most 100000"),
        ("--retries", "-1", "expected at least 0"),
    ],
)
def test_options_that_cannot_be_submitted_are_refused(
    option: str, value: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert main(["submit", "--dry-run", "--results", str(folder), f"{option}={value}", "--", "-q"]) == 2
    assert f"{option} {value!r}" in (told := capsys.readouterr().err) or f"{option} {value}" in told
    assert said in told and not folder.exists()


@pytest.mark.parametrize(
    "words, said",
    [
        (["suite.toml"], "'suite.toml': expected options of pytest behind --"),
        (["--", "pytest", "suites"], "'pytest': expected options of pytest behind --"),
        (["--", "--nonsense"], "-- --nonsense: pytest refuses this: "),
        (["--", "--world", "two"], "--world 'two': expected a whole number"),
        (["--", "-k", "nothing_such"], "-- -k nothing_such: no test is selected by these options"),
    ],
)
def test_options_that_every_task_would_fail_by_are_refused(
    slurm: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "--results", str(slurm / "out"), *words]) == 2
    assert said in capsys.readouterr().err
    assert not (slurm / "asked").exists() and not (slurm / "out").exists()


def test_own_options_are_taken_behind_others_and_gpus_need_not_be_here(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["submit", "--results", str(slurm / "out"), "--tasks", "2", "--dry-run", "--", "--device", "cuda"]
    assert main(words) == 0
    assert "meshmark.suites --device cuda" in capsys.readouterr().out
    assert not (slurm / "asked").exists()


def test_trials_of_clusters_are_kept_in_pieces_and_a_wrong_one_is_told(tmp_path: Path) -> None:
    """`make cluster-test` writes the pieces; a trial that is repeated replaces its row."""
    rows = tmp_path / "cluster" / "rows.json"
    good = Row(engine="SLURM, sbatch", shape="2 x 1 x 1", fault="scancel", seconds=4.26, told="gone on", commit="abc")
    keep(dataclasses.replace(good, wrong=["kept [] of the case before"], lost="the case before"), rows)
    assert "| **wrong**" in page(kept(rows)) and "- SLURM, sbatch, 2 x 1 x 1, scancel: kept []" in page(kept(rows))
    keep(dataclasses.replace(good, lost="nothing"), rows)
    keep(dataclasses.replace(good, fault="requeued", commit="def", date="2026-01-02T03:04:05+00:00"), rows)
    assert "of abc, def, from 2026-01-02 03:04 to 2026-01-02 03:04 UTC" in page(kept(rows))
    assert [row.fault for row in kept(rows)] == ["scancel", "requeued"]
    assert "2 trials" in page(kept(rows)) and "2 went as they should" in page(kept(rows))
    assert "4.3" in page(kept(rows)) and "wrong" not in page(kept(rows))
    assert whole_of(rows) is None and "in one go" not in page(kept(rows), whole_of(rows))


def test_trials_made_in_one_go_are_told_from_those_made_later(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    stale = Row(
        engine="by hand", shape="2 x 1 x 1", fault="of another day", commit="outdated", date="2026-01-01T00:00:00"
    )
    keep(stale, rows)
    begin(rows)
    first = dataclasses.replace(stale, fault="link down", commit="abc", date="2026-01-02T03:04:05")
    keep(first, rows)
    finish(Whole(seconds=3000.0, trials=1, commit="abc", end="2026-01-02T03:05:00"), rows)
    beside = dataclasses.replace(first, fault="beside", commit="def", date="2026-01-02T03:04:06")
    keep(beside, rows)
    keep(dataclasses.replace(first, fault="later", commit="def", date="2026-01-02T04:00:00"), rows)
    told = page(kept(rows), whole_of(rows))
    assert "1 trials in one go of 50 minutes, of abc, from 2026-01-02 03:04 to 2026-01-02 03:04 UTC. " in told
    assert (
        "-k NAME`) (beside; later), of def, from 2026-01-02 03:04 to 2026-01-02 04:00" in told
        and "outdated" not in told
    )
