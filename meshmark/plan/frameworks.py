"""Frameworks as the planner knows them: the recipe that each trains by, and which layouts it has."""

from __future__ import annotations

from dataclasses import dataclass

from meshmark.errors import UnknownNameError
from meshmark.spec.layout import Axis
from meshmark.theory.recipe import RECIPES, TrainingRecipe


@dataclass(frozen=True, kw_only=True)
class Framework:
    """What a search asks of a framework."""

    name: str
    recipe: str
    axes: tuple[Axis, ...]
    """Degrees above one that it has."""
    zero_stages: tuple[int, ...]
    adapter: str | None = None
    """Meshmark's adapter of it; None where there is none, and nothing can be run."""

    @property
    def told(self) -> str:
        """In one line: bytes a parameter before sharding, and what is searched."""
        states = RECIPES[self.recipe].states.total
        stages = ", ".join(map(str, self.zero_stages))
        return f"recipe {self.recipe}, {states:g} bytes a parameter; {', '.join(self.axes)}; ZeRO {stages}"


FRAMEWORKS: dict[str, Framework] = {
    framework.name: framework
    for framework in (
        Framework(name="nanotron", recipe="nanotron", axes=("dp", "tp", "pp"), zero_stages=(0, 1)),
        Framework(
            name="megatron",
            recipe="megatron",
            axes=("dp", "tp", "pp", "cp"),
            zero_stages=(0, 1),
            adapter="megatron",
        ),
        Framework(name="megatron-deepspeed", recipe="megatron-deepspeed", axes=("dp", "tp", "pp"), zero_stages=(0, 1)),
        Framework(name="deepspeed", recipe="zero", axes=("dp",), zero_stages=(0, 1, 2, 3), adapter="deepspeed"),
        Framework(name="ddp", recipe="ddp", axes=("dp",), zero_stages=(0,), adapter="ddp"),
        Framework(name="fsdp2", recipe="fsdp2-foreach", axes=("dp",), zero_stages=(3,), adapter="fsdp2"),
        Framework(name="torchtitan", recipe="fsdp2", axes=("dp", "tp", "pp", "cp"), zero_stages=(0, 3)),
        Framework(name="composer", recipe="fsdp-fused-loss", axes=("dp",), zero_stages=(3,)),
    )
}


def framework(name: str) -> Framework:
    """The framework called `name`. Raises `UnknownNameError` when the planner knows none of that name."""
    if name not in FRAMEWORKS:
        raise UnknownNameError("framework", name, FRAMEWORKS)
    return FRAMEWORKS[name]


def recipe_of(name: str) -> TrainingRecipe:
    """What the framework called `name` trains by."""
    return RECIPES[framework(name).recipe]
