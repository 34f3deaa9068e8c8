"""torchtitan's Trainer, wrong as a patch of its functions makes it."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from meshmark.adapter.contract import Adapter
from meshmark.adapters.torchtitan.loop import TorchTitanLoop


class BrokenTitan(Adapter):
    """Runs a Trainer that `loop` has spoilt before training."""

    loop: ClassVar[type[TorchTitanLoop]]


class _CountsOwnTargets(TorchTitanLoop):
    def hook(self) -> None:
        from torchtitan.distributed import utils

        utils.dist_sum_tensor = lambda own, mesh, *_: own * mesh.size()
        super().hook()


class CountsOwnTargets(BrokenTitan):
    """Every rank divides by its own number of targets, times the number of ranks."""

    loop: ClassVar = _CountsOwnTargets


class _DividesByShards(TorchTitanLoop):
    def hook(self) -> None:
        from torch.distributed.fsdp import FSDPModule

        for module in self.trainer.model_parts[0].modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(self.case.layout.dp)
        super().hook()


class DividesByShards(BrokenTitan):
    """FSDP2 keeps its division by the number of ranks, of what is divided by the number of targets already."""

    loop: ClassVar = _DividesByShards


class _ClipsByStage(TorchTitanLoop):
    def hook(self) -> None:
        from torchtitan.distributed import utils

        clip = utils.clip_grad_norm_

        def by_stage(*args: Any, pp_mesh: Any = None, **kwargs: Any) -> Tensor:  # noqa: ANN401
            norm: Tensor = clip(*args, **kwargs)
            return norm

        utils.clip_grad_norm_ = by_stage
        super().hook()


class ClipsByStage(BrokenTitan):
    """Every stage clips by the norm of its own gradients (pytorch/torchtitan#596)."""

    loop: ClassVar = _ClipsByStage


class _StepsScheduleTwice(TorchTitanLoop):
    def hook(self) -> None:
        step = self.trainer.lr_schedulers.step

        def twice() -> None:
            step()
            step()

        self.trainer.lr_schedulers.step = twice
        super().hook()


class StepsScheduleTwice(BrokenTitan):
    """The schedule goes twice as fast."""

    loop: ClassVar = _StepsScheduleTwice
