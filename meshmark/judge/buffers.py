"""Workloads whose rows affect each other's gradients within a micro-batch: batch norms and their statistics.

The workload defines statistics as those of one micro-batch of one replica. The exact gradient is therefore the sum
over all micro-batches of all replicas, each normalised separately. Each replica's running averages are those that
float64 computes from the replica's values before the step and from the micro-batches that it processed.
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
