"""Algorithms that send less than gradients. All replicas step on one direction d and so stand together; C is one of
`compressors`, of every tensor alone.

- compressed: d = mean_i C(g_i); a format: of parts that are cast, divided by n, and summed in that format
- error feedback (Seide et al. 2014; Mem-SGD, arXiv:1809.07599; EF-SGD, arXiv:1901.09847):
  p_i = g_i + e_i, d = mean_i C(p_i), e_i <- p_i - C(p_i). What is sent and what is left add up to what was to be sent
- PowerSGD (arXiv:1905.13727, algorithms 1 and 2): p_i as before, P = orthonormal(mean_i p_i Q), Q <- mean_i p_i^T P,
  d = P Q^T, e_i <- p_i - d; the first Q is drawn. Tensors that this would hardly make smaller go as they are
- EF21 (arXiv:2106.05203, algorithm 2), from h_i = 0:  h_i <- h_i + C(g_i - h_i), d = mean_i h_i
- several rounds (NEOLITHIC's, arXiv:2206.03665): C(x) = v_R, where v_0 = 0, v_{r+1} = v_r + C(x - v_r)
- majority vote (arXiv:1810.05291, algorithm 1): d = sign(sum_i sign(g_i)), 0 where as many say the one as the other

With a server, compression is on the way there and back; e_i is kept by replica i, e by the server:

- DoubleSqueeze (arXiv:1905.05957, algorithm 1): p_i = g_i + e_i, e_i <- p_i - C(p_i), s = mean_i C(p_i) + e,
  d = C(s), e <- s - d

The server decides by the bits that it has: it sums in order of the replicas, in the gradients' own format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from meshmark.algorithms.compressed import Compressing
from meshmark.algorithms.compressed.compressor import Compressor, CompressorKind
from meshmark.algorithms.compressed.compressors import Array, Draw, compressed, signs
from meshmark.algorithms.contract import Replicas, Tensors, UpdateRule, averaged, combined
from meshmark.models.module import random_bits
from meshmark.spec.workload import Workload

FORMATS = {CompressorKind.FP16: torch.float16, CompressorKind.BF16: torch.bfloat16}


class CompressedTransition(Replicas):
    """Each tells its own gradients, before they are compressed."""

    order: Sequence[int] = ()
    """Order of replicas in which an inexact sum is taken; their own order if empty."""

    def __init__(self, workload: Workload, rules: Sequence[UpdateRule], exact: bool = True) -> None:
        """`exact`: sums are taken in float64, not in the format of what is summed."""
        super().__init__(rules)
        self.algorithm, self.seed, self.exact = cast(Compressing, workload.algorithm), workload.seed, exact

    def randomize(self, run: int, seed: int) -> None:
        self.order = random_bits(f"replicas/{run}", (len(self.rules),), seed=seed).argsort().tolist()

    def transition(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        compresses = self.algorithm.compresses(self.steps)
        self.taken = self.directions(gradients) if compresses else self.whole(gradients)
        self.steps += 1
        return self.alone(parameters, self.taken)

    def stepped_on(self, gradients: Sequence[Tensors]) -> Sequence[Tensors]:
        return self.taken

    def whole(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        """Return what each replica steps on in the warm-up."""
        return averaged(self.widened(gradients))

    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        """Return what each replica steps on."""
        told = [{name: self.received(x, self.draw(i, name)) for name, x in g.items()} for i, g in enumerate(gradients)]
        return averaged(self.widened(told))

    def received(self, x: Array, draw: Draw) -> Array:
        """Return what all replicas receive of one replica's `x`."""
        found = self.once(x, draw)
        for _ in range(1, self.compressor.rounds):
            found = found + self.once(x - found, draw)
        return found

    def once(self, x: Array, draw: Draw) -> Array:
        """In one round of compression."""
        return compressed(self.compressor, x, draw)

    @property
    def compressor(self) -> Compressor:
        assert self.algorithm.compressor is not None, f"{self.algorithm.kind} compresses"
        return self.algorithm.compressor

    def draw(self, replica: int, name: str) -> Draw:
        return Draw(seed=self.seed, step=self.steps, replica=replica, name=name)

    def widened(self, replicas: Sequence[Tensors]) -> list[Tensors]:
        if not self.exact:
            return list(replicas)
        return [{name: x.astype(np.float64) for name, x in tensors.items()} for tensors in replicas]


