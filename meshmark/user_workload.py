"""The class that a user's own workload derives from: a model, its batches and its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `import meshmark` must not import torch
    from torch import Tensor, nn


class Workload(ABC):
    """A training problem of your own, in plain PyTorch.

    `--workload path/to/file.py:Class` trains and judges it under every adapter that wraps a module. A class with these
    three methods is enough; deriving from this one is a convenience.

    Optional class attributes: `optimizer`, a `meshmark.spec.optimizer.OptimizerSpec` (by default AdamW with clipping);
    `couples_rows`, True where rows enter one another's loss, as in a contrastive one: it is then judged by
    micro-batches. An optional method `weight(batch)` returns the weight alone, where the loss takes long.
    """

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a new module, with the initial values that your own code draws; the random seed is set before."""

    @abstractmethod
    def batch(self, step: int) -> Any:  # noqa: ANN401
        """Return the global batch of `step`: any tree of tensors, all with as many rows along the first dimension.

        It must be a function of the step alone; draw with `torch.Generator().manual_seed(step)`.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        """Return the loss of some rows as a sum and its weight, so that the mean is the sum over the weight.

        The weight of all rows together, such as the number of tokens that count, is what the loss of the global batch
        is divided by, however rows are dealt to ranks and micro-batches.
        """
