"""Fit megatron-core's rates on the H100 to three models under NeMo."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Set

import numpy as np

from meshmark.plan.layout_table import batches
from meshmark.plan.prediction import predict_grid
from meshmark.plan.rates import NCCL, HostRates, KernelRates, Rates
from meshmark.plan.rows import number
from meshmark.spec.hardware import gpu
from meshmark.theory.grid import Column
from meshmark.theory.recipe import recipe
from studies.fit import fit_rates
from studies.papers import paper

_BOUNDS = {"kernels.gemm_efficiency": (0.3, 0.95), "network.tensor_overlap": (0.01, 0.95)}
_HALF_WIDTH = 331.0
"""As on the A100, where Megatron SC21's table 1 tells it."""
_ATTENTION, _HALF_LENGTH = 0.645, 1200.0
"""Share of peak that attention reaches on long sequences, forward and backward together, and the tokens for half of it:
0.401, 0.508, 0.573, 0.610 and 0.615 for 2,048 to 32,768 tokens, by cuDNN 9.19 on H200, which has the H100's chip
(github:NVIDIA/cudnn-frontend df73764 benchmark/sdpa_benchmark_training/results/h200_919_only_cudnn; within 2 %)."""


MODELS = frozenset({"llama3-8b", "llama3-70b", "nemotron4-15b"})


def nemo_errors(models: Set[str] = MODELS) -> Callable[[Rates], Column]:
    """A residual for fitting: the logarithm of predicted over measured step time, of some models' rows."""
    table = [row for row in paper("nemo_h100_bf16") if row["model"] in models]
    rows = list(batches(table))

    def errors(given: Rates) -> Column:
        found = []
        for batch in rows:
            using = recipe("megatron-core")
            predicted = predict_grid(batch.model, batch.grid, gpu(batch.gpu_name), using, given)
            rate = np.array([number(table[i], "measured_tokens_per_s_per_gpu") for i in batch.rows])
            found.append(np.log(rate / predicted.tokens_per_second_per_gpu))
        return np.concatenate(found)

    return errors


def fit_megatron_core(pytorch: Rates, models: Set[str] = MODELS) -> Rates:
    """Two numbers, the efficiency of matrix products and the share of tensor-parallel collectives that is hidden; the
    network is that of `pytorch`."""
    start = dataclasses.replace(
        pytorch,
        name="h100-megatron-core",
        origin="nemo_h100_bf16, all 20 rows; network of the sweep's cluster, attention by cuDNN's benchmark",
        kernels=KernelRates(
            gemm_efficiency=0.7,
            gemm_half_width=_HALF_WIDTH,
            attention_efficiency=_ATTENTION,
            attention_half_length=_HALF_LENGTH,
        ),
        network=dataclasses.replace(pytorch.moved(NCCL).network, tensor_overlap=0.3),
        host=HostRates(),
    )
    return fit_rates(start, _BOUNDS, nemo_errors(models))
