"""How an eager framework's backward pass handles gradients and gathered weights."""

from __future__ import annotations

from dataclasses import dataclass

from meshmark.theory.gradient_path import GradientPath


@dataclass(frozen=True, kw_only=True)
class EagerBackward:
    """How an eager framework's backward pass handles gradients and gathered weights."""

    gradient_path: GradientPath = GradientPath.WHOLE
    loss_tensors: float = 2.0
    """Number of tensors of the logits' size that the loss's backward makes beyond its input.

    These are the gradients of the log-softmax and of the logits; zero if it works in place.
    """
    prefetches: bool = True
    """True if FSDP gathers one block ahead in the backward pass, and keeps gradients being reduced until the next
    block's.
    """
    keeps_root: bool = False
    """True if FSDP keeps parameters outside all blocks gathered from the forward to the backward pass."""
    kept_share: float = 0.0
    """Share of a block's gathered weights that stays until its backward. With 1, they are not gathered again."""
    num_reductions: int = 1
    """Number of blocks whose gradients FSDP2 keeps in reduction at a time (`set_reduce_scatter_max_input_buffers`)."""
    accumulates_outside_buckets: bool = True
    """True if gradients that DDP has not reduced yet lie next to its buckets.

    False if it reduces every micro-batch.
    """
    interleaves: bool = False
    """True if several chunks of a pipeline rank run as in interleaved 1F1B.

    The peak of other orders is not planned.
    """
    bucket_elements: int | None = None
    """Elements of each of DeepSpeed's `num_buckets` buckets at stage 2.

    None means the size that the suites configure.
    """
    num_buckets: int = 1
