"""Interface of an engine: one rank's part of a training run under one framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshmark.adapter.capabilities import Feature
from meshmark.adapter.holdings import Holdings
from meshmark.adapter.traffic_source import TrafficSource
from meshmark.reference.data import Batch


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """Where an engine finds itself. The default process group is up before `build` is called."""

    rank: int
    world_size: int
    device: torch.device
    backend: str
    """gloo or nccl."""
    scratch: Path
    """A folder of this case's own, removed after it."""


_MISSING = "this engine has no `{}`: write it, or name Feature.{} in its adapter's `Capabilities.lacks`"


class Engine(ABC):
    """Engine of one rank: its part of a training run under one framework."""

    @abstractmethod
    def backward(self, batch: Batch) -> Tensor:
        """Forward and backward over a whole *global* batch (on the CPU), of which the engine trains its part.

        Afterwards every reduction over ranks is done: the gradient is that of the mean over all unmasked tokens of the
        global batch, not yet clipped. Returns this rank's share of the loss, a scalar on any device: the shares of all
        ranks add up to the global mean (a rank that computes none, or the same as another, returns zero).

        Under an algorithm whose replicas may differ, in a step that they take alone: the gradient is that of dp times
        this replica's share of the loss, reduced over the ranks of the replica alone.
        """

    @abstractmethod
    def update(self) -> Tensor | None:
        """Clip, step the optimizer, do what the workload's algorithm does besides, forget the gradients. Returns the
        global norm before clipping of the gradients that are stepped on, where the framework tells it."""

    def step(self, batch: Batch) -> Tensor:
        """Run one whole optimizer step, which is what is timed. Returns what `backward` returns."""
        loss = self.backward(batch)
        self.update()
        return loss

    @abstractmethod
    def parameters(self) -> Mapping[str, Tensor]:
        """The full value, by canonical name, of every parameter of which this rank holds any part; a collective call.
        Master weights where there are such. Without data parallelism's help: a replica returns its own."""

    @abstractmethod
    def gradients(self) -> Mapping[str, Tensor]:
        """The full reduced, unclipped gradients, like `parameters`; to be called between `backward` and `update`."""

    def loss_scale(self) -> float:
        """Return the factor that the loss of this step was multiplied by, so that small gradients do not vanish.

        Call it when `gradients` may be called.
        """
        return 1.0

    def server_versions(self) -> tuple[int | None, int | None] | None:
        """Under a parameter server, of the step that was last updated: the version of the server's parameters that this
        replica's push made, and that which its fetch returned; None where the step had none. The initial values are
        version 0, and each push that is applied makes the next. To be called like `parameters`."""
        return None

    def buffers(self) -> Mapping[str, Tensor]:
        """Return the buffers of this rank's replica by canonical name, such as a batch norm's running statistics.

        There are none by default. Nothing is communicated, because replicas' buffers may differ.
        """
        return {}

    @abstractmethod
    def holdings(self) -> Holdings:
        """Return the source of collectives that do not go through `torch.distributed`; None if there are none.

        Collectives of `torch.distributed` itself are always observed.
        """

    def traffic_source(self) -> TrafficSource | None:
        """Tells of collectives that do not go through `torch.distributed`, whose own are always seen; None where there
        are none."""
        return None

    def evaluate(self, batch: Batch) -> Tensor:
        """This rank's share of the loss of a whole global batch in evaluation: no dropout, no gradients; the next step
        is as if it had not happened."""
        raise NotImplementedError(_MISSING.format("evaluate", Feature.EVALUATE.name))

    def save(self, folder: Path) -> None:
        """Leave all that training needs to go on in `folder`, which exists and all ranks share; a collective call."""
        raise NotImplementedError(_MISSING.format("save", Feature.SAVE.name))

    def load(self, folder: Path) -> None:
        """Go on from where the engine was that saved to `folder`: in the same layout or, unless the adapter lacks
        `RESHARD`, another. To be called before the first step; a collective call."""
        raise NotImplementedError(_MISSING.format("load", Feature.SAVE.name))

    def enter_fake_world(self) -> None:  # noqa: B027
        """Learn what peers would tell before the first step, for they do not exist; called when the engine is built.

        In a fake world every collective is over at once, and what is received is zeros. An engine whose framework sends
        shapes, or waits for an answer, sets these itself here; one that cannot names `Feature.FAKE_WORLD` in its
        adapter's `Capabilities.lacks`, with the reason.
        """

    def close(self) -> None:  # noqa: B027
        """Release what the process's end would not."""
