"""How an optimizer's step goes over the parameters of a rank, and so what it makes besides."""

from __future__ import annotations

from enum import StrEnum


class UpdateForm(StrEnum):
    """Of PyTorch's AdamW (torch/optim/adam.py)."""

    LOOP = "loop"
    """One parameter after another, with two temporaries of its size: PyTorch's default on a CPU."""
    FOREACH = "foreach"
    """All of a group at once, with the roots of all its second moments: PyTorch's default on a GPU."""
    FUSED = "fused"
    """In one kernel, in place; so do Apex's and DeepSpeed's."""
