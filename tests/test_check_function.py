"""`observed`: a function in a launcher's workers is judged as a script is."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WORKER = """
import torch, torch.distributed as dist
from torch import nn
from meshmark.check.function import observed

def train(own_limit):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draws = torch.Generator().manual_seed(dist.get_rank())
    while True:
        loss = nn.functional.cross_entropy(model(torch.randn(5, 4, generator=draws)), torch.arange(5) % 3)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05 * (1 + own_limit * dist.get_rank()))
        optimizer.step()

dist.init_process_group("gloo")
outcome = observed(train)({own_limit})
if dist.get_rank() == 0:
    print("outcome:", outcome)
"""


def _launched(tmp_path: Path, own_limit: bool) -> str:
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(own_limit=own_limit))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_function_of_workers_is_judged(tmp_path: Path) -> None:
    said = _launched(tmp_path, own_limit=False)
    assert "RIGHT: train trains as one process would in float64" in said and "outcome: right" in said


@pytest.mark.slow
def test_a_function_that_clips_by_rank_is_wrong(tmp_path: Path) -> None:
    said = _launched(tmp_path, own_limit=True)
    assert "WRONG: train" in said and "outcome: wrong" in said


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason='pip install "meshmark[ray]"')
def test_workers_of_ray_train_are_judged() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "ray" / "checked.py")],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
    )
    assert "RIGHT: loop trains as one process would in float64" in done.stdout + done.stderr
