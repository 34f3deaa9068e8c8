"""Data parallelism by hand: gradients are summed over ranks in another way each, without DDP."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshmark.adapter.contract import Adapter, Arithmetic, Capabilities, Casting
from meshmark.adapter.engine import DataParallelEngine, Engine, Holdings, RankContext, initial_model, skip_block
from meshmark.adapters.ddp import DDP
from meshmark.models.module import parameter_shapes
from meshmark.reference.data import Batch
from meshmark.reference.objective import build_optimizer
from meshmark.spec.case import Case
from meshmark.theory.memory import ExtraMemory, model_states
from meshmark.theory.recipe import TrainingRecipe, eager_recipe
from meshmark.theory.traffic import (
    Flow,
    OneTimeTraffic,
    Purpose,
    TrafficException,
    messages,
    reduced_each,
    step_traffic,
)

Change = Callable[[Flow], Flow]


class ByHandEngine(DataParallelEngine):
    """Gradients of all micro-batches are summed here, then over ranks by `reduce`."""

    def gradients_held(self) -> list[Tensor]:
        return [p.grad for p in self.module.parameters() if p.grad is not None]

    def reduce(self) -> None:
        """Leave the mean over ranks in the gradients."""
        raise NotImplementedError

    def finish_gradients(self) -> None:
        self.reduce()
        super().finish_gradients()


class ByHand(Adapter):
    arithmetic: ClassVar = Arithmetic(casting=Casting.AUTOCAST)
    capabilities: ClassVar = Capabilities(
        degrees=frozenset({"dp"}), families=DDP.capabilities.families, precisions=DDP.capabilities.precisions
    )
    engine: ClassVar[type[DataParallelEngine]] = ByHandEngine

    @classmethod
    def one_time_traffic(cls, case: Case, rank: int) -> tuple[OneTimeTraffic, ...]:
        return ()

    def build(self, case: Case, context: RankContext) -> Engine:
        model = initial_model(case, context.device)
        return self.engine(case, context, model, self.optimizer(case, model))

    def optimizer(self, case: Case, model: nn.Module) -> torch.optim.Optimizer:
        return build_optimizer(case.workload.optimizer, model.named_parameters())


def instead(case: Case, rank: int, reason: str, *changes: Change) -> tuple[TrafficException, ...]:
    """Return what is sent instead of the one all-reduce of gradients: a flow for each of `changes`."""
    found = [flow for flow in step_traffic(case, rank) or () if flow.purpose is Purpose.GRADIENTS]
    sends = tuple(change(flow) for flow in found for change in changes)
    return (TrafficException(sends=sends, instead_of=tuple(found), reason=reason),) if found else ()


def kind(name: str, times: int = 1) -> Change:
    return lambda flow: replace(flow, kind=name, num_bytes=times * flow.num_bytes)


def gradient_bytes(case: Case) -> int:
    return case.precision.accumulation.itemsize * sum(map(math.prod, parameter_shapes(case.workload.model).values()))


def beside_gradients(cls: type[Adapter], case: Case, rank: int, num_bytes: float, reason: str) -> ExtraMemory:
    """Return how much `num_bytes` beside all gradients, when activations are gone, is above the planned peak."""
    plan = model_states(case, rank, cls.recipe(case))
    assert plan is not None and plan.peak is not None, "gpt-mini is planned"
    held = plan.parameters + plan.gradients + plan.optimizer_states + num_bytes
    return ExtraMemory(category="peak", num_bytes=max(held - plan.peak, 0.0), reason=reason)


class TensorByTensor(ByHandEngine):
    def reduce(self) -> None:
        for gradient in self.gradients_held():
            dist.all_reduce(gradient)
            gradient /= self.context.world_size


class TensorByTensorHand(ByHand):
    engine = TensorByTensor


class DividedFirst(ByHandEngine):
    """Divides before the sum, last tensor first, and waits for all of them at the end."""

    def reduce(self) -> None:
        works = [
            dist.all_reduce(gradient.div_(self.context.world_size), async_op=True)
            for gradient in reversed(self.gradients_held())
        ]
        for work in works:
            work.wait()


class DividedFirstHand(ByHand):
    engine = DividedFirst


class FlatCopy(ByHandEngine):
    """One all-reduce of one flat copy."""

    def reduce(self) -> None:
        gradients = self.gradients_held()
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        self.reduce_flat(flat)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def reduce_flat(self, flat: Tensor) -> None:
        dist.all_reduce(flat)
        flat /= self.context.world_size


class FlatCopyHand(ByHand):
    engine = FlatCopy
    copies: ClassVar[float] = 1.0
    """Flat tensors of all gradients' size that are alive at once."""

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        copies = cls.copies * gradient_bytes(case)
        return (beside_gradients(cls, case, rank, copies, "gradients are reduced in a flat copy"),)


