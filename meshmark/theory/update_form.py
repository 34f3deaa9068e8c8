"""How an optimizer step visits a rank's parameters, and which temporaries it makes."""

from __future__ import annotations

from enum import StrEnum


class UpdateForm(StrEnum):
    """Form of a step of PyTorch's AdamW (torch/optim/adam.py)."""

    LOOP = "loop"
    """One parameter after another, with two temporaries of its size. PyTorch's default on a CPU."""
    FOREACH = "foreach"
    """All parameters of a group at once, with the roots of all its second moments. PyTorch's default on a GPU."""
    FUSED = "fused"
    """One kernel in place, as Apex's and DeepSpeed's do."""
