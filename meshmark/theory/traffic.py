"""Closed forms of what one rank communicates in one optimizer step.

Bytes are those of full tensors, by kind of collective, as a framework asks for them; `wire_factor` of
`meshmark.measure.traffic` turns them into bytes sent under ring algorithms.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from meshmark.theory.partition import uniform_stages
from meshmark.theory.states import local_parameters

Traffic = dict[str, float]
"""Bytes by kind of collective."""


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """How a framework keeps data-parallel ranks together."""

    kind: str = "all_reduce"
    """Collective that reduces gradients: all_reduce, reduce_scatter or reduce."""
    every_micro_batch: bool = False
    """Whether each micro-batch is reduced by itself, or their sum once."""
    gradient_bytes: int | None = None
    """Bytes an element on the wire; None means those of the precision that is asked for."""
    gathers_per_micro_batch: int = 0
    """All-gathers of the parameters for each micro-batch: 2 under ZeRO-3, one for forward and one for backward."""
    gathers_per_step: int = 0
    """All-gathers of the updated parameters: 1 under ZeRO-1 and 2."""
    gather_kind: str = "all_gather"
    """Collective that brings parameters together: all_gather, or owners' broadcasts."""
    weight_bytes: int | None = None
    """Bytes an element of a gathered weight."""


def wide_bytes(precision: Precision) -> int:
    return precision.wide.itemsize


def default_reduction(case: Case) -> Reduction:
    """The textbook's: one all-reduce a step, or under ZeRO reduce-scatter and all-gather (arXiv:1910.02054, section 7:
    2P elements up to stage 2, 3P at stage 3)."""
    if case.layout.zero_stage == 0:
        return Reduction()
    if case.layout.zero_stage < 3:
        return Reduction(kind="reduce_scatter", gathers_per_step=1)
    return fully_sharded(case)


def fully_sharded(case: Case) -> Reduction:
    """ZeRO-3 as FSDP does it: weights gathered as the products read them, for forward and again for backward, gradients
    reduced after every micro-batch, so that they stay sharded."""
    return Reduction(
        kind="reduce_scatter",
        gathers_per_micro_batch=2,
        every_micro_batch=True,
        weight_bytes=case.precision.weights.itemsize,
    )


METERED_STEP = 2
"""Counted from 0: the step that traffic is planned and metered of, where the steps of an algorithm differ."""


def local_sgd_traffic(case: Case, rank: int) -> Traffic:
    """Replicas that step alone send nothing, but for their gradients in the warm-up and their parameters when these
    are averaged (arXiv:1808.07217)."""
    algorithm, precision = case.workload.algorithm, case.precision
    reduced = algorithm.reduces_gradients(METERED_STEP) * precision.reduction.itemsize
    averaged = algorithm.averages_after(METERED_STEP) * precision.master.itemsize
    if case.layout.dp == 1 or not reduced + averaged:
        return {}
    count = local_parameters(case.workload.model, case.layout, rank)
    assert count is not None, "step_traffic leaves out what is not planned"
    return {"all_reduce": float((reduced + averaged) * count)}


def data_parallel_traffic(case: Case, rank: int, reduction: Reduction | None = None) -> Traffic:
    """Reduction of gradients and gathering of parameters over the data- and context-parallel ranks."""
    if case.workload.algorithm.replicas_differ:
        return local_sgd_traffic(case, rank)
    if case.layout.dp * case.layout.cp == 1:
        return {}
    how = reduction or default_reduction(case)
    precision, count = case.precision, local_parameters(case.workload.model, case.layout, rank)
    assert count is not None, "step_traffic leaves out what is not planned"
    times = case.layout.num_micro_batches if how.every_micro_batch else 1
    gathers = how.gathers_per_step + how.gathers_per_micro_batch * case.layout.num_micro_batches
    traffic: Traffic = {how.kind: float(times * count * (how.gradient_bytes or precision.reduction.itemsize))}
    if gathers:
        traffic[how.gather_kind] = float(gathers * count * (how.weight_bytes or precision.master.itemsize))
    return traffic


def tensor_parallel_traffic(case: Case, activation_bytes: int | None = None) -> Traffic:
    """Four all-reduces of B x T x C a block, two in forward and two in backward (arXiv:1909.08053, section 3); one for
    the embedding, one for the gradient of the head's input; and three scalars a token for the vocabulary-parallel loss.
    """
    layout, model = case.layout, case.workload.model
    if layout.tp == 1:
        return {}
    wide = wide_bytes(case.precision)
    tokens = case.workload.tokens_per_step // (layout.dp * layout.cp)
    stream = tokens * model.hidden * (activation_bytes or wide)
    return {"all_reduce": float((4 * model.num_layers + 2) * stream + 3 * tokens * wide)}


def pipeline_traffic(case: Case, rank: int, activation_bytes: int | None = None) -> Traffic:
    """The residual stream forward and its gradient backward over every boundary that `rank` has (GPipe,
    arXiv:1811.06965, section 2.2): two a virtual stage (arXiv:2104.04473, section 2.2.2), but before the first and
    after the last. The first and the last stage, which both hold a tied weight, sum its gradient."""
    layout = case.layout
    if layout.pp == 1:
        return {}
    model = case.workload.transformer
    stage = layout.coordinates(rank).pp
    boundaries = 2 * layout.virtual_stages - (stage == 0) - (stage == layout.pp - 1)
    tokens = case.workload.tokens_per_step // (layout.dp * layout.cp)
    stream = tokens * model.hidden * (activation_bytes or wide_bytes(case.precision))
    traffic: Traffic = {"send": float(boundaries * stream), "recv": float(boundaries * stream)}
    if model.tied_embeddings and stage in (0, layout.pp - 1):
        traffic["all_reduce"] = float(model.vocab_size * model.hidden // layout.tp * wide_bytes(case.precision))
    return traffic


def context_parallel_traffic(case: Case, rank: int, activation_bytes: int | None = None) -> Traffic:
    """Ring attention (arXiv:2310.01889 sec. 3): in each of cp - 1 hops a rank passes on a block of keys and one of
    values, and in the backward pass their gradients too."""
    layout, model = case.layout, case.workload.model
    if layout.cp == 1:
        return {}
    layers = uniform_stages(case.workload.transformer, layout.pp)[layout.coordinates(rank).pp].num_layers
    tokens = case.workload.tokens_per_step // (layout.dp * layout.cp)
    block = tokens * model.kv_hidden // layout.tp * (activation_bytes or wide_bytes(case.precision))
    sent = float(6 * (layout.cp - 1) * layers * block)
    return {"send": sent, "recv": sent}


def step_traffic(case: Case, rank: int, reduction: Reduction | None = None) -> Traffic | None:
    """All of the above; None where the split of the model is not planned."""
    if local_parameters(case.workload.model, case.layout, rank) is None:
        return None
    return add_traffic(
        data_parallel_traffic(case, rank, reduction),
        tensor_parallel_traffic(case),
        pipeline_traffic(case, rank),
        context_parallel_traffic(case, rank),
    )


def add_traffic(*parts: Traffic) -> Traffic:
    """Sum by kind."""
    total: Traffic = {}
    for part in parts:
        for kind, num_bytes in part.items():
            total[kind] = total.get(kind, 0.0) + num_bytes
    return total
