"""The base class of a user's own workload: a model, its batches and its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `import meshmark` must not import torch
    from torch import Tensor, nn


class Workload(ABC):
    """A training problem of your own, in plain PyTorch.

    `--workload path/to/file.py:Class` trains and judges it under every adapter that wraps a module. Any class with
    these three methods works; deriving from this one is optional.

    Optional class attributes:

    - `optimizer`, a `meshmark.spec.optimizer.OptimizerSpec`; by default AdamW with clipping. Its `no_decay` takes shell
      patterns of the names of parameters without weight decay.
    - `units`, names of the classes whose modules are sharded, wrapped or recomputed one by one.
    - `algorithm`, the id of an algorithm such as "local-sgd2", or a `meshmark.spec.algorithm.Algorithm`.
    - `couples_rows`, True if rows affect each other's loss, as in a contrastive loss. It is then judged by
      micro-batches.

    Optional methods:

    - `layers(model)` returns the parts of the model's forward pass in order, between which a pipeline is cut. The first
      takes what the loss gives the model; each of the others takes the one tensor that the part before it returned.
    - `tensor_parallel_plan()` returns a style for every module that is split, by its path, in which `*` stands for one
      part: `{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}`. Styles have Transformers' names, or are PyTorch's
      objects, such as `ColwiseParallel()`.
    - `weight(batch)` returns only the weight, for a loss that is slow.
    """

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a new module with the initial values that your own code draws. The random seed is set before."""

    @abstractmethod
    def batch(self, step: int) -> Any:  # noqa: ANN401
        """Return the global batch of `step`: any tree of tensors with equal numbers of rows in the first dimension.

        It must depend only on the step. Draw with `torch.Generator().manual_seed(step)`.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        """Return the summed loss of some rows and its weight. The mean loss is the sum divided by the weight.

        The loss of the global batch is divided by the weight of all its rows, such as the number of tokens that count,
        however rows are split over ranks and micro-batches.
        """
