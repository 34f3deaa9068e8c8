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

    Optional class attributes:

    - `optimizer`, a `meshmark.spec.optimizer.OptimizerSpec`; by default AdamW with clipping. Its `no_decay` takes shell
      patterns of the names of parameters without weight decay.
    - `units`, names of the classes whose modules are sharded, wrapped or recomputed one by one.
    - `algorithm`, the id of an algorithm such as "local-sgd2", or a `meshmark.spec.algorithm.Algorithm`.
    - `couples_rows`, True where rows enter one another's loss, as in a contrastive one: it is then judged by
      micro-batches.

    Optional methods:

    - `layers(model)` returns the parts of the model's forward pass in order, between which a pipeline is cut. The first
      takes what the loss gives the model; each of the others takes the one tensor that the part before it returned.
    - `tensor_parallel_plan()` returns a style for every module that is split, by its path, in which `*` stands for one
      part: `{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}`. Styles have Transformers' names, or are PyTorch's
      objects, such as `ColwiseParallel()`.
    - `weight(batch)` returns the weight alone, where the loss takes long.
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
