"""Find the ranks that compute one forward pass together, as in tensor parallelism, and read what they compute.

They hold parts of one weight, use them as parts, and are given the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from meshmark.check.pieces import CannotTellError, is_dtensor
from meshmark.check.recording import Step
from meshmark.check.tree import tensors_in


def partners(root: nn.Module) -> tuple[int, ...]:
    """Return the ranks that compute together with this one, itself included. Empty: it computes alone.

    Raises `CannotTellError` if they are not the same for all weights.
    """
    sharding = {_ranks_of_fsdp(module) for module in root.modules()}
    found = {
        ranks
        for parameter in root.parameters()
        if is_dtensor(parameter)
        for ranks in _groups(parameter)
        if len(ranks) > 1 and ranks not in sharding
    }
    if len(found) > 1:
        raise CannotTellError(f"weights are sharded over {len(found)} groups of ranks that compute together")
    return next(iter(found), ())


def _groups(parameter: Any) -> Iterator[tuple[int, ...]]:  # noqa: ANN401
    """Yield the ranks along every axis of the mesh over which a parameter is sharded."""
    mesh, at = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    for axis, placement in enumerate(parameter.placements):
        if not (placement.is_replicate() or placement.is_partial()):  # strided shards are no `is_shard`
            yield tuple(mesh.mesh[(*at[:axis], slice(None), *at[axis + 1 :])].flatten().tolist())


def _ranks_of_fsdp(module: nn.Module) -> tuple[int, ...]:
    """Return the ranks over which FSDP2 shards the parameters of a unit. They are given different rows."""
    import torch.distributed as dist

    if not any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
        return ()
    unit = module._get_fsdp_state()._fsdp_param_group  # type: ignore[operator]
    group = getattr(unit and unit.mesh_info, "shard_process_group", None)
    return tuple(dist.get_process_group_ranks(group)) if group is not None else ()


def check_inputs(together: Sequence[Step], ranks: Sequence[int]) -> None:
    """Raise `CannotTellError` if ranks that compute together were given different rows."""
    first, *others = ([list(tensors_in(call.inputs)) for call in step.calls] for step in together)
    for rank, other in zip(ranks[1:], others, strict=True):
        if [len(call) for call in first] != [len(call) for call in other] or not all(
            a.shape == b.shape and bool((a == b).all())
            for own, theirs in zip(first, other, strict=True)
            for a, b in zip(own, theirs, strict=True)
        ):
            raise CannotTellError(
                f"ranks {ranks[0]} and {rank} compute one tensor-parallel forward pass, but read different rows: wrong "
                "unless each is given a part of the same rows (was data split by rank, not by data-parallel group?)"
            )
