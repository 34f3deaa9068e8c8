"""Bytes of compressed gradients, in closed form."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from meshmark.algorithms.compressed.compressor import Compressor, CompressorKind
from meshmark.models.transformer import ModelSpec
from meshmark.spec.case import Case
from meshmark.theory.partition import parameter_shapes, uniform_stages

_INDEX, _SCALE = 4, 4
"""Bytes of a place in a tensor, and of what a tensor is scaled by."""
_FORMAT = 2
"""Bytes of an element in fp16 or bf16."""


def message_bytes(compressor: Compressor | None, shapes: Sequence[tuple[int, ...]], itemsize: int) -> int:
    """Return the bytes that one replica sends of tensors of these shapes, for what is gathered.

    `itemsize` is that of the gradients. Without a compressor an element is one bit.
    """
    return sum(_tensor_bytes(compressor, math.prod(shape), itemsize) for shape in shapes)


def _tensor_bytes(compressor: Compressor | None, size: int, itemsize: int) -> int:
    if compressor is None:
        return -(-size // 8)
    if compressor.kind is CompressorKind.TOP_K:
        return compressor.rounds * compressor.kept(size) * (itemsize + _INDEX)
    once = {CompressorKind.SIGN: -(-size // 8), CompressorKind.QSGD: size}[compressor.kind] + _SCALE
    return compressor.rounds * once


def summed_bytes(compressor: Compressor, shapes: Iterable[tuple[int, ...]], itemsize: int) -> list[int]:
    """Return the bytes of every all-reduce of a step; empty for what is gathered."""
    sizes = [math.prod(shape) for shape in shapes]
    if compressor.kind in (CompressorKind.FP16, CompressorKind.BF16):
        return [_FORMAT * sum(sizes)]
    if compressor.kind is CompressorKind.RANDOM_K:
        return [itemsize * sum(map(compressor.kept, sizes))]
    if compressor.kind is not CompressorKind.POWER_SGD:
        return []
    factors = [(shape, compressor.factors(shape)) for shape in shapes]
    whole = sum(math.prod(shape) for shape, factored in factors if factored is None)
    rows = sum(f[0] * f[2] for _, f in factors if f)
    columns = sum(f[1] * f[2] for _, f in factors if f)
    return [itemsize * count for count in (whole, rows, columns)]


def trained_shapes(case: Case, rank: int) -> list[tuple[int, ...]]:
    """Return the shapes of the trained parameters of `rank`'s pipeline stage."""
    model, layout = case.workload.model, case.layout
    if not isinstance(model, ModelSpec):  # the adapters of these algorithms split none of them
        from meshmark.models.module import parameter_shapes as reference_shapes  # imports torch, which takes seconds

        shapes = reference_shapes(model)
        return [shape for name, shape in shapes.items() if case.workload.trains(name)]
    stage = uniform_stages(model, layout.pp)[layout.coordinates(rank).pp]
    return [shape for name, shape in parameter_shapes(model, stage).items() if case.workload.trains(name)]
