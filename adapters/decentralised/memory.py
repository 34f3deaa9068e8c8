"""What decentralised engines hold beyond parameters, gradients and the optimizer's states."""

from __future__ import annotations

import math

from meshmark.reference.build import parameter_shapes
from meshmark.spec.algorithm import AlgorithmKind
from meshmark.spec.case import Case
from meshmark.theory.recipe import TrainingRecipe
from meshmark.theory.states import Remainder, model_states
from meshmark.theory.traffic import METERED_STEP

KEPT = {AlgorithmKind.GRADIENT_TRACKING: 2, AlgorithmKind.EXACT_DIFFUSION: 1}
"""From step to step, in vectors as long as the parameters. The momentum that others keep is one, as the optimizer's."""
BESIDES = {
    AlgorithmKind.DSGD: 0,
    AlgorithmKind.DPSGD: 1,
    AlgorithmKind.DMSGD: 1,
    AlgorithmKind.QUASI_GLOBAL: 1,
    AlgorithmKind.GRADIENT_TRACKING: 1,
    AlgorithmKind.EXACT_DIFFUSION: 1,
}
"""At the fullest moment of the update, besides parameters, what is kept, and messages: gradients that are sent or are
yet to become what is kept, or where a replica stood before."""


def held_besides(case: Case, rank: int, recipe: TrainingRecipe) -> tuple[Remainder, ...]:
    """What is kept; and messages, which are there in the update, or from before the gradient, in which case the peak of
    the backward pass is on top of them."""
    kind, graph = case.workload.algorithm.kind, case.workload.algorithm.graph
    plan = model_states(case, rank, recipe)
    if plan is None or graph is None:
        return ()
    shapes = parameter_shapes(case.workload.model).items()
    trained = sum(math.prod(shape) for name, shape in shapes if case.workload.trains(name))
    vector = trained * case.precision.master.itemsize
    kept = KEPT.get(kind, 0) * vector
    place = case.layout.coordinates(rank).dp
    heard = len(graph.hears(case.layout.dp, METERED_STEP, place))
    messages = case.workload.algorithm.vectors_mixed * (1 + heard) * vector
    found = [Remainder(category="optimizer_states", num_bytes=kept, reason=f"what {kind} keeps")] if kept else []
    if plan.peak is None:
        return tuple(found)
    early = messages if kind is AlgorithmKind.DPSGD else 0
    updating = plan.parameters + plan.optimizer_states + kept + BESIDES[kind] * vector + messages
    besides = max(plan.peak + kept + early, updating) - plan.peak - kept
    if besides:
        found.append(Remainder(category="peak", num_bytes=besides, reason="messages to neighbours"))
    return tuple(found)
