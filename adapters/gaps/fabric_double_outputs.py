# /// script
# dependencies = ["lightning-fabric==2.6.6", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "Fabric's 64-true rounds what the model returns to float32"
# framework = "lightning-fabric"
# symptom = "The outputs of a model in float64 are float32, and with them the loss and the gradients that flow back."
# cause = """
# `DoublePrecision.convert_output` casts outputs to `torch.get_default_dtype()`, as mixed precision does, and is applied
# after the context in which that is float64 (lightning_fabric/wrappers.py, `_FabricModule`)."""
# processes = 1
# ///
import sys

import torch
from lightning_fabric import Fabric
from torch import nn

fabric = Fabric(accelerator="cpu", devices=1, precision="64-true")
model = fabric.setup(nn.Linear(4, 2))
outputs = model(torch.ones(1, 4, dtype=torch.float64))
if outputs.dtype is not torch.float64:
    sys.exit(f"expected: torch.float64; got: {outputs.dtype}")
