"""Checkpoints by PyTorch's torch.distributed.checkpoint: each rank writes what it holds, under canonical names, and
reads what it needs, in whatever layout. Replicas that differ each write a file of their own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from meshmark.reference.objective import Schedule

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

# torch.distributed.checkpoint takes a second to import, which only ranks should take.


def save_local(folder: Path, state: dict[str, Any]) -> None:
    """Write `state` to a file of this rank. A collective call."""
    torch.save(state, _local_file(folder))
    dist.barrier()


def load_local(folder: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return what this rank passed to `save_local`."""
    state: dict[str, Any] = torch.load(_local_file(folder), map_location=device)
    return state


def _local_file(folder: Path) -> Path:
    return folder / f"state-{dist.get_rank()}.pt"


def save_sharded(folder: Path, model: nn.Module, optimizer: Optimizer, schedule: Schedule | None) -> None:
    """Write model, optimizer and schedule, if any, with torch.distributed.checkpoint. A collective call."""
    from torch.distributed.checkpoint.state_dict_saver import save

    save(_state(model, optimizer, schedule), checkpoint_id=folder)


def load_sharded(folder: Path, model: nn.Module, optimizer: Optimizer, schedule: Schedule | None) -> None:
    """Load what `save_sharded` wrote into objects that were built in the same way. A collective call."""
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    state = _state(model, optimizer, schedule)
    load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=_options()
    )
    if schedule:
        schedule.load_state_dict(state["schedule"])


def save_whole(folder: Path, model: nn.Module, optimizer: Optimizer, schedule: Schedule | None) -> None:
    """Write one file of whole tensors, by the first rank. Frozen parameters are left out. A collective call."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    state = _state(model, optimizer, schedule, options)
    if dist.get_rank() == 0:
        torch.save(state, _whole_file(folder))
    dist.barrier()


def load_whole(folder: Path, model: nn.Module, optimizer: Optimizer, schedule: Schedule | None) -> None:
    """Read what `save_whole` wrote, by the first rank, which sends the others their shards. A collective call."""
    from torch.distributed.checkpoint import state_dict as of
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    first = dist.get_rank() == 0
    state = torch.load(_whole_file(folder), map_location="cpu") if first else {"model": {}, "optimizer": {}}
    # Not by `set_state_dict`, which ranks without weights leave early (adapters/gaps/dcp_broadcast_empty_model.py).
    of.set_model_state_dict(model, state["model"], options=options)
    of.set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    if schedule:  # read by every rank, for pickled objects are not taken from a peer; mapped, no weights are read
        schedule.load_state_dict(torch.load(_whole_file(folder), map_location="cpu", mmap=True)["schedule"])


def save_in_background(folder: Path, model: nn.Module, optimizer: Optimizer, schedule: Schedule | None) -> None:
    """As `save_sharded`, by a thread, which is waited for. A collective call."""
    from torch.distributed.checkpoint.state_dict_saver import async_save

    state = _state(model, optimizer, schedule)
    async_save(state, checkpoint_id=folder).result()  # type: ignore[union-attr]


def load_converted(folder: Path, model: nn.Module, optimizer: Optimizer, schedule: Schedule | None) -> None:
    """Make one file of what `save_in_background` or `save_sharded` wrote, and load it whole. A collective call."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    if dist.get_rank() == 0:
        dcp_to_torch_save(folder, _whole_file(folder))
    dist.barrier()
    state = torch.load(_whole_file(folder), map_location="cpu")
    # Not flattened, as it was saved (adapters/gaps/dcp_full_flattened_optimizer.py).
    options = StateDictOptions(full_state_dict=True)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
    )
    if schedule:  # what was empty is not in the file (adapters/gaps/dcp_converted_empty_container.py)
        schedule.load_state_dict({**schedule.state_dict(), **state["schedule"]})


def _whole_file(folder: Path) -> Path:
    return folder / "whole.pt"


def _state(
    model: nn.Module, optimizer: Optimizer, schedule: Schedule | None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer, options=options or _options())
    return {"model": weights, "optimizer": moments, "schedule": schedule.state_dict() if schedule else {}}


def _options() -> StateDictOptions:
    """Return options that flatten the optimizer's state to one entry for each parameter.

    The ranks of a pipeline have different parameters, and so different groups.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(flatten_optimizer_state_dict=True)
