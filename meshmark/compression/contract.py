"""The interface that packages which make models smaller are put behind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from meshmark.adapter.contract import Requirement
from meshmark.compression.specification import Specification


class Method:
    """One method of one package."""

    requirement: ClassVar[Requirement | None] = None
    """The package. None for PyTorch's own methods."""

    @classmethod
    def refusal(cls) -> str:
        """Return why the method cannot run here and what to do, or nothing."""
        return (cls.requirement.missing or "") if cls.requirement else ""


class CompressionAdapter(Method, ABC):
    """A method that compresses a trained model."""

    specification: ClassVar[Specification]

    @abstractmethod
    def compress(self, model: nn.Module, example: Tensor) -> nn.Module:
        """Compress `model` in place and return it. `example` is an input of it, [rows, tokens]."""

    def finish(self, model: nn.Module) -> nn.Module:
        """Return the model in the mode in which it is used."""
        return model.eval()

    @abstractmethod
    def weight(self, layer: nn.Linear) -> Tensor:
        """Return the weight that a compressed layer stands for, [outputs, inputs]."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A moment that an optimizer keeps of one parameter."""

    values: Tensor
    """8-bit codes or float32 values, in the parameter's shape."""
    largest: Tensor | None
    """Largest absolute value of each block of 256 elements. None if `values` are float32."""


class OptimizerAdapter(Method, ABC):
    """AdamW whose moments are kept in 8 bits."""

    @abstractmethod
    def build(self, parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:  # noqa: ANN401
        """Return the optimizer. `options` are lr, betas, eps and weight_decay."""

    @abstractmethod
    def moments(self, state: dict[str, Any]) -> tuple[Moment, Moment]:
        """Return both moments of the parameter that has this `state`."""
