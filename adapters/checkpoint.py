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
    """All that this rank holds, which no other does. A collective call."""
    torch.save(state, _local_file(folder))
    dist.barrier()


def load_local(folder: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return what this rank passed to `save_local`."""
    state: dict[str, Any] = torch.load(_local_file(folder), map_location=device)
    return state


def _local_file(folder: Path) -> Path:
    return folder / f"state-{dist.get_rank()}.pt"


def save_sharded(folder: Path, model: nn.Module, optimizer: Optimizer, schedule: Schedule | None) -> None:
    """`schedule`: PyTorch's scheduler, or None. A collective call."""
    from torch.distributed.checkpoint.state_dict_saver import save

    save(_state(model, optimizer, schedule), checkpoint_id=folder)


def load_sharded(folder: Path, model: nn.Module, optimizer: Optimizer, schedule: Schedule | None) -> None:
    """Into objects built as those were that `save_sharded` was given. A collective call."""
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    state = _state(model, optimizer, schedule)
    load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=_options()
    )
    if schedule:
        schedule.load_state_dict(state["schedule"])


def _state(model: nn.Module, optimizer: Optimizer, schedule: Schedule | None) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer, options=_options())
    return {"model": weights, "optimizer": moments, "schedule": schedule.state_dict() if schedule else {}}


def _options() -> StateDictOptions:
    """Return options that flatten the optimizer's state to one entry for each parameter.

    The ranks of a pipeline have different parameters, and so different groups.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(flatten_optimizer_state_dict=True)
