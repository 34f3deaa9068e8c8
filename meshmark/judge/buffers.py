"""Where the rows of a micro-batch enter one another's gradients: batch norms, and the statistics that they keep.

The workload defines statistics as those of one micro-batch of one replica. So the exact gradient is the sum over all
micro-batches of all replicas, each normalised by itself, and each replica's running averages are those that float64
makes, from where they were before the step, of the micro-batches that this replica saw.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from meshmark.judge.deviation import Deviation, Deviations, Quantity, QuantityKind, Tensors, deviation
from meshmark.judge.trace import Trace
from meshmark.reference.build import buffer_shapes, module_class, parameter_shapes, skeleton
from meshmark.reference.data import Batch, make_batch
from meshmark.reference.model import Model
from meshmark.reference.objective import loss_share
from meshmark.spec.layout import Layout
from meshmark.spec.model_config import Dataset
from meshmark.spec.workload import Workload


def together(workload: Workload, batch: Batch, layout: Layout | None) -> list[Batch]:
    """`batch`, in parts whose rows are normalised together: whole, or by micro-batches of the replicas of `layout`."""
    if not workload.couples_rows or layout is None:
        return [batch]
    rows = workload.global_batch // (layout.dp * layout.num_micro_batches)
    return list(batch.micro_batches(len(batch) // rows))


def exact_model(workload: Workload, batch: Batch) -> Model:
    """Without values, and without dropout; but batch norms work as they do in training.

    A user's own module, which has no dropout, works as in training throughout.
    """
    model = skeleton(workload.model)
    model.train(workload.dataset is Dataset.OWN).skipped_block = batch.skipped_block
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.train()
    return model


def doubles(tensors: Tensors) -> dict[str, Tensor]:
    """In float64; counts stay whole numbers."""
    found = {name: torch.from_numpy(value) for name, value in tensors.items()}
    return {name: value.double() if value.is_floating_point() else value.clone() for name, value in found.items()}


def initial_buffers(workload: Workload) -> Tensors:
    """Return the prescribed start, of every replica."""
    values = module_class(workload.model).initial_buffers(workload.model, workload.seed)
    return {name: value.numpy() for name, value in values.items()}


def fresh_buffers(workload: Workload) -> dict[str, Tensor]:
    return doubles(initial_buffers(workload))


@torch.no_grad()
def exact_buffers(
    workload: Workload, parameters: Tensors, before: Tensors, parts: Sequence[Batch], momentum: float | None = None
) -> Tensors:
    """What `before` becomes when a replica trains on `parts`, one after the other; `momentum`: another than its own."""
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
    """The loss in evaluation before `step`: each replica's rows under its own running statistics."""
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
    """Every buffer of a trace against the truth, that of the replica which is furthest from it; none for a workload
    without. A replica that tells no buffers is infinitely far."""
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
    """The buffers that a replica should have after `step`, made of those that it had before and of the parameters where
    the run was. An attempt that loss scaling left out has seen the batch too."""
    nowhere = initial_buffers(workload)
    told = trace.buffers[replica][step]
    before = {name: told.get(name, np.full_like(x, np.nan if x.shape else 0)) for name, x in nowhere.items()}
    own = make_batch(workload, step).shard(replica, len(trace.buffers))
    parts = together(workload, own, layout) * (1 + trace.left_out[step] if trace.left_out else 1)
    return exact_buffers(workload, known_parameters(trace, workload, step), before, parts)


def known_parameters(trace: Trace, workload: Workload, step: int) -> Tensors:
    """Where the run was before `step`; what it did not tell is no number."""
    told = trace.parameters[step]
    return {name: told.get(name, np.full(shape, np.nan)) for name, shape in parameter_shapes(workload.model).items()}


def _furthest(replicas: list[Deviation]) -> Deviation:
    return max(replicas, key=lambda d: d.distance)
