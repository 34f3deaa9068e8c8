# /// script
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "DeepSpeed's async_io writes nothing from memory at an odd address"
# framework = "deepspeed"
# symptom = "The file stays empty. wait() reports success."
# cause = """
# Direct I/O needs aligned memory. _swap_in_pinned_gradients of partitioned_optimizer_swapper.py reads each
# gradient to where it stands in its group: with a hidden width of 400, ZeRO-Infinity trains by other gradients."""
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
part = memory.narrow(0, 1, WHOLE)
with tempfile.TemporaryDirectory(dir=".") as folder:
    file = Path(folder) / "part"
    assert handle.async_pwrite(part, str(file), 0) == 0
    done = handle.wait()
    written = file.stat().st_size
if written != 4 * part.numel():
    sys.exit(f"expected: {4 * part.numel()} bytes; got: {written}, with {done} operation reported as done")
