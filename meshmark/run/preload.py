"""Imported once by the forkserver, so that every rank starts with PyTorch and the frameworks in place.

MESHMARK_PRELOAD names the frameworks' modules, MESHMARK_LAUNCHER the process that starts the server. What cannot be
imported here is left to the rank that needs it, where it becomes that case's outcome; what frameworks print while they
are imported is left out for the same reason.
"""

import contextlib
import gc
import importlib
import os
from collections.abc import Iterator

from meshmark.run.orphans import adopt_orphans, die_with_parent

_ALWAYS = (
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.profiler",
    "meshmark.run.worker",
)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Point this process's output nowhere for a while."""
    kept = [os.dup(stream) for stream in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        yield
    finally:
        for stream, old in zip((1, 2), kept, strict=True):
            os.dup2(old, stream)
            os.close(old)
        os.close(nowhere)


adopt_orphans()
die_with_parent(int(os.environ["MESHMARK_LAUNCHER"]))  # an import can hang
with _silence():
    for _name in (*_ALWAYS, *filter(None, os.environ.get("MESHMARK_PRELOAD", "").split(","))):
        with contextlib.suppress(Exception):
            importlib.import_module(_name)
gc.freeze()  # keeps the children's collector from touching, and so copying, every shared page
die_with_parent(None)  # from here on the server sees by itself that the launcher is gone, and ends its children first
