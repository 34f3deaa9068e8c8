"""Where a rank stands in a launch, and the evidence that it leaves when it hangs."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from meshmark.measure.flight_recorder import dump, under_way
from meshmark.text import describe_error

# --- Where a rank stands in a launch.


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Where a rank stands in a launch."""

    rank: int
    local_rank: int
    local_world_size: int
    """Ranks of this launch on this node."""
    world_size: int
    host: str
    port: int
    """Port of the run's store. 0 if all ranks are on this node; the store is then a file in `folder`."""
    prefix: str
    """Keys of this launch in the store start with it."""
    folder: Path
    """Folder of this launch on this node, for reports, failures, logs and stacks."""

    def file(self, kind: str) -> Path:
        return self.folder / f"{kind}-{self.rank}"


# --- What a rank that hangs was communicating. The launcher asks for it before it ends the rank.


def answer_about_collectives(info: RankInfo) -> None:
    """Write what this rank communicates whenever the launcher asks. The flight recorder must be on."""
    pipe = info.file("ask")
    os.mkfifo(pipe, 0o600)
    threading.Thread(target=_answer, args=(pipe, info.file("collectives")), daemon=True).start()


def _answer(pipe: Path, file: Path) -> None:
    with pipe.open():  # until the launcher opens it too
        pass
    try:
        text = "\n".join(under_way(dump()["entries"])) or "nothing was communicated"
    except Exception as error:
        text = f"the flight recorder cannot be read: {describe_error(error)}"
    file.write_text(text + "\n")


def ask(info: RankInfo) -> bool:
    """Return whether the rank listens. Its answer is written to its file `collectives`."""
    try:
        os.close(os.open(info.file("ask"), os.O_WRONLY | os.O_NONBLOCK))
    except OSError:  # no pipe, or nobody at its other end
        return False
    return True
