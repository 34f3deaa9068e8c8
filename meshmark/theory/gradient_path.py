"""How gradients travel within a step."""

from __future__ import annotations

from enum import StrEnum


class GradientPath(StrEnum):
    """How an eager framework's gradients come from the backward pass to the update: what is alive meanwhile."""

    WHOLE = "whole"
    """Each in a tensor of its own until the update."""
    BUCKETS = "buckets"
    """As views of DDP's buckets, which are there from the start of the step; those of all micro-batches but the last
    accumulate beside them (`gradient_as_bucket_view`, `no_sync`)."""
    STAGED = "staged"
    """DeepSpeed's stage 1: whole until the last micro-batch is over, then through a bucket into the rank's part
    (`reduce_ipg_grads` and `copy_grads_in_partition` of its runtime/zero/stage_1_and_2.py)."""
    FLATTENED = "flattened"
    """DeepSpeed without ZeRO: whole until the last micro-batch is over, then through one flat copy of all of them
    (`buffered_allreduce_fallback` of its runtime/engine.py)."""
    STREAMED = "streamed"
    """DeepSpeed's stage 2: the same while every micro-batch's backward pass runs (`streamed.py`)."""
    MODULES = "modules"
    """DeepSpeed's stage 3: the same into a flat tensor for life, while each module's weights are gathered alone."""
    UNITS = "units"
    """FSDP: block by block whole, then reduce-scattered; what is in no block together at the end."""
    FLAT_UNITS = "flat units"
    """FSDP1: the same, each unit's put together to one flat tensor, which is widened where the reduction is wide, and
    there until that is done; shards are there until the next forward pass (`_post_backward_hook` of PyTorch's
    distributed/fsdp/_runtime_utils.py)."""


DEEPSPEED_PATHS = (GradientPath.STAGED, GradientPath.STREAMED, GradientPath.MODULES)
