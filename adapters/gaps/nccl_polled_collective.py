# /// script
# dependencies = ["torch==2.11.0"]
#
# [tool.meshmark]
# title = "NCCL's tensors outlive a collective that is polled and never waited for"
# framework = "torch"
# symptom = """
# FairScale's ShardedDDP holds the gradients that it has reduced after zero_grad, until the next collective."""
# cause = """
# ProcessGroupNCCL keeps the tensors of an asynchronous collective until wait(). Its watchdog sees the end, but leaves
# them to the next call of the main thread. FairScale asks is_completed() and never waits."""
# processes = 1
# gpu = true
# ///
import sys
import time

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    sys.exit("this script needs a GPU")

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
torch.cuda.set_device(0)
dist.all_reduce(torch.ones(8, device="cuda"))
torch.cuda.synchronize()


def held_after(*, waits: bool) -> int:
    """Return the bytes that are still allocated 1.5 s after the last reference to a reduced tensor is gone."""
    before = torch.cuda.memory_allocated()
    gradient = torch.ones(1_000_000, device="cuda")
    work = dist.reduce(gradient, 0, async_op=True)
    if waits:
        work.wait()
    while not work.is_completed():
        time.sleep(0.01)
    del gradient, work
    time.sleep(1.5)
    return torch.cuda.memory_allocated() - before


waited, polled = held_after(waits=True), held_after(waits=False)
if polled != waited:
    sys.exit(f"expected: {waited} bytes held, as after wait(); got: {polled}")
