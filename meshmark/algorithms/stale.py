"""Pipelines that do not wait: a gradient is of older weights than those that it changes. Stage s of p, counted from 0.

- PipeDream (arXiv:1806.03377, section 3.3): each micro-batch makes an update of its own, and the pipeline is flushed at
  the end of a step. Micro-batch b finds at stage s the weights after max(0, b - (p - 1 - s)) of the step's updates,
  and stashes them for its backward pass: w_{b+1} = w_b - r grad f_b(w^1_{b-p+1}, ..., w^p_b)
- with vertical synchronisation (the same section): at every stage the version that the first stage had
- PipeDream-2BW (arXiv:2006.09503, section 3.1): w_{t+1} = w_t - step(grad f(w_{t-1})), two versions being kept

f_b is the micro-batch's share of the global loss, so that what all change is a step of r by the mean gradient. What a
step is made of is the sum of its micro-batches' gradients, wherever each was computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshmark.algorithms.replicas import Tensors, combined
from meshmark.reference.data import Batch
from meshmark.reference.transformer import stage_layers
from meshmark.spec.algorithm import AlgorithmKind
from meshmark.spec.layout import Layout
from meshmark.spec.workload import Workload

Compute = Callable[[Tensors, Batch, Tensors], tuple[float, Tensors]]
"""From weights, a part of a batch, and the newest weights when it is passed back, to its share of the loss and that's
gradients. Right ones do not depend on the newest."""
Versions = Callable[[int, int], int]
"""From a stage and a micro-batch to how many updates of the step its weights have seen; under 2BW, to how many steps
old they are."""


@dataclass(frozen=True, kw_only=True)
class StaleStep:
    loss: float
    gradients: Tensors
    """Of all micro-batches together."""
    after: Tensors | None
    """Where micro-batches' own updates lead to, one after the other; None where the step makes one update."""


def prescribed(kind: AlgorithmKind, num_stages: int) -> Versions:
    """What the schedule says."""
    if kind is AlgorithmKind.PIPEDREAM_2BW:
        return lambda stage, micro_batch: 1
    if kind is AlgorithmKind.PIPEDREAM_VERTICAL:
        return lambda stage, micro_batch: max(0, micro_batch - (num_stages - 1))
    return lambda stage, micro_batch: max(0, micro_batch - (num_stages - 1 - stage))


def stale_step(
    workload: Workload,
    layout: Layout,
    history: Sequence[Tensors],
    batch: Batch,
    compute: Compute,
    versions: Versions | None = None,
) -> StaleStep:
    """`history`: where the run was before each step so far, and before this one. `versions`: the prescribed ones by
    default."""
    chosen = versions or prescribed(workload.algorithm.kind, layout.pp)
    stages = stages_of(workload, layout.pp, history[-1])
    if workload.algorithm.kind is AlgorithmKind.PIPEDREAM_2BW:
        here = {n: history[-1 - min(chosen(stage, 0), len(history) - 1)][n] for n, stage in stages.items()}
        loss, gradients = compute(here, batch, history[-1])
        return StaleStep(loss=loss, gradients=gradients, after=None)
    rate = workload.optimizer.learning_rate
    total: Tensors | None = None
    made, losses = [history[-1]], 0.0
    for index, part in enumerate(batch.micro_batches(layout.num_micro_batches)):
        here = {name: made[min(chosen(stage, index), index)][name] for name, stage in stages.items()}
        loss, own = compute(here, part, made[index])
        losses += loss
        total = combined((1, total), (1, own)) if total else own
        made.append({**made[-1], **combined((1, {name: made[-1][name] for name in own}), (-rate, own))})
    assert total is not None
    return StaleStep(loss=losses, gradients=total, after=made[-1])


def stages_of(workload: Workload, num_stages: int, names: Tensors) -> dict[str, int]:
    """By parameter."""
    model = workload.transformer
    owner = {layer: stage for stage in range(num_stages) for layer in stage_layers(model, num_stages, stage)}

    def layer(name: str) -> int:
        if name.startswith("embedding."):
            return 0
        return int(name.split(".")[1]) + 1 if name.startswith("blocks.") else model.num_layers + 1

    return {name: owner[layer(name)] for name in names}
