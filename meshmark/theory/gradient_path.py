"""How gradients travel within a step."""

from __future__ import annotations

from enum import StrEnum


class GradientPath(StrEnum):
    """How an eager framework's gradients get from the backward pass to the update, which decides what is alive
    meanwhile.
    """

    WHOLE = "whole"
    """Each gradient is a separate tensor until the update."""
    BUCKETS = "buckets"
    """Gradients are views of DDP's buckets, which exist from the start of the step.

    Those of all micro-batches but the last accumulate in separate tensors (`gradient_as_bucket_view`, `no_sync`).
    """
    STAGED = "staged"
    """DeepSpeed's stage 1: whole until the last micro-batch is over, then through a bucket into the rank's part.

    See `reduce_ipg_grads` and `copy_grads_in_partition` of its runtime/zero/stage_1_and_2.py.
    """
    FLATTENED = "flattened"
    """DeepSpeed without ZeRO: whole until the last micro-batch is over, then through one flat copy of all of them.

    See `buffered_allreduce_fallback` of its runtime/engine.py.
    """
    STREAMED = "streamed"
    """DeepSpeed's stage 2: through a bucket into the rank's part during every micro-batch's backward pass
    (`streamed.py`).
    """
    MODULES = "modules"
    """DeepSpeed's stage 3: as stage 2, into a permanent flat tensor, with each module's weights gathered
    separately.
    """
    UNITS = "units"
    """FSDP: block by block whole, then reduce-scattered.

    Gradients outside all blocks are reduced together at the end.
    """
    FLAT_UNITS = "flat units"
    """FSDP1: as `UNITS`, with each unit's gradients combined in one flat tensor.

    It is widened if the reduction is wide, and stays until the reduction is done. Shards stay until the next forward
    pass (`_post_backward_hook` of PyTorch's distributed/fsdp/_runtime_utils.py).
    """


DEEPSPEED_PATHS = (GradientPath.STAGED, GradientPath.STREAMED, GradientPath.MODULES)
