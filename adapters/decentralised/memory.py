"""Memory that decentralised engines hold beyond parameters, gradients and the optimizer's states."""

from __future__ import annotations

import math

from meshmark.algorithms.decentralised import Decentralised
from meshmark.models.module import parameter_shapes
from meshmark.spec.case import Case
from meshmark.theory.memory import ExtraMemory, model_states
from meshmark.theory.recipe import TrainingRecipe
from meshmark.theory.traffic import METERED_STEP


def held_besides(case: Case, rank: int, recipe: TrainingRecipe) -> tuple[ExtraMemory, ...]:
    """Return the vectors that are kept, and the messages.

    Messages are there in the update, or already before the gradient. In the latter case the peak of the backward pass
    is on top of them.
    """
    algorithm, plan = case.workload.algorithm_as(Decentralised), model_states(case, rank, recipe)
    if plan is None:
        return ()
    shapes = parameter_shapes(case.workload.model).items()
    trained = sum(math.prod(shape) for name, shape in shapes if case.workload.trains(name))
    vector = trained * case.precision.master.itemsize
    kept = algorithm.vectors_kept(case, rank) * vector
    place = case.layout.coordinates(rank).dp
    heard = len(algorithm.graph.hears(case.layout.dp, METERED_STEP, place))
    messages = algorithm.vectors_mixed * (1 + heard) * vector
    found = (
        [ExtraMemory(category="optimizer_states", num_bytes=kept, reason=f"what {algorithm.kind} keeps")]
        if kept
        else []
    )
    if plan.peak is None:
        return tuple(found)
    early = messages if algorithm.sends_before_gradients else 0
    updating = plan.parameters + plan.optimizer_states + kept + algorithm.vectors_in_update * vector + messages
    besides = max(plan.peak + kept + early, updating) - plan.peak - kept
    if besides:
        found.append(ExtraMemory(category="peak", num_bytes=besides, reason="messages to neighbours"))
    return tuple(found)
