# /// script
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "zero.Init ignores dtype for weights on NVMe where fp16 is not supported"
# framework = "deepspeed"
# symptom = "float32 weights are written to files as bf16."
# cause = """
# partition_parameters.py has `dtype or torch.float16 if fp16_supported else torch.bfloat16`, which Python reads
# as `(dtype or torch.float16) if ...`."""
# operators = "pin_memory async_io"
# processes = 2
# ///
import sys
import tempfile
from pathlib import Path

import deepspeed
import torch
from torch import nn

deepspeed.ops.__compatible_ops__ = {}  # On a CPU, DeepSpeed would compile an operator.
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
with tempfile.TemporaryDirectory(dir=".") as folder:
    home = {"device": "nvme", "nvme_path": folder, "buffer_size": 2**20, "pin_memory": False}
    deepspeed.zero.Init(
        module=nn.Linear(2**11, 2**10, bias=False),
        config_dict_or_path={"train_batch_size": 2, "zero_optimization": {"stage": 3, "offload_param": home}},
        remote_device="nvme",
        pin_memory=False,
        dtype=torch.float32,
    )
    (file,) = Path(folder).rglob("*param.tensor.swp")
    width = file.stat().st_size // 2**20  # each of two ranks holds 2**20 elements
if width != 4:
    sys.exit(f"expected: 4 bytes an element; got: {width}")
