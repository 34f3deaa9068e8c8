"""bf16 with less precision than declared, and fp16 that does not heed an overflow."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshmark.adapter.contract import Adapter
from meshmark.adapter.engine import Engine, RankContext
from meshmark.reference.data import Batch
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from tests.broken.engine import Broken


class RoundsGradients(Broken):
    """Gradients go through bf16 after they are reduced."""

    def after_backward(self) -> None:
        for _, grad in self.grads():
            grad.copy_(grad.bfloat16())


class CompressesBf16(Broken):
    """DDP's own hook that reduces gradients in 16 bits, of the kind that gloo knows."""

    def prepare(self) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        module: Any = self.module
        module.register_comm_hook(None, fp16_compress_hook)


class ReducesInBf16(Adapter):
    """FSDP2's default: gradients are reduced in the precision of the parameters."""

    def build(self, case: Case, context: RankContext) -> Engine:
        import torch.distributed.fsdp as module

        real = module.MixedPrecisionPolicy
        with mock.patch.object(module, "MixedPrecisionPolicy", lambda param_dtype, reduce_dtype: real(param_dtype)):
            return super().build(case, context)  # type: ignore[safe-super]


class ReduceDtypeForgotten(Adapter):
    """Asked to reduce in bf16, it reduces in fp32."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return super().build(dataclasses.replace(case, precision=Precision.BF16), context)  # type: ignore[safe-super]


class ReduceDtypeOfAnother(Adapter):
    """Asked to reduce in fp32, it reduces in bf16: a setting that another run has left."""

    def build(self, case: Case, context: RankContext) -> Engine:
        other = dataclasses.replace(case, precision=Precision.BF16_REDUCE_BF16)
        return super().build(other, context)  # type: ignore[safe-super]


class WholeInBf16(Adapter):
    """The model is cast to bf16, and with it all that is kept of it."""

    def build(self, case: Case, context: RankContext) -> Engine:
        engine: Any = super().build(case, context)  # type: ignore[safe-super]
        root = getattr(engine, "model", None) or engine.module
        for parameter in root.parameters():
            parameter.data = parameter.data.bfloat16()
        return engine  # type: ignore[no-any-return]


class StaysInFp32(Adapter):
    """Accelerate with `cpu=True` and fp16, and others: mixed precision is dropped without a word."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return super().build(dataclasses.replace(case, precision=Precision.FP32), context)  # type: ignore[safe-super]


def _finite(engine: Broken) -> None:
    with torch.no_grad():
        for _, grad in engine.grads():
            grad.nan_to_num_(0.0, 0.0, 0.0)


class CopyNotRefreshed(Broken):
    """The final norm computes with a copy of its weights that no update refreshes."""

    def prepare(self) -> None:
        self.first = {name: held.detach().clone() for name, held in self.named() if name.startswith("head.norm.")}

    def backward(self, batch: Batch) -> Tensor:
        held = [(held, self.first[name]) for name, held in self.named() if name in self.first]
        now = [weight.detach().clone() for weight, _ in held]
        for weight, first in held:
            weight.data.copy_(first)
        loss = super().backward(batch)
        for (weight, _), value in zip(held, now, strict=True):
            weight.data.copy_(value)
        return loss


class NarrowFinalNorm(Broken):
    """The final norm is computed in 16 bits: its input, weight and bias are rounded."""

    def prepare(self) -> None:
        norm = [module for module in self.modules() if isinstance(module, nn.LayerNorm)][-1]

        def forward(x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, enabled=False):
                weight, bias = (each.to(torch.bfloat16) for each in (norm.weight, norm.bias))
                return F.layer_norm(x.to(torch.bfloat16), norm.normalized_shape, weight, bias, norm.eps)

        norm.forward = forward  # type: ignore[method-assign]


class CopyRefreshedBySecondUpdates(CopyNotRefreshed):
    """The final norm computes with a copy of its weights that every second update refreshes."""

    def backward(self, batch: Batch) -> Tensor:
        self.calls = getattr(self, "calls", -1) + 1
        if self.calls % 2 == 0:
            self.prepare()
        return super().backward(batch)


class ForgetsScale(Broken):
    """After every step that it takes, loss scaling begins anew."""

    def update(self) -> Tensor | None:
        before = [held.detach().clone() for _, held in self.named()]
        norm = super().update()
        if not all(torch.equal(old, held) for old, (_, held) in zip(before, self.named(), strict=True)):
            self.scaler = torch.amp.GradScaler(self.context.device.type, init_scale=2.0**30)
        return norm


class NeverSkips(Broken):
    """Values that are not finite are replaced by zero."""

    def finish_gradients(self) -> None:
        _finite(self)
        super().finish_gradients()


class NeverTakesAStep(Broken):
    """The loss scale falls so slowly that every step overflows, and is left out."""

    def prepare(self) -> None:
        self.scaler = torch.amp.GradScaler(self.context.device.type, init_scale=2.0**20, backoff_factor=0.999)


class RankDoesNotSkip(Broken):
    """The first rank does not hear of the overflow."""

    def finish_gradients(self) -> None:
        if self.context.rank == 0:
            _finite(self)
        super().finish_gradients()


class OverflowMovesMoments(Broken):
    """The weights are left alone by the step, the moments are not."""

    def update(self) -> Tensor | None:
        overflow = any(not bool(grad.isfinite().all()) for _, grad in self.grads())
        norm: Tensor | None = super().update()
        if overflow:
            for moment in self.moments():
                moment.mul_(0.9)
        return norm


class SkipsNextToo(Broken):
    """The flag of the overflow is not cleared."""

    overflow = False

    def update(self) -> Tensor | None:
        again, self.overflow = self.overflow, any(not bool(grad.isfinite().all()) for _, grad in self.grads())
        before = [p.clone() for p in self.locals()]
        norm: Tensor | None = super().update()
        if again:
            self.put(before)
        return norm


class OverflowStays(Broken):
    """A skipped step does not clear its gradients."""

    @torch.no_grad()
    def finish_gradients(self) -> None:
        if kept := getattr(self, "kept", None):
            for name, grad in self.grads():
                grad.add_(kept[name])
        super().finish_gradients()

    def update(self) -> Tensor | None:
        grads = {name: grad.clone() for name, grad in self.grads()}
        self.kept = grads if any(not bool(g.isfinite().all()) for g in grads.values()) else None
        norm: Tensor | None = super().update()
        return norm
