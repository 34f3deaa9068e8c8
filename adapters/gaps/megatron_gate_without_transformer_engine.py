# /// script
# dependencies = ["megatron-core==0.16.1", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "A gate of experts fails without Transformer Engine"
# framework = "megatron-core"
# symptom = "Every forward pass of a mixture of experts raises `NameError: name 'te_general_gemm' is not defined`."
# cause = """
# moe_utils.py asks whether `te_general_gemm` is None, and defines it only where Transformer Engine is installed."""
# processes = 1
# ///
import sys

import torch
from megatron.core.transformer.moe.moe_utils import router_gating_linear

tokens, weight = torch.ones(2, 4), torch.ones(3, 4)
try:
    scores = router_gating_linear(tokens, weight, None, torch.float32)
except NameError as error:
    sys.exit(f"expected: scores of 4 for 2 tokens and 3 experts; got: {error}")
if not torch.equal(scores, torch.full((2, 3), 4.0)):
    sys.exit(f"expected: scores of 4 for 2 tokens and 3 experts; got: {scores.tolist()}")