class SmallBuckets(ByHandEngine):
    """Buckets of 16 KiB, in the order of parameters."""

    def reduce(self) -> None:
        bucket: list[Tensor] = []
        for gradient in self.gradients_held():
            bucket.append(gradient)
            if sum(each.nbytes for each in bucket) >= 2**14:
                self.reduce_bucket(bucket)
                bucket = []
        self.reduce_bucket(bucket)

    def reduce_bucket(self, bucket: list[Tensor]) -> None:
        if not bucket:
            return
        flat = torch.cat([each.flatten() for each in bucket])
        dist.all_reduce(flat)
        for each, part in zip(bucket, flat.split([e.numel() for e in bucket]), strict=True):
            torch.div(part.view_as(each), self.context.world_size, out=each)


class SmallBucketsHand(ByHand):
    engine = SmallBuckets


class ReduceAndBroadcast(ByHandEngine):
    """The last rank adds up and tells the others."""

    def reduce(self) -> None:
        last = self.context.world_size - 1
        for gradient in self.gradients_held():
            dist.reduce(gradient, dst=last)
            gradient /= self.context.world_size
            dist.broadcast(gradient, src=last)


class ReduceAndBroadcastHand(ByHand):
    engine = ReduceAndBroadcast

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        return instead(case, rank, "the last rank adds up and tells the others", kind("reduce"), kind("broadcast"))


