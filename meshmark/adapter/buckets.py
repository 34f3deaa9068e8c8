"""Traffic that PyTorch's DistributedDataParallel sends once, as does every adapter that wraps it."""

from __future__ import annotations

from meshmark.reference.build import parameter_shapes
from meshmark.spec.case import Case
from meshmark.spec.own_model import OwnModelConfig
from meshmark.theory.flow import OneTimeTraffic


def rebuilt_buckets(case: Case) -> OneTimeTraffic:
    """Return what DDP sends when it puts gradients into buckets again, by the order that the first step has shown.

    Rank 0 broadcasts the index of each parameter and the size of each bucket, of at most one parameter each
    (`Reducer::sync_bucket_indices`), in the second step.
    """
    model = case.workload.model
    count = model.num_tensors if isinstance(model, OwnModelConfig) else len(parameter_shapes(model))
    return OneTimeTraffic(
        kind="broadcast",
        steps=(1,),
        most_bytes=4 * (2 * count + 1),
        most_calls=2,
        reason="buckets are made again after the first step, and rank 0 tells which",
    )
