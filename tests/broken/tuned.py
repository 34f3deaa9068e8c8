"""Tuned in name alone, or to a kernel that computes something else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshmark.adapter.engine import Engine, RankContext
from meshmark.adapter.single import Single, SingleEngine
from meshmark.spec.case import Case, Tuning


class Untuned(Single):
    def build(self, case: Case, context: RankContext) -> Engine:
        return super().build(dataclasses.replace(case, tuning=Tuning()), context)


class HalfCompiled(Single):
    def build(self, case: Case, context: RankContext) -> Engine:
        """By Dynamo alone, without the seconds of a compiler; one block stays as it is."""
        return compiled(super().build(dataclasses.replace(case, tuning=Tuning()), context), skip=1, scale=1.0)


class Miscompiled(Single):
    """Every block is compiled, to what is off by a ten-thousandth."""

    def build(self, case: Case, context: RankContext) -> Engine:
        return compiled(super().build(dataclasses.replace(case, tuning=Tuning()), context), skip=0, scale=1.0001)


def compiled(engine: Engine, *, skip: int, scale: float) -> Engine:
    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
        return lambda *arguments: [out * scale for out in graph(*arguments)]

    assert isinstance(engine, SingleEngine)
    for block in list(engine.module.blocks.children())[skip:]:  # type: ignore[union-attr]
        block.compile(backend=backend, fullgraph=True)
    return engine
