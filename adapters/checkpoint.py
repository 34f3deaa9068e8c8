"""Checkpoints by PyTorch's torch.distributed.checkpoint: each rank writes what it holds, under canonical names, and
reads what it needs, in whatever layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from meshmark.reference.objective import Schedule

# One entry a parameter: the ranks of a pipeline have different ones, and so different groups.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def save_sharded(folder: Path, model: nn.Module, optimizer: Optimizer, schedule: Schedule | None) -> None:
    """`schedule`: PyTorch's scheduler, or None. A collective call."""
    save(_state(model, optimizer, schedule), checkpoint_id=folder)


def load_sharded(folder: Path, model: nn.Module, optimizer: Optimizer, schedule: Schedule | None) -> None:
    """Into objects built as those were that `save_sharded` was given. A collective call."""
    state = _state(model, optimizer, schedule)
    load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=_OPTIONS
    )
    if schedule:
        schedule.load_state_dict(state["schedule"])


def _state(model: nn.Module, optimizer: Optimizer, schedule: Schedule | None) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer, options=_OPTIONS)
    return {"model": weights, "optimizer": moments, "schedule": schedule.state_dict() if schedule else {}}
