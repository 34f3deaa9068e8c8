"""Progress on a terminal: a real pseudo-terminal."""

from __future__ import annotations

import dataclasses
import os
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshmark.launch.cluster import ClusterSpec
from meshmark.pytest_plugin.live import Live
from meshmark.pytest_plugin.progress import Cases, on_terminal
from meshmark.pytest_plugin.selection import Selection, crowding
from meshmark.run.runner import RunOptions


def drawn(draw: Any) -> str:  # noqa: ANN401
    """All that `draw` of a `Live` leaves on a terminal, without colours."""
    terminal, other = os.openpty()
    live = Live(other)
    live.console.size = (100, 30)
    draw(live)
    live.close()
    os.close(other)
    said = b""
    try:
        while part := os.read(terminal, 65536):
            said += part
    except OSError:  # the other end is closed, and all is read
        pass
    os.close(terminal)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode())


def test_a_case_is_one_line_that_says_how_each_suite_ended() -> None:
    how = {"equivalence": "passed", "memory": "failed", "throughput": "skipped"}
    said = drawn(lambda live: live.ended("ddp-dp2", how, 12.34))
    assert "✗ ddp-dp2  ✓ equivalence  ✗ memory  – throughput  12.3 s\r\n" in said
    assert "✓ ddp-dp2" in drawn(lambda live: live.ended("ddp-dp2", {"equivalence": "passed"}, 1.0))


def test_the_bar_says_what_runs_and_the_time_left() -> None:
    def draw(live: Live) -> None:
        live.show("observe ddp-dp2", 3, 8, "about 1:05 left")
        live._bar.refresh()

    said = drawn(draw)
    assert "observe ddp-dp2" in said and "3/8" in said and "about 1:05 left" in said


def test_a_name_is_no_markup() -> None:
    """Names are neither rich's markup nor a terminal's control codes."""
    hostile = "[red]x[/nope] [link=y] \x1b[2Jgone"
    for draw in (lambda live: live.line(hostile), lambda live: live.ended(hostile, {hostile: "passed"}, 1.0)):
        said = drawn(draw)
        assert "[red]x[/nope] [link=y]" in said and "gone" in said and "\x1b[2J" not in said


def test_a_case_ends_with_its_last_test_and_keeps_its_failure() -> None:
    cases = Cases([("a", "ddp", "memory"), ("b", "ddp", "equivalence"), ("c", "gpipe", "memory")])
    cases.add("a", "failed", 1.0)
    cases.add("a", "passed", 0.5)  # its teardown
    assert cases.end("a") is None
    cases.add("b", "passed", 2.0)
    assert cases.end("b") == ("ddp", {"memory": "failed", "equivalence": "passed"}, 3.5)
    assert "b" not in cases and "c" in cases


@pytest.mark.parametrize(
    ("tty", "verbosity", "captures", "ci", "drawn"),
    [
        (True, 0, True, "", True),
        (False, 0, True, "", False),
        (True, 1, True, "", False),
        (True, 0, False, "", False),
        (True, 0, True, "true", False),
    ],
)
def test_a_bar_is_drawn_where_nothing_else_writes(
    tty: bool, verbosity: int, captures: bool, ci: str, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    reporter = SimpleNamespace(isatty=lambda: tty, verbosity=verbosity)
    assert on_terminal(reporter, SimpleNamespace(is_globally_capturing=lambda: captures)) is drawn


def test_ranks_that_share_cores_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    asked = SimpleNamespace(worlds=[2], layouts=None, cluster=ClusterSpec(), options=RunOptions())

    def told(**changes: Any) -> list[str]:  # noqa: ANN401
        return crowding(cast(Selection, SimpleNamespace(**{**vars(asked), **changes})))

    assert told() == []
    assert told(worlds=[2, 4]) == ["4 ranks share 2 cores: their times are those of sharing"]
    assert told(worlds=[8])[0].startswith("8 ranks share 2 cores")
    assert told(worlds=[4], cluster=dataclasses.replace(ClusterSpec(), nnodes=2, rdzv="a:1")) == []
    assert told(options=RunOptions(device="cuda", num_gpus=1))[0].startswith("2 ranks share 1 GPU:")
    assert told(worlds=[1], options=RunOptions(device="cuda", num_gpus=1)) == []
    each, one = (ClusterSpec(nnodes=n, rdzv="a:1", tasks_per_node=n // 2, gpus_by_task=True) for n in (16, 2))
    assert told(worlds=[16], cluster=each, options=RunOptions(device="cuda", num_gpus=1)) == []
    (odd,) = told(worlds=[16], cluster=one, options=RunOptions(device="cuda", num_gpus=1))
    assert odd.startswith("8 ranks share 1 GPU: ") and odd.endswith(
        "start one a GPU, or one a node without --gpus-per-task"
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert told() == ["2 ranks of 2 threads share 2 cores: their times are those of sharing"]
