# /// script
# dependencies = ["torch==2.13.0"]
#
# [tool.meshmark]
# title = "The float32 norm of a large CPU tensor is short"
# framework = "torch"
# symptom = "torch.linalg.vector_norm of 40 million elements is 0.3 % too small; of 85 million, 0.9 %."
# cause = """
# Squares are added in float32 in few partial sums. Clipping by the norm of one flat tensor, as FairScale's FSDP
# does, scales gradients by another factor than clipping by the norm of each parameter's norm."""
# processes = 1
# ///
import sys

import torch

flat = torch.randn(40_000_000, generator=torch.Generator().manual_seed(0))
exact = sum(float(part.double().square().sum()) for part in flat.split(1_000_000)) ** 0.5
error = abs(float(torch.linalg.vector_norm(flat)) / exact - 1)
if error > 1e-4:
    sys.exit(f"expected: the norm to 1e-4; got: an error of {error:.2g}")
