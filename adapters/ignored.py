"""Parameters that FSDP1 or FSDP2 ignores: whole on every rank, with gradients that the user reduces."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import nn

from meshmark.spec.case import Case
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.recipe import TrainingRecipe
from meshmark.theory.traffic import Flow, Purpose, TrafficException


def average_gradients(parameters: Iterable[nn.Parameter], dp: int) -> None:
    """Replace each gradient by its mean over all ranks. A collective call."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dp


def held_whole(case: Case, recipe: TrainingRecipe, num_elements: int, reason: str) -> tuple[ExtraMemory, ...]:
    """Return what a rank holds of `num_elements` ignored elements beyond its shard of them, by category."""
    states, more = recipe.states, num_elements * (1 - 1 / case.layout.dp)
    sizes = {
        "parameters": states.weight_bytes,
        "gradients": states.gradient_bytes,
        "optimizer_states": states.moment_bytes,
    }
    return tuple(ExtraMemory(category=name, num_bytes=size * more, reason=reason) for name, size in sizes.items())


def sent_whole(
    case: Case, flows: Sequence[Flow] | None, num_elements: int, num_tensors: int, reason: str
) -> tuple[TrafficException, ...]:
    """Return the all-reduces of ignored gradients, once a step; nothing where `flows`, the plan, is unknown."""
    num_bytes = num_elements * case.precision.reduction.itemsize
    whole = tuple(
        dataclasses.replace(flow, kind="all_reduce", num_bytes=num_bytes, fewest=1, most=num_tensors)
        for flow in [flow for flow in flows or () if flow.purpose is Purpose.GRADIENTS][:1]
    )
    return (TrafficException(sends=whole, reason=reason),) if whole else ()
