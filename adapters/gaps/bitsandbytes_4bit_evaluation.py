# /// script
# dependencies = ["bitsandbytes==0.50.2", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "bitsandbytes' 4-bit layers compute in bfloat16 in evaluation mode, whatever compute_dtype says"
# framework = "bitsandbytes"
# symptom = "On a CPU with AVX512-BF16, a float32 layer is off by 1e-3 of its output after `eval()`."
# cause = """
# `Linear4bit.forward` repacks the weights for a bfloat16 kernel in evaluation mode, without a look at `compute_dtype`.
# The quantized block maxima of `compress_statistics` are dropped on the way."""
# processor = "avx512_bf16"
# processes = 1
# ///
import sys

import torch
from bitsandbytes.nn import LinearNF4

torch.manual_seed(0)
layer = LinearNF4(128, 128, bias=False, compute_dtype=torch.float32).to("cpu")
inputs = torch.randn(4, 128)
with torch.no_grad():
    trained = layer.train()(inputs)
    evaluated = layer.eval()(inputs)
off = float((evaluated - trained).abs().max() / trained.abs().max())
if off > 1e-5:
    sys.exit(f"expected: the same output in training and in evaluation mode, to 1e-5; got: {off:.1e} off")
