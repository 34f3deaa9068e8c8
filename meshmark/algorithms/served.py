"""Algorithms that compress twice, on the way to a server and back, and feed back what is lost on both. C is one of
`compressors`, of every tensor alone; e_i is kept by replica i, e by the server.

- DoubleSqueeze (arXiv:1905.05957, algorithm 1): p_i = g_i + e_i, e_i <- p_i - C(p_i), s = mean_i C(p_i) + e,
  d = C(s), e <- s - d

The server decides by the bits that it has: it sums in order of the replicas, in the gradients' own format.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshmark.algorithms.compressing import ErrorFeedback
from meshmark.algorithms.compressors import Array
from meshmark.algorithms.replicas import Tensors, combined


class DoubleSqueeze(ErrorFeedback):
    left_of_server: Tensors | None = None

    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        back = self.sent_back(self.sent(gradients))
        return [back for _ in gradients]

    def sent_back(self, told: Sequence[Tensors]) -> Tensors:
        """What all know of what the server makes of what it is told."""
        wanted = self.wanted_back({name: in_order([t[name] for t in told]) for name in told[0]})
        found = {name: self.told_back(name, x) for name, x in wanted.items()}
        self.left_of_server = combined((1, wanted), (-1, found))
        return found

    def wanted_back(self, mean: Tensors) -> Tensors:
        """s."""
        return mean if self.left_of_server is None else combined((1, mean), (1, self.left_of_server))

    def told_back(self, name: str, x: Array) -> Array:
        return self.told(x, self.draw(0, name))


def in_order(parts: Sequence[Array]) -> Array:
    """The mean, in the format of the parts."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total / total.dtype.type(len(parts))
