"""The twin: what one process computes for a step on the run's own parameters and micro-batches.

It uses the arithmetic that the case and its adapter declare; only the sums over micro-batches and ranks are exact.
Rounding in a narrow format is the same wherever the same operation is done on the same numbers. A layout that splits no
matrix product therefore differs from its twin only by the order of one sum, whatever the precision, while it differs
from float64 by everything that bf16 rounds. A sum that was requested in a narrow format is rounded as requested. A case
that is tuned to other kernels has a twin that runs them, because fused operations round in other places. Both are
compared with the noise of PyTorch's eager kernels, so that a wrong kernel does not excuse itself.

The twin is judged by the truth like the run: a wrong twin excuses nothing. Correct engines may still round in other
places than the twin, because a declaration leaves much open; `equivalents` defines such engines.

`Change` replaces what the model or its loss computes, so that the truth and the twin can reproduce a wrong run.

Batch norms make rows affect each other's gradients within a micro-batch. The workload defines statistics as those of
one micro-batch of one replica. The exact gradient is therefore the sum over all micro-batches of all replicas, each
normalised separately. Each replica's running averages are those that float64 computes from the replica's values before
the step and from the micro-batches that it processed.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from meshmark.adapter.contract import Arithmetic, Casting, Summing
from meshmark.adapter.engine import AUTOCAST, compile_blocks
from meshmark.algorithms.contract import Tensors
from meshmark.judge.deviation import Deviation, Deviations, Quantity, QuantityKind, deviation
from meshmark.judge.split_products import GPTModelOrder, split, split_loss_share
from meshmark.judge.trace import Trace, num_wider
from meshmark.models.config import Dataset
from meshmark.models.module import (
    Model,
    buffer_shapes,
    build_model,
    module_class,
    parameter_shapes,
    skeleton,
    with_values,
)
from meshmark.models.transformer.module import Transformer
from meshmark.reference.data import Batch, make_batch
from meshmark.reference.objective import loss_share
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.precision import NARROW
from meshmark.spec.workload import Workload

# --- Workloads whose rows affect each other's gradients within a micro-batch: batch norms and their statistics.


def together(workload: Workload, batch: Batch, layout: Layout | None) -> list[Batch]:
    """Split `batch` into parts whose rows are normalised together: all of it, or the replicas' micro-batches in
    `layout`.
    """
    if not workload.couples_rows or layout is None:
        return [batch]
    rows = workload.global_batch // (layout.dp * layout.num_micro_batches)
    return list(batch.micro_batches(len(batch) // rows))


def exact_model(workload: Workload, batch: Batch) -> Model:
    """Return the model without values and without dropout. Batch norms work as in training.

    A user's own module, which has no dropout, is in training mode entirely.
    """
    model = skeleton(workload.model)
    model.train(workload.dataset is Dataset.OWN).skipped_block = batch.skipped_block
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.train()
    return model


def doubles(tensors: Tensors) -> dict[str, Tensor]:
    """Return the tensors in float64. Integer counts keep their dtype."""
    found = {name: torch.from_numpy(value) for name, value in tensors.items()}
    return {name: value.double() if value.is_floating_point() else value.clone() for name, value in found.items()}


def initial_buffers(workload: Workload) -> Tensors:
    """Return the prescribed initial values, equal for every replica."""
    values = module_class(workload.model).initial_buffers(workload.model, workload.seed)
    return {name: value.numpy() for name, value in values.items()}


def fresh_buffers(workload: Workload) -> dict[str, Tensor]:
    return doubles(initial_buffers(workload))


@torch.no_grad()
def exact_buffers(
    workload: Workload, parameters: Tensors, before: Tensors, parts: Sequence[Batch], momentum: float | None = None
) -> Tensors:
    """Return the buffers after a replica trains on `parts`, one after the other. `momentum` overrides the model's."""
    buffers = {name: value.clone() for name, value in doubles(before).items()}
    for part in parts:
        model = exact_model(workload, part)
        if momentum is not None:
            model = copy.deepcopy(model)
            for module in model.modules():
                if isinstance(module, BatchNorm):
                    module.momentum = momentum
        torch.func.functional_call(model, {**doubles(parameters), **buffers}, (part.inputs,))
    return {name: value.numpy() for name, value in buffers.items()}


