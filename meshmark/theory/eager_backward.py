"""How an eager framework's backward pass goes about gradients and gathered weights."""

from __future__ import annotations

from dataclasses import dataclass

from meshmark.theory.gradient_path import GradientPath


@dataclass(frozen=True, kw_only=True)
class EagerBackward:
    """How an eager framework's backward pass treats gradients and gathered weights."""

    gradient_path: GradientPath = GradientPath.WHOLE
    loss_tensors: float = 2.0
    """Of the logits' size, that the loss's backward makes beyond what it was given: the gradients of the log-softmax
    and of the logits. None where it works in place."""
    prefetches: bool = True
    """FSDP gathers a block ahead in the backward pass, and keeps what is being reduced until the next block's is."""
    keeps_root: bool = False
    """FSDP leaves what is in no block gathered from forward to backward pass."""
    kept_share: float = 0.0
    """Of a block's gathered weights, what stays until its backward; all of them are not gathered again."""
    accumulates_beside: bool = True
    """What DDP has not reduced yet lies beside its buckets; in them where it reduces every micro-batch."""
    interleaves: bool = False
    """Several chunks of a pipeline's rank run as in interleaved 1F1B: the peak of another order is not planned."""
    bucket_elements: int | None = None
    """Of DeepSpeed's buckets at stage 2, of which there are `num_buckets`; None: what the suites give it."""
    num_buckets: int = 1
