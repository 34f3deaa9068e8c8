"""Real adapters under many names. Each name is one case of a session: `ddp_7` is `ddp` for the seventh time.

An adapter writes its name to a file when its case begins, in the process that launches it: what has begun must leave
a record. Every second one also starts two processes on each rank, one of them in a session of its own, as data loaders
and compilers do. They must end with the rank.
"""

from __future__ import annotations

import os
import subprocess
from typing import Any

from benchmarks.chaos.processes import CHILD
from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.spec.case import Case

BEGUN = "MESHMARK_CHAOS_BEGUN"
"""Environment variable with the file to which the names of cases are appended as they begin."""


def __getattr__(name: str) -> type[Adapter]:
    base, _, number = name.rpartition("_")
    target = builtin_adapters().get(base.replace("_", "-"))
    if not target or not number.isdigit():
        raise AttributeError(name)
    whole = load_adapter(target)

    class Numbered(whole):  # type: ignore[misc, valid-type]
        @classmethod
        def environment(cls, device: str) -> dict[str, str]:
            with open(os.environ[BEGUN], "a") as begun:
                begun.write(f"{name}\n")
            variables: dict[str, str] = whole.environment(device)
            return variables

        def build(self, case: Case, context: RankContext) -> Engine:
            if int(number) % 2:
                start_children(name)
            engine: Engine = whole.build(self, case, context)
            return engine

    adapter: Any = Numbered
    return adapter  # type: ignore[no-any-return]


def start_children(name: str) -> None:
    """Start two processes that would run for ever: one in this rank's process group, one in a session of its own."""
    for is_apart in (False, True):
        subprocess.Popen(
            ["sleep", "infinity"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=is_apart,
            env={**os.environ, CHILD: name},
        )
