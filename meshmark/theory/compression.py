"""Closed forms of what compressed gradients take: bytes sent by kind of collective, and what is kept besides."""

from __future__ import annotations

import math
from collections.abc import Iterable

from meshmark.spec.algorithm import SERVED, AlgorithmKind, AlgorithmSpec
from meshmark.spec.case import Case
from meshmark.spec.compressor import Compressor, CompressorKind
from meshmark.theory.parameter_order import parameter_shapes
from meshmark.theory.partition import uniform_stages

_KEPT = {
    AlgorithmKind.ERROR_FEEDBACK: 1,
    AlgorithmKind.EF21: 2,
    AlgorithmKind.DOUBLE_SQUEEZE: 1,
    AlgorithmKind.ONE_BIT_ADAM: 1,
    AlgorithmKind.ONE_BIT_LAMB: 2,
    AlgorithmKind.ZERO_ONE_ADAM: 3,
}
"""From step to step, in vectors as long as the gradients; Adam's moments are an optimizer's states."""
_INDEX, _SCALE = 4, 4
"""Bytes of a place in a tensor, and of what a tensor is scaled by."""
_FORMAT = 2
"""Of an element in fp16 or bf16."""


def vectors_kept(case: Case, rank: int) -> int:
    """Beside the optimizer's states; on a server what it has left too."""
    kind = case.workload.algorithm.kind
    return _KEPT.get(kind, 0) + (kind in SERVED and case.layout.coordinates(rank).dp == 0)


def told_bytes(algorithm: AlgorithmSpec, size: int, itemsize: int) -> int:
    """Of one tensor, as one replica tells all others; for what is gathered."""
    compressor = algorithm.compressor
    if compressor is None:
        return -(-size // 8)
    if compressor.kind is CompressorKind.TOP_K:
        return compressor.rounds * compressor.kept(size) * (itemsize + _INDEX)
    once = {CompressorKind.SIGN: -(-size // 8), CompressorKind.QSGD: size}[compressor.kind] + _SCALE
    return compressor.rounds * once


def summed_bytes(compressor: Compressor, shapes: Iterable[tuple[int, ...]], itemsize: int) -> list[int]:
    """Of every all-reduce of a step; empty for what is gathered."""
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
    model, layout = case.workload.transformer, case.layout
    stage = uniform_stages(model, layout.pp)[layout.coordinates(rank).pp]
    return [shape for name, shape in parameter_shapes(model, stage).items() if case.workload.trains(name)]


def step_bytes(case: Case, rank: int) -> list[tuple[str, int, int]]:
    """By kind of the collectives of a step that compresses: bytes of their full tensors, and calls at least."""
    algorithm, shapes = case.workload.algorithm, trained_shapes(case, rank)
    itemsize = case.precision.accumulation.itemsize
    if algorithm.compressor and (summed := summed_bytes(algorithm.compressor, shapes, itemsize)):
        return [("all_reduce", sum(summed), len(summed))]
    told = sum(told_bytes(algorithm, math.prod(shape), itemsize) for shape in shapes)
    if algorithm.kind in SERVED:
        return [("gather", case.layout.dp * told, 1), ("broadcast", told, 1)]
    return [("all_gather", case.layout.dp * told, 1)]
