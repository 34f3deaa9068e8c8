"""Horovod, where `make horovod` has built it: a tiny case, and its traffic beside Horovod's own log."""

from __future__ import annotations

import functools
import json
import math
import re
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.launch.launch import ForkserverLauncher
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from tests.broken.mutant import GPT
from tests.broken.roster import REDUCED
from tests.ranks import on_two_ranks, start_horovod

CASE = Case(adapter="horovod", workload=GPT, layout=REDUCED)
MISSING = load_adapter(builtin_adapters()["horovod"]).refusal(CASE, "cpu", "gloo")
built = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")


@pytest.mark.skipif(MISSING is None, reason="Horovod is built")
def test_where_it_is_not_built_the_skip_says_how() -> None:
    assert MISSING == "horovod is not installed: make horovod"


@built
def test_it_trains_as_planned(launcher: ForkserverLauncher, tmp_path: Path) -> None:
    runner = Runner(launcher, builtin_adapters(), RunOptions(observed_steps=3), tmp_path)
    record = runner.observe(CASE)
    runner.close()
    judged = {v.suite: v.passed for v in record.verdicts}
    assert judged == {"equivalence": True, "memory": True, "communication": True}, record.outcome.message


def told_and_logged(path: Path, rank: int) -> tuple[list[int], list[int]]:
    """Bytes of every all-reduce of one step as the source tells them, and as Horovod's timeline has them."""
    import os

    from meshmark.adapters.horovod.traffic import HorovodTraffic

    os.environ["HOROVOD_TIMELINE"] = str(path)
    hvd = start_horovod(rank)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    source = HorovodTraffic(2)
    source.start()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    source.stop()
    hvd.allreduce(torch.zeros(1), name="last")
    hvd.allreduce(torch.zeros(1), name="after it")  # a new name flushes the file
    told = sorted(transfer.num_bytes for transfer in source.requested())
    return told, _logged(path) if rank == 0 else []


def _logged(path: Path) -> list[int]:
    """Return the sizes of float32 all-reduces that ended before that of a single number, which comes last."""
    deadline, shapes = time.monotonic() + 30, list[list[int]]()
    while [1] not in shapes and time.monotonic() < deadline:
        time.sleep(0.05)
        found = re.findall(r'"dtype": "float32", "shape": "(\[[\d, ]*\])"', path.read_text())
        shapes = [json.loads(shape) for shape in found]
    return sorted(4 * math.prod(shape) for shape in shapes[: shapes.index([1])])


@built
def test_its_traffic_is_what_its_own_timeline_has(tmp_path: Path) -> None:
    told, logged = on_two_ranks(functools.partial(told_and_logged, tmp_path / "timeline.json"))
    assert told == logged == sorted(4 * size for size in (15, 5, 10, 2))
