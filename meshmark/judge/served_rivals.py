"""The rivals of what goes by a server: algorithms that compress both ways, with one thing changed."""

from __future__ import annotations

from meshmark.algorithms.compressing import Compressing
from meshmark.algorithms.compressors import Array
from meshmark.algorithms.replicas import Tensors
from meshmark.algorithms.served import DoubleSqueeze


class _ServerForgets(DoubleSqueeze):
    def wanted_back(self, mean: Tensors) -> Tensors:
        return mean


class _ServerAddsTwice(DoubleSqueeze):
    def wanted_back(self, mean: Tensors) -> Tensors:
        return super().wanted_back(super().wanted_back(mean))


class _ServerSendsAll(DoubleSqueeze):
    def told_back(self, name: str, x: Array) -> Array:
        return x


OF_SERVERS: dict[str, type[Compressing]] = {
    "what the server has left is forgotten": _ServerForgets,
    "what the server has left is added twice": _ServerAddsTwice,
    "the server sends its mean as it is": _ServerSendsAll,
}
