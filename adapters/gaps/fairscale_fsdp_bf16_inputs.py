# /// script
# dependencies = ["fairscale==0.4.13", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "FairScale's FSDP casts inputs to fp16 where bf16 is asked for"
# framework = "fairscale"
# symptom = "A linear layer raises: its input is Half and its weight BFloat16."
# cause = """
# cast_floats_to_right_precision, which the outermost wrapper calls in mixed precision, says x.half() whatever
# compute_dtype is."""
# processes = 2
# ///
import contextlib
import sys
import types

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import FullyShardedDataParallel, fully_sharded_data_parallel
from torch import nn

dist.init_process_group("gloo")
if not torch.cuda.is_available():  # FairScale takes CUDA's streams for granted. These do nothing.
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    without_streams = types.ModuleType("torch")
    without_streams.__getattr__ = lambda name: getattr(torch, name)
    without_streams.cuda = types.SimpleNamespace(
        is_available=lambda: True,
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda stream: contextlib.nullcontext(),
        synchronize=lambda: None,
    )
    fully_sharded_data_parallel.torch = without_streams
    torch.Tensor.record_stream = lambda self, stream: None


model = FullyShardedDataParallel(
    nn.Linear(4, 4),
    compute_device=torch.device("cpu"),
    mixed_precision=True,
    compute_dtype=torch.bfloat16,
    bucket_cap_mb=0,
)
try:
    model(torch.ones(1, 4)).sum().backward()
except RuntimeError as error:
    sys.exit(f"expected: a forward pass in bf16; got: {str(error)[:160]}")