@torch.no_grad()
def exact_evaluation(workload: Workload, parameters: Tensors, batch: Batch, trace: Trace, step: int) -> float:
    """Return the evaluation loss before `step`, with each replica's rows under its own running statistics."""
    model, replicas = exact_model(workload, batch).eval(), [replica[step] for replica in trace.buffers]
    shares = [
        loss_share(
            torch.func.functional_call(model, {**doubles(parameters), **doubles(buffers)}, (part.inputs,)),
            part,
            workload.loss,
        )
        for buffers, part in zip(replicas, batch.micro_batches(len(replicas)), strict=True)
    ]
    return float(torch.stack(shares).sum())


def assess_buffers(trace: Trace, workload: Workload, layout: Layout | None) -> Deviations:
    """Compare every buffer of a trace with the truth. Empty for a workload without batch norms.

    The replica that is furthest from the truth counts. A replica that reports no buffers is infinitely far.
    """
    if not workload.couples_rows:
        return {}
    found = dict[Quantity, list[Deviation]]()
    for name, x in initial_buffers(workload).items():
        found[QuantityKind.INITIAL.of(name)] = [_furthest([deviation(told[0].get(name), x) for told in trace.buffers])]
    for step in range(len(trace.gradients)):
        exact = [replica_truth(trace, workload, layout, replica, step) for replica in range(len(trace.buffers))]
        for name in buffer_shapes(workload.model):
            each = [deviation(told[step + 1].get(name), x[name]) for told, x in zip(trace.buffers, exact, strict=True)]
            found.setdefault(QuantityKind.BUFFERS.of(name), []).append(_furthest(each))
    return found


def replica_truth(trace: Trace, workload: Workload, layout: Layout | None, replica: int, step: int) -> Tensors:
    """Return the buffers that a replica should have after `step`, given its buffers and the parameters before it.

    An attempt that loss scaling skipped has processed the batch too.
    """
    nowhere = initial_buffers(workload)
    told = trace.buffers[replica][step]
    before = {name: told.get(name, np.full_like(x, np.nan if x.shape else 0)) for name, x in nowhere.items()}
    own = make_batch(workload, step).shard(replica, len(trace.buffers))
    parts = together(workload, own, layout) * (1 + trace.left_out[step] if trace.left_out else 1)
    return exact_buffers(workload, known_parameters(trace, workload, step), before, parts)


def known_parameters(trace: Trace, workload: Workload, step: int) -> Tensors:
    """Return the run's parameters before `step`, with NaN for those it did not report."""
    told = trace.parameters[step]
    return {name: told.get(name, np.full(shape, np.nan)) for name, shape in parameter_shapes(workload.model).items()}


def _furthest(replicas: list[Deviation]) -> Deviation:
    return max(replicas, key=lambda d: d.distance)


# --- What a wrong run may compute in place of the model and its loss.


def _as_it_is(_model: Model) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of what the model or its loss computes."""

    within: Callable[[Model], contextlib.AbstractContextManager[None]] = _as_it_is
    """Context in which the forward pass runs. It undoes what it does to the model, which others use too."""
    loss: Callable[[Tensor, Batch], Tensor] | None = None
    """Replaces the share of the loss, as a function of the outputs and their part of the batch."""


UNCHANGED = Change()


# --- The twin: what one process computes for a step on the run's own parameters and micro-batches.


class BiasApart(nn.Linear):
    """A linear layer that adds the bias to a product that is rounded already, except to one of two dimensions.

    DeepSpeed's `LinearFunctionForZeroStage3` computes so.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None or x.dim() == 2:
            return F.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight) + self.bias


def add_biases_apart(model: nn.Module, layer: type[nn.Linear] = BiasApart) -> None:
    """Make linear layers add biases to products that are rounded already."""
    for part in model.modules():
        if type(part) is nn.Linear:
            part.__class__ = layer


Gradients = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class TwinStep:
    """The twin's results for a global batch, or for some of its micro-batches."""

    loss: float
    gradients: Tensors
    """Gradients of every trained parameter in float64. Zero if unused."""

    def deviations(self, trace: Trace, step: int, exact: Tensors) -> dict[Quantity, Deviation]:
        """Return the deviations of a run's step from this one, and of this one from the `exact` gradients."""
        found = {QuantityKind.TWIN_LOSS.of(): deviation(np.array(trace.losses[step]), np.array(self.loss))}
        for name, own in self.gradients.items():
            absent = None if own.any() else np.zeros_like(own)
            found[QuantityKind.TWIN.of(name)] = deviation(trace.gradients[step].get(name, absent), own)
            found[QuantityKind.REFERENCE.of(name)] = deviation(own, exact[name])
        return found

    def deviations_of(self, other: TwinStep, way: QuantityKind) -> dict[Quantity, Deviation]:
        """Return the deviations of an equivalent's step from this one."""
        found = {way.of(name): deviation(other.gradients[name], own) for name, own in self.gradients.items()}
        return found | {way.of(): deviation(np.array(other.loss), np.array(self.loss))}


