"""FSDP1 by what it leaves to the user: modules that it ignores, and flat parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, ClassVar

from torch import Tensor, nn

from meshmark.adapter.contract import Feature
from meshmark.adapter.engine import Gathered, RankContext
from meshmark.adapters.fsdp1 import FSDP1, FSDP1Engine, canonical, padding_of_units
from meshmark.adapters.ignored import average_gradients, held_whole, sent_whole
from meshmark.models.module import Model, block_of, parameter_shapes
from meshmark.models.transformer import TEXT_FAMILIES
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from meshmark.theory.memory import ExtraMemory
from meshmark.theory.traffic import Purpose, TrafficException, besides, step_traffic

IGNORED = "head.norm"
"""Name of the module that FSDP1 ignores, the last norm."""
_WHOLE = "an ignored module is whole on every rank, and its gradients are all-reduced once a step"


class IgnoringFSDP1Engine(FSDP1Engine):
    """Every rank has the ignored module whole, and reduces its gradients once a step."""

    def ignored(self) -> Iterator[tuple[str, nn.Parameter]]:
        named = ((canonical(name), parameter) for name, parameter in self.module.named_parameters())
        return ((name, parameter) for name, parameter in named if name.startswith(IGNORED))

    def finish_gradients(self) -> None:
        average_gradients((parameter for _, parameter in self.ignored()), self.case.layout.dp)
        super().finish_gradients()

    def parameters(self) -> Mapping[str, Tensor]:
        return _both(super().parameters(), {name: parameter.detach() for name, parameter in self.ignored()})

    def gradients(self) -> Mapping[str, Tensor]:
        own = {name: parameter.grad for name, parameter in self.ignored() if parameter.grad is not None}
        return _both(super().gradients(), own)


def _both(sharded: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors that are brought together when they are asked for, and those that are here."""
    calls = [([name], lambda name=name: [sharded[name]]) for name in sharded]
    return Gathered([*calls, *(([name], lambda name=name: [own[name]]) for name in own)])


class IgnoresLastNorm(FSDP1):
    """FSDP1 with a module that it ignores."""

    engine: ClassVar[type[FSDP1Engine]] = IgnoringFSDP1Engine
    capabilities: ClassVar = dataclasses.replace(
        FSDP1.capabilities, families=TEXT_FAMILIES, precisions=frozenset({Precision.FP32})
    )

    @classmethod
    def supports(cls, case: Case, device: str, backend: str) -> str | None:
        if not all(map(case.workload.trains, ignored_shapes(case))):
            return f"{case.adapter} takes models whose last norm is trained, which is what it ignores"
        return super().supports(case, device, backend)

    @classmethod
    def unit_sizes(cls, case: Case) -> dict[str, list[int]]:
        shapes, ignored = parameter_shapes(case.workload.model), ignored_shapes(case)
        found: dict[str, list[int]] = {"": []}
        for name, shape in shapes.items():
            if name not in ignored:
                found.setdefault(block_of(case.workload.model, name), []).append(math.prod(shape))
        return found

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        whole = held_whole(case, cls.recipe(case), _ignored_elements(case), _WHOLE)
        return (*super().extra_memory(case, rank), *whole)

    @classmethod
    def traffic_exceptions(cls, case: Case, rank: int) -> tuple[TrafficException, ...]:
        """The root, of which the ignored module would be a part, is gathered once a micro-batch, not twice."""
        flows, elements = step_traffic(case, rank), _ignored_elements(case)
        less = Fraction(-elements, case.workload.model.num_parameters)
        return (
            *super().traffic_exceptions(case, rank),
            *besides(flows, Purpose.GRADIENTS, less, _WHOLE),
            *besides(flows, Purpose.WEIGHTS, less * (1 + cls.sharding.reshards_root) / 2, _WHOLE),
            *sent_whole(case, flows, elements, len(ignored_shapes(case)), _WHOLE),
        )


class FSDP1Ignores(IgnoresLastNorm):
    """`ignored_modules`: the last norm is not sharded, and its gradients are the user's to reduce."""

    def model(self, case: Case, context: RankContext) -> Model:
        self.whole = super().model(case, context)
        return self.whole

    def choices(self, case: Case) -> dict[str, Any]:
        return {"ignored_modules": [self.whole.get_submodule(IGNORED)]}


def ignored_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the ignored module's tensors by name."""
    shapes = parameter_shapes(case.workload.model)
    return {name: tuple(shape) for name, shape in shapes.items() if name.startswith(IGNORED)}


def _ignored_elements(case: Case) -> int:
    return sum(map(math.prod, ignored_shapes(case).values()))


class FSDP1Flat(FSDP1):
    """`use_orig_params=False`, FSDP1's own default: the optimizer steps on the flat tensors themselves."""

    capabilities: ClassVar = dataclasses.replace(
        FSDP1.capabilities,
        unfreezes=False,
        lacks={
            **FSDP1.capabilities.lacks,
            Feature.DECAY_GROUPS: "a unit is one parameter, which is in one group of the optimizer",
            Feature.FROZEN: "a unit is one parameter, which is trained as a whole or not at all",
        },
    )

    def choices(self, case: Case) -> dict[str, Any]:
        return {"use_orig_params": False}

    @classmethod
    def extra_memory(cls, case: Case, rank: int) -> tuple[ExtraMemory, ...]:
        """Return that `zero_grad` frees a shard's gradients, which stay while parameters are views of it."""
        padding, sizes = padding_of_units(case, cls.sharding, cls.unit_sizes(case)), cls.unit_sizes(case)
        elements = (sum(map(sum, sizes.values())) + padding.root + padding.blocks) // case.layout.dp
        reason = "gradients of flat tensors are freed when they are cleared, and are there at the peak"
        freed = (("steady", -4 * elements), ("peak", 4 * elements))
        more = (ExtraMemory(category=name, num_bytes=num_bytes, reason=reason) for name, num_bytes in freed)
        return (*super().extra_memory(case, rank), *more)
