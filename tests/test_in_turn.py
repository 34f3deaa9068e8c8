"""Gloo lets the two ways of a pair of ranks go in turn, as `studies.throttled` computes, when one rank comes later.
The kernel paces the sockets, which needs no root. Plain TCP at the same pace is measured too: its ways go at once.

The cause is gloo's order of messages. A rank sends its data as soon as it knows that the peer's receive is posted. Its
own receive is announced on the same connection. The later rank knows of the peer's receive when it comes, so its
announcement waits behind its data, and the peer's data waits for the announcement. Where both receives are announced
before the data, both ways go at once."""

from __future__ import annotations

import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from studies.throttled import IN_TURN

BYTES, PACE = 600_000, 4_000_000
"""Sent each way, and bytes that a socket may send a second."""
LATE = 0.01
"""Seconds that rank 1 comes later. Without them the order is a race: two runs of five went at once."""
ROUNDS = 5
_MAX_PACING_RATE = 47
"""SO_MAX_PACING_RATE of Linux, which Python has no name for: TCP paces by itself, on loopback too."""


def median_seconds(call: Callable[[], None], meet: Callable[[], None] = lambda: None) -> float:
    """After idle moments a socket catches up, and a busy machine comes late: neither is the rule."""
    found = []
    for _ in range(ROUNDS):
        meet()
        started = time.perf_counter()
        call()
        meet()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def connected() -> Iterator[socket.socket]:
    """Duplicates of all sockets of this process that have a peer: gloo's among them."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found = socket.socket(fileno=os.dup(int(descriptor)))
        except OSError:
            continue  # no socket, or gone
        with found:
            try:
                found.getpeername()
            except OSError:
                continue
            if found.family in (socket.AF_INET, socket.AF_INET6):
                yield found


def rank_seconds(rank: int, results: Connection, folder: Path) -> None:
    """Measure the seconds of one direction; of both when rank 1 comes late; and of both after posted receives."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    out, into = torch.zeros(BYTES, dtype=torch.uint8), torch.empty(BYTES, dtype=torch.uint8)

    def one_way() -> None:
        if rank:
            dist.recv(into, 0)
        else:
            dist.send(out, 1)

    def both_ways() -> None:
        if rank:
            time.sleep(LATE)
        for work in [dist.isend(out, 1 - rank), dist.irecv(into, 1 - rank)]:
            assert work is not None
            work.wait()

    def receives_first() -> None:
        receive = dist.irecv(into, 1 - rank)
        dist.barrier()
        send = dist.isend(out, 1 - rank)
        assert receive is not None and send is not None
        send.wait()
        receive.wait()

    both_ways()
    for found in connected():
        found.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, PACE)
    results.send([median_seconds(call, dist.barrier) for call in (one_way, both_ways, receives_first)])


def tcp_seconds() -> tuple[float, float]:
    """The same of two plain sockets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = socket.create_connection(server.getsockname())
        second, _ = server.accept()
    data = bytes(BYTES)

    def read(own: socket.socket) -> None:
        left = BYTES
        while left:
            left -= len(own.recv(min(left, 1 << 16)))

    def sent(*ways: tuple[socket.socket, socket.socket]) -> None:
        threads = [threading.Thread(target=start.sendall, args=(data,)) for start, _ in ways]
        threads += [threading.Thread(target=read, args=(end,)) for _, end in ways]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with first, second:
        for own in (first, second):
            own.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, PACE)
        return median_seconds(lambda: sent((first, second))), median_seconds(
            lambda: sent((first, second), (second, first))
        )


def test_the_two_ways_of_a_pair_go_in_turn_by_gloo_when_one_rank_comes_later(tmp_path: Path) -> None:
    alone = BYTES / PACE
    try:
        one, both = tcp_seconds()
    except OSError as error:
        pytest.skip(f"this kernel paces no sockets: {error}")
    if one < 0.7 * alone:
        pytest.skip(f"sockets are not paced here: {BYTES:,} bytes took {one:.3f} s, where {alone:.3f} s are due")
    assert both < 1.5 * one, "which are no two sockets' pace"
    fork = get_context("fork")  # which need import nothing anew
    pipes = [fork.Pipe(duplex=False) for _ in range(2)]
    ranks = [fork.Process(target=rank_seconds, args=(r, ours, tmp_path)) for r, (_, ours) in enumerate(pipes)]
    try:
        for rank in ranks:
            rank.start()
        assert pipes[0][0].poll(120), "a rank says nothing"
        one, late, receives_first = pipes[0][0].recv()
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    assert one > 0.7 * alone, "gloo's sockets are not paced"
    assert (late - LATE) / one == pytest.approx(IN_TURN, rel=0.25)
    assert receives_first < 1.5 * one, "both receives were announced before the data"
