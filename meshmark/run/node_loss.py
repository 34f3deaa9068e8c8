"""What becomes of a run whose nodes are not all there any more."""

from __future__ import annotations

import os
from enum import StrEnum

from meshmark.errors import UnknownNameError


class NodeLoss(StrEnum):
    """What to do about it."""

    END = "end"
    """End the run, in good order."""
    CONTINUE = "continue"
    """Go on with the nodes that are left, and the cases that fit them; node 0 must be one, for it has the records."""


def node_loss(text: str) -> NodeLoss:
    """Raises `UnknownNameError`."""
    if text not in [*NodeLoss]:
        raise UnknownNameError("--on-node-loss", text, list(NodeLoss))
    return NodeLoss(text)


def rank_room(device: str, num_gpus: int) -> int:
    """Ranks that this node can hold: one a GPU, or a core."""
    return num_gpus if device == "cuda" else len(os.sched_getaffinity(0))
