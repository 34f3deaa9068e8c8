# /// script
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "DeepSpeed's async_io leaves out what is beyond the last 512 bytes"
# framework = "deepspeed"
# symptom = "A file of a tensor whose size is no multiple of 512 bytes is short. wait() reports success."
# cause = """
# Direct I/O takes whole blocks, and the rest is dropped. DeepSpeed's swappers pad to 1024 bytes and do not meet
# it, except with fast_init."""
# operators = "pin_memory async_io"
# processes = 1
# ///
import sys
import tempfile
from pathlib import Path

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder

WHOLE = 2**18  # elements: 1 MiB
handle = AsyncIOBuilder().load().aio_handle(2**20, 8, False, True, 1)
memory = handle.new_cpu_locked_tensor(2 * WHOLE, torch.empty(0)).copy_(torch.arange(2 * WHOLE))
part = memory.narrow(0, 0, WHOLE + 7)
with tempfile.TemporaryDirectory(dir=".") as folder:
    file = Path(folder) / "part"
    assert handle.async_pwrite(part, str(file), 0) == 0
    done = handle.wait()
    written = file.stat().st_size
if written != 4 * part.numel():
    sys.exit(f"expected: {4 * part.numel()} bytes; got: {written}, with {done} operation reported as done")