@dataclass(frozen=True, kw_only=True)
class Twin:
    """The twin of one case, on one device."""

    case: Case
    arithmetic: Arithmetic
    device: torch.device
    arrange: Callable[[Batch], Batch] = field(default=lambda batch: batch)
    """Reorders the rows of a batch. Each noise run has its own order."""
    order: Sequence[int] = ()
    """Order in which ranks are summed if such sums are rounded. By default from the first on."""
    times: Fraction = Fraction(1)
    """Factor on the layout's number of micro-batches, if the rows allow it."""
    rewrite: Callable[[Model], None] = field(default=lambda model: None)
    """Replaces layers of the model."""
    others: Mapping[QuantityKind, Twin] = field(default_factory=dict)
    """Equivalents of this twin, by their way to compute. Noise runs measure how far they are."""

    @property
    def rows(self) -> int:
        """Rows of a micro-batch in the layout."""
        layout = self.case.layout
        return self.case.workload.global_batch // (layout.dp * layout.num_micro_batches)

    def _num_micro_batches(self, num_rows: int) -> int:
        own = num_rows // self.rows
        other = max(int(own * self.times), 1)
        return other if num_rows % other == 0 else own

    def step_of(
        self,
        trace: Trace,
        parameters: Tensors,
        batch: Batch,
        step: int,
        changed: Tensors | None = None,
        change: Change = UNCHANGED,
    ) -> TwinStep:
        """Return the twin's step for a run's step, with the run's loss scale."""
        loss_scale = trace.loss_scales[step] if trace.loss_scales else 1.0
        return self.step(parameters, batch, loss_scale, changed, change)

    def step(
        self,
        parameters: Tensors,
        batch: Batch,
        loss_scale: float = 1.0,
        changed: Tensors | None = None,
        change: Change = UNCHANGED,
    ) -> TwinStep:
        """Return loss and gradients of `batch` at `parameters`.

        `loss_scale` is the factor on the run's loss, which keeps small gradients from underflow. `changed` is values
        that the backward pass finds in parameters, and in their casts, in place of those of the forward pass. `change`
        is computed in place of the right function. Diagnoses alone ask for these two.
        """
        layout = self.case.layout
        micro_batches = list(self.arrange(batch).micro_batches(self._num_micro_batches(len(batch))))
        weights = self._weights(parameters)
        losses, total = list[float](), dict[str, Tensor]()

        def part(index: int) -> Gradients:
            share, gradients = self._part(weights, micro_batches[index], loss_scale, changed or {}, change)
            losses.append(float(share))
            return gradients

        for gradients in self._reduced(part, len(micro_batches)):
            for name, gradient in gradients.items():
                total[name] = total[name] + gradient if name in total else gradient.to(torch.float64)
        scale = loss_scale * (layout.dp if self.arithmetic.averages else 1)
        unused = {n: np.zeros(x.shape) for n, x in parameters.items() if self.case.workload.trains(n)}
        return TwinStep(
            loss=sum(losses), gradients=unused | {name: g.div(scale).cpu().numpy() for name, g in total.items()}
        )

    def _weights(self, parameters: Tensors) -> dict[str, Tensor]:
        """Return the weights as the products read them, or as autocast receives them."""
        cast = self.arithmetic.casting is Casting.WEIGHTS
        kind = getattr(torch, self.case.precision.weights if cast else self.case.precision.master)
        return {
            name: torch.from_numpy(value).to(self.device, kind).requires_grad_(self.case.workload.trains(name))
            for name, value in parameters.items()
        }

    @cached_property
    def _model(self) -> Model:
        """The model without values. Cached, because compiling one takes seconds."""
        workload, tp = self.case.workload, self.case.layout.tp
        with torch.device("meta"):
            if self.arithmetic.gpt_model_order:
                return GPTModelOrder(workload.transformer, tp)
            model = build_model(workload.model)
        if self.case.tuning.compile:
            compile_blocks(model)
        if self.arithmetic.splits_products:
            assert isinstance(model, Transformer)
            split(model, tp)
        if self.case.layout.zero_stage in self.arithmetic.adds_biases_apart_at:
            add_biases_apart(model)
        self.rewrite(model)
        if self.case.layout.zero_stage == 3 and self.arithmetic.sums is not Summing.TENSORS:
            by_block = self.arithmetic.sums is Summing.BLOCKS
            for part in (model, *model.blocks.values()) if by_block else model.modules():
                part.register_forward_pre_hook(_give_nodes if by_block else _give_nodes_by_place, with_kwargs=True)
        return model

    @property
    def linear_layers(self) -> list[str]:
        """Names of the model's linear layers, in their order."""
        return [name for name, module in self._model.named_modules() if isinstance(module, nn.Linear)]

    @cached_property
    def _buffers(self) -> dict[str, Tensor]:
        """The initial buffers: tables that modules read, and statistics, which training only writes."""
        values = initial_buffers(self.case.workload) if any(True for _ in self._model.buffers()) else {}
        return {
            name: torch.from_numpy(values[name]).to(self.device, buffer.dtype)
            for name, buffer in self._model.named_buffers()
        }

    def loss_of(self, parameters: Tensors, batch: Batch, change: Change = UNCHANGED) -> float:
        """Return the loss of `batch` at `parameters` alone, which takes a third of a step's time."""
        micro_batches = self.arrange(batch).micro_batches(self._num_micro_batches(len(batch)))
        weights = self._weights(parameters)
        return sum(float(self._share(weights, part.to(self.device), change)) for part in micro_batches)

    def _share(self, weights: Mapping[str, Tensor], part: Batch, change: Change) -> Tensor:
        """Return the share of the loss of one micro-batch, which is on the device."""
        model = self._model
        model.skipped_block = part.skipped_block
        buffers = {name: value.clone() for name, value in self._buffers.items()}
        low = self._autocast
        with torch.autocast(self.device.type, dtype=low, enabled=low is not None), change.within(model):
            outputs = torch.func.functional_call(model, {**weights, **buffers}, (part.inputs,))
        return change.loss(outputs, part) if change.loss else self._loss_share(outputs, part)

    @property
    def _autocast(self) -> torch.dtype | None:
        """The dtype that products are cast to by autocast, or None."""
        return AUTOCAST.get(self.case.precision.compute) if self.arithmetic.casting is Casting.AUTOCAST else None

    def _part(
        self,
        weights: dict[str, Tensor],
        part: Batch,
        loss_scale: float,
        changed: Tensors,
        change: Change,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and gradients of one micro-batch, the latter scaled as the run's are before they are reduced."""
        values = {**weights, **self._buffers}
        return with_values(self._model, values, lambda: self._differentiate(weights, part, loss_scale, changed, change))

    def _differentiate(
        self, weights: dict[str, Tensor], part: Batch, loss_scale: float, changed: Tensors, change: Change
    ) -> tuple[Tensor, dict[str, Tensor]]:
        before = {name: weights[name].detach().clone() for name in changed}
        with _Casts({name: weights[name] for name in changed}) as casts:
            share = self._share(weights, part.to(self.device), change)
        casts.overwrite({name: torch.from_numpy(value) for name, value in changed.items()})
        scaled = (share * self.case.layout.dp if self.arithmetic.averages else share) * loss_scale
        if self.arithmetic.divides:
            scaled = scaled * self.case.layout.num_micro_batches / self.case.layout.num_micro_batches
        trained = {name: weight for name, weight in weights.items() if weight.requires_grad and part.trains(name)}
        # Outside autocast, but for products of Megatron-LM's layers, which on a CPU need it in their backward too.
        low = self._autocast
        inside = low is not None and self.arithmetic.splits_products and self.device.type == "cpu"
        with torch.autocast(self.device.type, dtype=low, enabled=inside):
            found = torch.autograd.grad(scaled, list(trained.values()), allow_unused=True)
        casts.overwrite(before)
        wide = getattr(torch, self.case.precision.accumulation)
        return share.detach(), {n: g.to(wide) for n, g in zip(trained, found, strict=True) if g is not None}

    def _loss_share(self, outputs: Tensor, part: Batch) -> Tensor:
        if self.arithmetic.splits_products:
            return split_loss_share(outputs, part, self.case.layout.tp)
        return loss_share(outputs, part, self.case.workload.loss, chunked=self.case.tuning.chunked_loss)

    def _reduced(self, part: Callable[[int], Gradients], num_parts: int) -> Iterator[Gradients]:
        """Yield what is added up exactly: the gradients of every micro-batch, or the results of narrow reductions over
        ranks.

        Holds at most one rank's gradients at a time, or one per rank that is reduced with others.
        """
        count, wide = self.case.layout.num_micro_batches, getattr(torch, self.case.precision.accumulation)
        order = self.order or range(num_parts // count)
        if not self.case.precision.narrows_reduction:
            yield from map(part, range(num_parts))
        elif self.arithmetic.reduces_each:
            for micro in range(count):
                yield self._sum_rounded([part(rank * count + micro) for rank in order])
        else:
            own = [_total((part(rank * count + micro) for micro in range(count)), wide) for rank in order]
            yield self._sum_rounded(own)

    def _sum_rounded(self, parts: Sequence[Gradients]) -> Gradients:
        """Return the rounded sum of one part per rank."""
        low, num_ranks = getattr(torch, self.case.precision.reduction), len(parts)
        sent = [{name: g.to(low).div_(num_ranks) for name, g in part.items()} for part in parts]
        return {name: g.to(torch.float64).mul_(num_ranks) for name, g in _total(sent, low).items()}


_FEWEST_WIDER = 8
"""Least number of elements of a tensor that need more bits. Each fits the narrow format with probability 2**-16."""


def rounded_gradients(trace: Trace, twin: Twin) -> list[str]:
    """Return the names of gradients that a run rounded in its first step and the twin did not.

    Every element of such a gradient is a number of the narrow format, although the twin's elements need more bits. The
    distance from the twin does not show this if equivalent arithmetic may be as far away as a rounding.
    """
    narrow, workload = NARROW[twin.case.precision.compute], twin.case.workload
    found = [name for name, x in trace.gradients[0].items() if x.any() and num_wider(x, narrow) == 0]
    if not found:
        return []
    own = twin.step_of(trace, known_parameters(trace, workload, 0), make_batch(workload, 0), 0).gradients
    return [name for name in found if name in own and num_wider(own[name], narrow) >= _FEWEST_WIDER]


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """A copy of a weight, or of a part of it, which the backward pass may read in its place."""

    copy: Tensor
    source: Tensor
    """The weight, or another copy."""
    part: tuple[Sequence[int], Sequence[int], int]
    """Size, stride and offset of the part in the source's memory."""


class _Casts(TorchDispatchMode):
    """Records the casts of some weights in the forward pass. The backward pass reads them instead of the weights.

    If products are split, each rank's part is cast, and some parts are made contiguous first.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weights = weights
        self.sources = {_memory(weight): weight for weight in weights.values()}
        self.copies: list[_Copy] = []

    def __enter__(self) -> Self:
        if self.weights:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        if self.weights:
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401
        out = func(*args, **(kwargs or {}))
        if func in _COPIES and (source := self.sources.get(_memory(args[0]))) is not None:
            part = args[0].size(), args[0].stride(), args[0].storage_offset()
            self.copies.append(_Copy(copy=out, source=source, part=part))
            self.sources[_memory(out)] = out
        return out

    @torch.no_grad()
    def overwrite(self, values: Mapping[str, Tensor]) -> None:
        """Overwrite the weights and their casts with `values`, unseen by autograd."""
        for name, value in values.items():
            self.weights[name].data.copy_(value)
        for each in self.copies:
            each.copy.data.copy_(each.source.data.as_strided(*each.part))


_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _give_nodes(_module: nn.Module, args: object, kwargs: object) -> Any:  # noqa: ANN401
    """Give a module's inputs a node in the backward pass, which adds up their gradients."""

    def with_node(leaf: object) -> object:
        return leaf.view_as(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf

    return pytree.tree_map(with_node, (args, kwargs))


def _give_nodes_by_place(module: nn.Module, args: object, kwargs: object) -> Any:  # noqa: ANN401
    """Like `_give_nodes`, for positional arguments only, as DeepSpeed does."""
    return _give_nodes(module, args, {})[0], kwargs


def twin_of(case: Case, arithmetic: Arithmetic | None, device: torch.device) -> Twin | None:
    """Return the twin of a case, or None if the truth is as precise or no twin can compute the same.

    The latter is the case if products are split in an undeclared way, or in more than two parts, whose narrow sum
    depends on its order. It is also the case if a narrow reduction divides by a number that is not a power of two,
    before or after it rounds.
    """
    layout = case.layout
    divides = case.precision.narrows_reduction and layout.dp.bit_count() > 1
    whole = layout.tp == 1 or (arithmetic is not None and arithmetic.splits_products and layout.tp == 2)
    otherwise = layout.cp > 1 or divides or (layout.tp > 1 and case.tuning.passes_otherwise)
    if arithmetic is None or not case.precision.is_mixed or not whole or otherwise:
        return None
    return Twin(case=case, arithmetic=arithmetic, device=device)


def _total(parts: Iterable[Gradients], kind: torch.dtype) -> dict[str, Tensor]:
    """Sum gradients by name, in the dtype `kind` and in order."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, gradient in part.items():
            total[name] = total[name] + gradient.to(kind) if name in total else gradient.to(kind)
    return total
