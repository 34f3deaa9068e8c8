"""DeepSpeed's configuration, and its settings for a whole process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

import torch

from meshmark.adapter.engine import RankContext
from meshmark.errors import AdapterError
from meshmark.spec.case import Case
from meshmark.spec.precision import Dtype
from meshmark.theory.model_theory import bucket_elements


def closed_form_options(case: Case) -> dict[str, Any]:
    """The choices of `zero_optimization` that make it ZeRO's closed form, and its buckets fit small models."""
    return {
        # Stage 3 allocates the bucket whole, 2 GB by default.
        "reduce_bucket_size": bucket_elements(case.workload.model),
        "stage3_param_persistence_threshold": 0,  # 1e5 by default: smaller parameters are not sharded
        # The defaults keep gathered what is used again within 1e9 elements, or comes up in a look-ahead of 5e7 that
        # skips what is there already: all of a small model, from forward to backward. Off, stage 3 is ZeRO's: every
        # layer is gathered when it is used. (Without look-ahead gathers do not overlap with computation.)
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
    }


def ds_config(case: Case, zero: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """DeepSpeed's configuration for `case`. `zero`: its choices of `zero_optimization`; None: every one that changes
    memory, traffic or arithmetic made explicit, as theory says."""
    layout, clip_norm = case.layout, case.workload.optimizer.clip_norm
    micro_batch = case.workload.global_batch // (layout.dp * layout.num_micro_batches)
    return {
        "train_batch_size": case.workload.global_batch,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": layout.num_micro_batches,
        "gradient_clipping": 0.0 if clip_norm is None else clip_norm,  # left out, it would be 1.0
        "zero_optimization": {"stage": layout.zero_stage, **(closed_form_options(case) if zero is None else zero)},
        "zero_allow_untested_optimizer": True,  # SGD is none of the "tested"
        "zero_force_ds_cpu_optimizer": False,  # its own CPU optimizers are Adam and Lion alone
        "bf16": {"enabled": case.precision.compute is Dtype.BF16},
        "fp16": {"enabled": case.precision.compute is Dtype.FP16},
        "communication_data_type": "fp32",  # otherwise gradients are reduced in bf16 or fp16
        "data_types": {"grad_accum_dtype": "fp32"},  # otherwise they are accumulated in bf16 or fp16
    }


def prepare(context: RankContext) -> None:
    """Hold DeepSpeed to the context's device, and keep it from compiling. Raises `AdapterError` on another device."""
    if context.device.type == "cuda":
        os.environ["LOCAL_RANK"] = str(context.device.index)  # which it takes for a GPU's, but ranks may share one
    # As its launcher does. On a CPU it would otherwise start `numactl` four times a step, to count the devices.
    os.environ["LOCAL_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    name = get_accelerator().device_name().partition(":")[0]
    if name != context.device.type:
        raise AdapterError(
            f"rank {context.rank}: DeepSpeed chose the accelerator {name!r}, the case runs on {context.device.type!r}; "
            f"set DS_ACCELERATOR={context.device.type} before deepspeed is imported"
        )
    if torch.distributed.get_backend() == "fake":
        _agree_with_rank_0()
    if name == "cpu":
        # On a CPU init_distributed compiles a shared-memory operator for a minute (gloo is used all the same). It asks
        # this table whether it may, and looking in fills the table first, by running compilers.
        deepspeed.ops.__compatible_ops__ = {}


def _agree_with_rank_0() -> None:
    """Have stage 3 take its own lists for rank 0's, which it compares with: a fake world has no rank 0 to send any.
    It asks all the same, so that what is sent is what a real world sends."""
    from deepspeed.runtime.zero import utils

    ask_length, ask = utils.assert_lst_len_same_as_other_ranks, utils.get_lst_from_rank0

    def same_length(lst: list[int]) -> None:
        with contextlib.suppress(RuntimeError):
            ask_length(lst)

    def same(lst: list[int]) -> list[int]:
        ask(lst)
        return lst

    utils.assert_lst_len_same_as_other_ranks, utils.get_lst_from_rank0 = same_length, same
