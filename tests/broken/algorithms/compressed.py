"""Compressed data parallelism that sends, keeps or draws something else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.futures import Future

from meshmark.adapters.compressed.codecs import QSGD, Codec, Sign, TopK
from meshmark.algorithms.compressed.compressor import CompressorKind
from meshmark.algorithms.compressed.compressors import Draw
from meshmark.spec.layout import Layout
from meshmark.spec.workload import workload
from tests.broken.engine import Broken, average
from tests.broken.mutant import of_algorithm, on

Named = dict[str, Tensor]


class Compressing(Broken):
    """Puts another direction, or another codec, in the place of the engine's."""

    exchange: Any
    kept: dict[str, Named]
    steps_done: int
    codec: type[Codec] | None = None

    def prepare(self) -> None:
        if self.codec:
            self.exchange.codec = self.codec(self.case.workload.algorithm.compressor)

    def honest(self, own: Named) -> Named:
        found: Named = super().direction(own)  # type: ignore[misc]
        return found


class SendsWhole(Compressing):
    """Nothing is compressed."""

    def direction(self, own: Named) -> Named:
        average(own.values())
        return own


class SumsReplicas(Compressing):
    def direction(self, own: Named) -> Named:
        return {name: x.mul_(dist.get_world_size()) for name, x in self.honest(own).items()}


class DividesTwice(Compressing):
    def direction(self, own: Named) -> Named:
        return {name: x.div_(dist.get_world_size()) for name, x in self.honest(own).items()}


class StepsOnFirst(Compressing):
    """On the first replica's gradient."""

    def direction(self, own: Named) -> Named:
        for gradient in own.values():
            dist.broadcast(gradient, 0)
        return self.honest(own)


class ForgetsLeft(Compressing):
    """What is left of the step before, or known of the gradient."""

    def direction(self, own: Named) -> Named:
        self.kept = {}
        return self.honest(own)


class AddsLeftTwice(Compressing):
    def direction(self, own: Named) -> Named:
        for name, x in self.kept.get("left", {}).items():
            own[name].add_(x)
        return self.honest(own)


class ForgetsLeftOnOne(Compressing):
    """One replica loses what it keeps."""

    def direction(self, own: Named) -> Named:
        if dist.get_rank() == 1:
            for x in self.kept.get("left", {}).values():
                x.zero_()
        return self.honest(own)


class ForgetsLeftOnce(Compressing):
    def direction(self, own: Named) -> Named:
        if self.steps_done == 1:
            self.kept = {}
        return self.honest(own)


class AddsLeftLate(Compressing):
    before: Named

    def direction(self, own: Named) -> Named:
        now, before = self.kept, getattr(self, "before", None)
        self.kept = {"left": before} if before else {}
        self.before = {name: x.clone() for name, x in now.get("left", {}).items()}
        return self.honest(own)


class LeavesWhatWasSent(Compressing):
    """It is not taken off."""

    def direction(self, own: Named) -> Named:
        wanted = {name: x + self.kept["left"][name] if self.kept else x.clone() for name, x in own.items()}
        found = self.honest(own)
        self.kept = {"left": wanted}
        return found


class _Signed(TopK):
    def pack(self, x: Tensor, draw: Draw) -> list[Tensor]:
        assert self.compressor is not None
        places = torch.sort(x, descending=True, stable=True).indices[: self.compressor.kept(x.numel())]
        return [x[places], places.int()]


class LargestSigned(Compressing):
    """Not of magnitudes."""

    codec = _Signed


