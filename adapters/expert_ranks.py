"""Experts of a mixture that groups of data-parallel ranks share: which rank has which, whatever the framework."""

from __future__ import annotations

from meshmark.models.mixture import MixtureSpec
from meshmark.spec.case import Case

EXPERT_RANKS = 2
"""Ranks that share a layer's experts. Each has as many of them, the first rank the first ones."""


def mixture_of(case: Case) -> MixtureSpec:
    """Return the model of a case whose adapter takes mixtures of experts alone."""
    model = case.workload.model
    assert isinstance(model, MixtureSpec)
    return model


def refusal_of_ranks(case: Case) -> str | None:
    """Return why the data-parallel ranks of a case cannot share experts, or None."""
    if case.layout.dp % EXPERT_RANKS == 0:
        return None
    return f"{EXPERT_RANKS} ranks share experts, so dp must be a multiple of it, got {case.layout.dp}"


def elements_elsewhere(case: Case) -> float:
    """Return the number of expert parameters that a rank does not hold."""
    spec = mixture_of(case)
    return spec.num_layers * spec.num_experts * spec.expert_parameters * (1 - 1 / EXPERT_RANKS)


def expert_numbers(spec: MixtureSpec, local: int) -> list[int]:
    """Return which expert is a rank's number `local`, for each of the ranks that share them."""
    return [local + rank * (spec.num_experts // EXPERT_RANKS) for rank in range(EXPERT_RANKS)]
