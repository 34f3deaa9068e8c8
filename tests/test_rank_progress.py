"""Slow or hung: what a rank's mark says when its time is up."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from meshmark import rank_progress
from meshmark.judge.diagnosis import diagnose
from meshmark.judge.truth import assess
from meshmark.launch.launch import _settle
from meshmark.launch.watchdog import stack_state
from meshmark.rank_progress import Mark, Pace, Phase, read_mark
from meshmark.records.rank_report import RankFailure, StackState
from tests.test_diagnosis import CASE, STEPS, honest

LIMIT = 120.0


def mark(silence: float, phase: Phase = Phase.TRAIN, done: int = 4, total: int = 10, longest: float = 10.0) -> Mark:
    return Mark(phase=phase, done=done, total=total, time=LIMIT - silence, longest=longest)


@pytest.mark.parametrize(
    "left, pace",
    [
        (mark(9.0), Pace.SLOW),
        (mark(49.0), Pace.SLOW),
        (mark(51.0), Pace.HUNG),
        (mark(1.9, longest=0.01), Pace.SLOW),
        (mark(2.1, longest=0.01), Pace.HUNG),
        (mark(59.0, done=0, longest=0.0), Pace.SLOW),
        (mark(61.0, longest=100.0), Pace.HUNG),
        (mark(61.0, phase=Phase.BUILD, done=0, total=0), Pace.HUNG),
        (mark(61.0, done=10), Pace.WAITS),
        (mark(61.0, phase=Phase.GATHER, done=0, total=0), Pace.WAITS),
        (mark(61.0, phase=Phase.EXPLAIN, total=0), Pace.HUNG),
    ],
)
def test_a_rank_is_slow_that_did_something_lately_by_its_own_measure(left: Mark, pace: Pace) -> None:
    assert left.pace(now=LIMIT, limit=LIMIT) is pace


def test_a_mark_tells_how_far_it_came() -> None:
    assert mark(2.5).text(now=LIMIT) == "4 of 10 steps, the last 2.5 s ago"
    assert mark(2.5, done=0).text(now=LIMIT) == "0 of 10 steps, begun 2.5 s ago"
    assert mark(2.5, phase=Phase.BUILD, done=0, total=0).text(now=LIMIT) == "building the engine for 2.5 s"


def test_a_mark_is_read_as_it_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_progress, "_marker", rank_progress._Marker())
    before = time.monotonic()
    assert read_mark(tmp_path / "mark", started=before) == Mark(phase=Phase.JOIN, time=before)
    rank_progress.watch(tmp_path / "mark")
    rank_progress.begin(Phase.TRAIN, 3)
    time.sleep(0.02)
    rank_progress.advance()
    rank_progress.advance()
    left = read_mark(tmp_path / "mark", started=before)
    assert (left.phase, left.done, left.total) == (Phase.TRAIN, 2, 3)
    assert 0.02 <= left.longest < 1 and before < left.time <= time.monotonic()
    rank_progress.begin(Phase.TRUTH, 5)
    assert read_mark(tmp_path / "mark", started=before).longest == 0.0, "steps say nothing of how long the truth takes"


def test_a_mark_costs_microseconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_progress, "_marker", rank_progress._Marker())
    rank_progress.watch(tmp_path / "mark")
    start = time.process_time()
    for _ in range(1000):
        rank_progress.advance()
    assert (time.process_time() - start) / 1000 < 50e-6


def test_the_truth_and_the_diagnosis_are_progress_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come when the other ranks have nothing left to do, and can take longer than the steps did."""
    monkeypatch.setattr(rank_progress, "_marker", rank_progress._Marker())
    trace, tolerance_model = honest()
    trace = dataclasses.replace(trace, gradients=[{n: 2 * g for n, g in step.items()} for step in trace.gradients])
    rank_progress.watch(tmp_path / "mark")
    deviations = assess(trace, CASE.workload)
    left = read_mark(tmp_path / "mark", started=0.0)
    assert (left.phase, left.done, left.total) == (Phase.TRUTH, STEPS, STEPS) and left.longest > 0
    assert diagnose(CASE, trace, deviations, (), tolerance_model)
    left = read_mark(tmp_path / "mark", started=0.0)
    assert left.phase is Phase.EXPLAIN and left.done > 0


def failure(rank: int, kind: str, when: float, stack_state: StackState = StackState.INSIDE) -> RankFailure:
    return RankFailure(rank=rank, kind=kind, message="", time=when, stack_state=stack_state)


@pytest.mark.parametrize(
    "failures, first",
    [
        ([failure(0, Pace.SLOW, 9.0), failure(1, Pace.WAITS, 3.0)], (0, "slow")),
        ([failure(0, Pace.SLOW, 9.0), failure(1, Pace.HUNG, 3.0)], (1, "hung")),
        ([failure(0, Pace.WAITS, 4.0), failure(1, Pace.WAITS, 3.0)], (1, "hung")),
        ([failure(0, Pace.HUNG, 1.0), failure(1, "oom", 3.0)], (1, "oom")),
        ([failure(0, "raised", 1.0), failure(1, "killed", 3.0)], (1, "killed")),
        ([failure(0, "raised", 1.0), failure(1, "exited", 3.0)], (1, "exited")),
        ([failure(0, "killed", 1.0), failure(1, "unfinished", 3.0)], (1, "unfinished")),
        ([failure(0, Pace.HUNG, 1.0), failure(1, Pace.HUNG, 3.0, StackState.OUTSIDE)], (1, "hung")),
        ([failure(0, Pace.HUNG, 1.0, StackState.OUTSIDE), failure(1, Pace.HUNG, 3.0, StackState.SILENT)], (1, "hung")),
        ([failure(0, Pace.WAITS, 1.0), failure(1, Pace.WAITS, 3.0, StackState.OUTSIDE)], (1, "hung")),
    ],
)
def test_the_rank_to_blame_comes_first(failures: list[RankFailure], first: tuple[int, str]) -> None:
    """Ranks that wait for one that comes on are slow with it, on any node; where none comes on, all hang."""
    assert (_settle(failures)[0].rank, _settle(failures)[0].kind) == first


@pytest.mark.parametrize(
    "innermost, stands",
    [
        ('File "/venv/torch/distributed/distributed_c10d.py", line 3007 in all_reduce', StackState.INSIDE),
        ('File "/venv/torch/autograd/graph.py", line 869 in _engine_run_backward', StackState.INSIDE),
        (f'File "{__file__}", line {{line}} in test', StackState.INSIDE),
        ('File "/site/loader.py", line 12 in next', StackState.OUTSIDE),
    ],
)
def test_where_a_rank_stands_is_its_innermost_frame(innermost: str, stands: StackState) -> None:
    waits = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "work.wait()" in line)
    other = 'Thread 0x01 (most recent call first):\n  File "/venv/torch/distributed/x.py", line 1 in wait\n\n'
    outer = '  File "/venv/torch/distributed/run.py", line 5 in main'
    stack = f"{other}Current thread 0x02 (most recent call first):\n  {innermost.format(line=waits)}\n{outer}\n"
    assert stack_state(stack) is stands
    assert stack_state("") is StackState.SILENT
