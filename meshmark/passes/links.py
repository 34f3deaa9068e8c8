"""Measure the links between nodes: an all-reduce of all ranks, then each pair of nodes by itself, in both
directions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from meshmark import rank_progress
from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import RankContext
from meshmark.measure.links import Link, rounds
from meshmark.records.rank_report import RankReport
from meshmark.records.request import Request

NUM_TRANSFERS = 7
"""Number of timed transfers, after one that establishes the connection."""
NUM_GOES = 2
NUM_BYTES = {"cpu": 4 * 2**20, "cuda": 128 * 2**20}
"""Bytes of a transfer and of an all-reduce. They are large enough for the link's rate to dominate its latency."""


def measure_links(request: Request, adapter: Adapter, context: RankContext, started: float) -> RankReport:
    """Measure the links. The first rank of each node reports the links from its node."""
    each, place = (int(os.environ[name]) for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"))
    node, is_first = (context.rank - place) // each, place == 0
    size = NUM_BYTES[context.device.type]
    payload = torch.zeros(size, dtype=torch.uint8, device=context.device)
    played = rounds(context.world_size // each)
    rank_progress.begin(rank_progress.Phase.TRAIN, total=1 + NUM_GOES * len(played))
    reduced = [_seconds(context, lambda: dist.all_reduce(payload)) for _ in range(1 + NUM_TRANSFERS)][1:]
    links = list[Link]()
    for go in range(NUM_GOES):
        for pairs in played:
            rank_progress.advance()
            dist.barrier()
            mine = [pair for pair in pairs if is_first and node in pair]
            for ends in [*mine, *((b, a) for a, b in mine)]:
                if seconds := _send(context, payload, ends, each):
                    links.append(Link(source=node, target=ends[1], go=go, num_bytes=size, seconds=seconds))
    return RankReport(
        rank=context.rank,
        build_seconds=0.0,
        run_seconds=time.time() - started,
        links=links,
        all_reduce_seconds=reduced,
    )


def _send(context: RankContext, payload: torch.Tensor, ends: tuple[int, int], each: int) -> list[float]:
    """Return the sender's seconds for each transfer.

    The receiver answers each transfer with one word, and returns an empty list.
    """
    source, target = (node * each for node in ends)
    word = torch.zeros(1, device=context.device)
    sends = context.rank == source

    def there() -> None:
        dist.send(payload, target)
        dist.recv(word, target)

    def back() -> None:
        dist.recv(payload, source)
        dist.send(word, source)

    seconds = [_seconds(context, there if sends else back) for _ in range(1 + NUM_TRANSFERS)]
    return seconds[1:] if sends else []


def _seconds(context: RankContext, run: Callable[[], object]) -> float:
    start = time.monotonic()
    run()
    if context.device.type == "cuda":
        torch.cuda.synchronize(context.device)
    return time.monotonic() - start
