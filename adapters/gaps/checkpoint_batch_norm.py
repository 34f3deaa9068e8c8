# /// script
# dependencies = ["torch==2.13.0"]
#
# [tool.meshmark]
# title = "A batch norm under torch.utils.checkpoint counts each batch twice"
# framework = "torch"
# symptom = "Running statistics and num_batches_tracked are updated twice for one batch."
# cause = """
# The forward pass that is run again in the backward pass updates them again. FairScale's checkpoint_wrapper does
# not."""
# processes = 1
# ///
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

for use_reentrant in (False, True):
    norm = nn.BatchNorm1d(2)
    x = torch.randn(4, 2, requires_grad=True)
    checkpoint(norm, x, use_reentrant=use_reentrant).square().sum().backward()
    if int(norm.num_batches_tracked) != 1:
        sys.exit(f"expected: 1 batch tracked; got: {int(norm.num_batches_tracked)} with {use_reentrant=}")