class ScatterAndGather(FlatCopy):
    """A reduce-scatter and an all-gather of one flat copy."""

    def reduce_flat(self, flat: Tensor) -> None:
        share = flat.new_empty(flat.numel() // self.context.world_size)
        dist.reduce_scatter_tensor(share, flat)
        dist.all_gather_into_tensor(flat, share / self.context.world_size)


class ScatterAndGatherHand(FlatCopyHand):
    engine = ScatterAndGather
    copies = 3.0  # the flat copy, gloo's copy of it, this rank's half, and the half divided

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        reason = "an all-reduce in its two halves"
        return instead(case, rank, reason, kind("reduce_scatter"), kind("all_gather"))


class WideGather(FlatCopy):
    """Every rank gathers the gradients of all and adds them up itself, in float64, from the last rank to the first."""

    def reduce_flat(self, flat: Tensor) -> None:
        world = self.context.world_size
        everyones = flat.new_empty(world, flat.numel())
        dist.all_gather_into_tensor(everyones.view(-1), flat)
        flat.copy_(everyones.flip(0).double().mean(0))


class WideGatherHand(FlatCopyHand):
    engine = WideGather
    copies = 9.0  # the flat copy, two gathered; these in float64 take four, and their mean takes two

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        reason = "every rank gathers the gradients of all"
        return instead(case, rank, reason, kind("all_gather", case.layout.dp))


class Ring(FlatCopy):
    """A ring all-reduce by messages: chunks are added up on their way round, and sent round once more."""

    def reduce_flat(self, flat: Tensor) -> None:
        rank, world = self.context.rank, self.context.world_size
        chunks, received = flat.chunk(world), torch.empty_like(flat.chunk(world)[0])
        for hop in range(2 * (world - 1)):
            out, into = chunks[(rank - hop) % world], chunks[(rank - hop - 1) % world]
            sending = dist.isend(out, (rank + 1) % world)
            dist.recv(received, (rank - 1) % world)
            sending.wait()
            if hop < world - 1:
                into += received
            else:
                into.copy_(received)
        flat /= world


class RingHand(FlatCopyHand):
    engine = Ring
    copies = 1.5  # the copy, and a chunk

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        world = case.layout.dp
        hops = 2 * (world - 1)

        def message(what: str, peer: int) -> Change:
            ends = (rank, peer % world)
            return lambda flow: messages(
                "dp", what, ends, hops * flow.num_bytes // world, (hops, hops), Purpose.GRADIENTS
            )

        return instead(case, rank, "a ring of messages", message("send", rank + 1), message("recv", rank - 1))


class InHooks(ByHandEngine):
    """Each gradient is reduced as soon as it is there, by a hook."""

    def __init__(self, case: Case, context: RankContext, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(case, context, module, optimizer)
        self.times = dict.fromkeys(module.parameters(), 0)
        self.works: list[Any] = []
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.accumulated)

    def accumulated(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.times[parameter] += 1  # type: ignore[index]
        if self.times[parameter] % self.case.layout.num_micro_batches == 0:  # type: ignore[index]
            self.works.append(dist.all_reduce(parameter.grad, async_op=True))

    def reduce(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()
        for gradient in self.gradients_held():
            gradient.mul_(1 / self.context.world_size)


class InHooksHand(ByHand):
    engine = InHooks


class EveryMicroBatch(ByHandEngine):
    """The gradients of every micro-batch are reduced by themselves, and then added up."""

    def differentiate(self, loss: Tensor) -> None:
        parameters = list(self.module.parameters())
        gradients = torch.autograd.grad(self.scaler.scale(loss), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            own = gradient.contiguous()
            dist.all_reduce(own)
            own /= self.context.world_size
            parameter.grad = own if parameter.grad is None else parameter.grad.add_(own)

    def reduce(self) -> None: ...


class EveryMicroBatchHand(ByHand):
    engine = EveryMicroBatch

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        reason = "a micro-batch's gradients, before they are added up"
        fresh = gradient_bytes(case) if case.layout.num_micro_batches > 1 else 0
        return (beside_gradients(cls, case, rank, fresh, reason),)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        return reduced_each(case, rank)


class Summed(TensorByTensor):
    """Gradients are added up over ranks, and losses are not multiplied before."""

    def differentiate(self, loss: Tensor) -> None:
        super().differentiate(loss / self.case.layout.dp)

    def reduce(self) -> None:
        for gradient in self.gradients_held():
            dist.all_reduce(gradient, op=dist.ReduceOp.SUM)


class SummedHand(ByHand):
    arithmetic = Arithmetic(casting=Casting.AUTOCAST, averages=False)
    engine = Summed


class LastMicroBatchFirst(TensorByTensor):
    """Gradients of all micro-batches are kept, and added up from the last to the first."""

    def __init__(self, case: Case, context: RankContext, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(case, context, module, optimizer)
        self.kept: list[list[Tensor]] = []

    def differentiate(self, loss: Tensor) -> None:
        super().differentiate(loss)
        self.kept.append(self.gradients_held())
        for parameter in self.module.parameters():
            parameter.grad = None

    def reduce(self) -> None:
        for parameter, *gradients in zip(self.module.parameters(), *reversed(self.kept), strict=True):
            for gradient in gradients[1:]:
                gradients[0] += gradient
            parameter.grad = gradients[0]
        self.kept.clear()
        super().reduce()


class LastMicroBatchFirstHand(ByHand):
    engine = LastMicroBatchFirst


class OneBackward(TensorByTensor):
    """All forward passes, and then one backward pass of the sum of their losses."""

    def backward(self, batch: Batch) -> Tensor:
        layout, part = self.case.layout, self.part(batch).to(self.context.device)
        skip_block(self.module, batch, self.case.workload)
        micro_batches = part.micro_batches(layout.num_micro_batches)
        total = torch.stack([self.loss_share(self.forward(m.inputs), m) for m in micro_batches]).sum()
        self.differentiate(total * layout.dp)
        self.finish_gradients()
        return total.detach()


class OneBackwardHand(ByHand):
    engine = OneBackward

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        return replace(eager_recipe(case), activations_known=False)


class GradientBuffer(ByHandEngine):
    """Gradients are views of one flat buffer that is there for good, as Megatron-LM's."""

    def __init__(self, case: Case, context: RankContext, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(case, context, module, optimizer)
        self.buffer = self.make_buffer()
        parameters = list(module.parameters())
        views = self.buffer.split([p.numel() for p in parameters])
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view.view_as(parameter)

    def make_buffer(self) -> Tensor:
        parameters = list(self.module.parameters())
        return parameters[0].new_zeros(sum(p.numel() for p in parameters))

    def reduce(self) -> None:
        dist.all_reduce(self.buffer)
        self.buffer /= self.context.world_size

    def forget_gradients(self) -> None:
        self.buffer.zero_()


class GradientBufferHand(ByHand):
    engine = GradientBuffer

    @classmethod
    def recipe(cls, case: Case) -> TrainingRecipe:
        using = eager_recipe(case, "eager-ddp")
        return replace(using, backward=replace(using.backward, accumulates_outside_buckets=False))


class FromTheLastRankHand(TensorByTensorHand):
    """The last rank draws the initial values and broadcasts them, tensor by tensor."""

    def build(self, case: Case, context: RankContext) -> Engine:
        model = initial_model(case, context.device)
        with torch.no_grad():
            for parameter in model.parameters():
                if context.rank != context.world_size - 1:
                    parameter.zero_()
                dist.broadcast(parameter, src=context.world_size - 1)
        return self.engine(case, context, model, self.optimizer(case, model))


class FlatParameters(GradientBuffer):
    """Parameters are views of one flat tensor, and gradients of another."""

    def make_buffer(self) -> Tensor:
        self.flat = self.optimizer.param_groups[0]["params"][0]
        self.flat.grad = torch.zeros_like(self.flat)
        return self.flat.grad

    def clip(self, max_norm: float) -> Tensor:
        """By squares; on a CPU `vector_norm` of a long float32 tensor loses digits, 1e-3 of 2e7 elements."""
        norm = self.buffer.square().sum().sqrt()
        nn.utils.clip_grads_with_norm_([self.flat], max_norm, norm)
        return norm

    def holdings(self) -> Holdings:
        return replace(super().holdings(), parameters=[self.flat.detach()], gradients=[self.buffer])


class FlatParametersHand(GradientBufferHand):
    """One tensor holds all parameters, and the optimizer knows that one alone."""

    engine = FlatParameters

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        reason = "the update's two temporaries are of all parameters at once"
        return (beside_gradients(cls, case, rank, 2 * gradient_bytes(case), reason),)

    def optimizer(self, case: Case, model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        flat = nn.Parameter(torch.cat([p.detach().flatten() for p in parameters]))
        for parameter, view in zip(parameters, flat.detach().split([p.numel() for p in parameters]), strict=True):
            parameter.data = view.view_as(parameter)
        return build_optimizer(case.workload.optimizer, [("flat", flat)])
