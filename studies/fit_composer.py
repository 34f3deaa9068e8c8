"""Fit composer's rates to llm-foundry's runs of two model sizes; the others are held out."""

from __future__ import annotations

import dataclasses

import numpy as np

from meshmark.plan.rates import NCCL, Rates
from meshmark.theory.grid import Column
from studies.fit import fit_rates
from studies.validate_fsdp import FITTED_MODELS, mpt_rows, mpt_time_ratios

_BOUNDS = {"kernels.gemm_efficiency": (0.3, 0.95), "kernels.attention_efficiency": (0.05, 0.95)}


def fit_composer(pytorch: Rates, gpu_name: str) -> Rates:
    """Two numbers, the efficiency of matrix products and that of attention: these runs' is the first FlashAttention, in
    Triton, and their sequences have up to 65,536 tokens. All else is PyTorch's on that GPU."""
    rows = [row for row in mpt_rows() if row["gpu"].startswith(gpu_name) and row["model"] in FITTED_MODELS]

    def errors(given: Rates) -> Column:
        found: Column = -np.log(mpt_time_ratios(rows, given))
        return found

    name = f"{gpu_name.lower()}-composer"
    origin = f"mpt_fsdp_benchmarks, {len(rows)} rows of {' and '.join(sorted(FITTED_MODELS))}"
    start = dataclasses.replace(pytorch.moved(NCCL), name=name, origin=origin)
    return fit_rates(start, _BOUNDS, errors)