class _Half(TopK):
    def pack(self, x: Tensor, draw: Draw) -> list[Tensor]:
        assert self.compressor is not None
        fewer = replace(self.compressor, percent=self.compressor.percent // 2).kept(x.numel())
        values, places = super().pack(x, draw)
        values[fewer:] = 0
        return [values, places]


class SendsHalf(Compressing):
    codec = _Half


class _ByNorm(Sign):
    def scale(self, x: Tensor) -> Tensor:
        return x.square().mean(dtype=torch.float64).sqrt().float().reshape(1)


class ScalesByNorm(Compressing):
    codec = _ByNorm


class _Unscaled(Sign):
    def scale(self, x: Tensor) -> Tensor:
        return torch.ones(1)


class NeverScales(Compressing):
    codec = _Unscaled


class ScalesByRow(Compressing):
    """Rounds each row's gradient to its own scale before all of it is sent by the tensor's."""

    def direction(self, own: Named) -> Named:
        shape = {name: x.reshape(-1, x.shape[-1]) for name, x in own.items()}
        scaled = {
            n: x.sign().add(x == 0) * x.abs().mean(1, True, dtype=torch.float64).float() for n, x in shape.items()
        }
        found = {name: scaled[name].view_as(x).clone() for name, x in own.items()}
        average(found.values())
        return found


class _Alike(QSGD):
    def drawn(self, draw: Draw, size: int) -> Tensor:
        return super().drawn(replace(draw, replica=0), size)


class DrawsAlike(Compressing):
    """The same randomness on all ranks."""

    codec = _Alike


class _Once(QSGD):
    def drawn(self, draw: Draw, size: int) -> Tensor:
        return super().drawn(replace(draw, step=0), size)


class DrawsOnce(Compressing):
    codec = _Once


class _Nearest(QSGD):
    def drawn(self, draw: Draw, size: int) -> Tensor:
        return torch.full((size,), 0.5)


class RoundsToNearest(Compressing):
    codec = _Nearest


class SameElements(Compressing):
    """Random-k draws the same elements in every step."""

    def direction(self, own: Named) -> Named:
        now, self.steps_done = self.steps_done, 0
        found = self.honest(own)
        self.steps_done = now
        return found


class StepsOnChanges(Compressing):
    def direction(self, own: Named) -> Named:
        before = {name: x.clone() for name, x in self.kept.get("mean", {}).items()}
        found = self.honest(own)
        return {name: x - before[name] if before else x for name, x in found.items()}


class ChangeOfMean(Compressing):
    """What is known of the mean is taken for what is known of the replica."""

    def direction(self, own: Named) -> Named:
        if self.kept:
            self.kept["own"] = {name: x.clone() for name, x in self.kept["mean"].items()}
        return self.honest(own)


class SignOfMean(Compressing):
    def direction(self, own: Named) -> Named:
        return {name: torch.where(x >= 0, 1.0, -1.0).to(x) for name, x in SendsWhole.direction(self, own).items()}


class MeanOfSigns(Compressing):
    def direction(self, own: Named) -> Named:
        total: Named = self.exchange.meet(own, self.steps_done).mean()
        return total


class TiesArePlus(Compressing):
    def direction(self, own: Named) -> Named:
        return {name: torch.where(x >= 0, 1.0, -1.0).to(x) for name, x in self.honest(own).items()}


# PyTorch's hooks


class Hooked(Broken):
    """Puts another hook in the place of the engine's, before it is called at all."""

    factors: Any
    own: Named
    names: dict[Tensor, str]

    def noting(self, hook: Any, bucket: dist.GradBucket) -> Future[Tensor]:  # noqa: ANN401
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self.own[self.names[parameter]] = gradient.clone()
        return self.hooked(hook, bucket)

    def hooked(self, hook: Any, bucket: dist.GradBucket) -> Future[Tensor]:  # noqa: ANN401
        found: Future[Tensor] = hook(bucket)
        return found


class OtherFormat(Hooked):
    def hooked(self, hook: Any, bucket: dist.GradBucket) -> Future[Tensor]:  # noqa: ANN401
        compressor = self.case.workload.algorithm.compressor
        assert compressor is not None
        other = bf16_compress_hook if compressor.kind is CompressorKind.FP16 else fp16_compress_hook
        found: Future[Tensor] = other(dist.group.WORLD, bucket)
        return found


class InNoFormat(Hooked):
    def hooked(self, hook: Any, bucket: dist.GradBucket) -> Future[Tensor]:  # noqa: ANN401
        buffer = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(buffer, async_op=True).get_future().then(lambda future: future.value()[0])


class HookSums(Hooked):
    def hooked(self, hook: Any, bucket: dist.GradBucket) -> Future[Tensor]:  # noqa: ANN401
        bucket.buffer().mul_(dist.get_world_size())
        return super().hooked(hook, bucket)


class HookDividesTwice(Hooked):
    def hooked(self, hook: Any, bucket: dist.GradBucket) -> Future[Tensor]:  # noqa: ANN401
        bucket.buffer().div_(dist.get_world_size())
        return super().hooked(hook, bucket)


class PowerForgets(Hooked):
    def after_backward(self) -> None:
        self.factors.error_dict.clear()


class PowerAddsTwice(Hooked):
    def after_backward(self) -> None:
        for left in self.factors.error_dict.values():
            left.mul_(2)


class PowerAddsTwiceOnOne(Hooked):
    def after_backward(self) -> None:
        if dist.get_rank() == 1:
            for left in self.factors.error_dict.values():
                left.mul_(2)


class PowerIsCold(Hooked):
    def after_backward(self) -> None:
        self.factors.p_memory_dict.clear()
        self.factors.q_memory_dict.clear()


class WarmsUpLonger(Hooked):
    def prepare(self) -> None:
        self.factors.start_powerSGD_iter += 1


_TOP_K = {
    LargestSigned: "the largest of signed values, not of magnitudes",
    SendsWhole: "nothing is compressed",
    SumsReplicas: "the sum over replicas, not their mean",
    SendsHalf: "half as many elements",
}
_QSGD = {
    DrawsAlike: "all replicas round by the same draws",
    DrawsOnce: "rounded by the same draws in every step",
    RoundsToNearest: "rounded to the nearest level, not at random",
    DividesTwice: "divided by the number of replicas twice",
}
_LEFT = {
    ForgetsLeft: "what is left is forgotten",
    ForgetsLeftOnOne: "what is left is forgotten on replica 1",
    ForgetsLeftOnce: "what is left is forgotten in step 1 alone",
    AddsLeftTwice: "what is left is added twice",
    AddsLeftLate: "what is left is added a step late",
}
_SIGN = {
    ScalesByNorm: "the scale is the root of the mean square, not the mean magnitude",
    NeverScales: "signs are not scaled",
    ScalesByRow: "the scale is of each row, not of the tensor",
}
_EF21 = {
    ForgetsLeft: "what is known of a gradient is forgotten",
    StepsOnChanges: "all step on what changed, not on what is known",
    ChangeOfMean: "the change is taken since what is known of the mean, not of the replica",
    StepsOnFirst: "the first replica's gradient alone",
}
_VOTE = {
    SignOfMean: "the sign of the mean gradient, not of most",
    TiesArePlus: "where as many say the one as the other, plus",
    StepsOnFirst: "the first replica's gradient alone",
}
_HOOK = {
    OtherFormat: "in fp16, not in bf16",
    HookSums: "the sum over replicas, not their mean",
    HookDividesTwice: "divided by the number of replicas twice",
}
_POWER = {
    PowerForgets: "what is left is forgotten",
    PowerAddsTwice: "what is left is added twice",
    PowerAddsTwiceOnOne: "what is left is added twice on replica 1",
    PowerIsCold: "the factor of the step before is not kept",
    WarmsUpLonger: "the warm-up is a step longer",
}
_IN_BF16 = "gpt-mini-sgd-compressed-bf16"
MUTANTS = [
    *of_algorithm("compressed", "gpt-mini-sgd-compressed-top-k10", _TOP_K),
    *of_algorithm("compressed", "gpt-mini-sgd-compressed-qsgd64", _QSGD),
    *of_algorithm("compressed", "gpt-mini-sgd-error-feedback-top-k10", _LEFT),
    *of_algorithm(
        "compressed",
        "gpt-mini-sgd-error-feedback-random-k10",
        {
            SameElements: "the same elements in every step",
            LeavesWhatWasSent: "what was sent is not taken off what is left",
        },
    ),
    *of_algorithm("compressed", "gpt-mini-sgd-error-feedback-sign", _SIGN),
    *of_algorithm("compressed", "gpt-mini-sgd-ef21-top-k10", _EF21),
    *of_algorithm("compressed", "gpt-mini-sgd-majority-vote", _VOTE),
    # Of two signs, the mean is the vote.
    *of_algorithm(
        "compressed",
        "gpt-mini-sgd-majority-vote",
        {MeanOfSigns: "the mean of signs, not the sign of most"},
        layout=Layout(dp=4),
    ),
    *of_algorithm("ddp-compressed", _IN_BF16, _HOOK),
    *on("ddp-compressed", InNoFormat, suite="communication", workload=workload(_IN_BF16)),
    *of_algorithm("ddp-compressed", "gpt-mini-sgd-error-feedback-power-sgd1w2", _POWER),
]
