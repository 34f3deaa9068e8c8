"""Messages between ranks are data: they arrive bit for bit, and nothing in them is ever run."""

from __future__ import annotations

import math
import multiprocessing
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from meshmark.judge import trace
from meshmark.judge.trace import all_gather_json, gather_arrays

ROOT = Path(__file__).parent.parent
NUM_RANKS = 3


def on_ranks(folder: Path, function: Callable[[int], Any]) -> list[Any]:
    """Return what `function` returns or raises on each of three ranks."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(NUM_RANKS)]

    def rank(number: int) -> None:
        store = dist.FileStore(str(folder / "store"), NUM_RANKS)
        dist.init_process_group("gloo", store=store, rank=number, world_size=NUM_RANKS)
        try:
            pipes[number][1].send(function(number))
        except ValueError as error:
            pipes[number][1].send(error)
        dist.barrier()

    processes = [context.Process(target=rank, args=(number,)) for number in range(NUM_RANKS)]
    for process in processes:
        process.start()
    try:
        for number, (answer, _) in enumerate(pipes):
            assert answer.poll(60), f"rank {number} does not answer"
        found = [answer.recv() for answer, _ in pipes]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
            process.join()
    return found


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def test_json_of_every_rank_reaches_every_rank(tmp_path: Path) -> None:
    found = on_ranks(tmp_path, lambda rank: all_gather_json({"rank": rank, "text": "é" * 1000 * rank, "half": 0.1}))
    expected = [{"rank": rank, "text": "é" * 1000 * rank, "half": 0.1} for rank in range(NUM_RANKS)]
    assert found == [expected] * NUM_RANKS


def test_arrays_come_home_bit_for_bit(tmp_path: Path) -> None:
    """Arrays of unequal sizes, several dtypes, empty, of no dimension, transposed, and not a number."""
    held = [
        [np.arange(7, dtype=np.float32), np.array([[math.nan, -0.0], [1e-310, math.inf]])],
        [],
        [np.float64(3.5).reshape(()), np.arange(6).reshape(2, 3).T, np.zeros((0, 4), np.float32)],
    ]
    found, *others = on_ranks(tmp_path, lambda rank: gather_arrays(held[rank]))
    assert others == [None, None]
    for sent, got in zip(held, found, strict=True):
        assert [(a.dtype, a.shape, a.tobytes()) for a in sent] == [(a.dtype, a.shape, a.tobytes()) for a in got]


def test_nothing_at_all_is_gathered_too(tmp_path: Path) -> None:
    assert on_ranks(tmp_path, lambda rank: gather_arrays([])) == [[[], [], []], None, None]


def test_a_size_that_nobody_can_have_is_refused_by_all(tmp_path: Path) -> None:
    """Before anything is allocated for it."""

    def lie(rank: int) -> object:
        if rank == 1:
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(NUM_RANKS)]
            dist.all_gather(sizes, torch.tensor([trace.MOST_BYTES + 1]))
            return None
        return all_gather_json("honest")

    first, _, last = on_ranks(tmp_path, lie)
    assert isinstance(first, ValueError) and isinstance(last, ValueError)
    assert str(trace.MOST_BYTES + 1) in str(first)


@pytest.mark.parametrize(
    "form, message",
    [
        (["|O", [1]], "plain numbers"),
        (["<f4", [-1]], "plain numbers"),
        (["<f4", [9]], "reshape"),
        (["<f4", [1]], "16 bytes where its arrays take 8"),
    ],
)
def test_a_form_that_does_not_fit_its_bytes_is_refused(form: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trace._unpacked([form], np.zeros(16, np.uint8))  # type: ignore[list-item]


@pytest.mark.parametrize(
    "path", sorted([*(ROOT / "meshmark").rglob("*.py"), *(ROOT / "adapters").rglob("*.py")]), ids=lambda path: path.name
)
def test_no_object_collective_is_used(path: Path) -> None:
    """They run code that a peer names. Reproducers, which run without Meshmark, show what frameworks do with them."""
    used = re.search(r"(gather|broadcast|scatter|send|recv)_object(_list)?\(", path.read_text())
    assert not used or path.parent.name == "gaps"
