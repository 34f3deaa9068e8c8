"""Defects of what reduces gradients by a library of its own, Horovod: what its users can get wrong, and it itself."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from meshmark.adapter.contract import Adapter
from meshmark.spec.case import Case
from tests.broken.engine import ONE_NORM, Broken


class SumsAsked(Broken):
    """`op=Sum`, of losses that are scaled for a mean."""

    def prepare(self) -> None:
        import horovod.torch as hvd

        self.optimizer.op = hvd.Sum


class OwnPartsAlone(Broken):
    """A plain optimizer: every rank steps by its own gradients, whatever the others sent."""

    def finish_gradients(self) -> None:
        own = {name: gradient.clone() for name, gradient in self.grads()}
        super().finish_gradients()  # type: ignore[misc]
        for name, gradient in self.grads():
            gradient.copy_(own[name])


class OneIsNotHooked(Broken):
    """A norm that the optimizer's hooks do not know of."""

    def finish_gradients(self) -> None:
        own = next(gradient.clone() for name, gradient in self.grads() if name == ONE_NORM)
        super().finish_gradients()  # type: ignore[misc]
        for name, gradient in self.grads():
            if name == ONE_NORM:
                gradient.copy_(own)


class SynchronizesTwice(Broken):
    """`step()` without `skip_synchronize()`: gradients are reduced once more, of averages, which stay what they are."""

    def update(self) -> Tensor | None:
        self.optimizer.synchronize()
        norm: Tensor | None = super().update()
        return norm


class ReducesEveryMicroBatch(Broken):
    """`backward_passes_per_step` is left at one, and every pass waits for its reduction: of an average, which stays the
    same, and what came to it. Right, and too much is sent."""

    passes = 0

    def prepare(self) -> None:
        self.optimizer.set_backward_passes_per_step(1)

    def differentiate(self, loss: Tensor) -> None:
        super().differentiate(loss)  # type: ignore[misc]
        self.passes += 1
        if self.passes % self.case.layout.num_micro_batches:
            self.optimizer.synchronize()


class CompressedUnasked(Adapter):
    """Gradients are sent in fp16, though whole ones were asked for."""

    compression = "fp16"


class FusesUnasked(Adapter):
    """Horovod's default buffer, where none was asked for."""

    variables: ClassVar[dict[str, str]] = {}


class BroadcastsNoState(Adapter):
    """`broadcast_optimizer_state` of an optimizer that has not stepped."""

    def distributed(self, case: Case, model: nn.Module) -> Any:  # noqa: ANN401
        import horovod.torch as hvd

        optimizer = super().distributed(case, model)  # type: ignore[misc]
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for parameter in model.parameters():
            parameter.grad = None
        return optimizer


class ClippedBeforeItIsReduced(Broken):
    """Clipped before the reduction is waited for, as where `synchronize()` is forgotten: by a rank's own norm."""

    def finish_gradients(self) -> None:
        clip = self.case.workload.optimizer.clip_norm
        assert clip is not None
        norm = torch.nn.utils.get_total_norm([gradient for _, gradient in self.grads()])
        super().finish_gradients()  # type: ignore[misc]
        for _, gradient in self.grads():
            gradient.mul_(min(1.0, clip / float(norm)))
