"""One timed pass as it is usually launched: `torchrun benchmarks/torchrun_case.py REQUEST`, a pickled request."""

from __future__ import annotations

import os
import pickle
import sys
import time
from pathlib import Path

import torch

from meshmark.adapter.engine import RankContext
from meshmark.adapter.registry import load_adapter
from meshmark.passes.timing import time_steps

if __name__ == "__main__":
    started = time.time()
    request = pickle.loads(Path(sys.argv[1]).read_bytes())
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    context = RankContext(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        device=torch.device("cpu"),
        backend="gloo",
        scratch=Path(sys.argv[1]).parent,
    )
    report = time_steps(request, load_adapter(request.adapter)(), context, started)
    assert len(report.step_seconds) == request.steps
    torch.distributed.destroy_process_group()
