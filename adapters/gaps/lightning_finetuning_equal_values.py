# /// script
# dependencies = ["pytorch-lightning==2.6.6", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "BaseFinetuning does not train unfrozen parameters whose values another parameter has"
# framework = "pytorch-lightning"
# symptom = """
# Biases of zeros and norms' weights of ones stay out of the optimizer once they are unfrozen, where a head has such a \
# tensor of the same shape. A warning says that they are in another group already, which is not so."""
# cause = """
# filter_on_optimizer asks torch.equal, which compares values, whether the optimizer has a parameter."""
# processes = 1
# ///
import sys

import torch
from pytorch_lightning.callbacks import BaseFinetuning
from torch import nn

head, backbone = nn.LayerNorm(4), nn.LayerNorm(4)  # weights of ones and biases of zeros
BaseFinetuning.freeze(backbone)
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
BaseFinetuning.unfreeze_and_add_param_group(backbone, optimizer)
held = {id(p) for group in optimizer.param_groups for p in group["params"]}
found = sum(id(p) in held for p in backbone.parameters())
if found != 2:
    sys.exit(f"expected: the optimizer has the 2 unfrozen parameters of the backbone; got: {found}")