class InFormatTransition(CompressedTransition):
    """Rounded once on each replica; and by the sum, which is noise."""

    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        found = {name: self.summed([own[name] for own in gradients]) for name in gradients[0]}
        return [found for _ in gradients]

    def summed(self, parts: Sequence[Array]) -> Array:
        dtype, count = FORMATS[self.compressor.kind], len(parts)
        narrow = [torch.from_numpy(np.ascontiguousarray(x)).to(dtype).div_(count) for x in parts]
        if self.exact:
            return np.asarray(torch.stack(narrow).double().sum(0).numpy())
        total = narrow[0]
        for part in narrow[1:]:
            total = total + part
        return total.float().numpy().astype(parts[0].dtype)


class ErrorFeedbackTransition(CompressedTransition):
    left: list[Tensors] | None = None
    """Part that was not sent, by replica."""

    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        return averaged(self.widened(self.sent(gradients)))

    def sent(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        """Return what each replica sends, by replica."""
        wanted = self.wanted(gradients)
        told: list[Tensors] = [
            {name: self.received(x, self.draw(i, name)) for name, x in p.items()} for i, p in enumerate(wanted)
        ]
        pairs = zip(wanted, told, strict=True)
        self.left = [{name: x - c[name] for name, x in p.items()} for p, c in pairs]
        return told

    def wanted(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        """p."""
        if self.left is None:
            return list(gradients)
        return [{n: x + e[n] for n, x in g.items()} for g, e in zip(gradients, self.left, strict=True)]


class PowerSGDTransition(ErrorFeedbackTransition):
    factors: dict[str, Array]
    """Q, by tensor."""

    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        if self.left is None:
            self.factors = {}
        wanted = self.wanted(self.widened(gradients))
        found = {name: self.approximated(name, [p[name] for p in wanted]) for name in wanted[0]}
        self.left = [{name: x - found[name] for name, x in p.items()} for p in wanted]
        return [found for _ in wanted]

    def approximated(self, name: str, parts: Sequence[Array]) -> Array:
        mean: Array = np.mean(parts, axis=0)
        shape = self.compressor.factors(mean.shape)
        if shape is None:
            return mean
        rows, columns, rank = shape
        matrix = mean.reshape(rows, columns)
        if name not in self.factors:
            self.factors[name] = self.first_factor(name, columns, rank).astype(mean.dtype)
        outer = np.linalg.qr(matrix @ np.linalg.qr(self.factors[name])[0])[0]
        self.factors[name] = matrix.T @ outer
        return (outer @ self.factors[name].T).reshape(mean.shape)

    def first_factor(self, name: str, columns: int, rank: int) -> Array:
        drawn = Draw(seed=self.seed, step=0, replica=0, name=name).uniform(columns * rank)
        return drawn.reshape(columns, rank) - np.float32(0.5)


class EF21Transition(CompressedTransition):
    known: list[Tensors] | None = None
    """h, by replica."""

    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        before = self.known or [{name: np.zeros_like(x) for name, x in own.items()} for own in gradients]
        self.known = [
            {name: h[name] + self.received(x - h[name], self.draw(i, name)) for name, x in own.items()}
            for i, (own, h) in enumerate(zip(gradients, before, strict=True))
        ]
        return averaged(self.widened(self.known))


class MajorityVoteTransition(CompressedTransition):
    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        votes = {name: np.sum([signs(own[name]) for own in gradients], axis=0) for name in gradients[0]}
        return [{name: np.sign(count) for name, count in votes.items()} for _ in gradients]


class DoubleSqueezeTransition(ErrorFeedbackTransition):
    left_of_server: Tensors | None = None

    def directions(self, gradients: Sequence[Tensors]) -> list[Tensors]:
        back = self.sent_back(self.sent(gradients))
        return [back for _ in gradients]

    def sent_back(self, told: Sequence[Tensors]) -> Tensors:
        """Return what all replicas receive of the server's result from `told`."""
        wanted = self.wanted_back({name: in_order([t[name] for t in told]) for name in told[0]})
        found = {name: self.received_back(name, x) for name, x in wanted.items()}
        self.left_of_server = combined((1, wanted), (-1, found))
        return found

    def wanted_back(self, mean: Tensors) -> Tensors:
        """s."""
        return mean if self.left_of_server is None else combined((1, mean), (1, self.left_of_server))

    def received_back(self, name: str, x: Array) -> Array:
        return self.received(x, self.draw(0, name))


def in_order(parts: Sequence[Array]) -> Array:
    """The mean, in the format of the parts."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total / total.dtype.type(len(parts))
