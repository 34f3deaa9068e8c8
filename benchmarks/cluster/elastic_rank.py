"""One rank under torchrun's elastic agent: `torchrun ... -m benchmarks.cluster.elastic_rank REQUEST.json REPORTS`. It
trains and saves halfway, until the last rank is killed; started again by its agent it goes on from what was saved."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

from meshmark.launch.rank import RankInfo, perform
from meshmark.passes.resume import TRACE
from meshmark.records.rank_report import RankReport
from meshmark.records.request import Request, Task
from meshmark.serial import decode, encode


def main(file: Path, reports: Path) -> int:
    request: Request = decode(Request, json.loads(file.read_text()))
    if request.task is Task.LOSE and (Path(request.checkpoint) / TRACE).exists():
        request = dataclasses.replace(request, task=Task.RESUME)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    info = RankInfo(
        rank=rank,
        local_rank=int(os.environ["LOCAL_RANK"]),
        local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        world_size=world_size,
        host="127.0.0.1",
        port=0,
        prefix=request.task,  # those of the first go are gone
        folder=reports,
    )
    ended = perform(request, info)
    info.file(f"{request.task}").write_text(json.dumps(encode(ended)))
    print(f"rank {rank} {request.task}: {ended if not isinstance(ended, RankReport) else 'done'}", flush=True)
    return 0 if isinstance(ended, RankReport) else 1


if __name__ == "__main__":
    code = main(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(code)  # a clean-up would wait for peers that are gone
