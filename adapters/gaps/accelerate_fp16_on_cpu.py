# /// script
# dependencies = ["accelerate==1.15.0", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "mixed_precision=fp16 is dropped on a CPU"
# framework = "accelerate"
# symptom = "Products are computed in float32. Nothing is said."
# cause = "Accelerator enables fp16 autocast on accelerators only, and neither warns nor raises elsewhere."
# processes = 2
# ///
import sys

import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator(cpu=True, mixed_precision="fp16")
layer = nn.Linear(4, 4)
dtypes = []
layer.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
model = accelerator.prepare(layer)
model(torch.ones(1, 4))
if dtypes[0] != torch.float16:
    sys.exit(f"expected: torch.float16, or an error; got: {dtypes[0]}")
