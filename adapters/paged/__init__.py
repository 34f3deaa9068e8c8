"""A paged engine of Meshmark's own, small enough to read: the reference on which defects are planted.

`blocks` gives out blocks of the KV cache, `model` computes a batch on them, `engine` schedules requests, and `ranks`
runs the model on several tensor-parallel ranks. It serves Llama models in Meshmark's own environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from meshmark.adapter.contract import Requirement
from meshmark.inference.contract import Engine, EngineOptions, InferenceAdapter


class Paged(InferenceAdapter):
    """The paged engine on one rank."""

    requires = (Requirement(module="safetensors", distribution="safetensors"),)
    precisions: ClassVar[tuple[str, ...]] = (
        "fp32",
        "bf16",
        "fp8-cache",
        "int8-weights",
        "int4-weights",
        "bf16-int4-weights",
    )
    promises: ClassVar[dict[str, str]] = {
        "copies": "seed + index",
        "sharing": "full blocks of the prompt",
        "beams": "the most probable, of one length",
    }

    def build(self, model: Path, options: EngineOptions) -> Engine:
        from meshmark.adapters.paged.engine import PagedEngine

        return PagedEngine(model, options)


class PagedTensorParallel(Paged):
    """The paged engine on two tensor-parallel ranks, each a process."""

    tp = 2
    precisions = ("fp32", "bf16", "fp8-cache")  # a group of weights with one scale is not cut
