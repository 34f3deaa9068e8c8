"""Engines that keep what they should let go of, and that hide an error. Mixins."""

from __future__ import annotations

import os
import time
from typing import Any

from torch import Tensor

import meshmark.passes.clauses as failing
from meshmark.reference.data import Batch
from tests.broken.engine import Broken


class KeepsGraph(Broken):
    """The sum of losses for the log is not detached."""

    def loss_share(self, outputs: Tensor, batch: Batch) -> Tensor:
        loss: Tensor = super().loss_share(outputs, batch)
        self.logged = getattr(self, "logged", 0) + loss
        return loss


class KeepsLogits(Broken):
    """Outputs are kept for a metric that nobody computes."""

    def loss_share(self, outputs: Tensor, batch: Batch) -> Tensor:
        self.kept = [*getattr(self, "kept", []), outputs.detach()]
        loss: Tensor = super().loss_share(outputs, batch)
        return loss


class KeepsEveryGradient(Broken):
    """Gradients of every step are kept."""

    def after_backward(self) -> None:
        self.kept = [*getattr(self, "kept", []), *[grad.clone() for _, grad in self.grads()]]


class KeepsBatches(Broken):
    """A loader that forgets nothing."""

    def backward(self, batch: Batch) -> Tensor:
        self.kept = [*getattr(self, "kept", []), batch]
        return super().backward(batch)


class KeepsParameters(Broken):
    """A copy of the parameters after every step, such as an average that is never taken."""

    def update(self) -> Tensor | None:
        norm: Tensor | None = super().update()
        self.kept = [*getattr(self, "kept", []), *[p.clone() for p in self.locals()]]
        return norm


class Handles(Broken):
    """Something stands between an error on the last rank and the process's end."""

    def prepare(self) -> None:
        if self.context.rank == self.context.world_size - 1:
            vars(failing)["RuntimeError"] = self.handle

    def handle(self, message: str) -> BaseException:
        """Return the error to raise in place of this one."""
        raise NotImplementedError


class Waits(Handles):
    """For the others, in a barrier that they never reach."""

    def handle(self, message: str) -> BaseException:
        while True:
            time.sleep(3600)


class HidesMessage(Handles):
    def handle(self, message: str) -> BaseException:
        return RuntimeError("a worker failed")


class Exits(Handles):
    """As if all were well."""

    def handle(self, message: str) -> BaseException:
        os._exit(0)


class PeersWait(Broken):
    """Whoever hears that a peer is gone waits for it to come back, as with a retry that has no end."""

    def step(self, batch: Any) -> Tensor:  # noqa: ANN401
        try:
            loss: Tensor = super().step(batch)
            return loss
        except RuntimeError:
            while True:
                time.sleep(3600)


class PeerFailsFirst(Broken):
    """The first rank gives up on its peer before that has told its error."""

    def step(self, batch: Any) -> Tensor:  # noqa: ANN401
        last = self.context.rank == self.context.world_size - 1
        if self.steps == failing.FAILS_AT and not last:
            raise ConnectionError("a peer does not answer")
        loss: Tensor = super().step(batch)
        time.sleep(1.0 if last else 0.0)
        return loss
