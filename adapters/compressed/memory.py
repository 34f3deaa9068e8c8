"""Memory that compressing engines hold beyond parameters, gradients and the optimizer's states."""

from __future__ import annotations

import math

from meshmark.algorithms.compressed import Compressing, ErrorFeedback
from meshmark.algorithms.compressed.traffic import trained_shapes
from meshmark.spec.case import Case
from meshmark.theory.memory import ExtraMemory, model_states
from meshmark.theory.recipe import TrainingRecipe


def _holders(case: Case, rank: int, kind: str) -> int:
    """Return the number of ranks that share the result of a collective of `kind`. The server alone holds all of it."""
    return case.layout.dp if kind == "gather" and case.layout.coordinates(rank).dp else 1


def held_besides(case: Case, rank: int, recipe: TrainingRecipe) -> tuple[ExtraMemory, ...]:
    """Return the vectors that are kept, and what the update holds in addition.

    The update holds the replica's own gradients, all replicas' messages and their sum, if that is more than the
    backward pass held.
    """
    algorithm, plan = case.workload.algorithm_as(Compressing), model_states(case, rank, recipe)
    if plan is None:
        return ()
    vector = case.precision.accumulation.itemsize * sum(map(math.prod, trained_shapes(case, rank)))
    kept = algorithm.vectors_kept(case, rank) * vector
    found = (
        [ExtraMemory(category="optimizer_states", num_bytes=kept, reason=f"what {algorithm.kind} keeps")]
        if kept
        else []
    )
    if plan.peak is None:
        return tuple(found)
    messages = sum(num_bytes // _holders(case, rank, kind) for kind, num_bytes, _ in algorithm.step_bytes(case, rank))
    # Under error feedback the replica's own gradients become what is kept.
    own = 0 if isinstance(algorithm, ErrorFeedback) else vector
    updating = plan.parameters + plan.optimizer_states + kept + own + vector + messages
    besides = max(plan.peak + kept, updating) - plan.peak - kept
    if besides:
        found.append(ExtraMemory(category="peak", num_bytes=besides, reason="messages, and what they say together"))
    return tuple(found)
