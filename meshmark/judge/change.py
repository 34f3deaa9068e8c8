"""What a wrong run may compute in place of the model and its loss, for the truth and the twin to compute too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from meshmark.reference.data import Batch
from meshmark.reference.model import Model


def _as_it_is(_model: Model) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing that is computed otherwise."""

    within: Callable[[Model], contextlib.AbstractContextManager[None]] = _as_it_is
    """Context in which the forward pass runs. It undoes what it does to the model, which others use too."""
    loss: Callable[[Tensor, Batch], Tensor] | None = None
    """Replaces the share of the loss, as a function of the outputs and their part of the batch."""


UNCHANGED = Change()
