# /// script
# dependencies = ["torch==2.13.0", "bitsandbytes==0.50.2"]
#
# [tool.meshmark]
# title = "4-bit layers compute in bfloat16 on a CPU when float32 is asked for"
# framework = "bitsandbytes"
# symptom = """
# On a CPU with AVX512-BF16, `LinearNF4(compute_dtype=torch.float32)` in evaluation mode is off by 5e-3 after the first
# call: maxima of blocks, inputs and outputs are rounded to bfloat16. In training mode it is not."""
# cause = """
# `Linear4bit.forward` (bitsandbytes/nn/modules.py) calls `_convert_weight_packed_for_cpu` whatever the `compute_dtype`.
# That keeps `absmax` in bfloat16, and the kernel for it takes bfloat16 alone."""
# processes = 1
# ///
import sys

import torch
from bitsandbytes.nn import LinearNF4

torch.manual_seed(0)
layer = LinearNF4(64, 64, bias=False, compute_dtype=torch.float32)
layer.load_state_dict({"weight": torch.randn(64, 64)})
layer, x = layer.to("cpu"), torch.randn(8, 64)
with torch.no_grad():
    training, evaluation = layer.train()(x), layer.eval()(x)
error = float((training - evaluation).abs().max() / training.abs().max())
if error > 1e-5:
    sys.exit(f"expected: float32 outputs in both modes; got: evaluation mode is off by {error:.1e}")
