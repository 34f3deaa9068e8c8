"""What a rank that hangs was communicating: told when the launcher asks, before it ends the rank.

A thread of the rank's own waits in the kernel, on a named pipe in the launch's folder, and costs nothing until somebody
opens that. It answers while the main thread hangs in a collective or a stream, for there Python's lock is free.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from meshmark.clip import told
from meshmark.measure.flight_recorder import dump, under_way
from meshmark.run.rank_info import RankInfo


def answer_when_asked(info: RankInfo) -> None:
    """From here on; the flight recorder must be on."""
    pipe = info.file("ask")
    os.mkfifo(pipe, 0o600)
    threading.Thread(target=_answer, args=(pipe, info.file("collectives")), daemon=True).start()


def _answer(pipe: Path, file: Path) -> None:
    with pipe.open():  # until the launcher opens it too
        pass
    try:
        text = "\n".join(under_way(dump()["entries"])) or "nothing was communicated"
    except Exception as error:
        text = f"the flight recorder cannot be read: {told(error)}"
    file.write_text(text + "\n")


def ask(info: RankInfo) -> bool:
    """Whether the rank listens; its answer comes into its file `collectives`."""
    try:
        os.close(os.open(info.file("ask"), os.O_WRONLY | os.O_NONBLOCK))
    except OSError:  # no pipe, or nobody at its other end
        return False
    return True
