"""Frameworks as the planner knows them: the recipe that each trains by, and which layouts it has."""

from __future__ import annotations

from dataclasses import dataclass

from meshmark.errors import UnknownNameError
from meshmark.plan.stacks import is_modern
from meshmark.spec.hardware import Gpu
from meshmark.spec.layout import AXES, Axis, Layout
from meshmark.spec.model_spec import Family
from meshmark.theory.recipe import RECIPES, TrainingRecipe


@dataclass(frozen=True, kw_only=True)
class Framework:
    """What a search asks of a framework."""

    name: str
    recipe: str
    older: str | None = None
    """The recipe of its generation that trained GPTs on GPUs before Hopper, where that is another."""
    axes: tuple[Axis, ...]
    """Degrees above one that it has."""
    zero_stages: tuple[int, ...]
    adapter: str | None = None
    """Meshmark's adapter of it; None where there is none, and nothing can be run."""

    def recipe_on(self, there: Gpu | None, family: Family) -> TrainingRecipe:
        """What it trains a family's models by on a GPU; today's generation where that is not known. Models with rotary
        positions and a gate are younger than what trained the papers' GPTs."""
        older = there is not None and not is_modern(there) and family is Family.GPT
        return RECIPES[self.older if self.older and older else self.recipe]

    def told(self, using: TrainingRecipe) -> str:
        """In one line: bytes a parameter before sharding, and what is searched."""
        stages = ", ".join(map(str, self.zero_stages))
        return f"recipe {using.name}, {using.states.total:g} bytes a parameter; {', '.join(self.axes)}; ZeRO {stages}"

    def beyond(self, layout: Layout) -> str | None:
        """What of a layout it is not known to train by, in words; None where it trains by all."""
        missing = [f"{axis} above 1" for axis in AXES if getattr(layout, axis) > 1 and axis not in self.axes]
        # Of one data-parallel rank nothing is shared out, whatever the stage.
        if layout.zero_stage not in self.zero_stages and layout.dp * layout.cp > 1:
            missing.append(f"ZeRO stage {layout.zero_stage}")
        if not missing:
            return None
        has = f"{', '.join(self.axes)} and ZeRO {', '.join(map(str, self.zero_stages))}"
        return f"framework {self.name}, which has {has}, does not train with {' and '.join(missing)}"


FRAMEWORKS: dict[str, Framework] = {
    framework.name: framework
    for framework in (
        Framework(name="nanotron", recipe="nanotron", axes=("dp", "tp", "pp"), zero_stages=(0, 1)),
        Framework(
            name="megatron",
            recipe="megatron-core",
            older="megatron",
            axes=("dp", "tp", "pp", "cp"),
            zero_stages=(0, 1),
            adapter="megatron",
        ),
        *(
            Framework(
                name=name,
                recipe="megatron-core",
                axes=("dp", "tp", "pp", "cp"),
                zero_stages=(0, 1),
                adapter="megatron",
            )
            for name in ("megatron-core", "nemo")
        ),
        Framework(name="megatron-2021", recipe="megatron", axes=("dp", "tp", "pp"), zero_stages=(0, 1)),
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


DEFAULT_FRAMEWORK = "megatron-core"
"""Whose recipe and rates are taken where none is named."""


def recipe_of(name: str, there: Gpu | None = None, family: Family = Family.GPT) -> TrainingRecipe:
    """What the framework called `name` trains by on a GPU."""
    return framework(name).recipe_on(there, family)
