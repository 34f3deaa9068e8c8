"""One rank under torchrun: `torchrun ... -m meshmark.run.torchrun_rank REQUEST.json`. What it measured, or why it
failed, is left beside the request."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from meshmark.run.orphans import die_with_parent
from meshmark.run.rank_info import RankInfo
from meshmark.run.request import Request
from meshmark.run.worker import run_rank
from meshmark.serial import decode


def main(file: Path) -> NoReturn:
    """Ranks meet in a file beside the request, in a folder that this user alone can open, and need no port."""
    die_with_parent(os.getppid())
    rank, local_rank, world_size, local_world_size = (
        int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    )
    info = RankInfo(
        rank=rank,
        local_rank=local_rank,
        local_world_size=local_world_size,
        world_size=world_size,
        host="127.0.0.1",
        port=0,
        prefix="torchrun",
        folder=file.parent,
    )
    info.file("pid").write_text(str(os.getpid()))
    mark = open(info.file("asked_to_end"), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGTERM, file=mark, chain=True)  # by the agent, when another rank has failed
    run_rank(decode(Request, json.loads(file.read_text())), info)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
