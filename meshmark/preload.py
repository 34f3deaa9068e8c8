"""Imported once by the forkserver, so that every rank starts with PyTorch and the frameworks in place.

MESHMARK_PRELOAD names the frameworks' modules. What cannot be imported here is left to the rank that needs it, where
it becomes that case's outcome.
"""

import contextlib
import gc
import importlib
import os

_ALWAYS = (
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.profiler",
    "meshmark.worker",
)
for _name in (*_ALWAYS, *filter(None, os.environ.get("MESHMARK_PRELOAD", "").split(","))):
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
gc.freeze()  # keeps the children's collector from touching, and so copying, every shared page
