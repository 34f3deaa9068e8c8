"""Published tables, repeated at our scale: compressed SGD on images; parallel beside decentralised SGD of a residual
network and an encoder of masked text.

Every setting here was fixed before anything was trained by it, and none was changed after: rates are those of the other
nets or linear in the batch (arXiv:1706.02677).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshmark.algorithms.compressed import EF21, Compressing, DoubleSqueeze, ErrorFeedback
from meshmark.algorithms.compressed.compressor import Compressor, CompressorKind
from meshmark.models.resnet import RESNET_MINI
from meshmark.models.transformer import MODELS
from meshmark.reference.data import FOUND_PERCENT, IGNORED, hidden, load_corpus, load_digits
from meshmark.spec.algorithm import Algorithm, algorithm_named
from studies.convergence.logistic import dealt_rows
from studies.convergence.nets import Images, Net, Text
from studies.convergence.quadratics import Array
from studies.convergence.targets import SYNCHRONOUS

SEEDS = 8
ROWS, EPOCHS, RATE = 8, 10, 0.1
"""Images that each replica draws in a step; mean number of times that each is drawn; rate over EIGHT replicas, linear
in their number."""
EIGHT = 8
"""Replicas of the table of compressed SGD and, here, of the encoder's."""
HELD_OUT = 5
"""Every so-manieth image is one to be told, which nobody trains on."""
TEXT_ROWS, TEXT_STEPS, TEXT_RATE = 4, 300, 0.3
WORKERS = (4, 8, 16, 32)
"""Workers of the residual network; nodes in the published table."""
PERCENT, ROUNDS = 5, 2
"""Percent of top-k, and NEOLITHIC's rounds, as published."""


def _top_k(cls: type[Compressing], rounds: int = 1) -> Algorithm:
    return cls(compressor=Compressor(kind=CompressorKind.TOP_K, percent=PERCENT, rounds=rounds))


COMPRESSED = {
    "PSGD": SYNCHRONOUS,
    "MEM-SGD": _top_k(ErrorFeedback),
    "DOUBLE-SQUEEZE": _top_k(DoubleSqueeze),
    "EF21-SGD": _top_k(EF21),
    "NEOLITHIC": _top_k(DoubleSqueeze, ROUNDS),
}
"""By the method's published name."""
DECENTRALISED = algorithm_named("dsgd-one-peer")


@dataclass(frozen=True, kw_only=True)
class HeldOut(Images):
    """Digits dealt by chance."""

    rows: int = ROWS
    seeds: int = SEEDS

    @functools.cached_property
    def whose(self) -> NDArray[np.intp]:
        labels = load_digits()[1].numpy()
        rows = np.flatnonzero(np.arange(len(labels)) % HELD_OUT)
        return np.stack([rows[dealt_rows(labels[rows], self.count, 0.0, seed)] for seed in range(self.seeds)])

    def fixed(self) -> tuple[Tensor, Tensor]:
        return self.taken(torch.arange(0, len(load_digits()[1]), HELD_OUT))


@dataclass(frozen=True, kw_only=True)
class MaskedText(Text):
    """Windows of all of the text for every replica, some of whose bytes are to be found again."""

    rows: int = TEXT_ROWS
    fixed_rows: int = 192
    seeds: int = SEEDS

    def drawn(self, step: int) -> tuple[Tensor, Tensor]:
        found = [
            self._masked(np.random.default_rng([seed, step]), (self.count, self.rows)) for seed in range(self.seeds)
        ]
        inputs, targets = zip(*found, strict=True)
        return torch.stack(inputs), torch.stack(targets)

    def fixed(self) -> tuple[Tensor, Tensor]:
        return self._masked(np.random.default_rng(self.seeds), (self.fixed_rows,))

    def _masked(self, draws: np.random.Generator, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        last = len(load_corpus(None, self.length + 1)) - self.length
        tokens = self.windows(torch.from_numpy(draws.integers(last, size=shape)))[0]
        percent, tenths, others = (torch.from_numpy(draws.integers(n, size=tokens.shape)) for n in (100, 10, 256))
        found = percent < FOUND_PERCENT
        return hidden(tokens, found, tenths, others), tokens.masked_fill(~found, IGNORED)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One algorithm, by all seeds."""

    net: str
    spec: Algorithm
    count: int
    """Number of replicas."""

    def final(self) -> Array:
        """By seed, of the mean of the replicas after the last step: percent of images that are told, or loss."""
        net = NETS[self.net](self.count)
        *_, last = net.means(self.spec)
        return net.accuracy(last) if self.net == RESNET else net.loss(last)


RESNET, ENCODER = "residual network", "encoder"


def residual_network(count: int) -> Net:
    data = HeldOut(count=count)
    return Net(
        name=RESNET,
        model=RESNET_MINI,
        data=data,
        rate=RATE * count / EIGHT,
        aim=0.0,
        most_steps=EPOCHS * data.whose[0].size // (ROWS * count),
    )


def encoder(count: int) -> Net:
    model = MODELS["bert-mini"]
    data = MaskedText(count=count, length=model.seq_len)
    return Net(name=ENCODER, model=model, data=data, rate=TEXT_RATE, aim=0.0, most_steps=TEXT_STEPS)


NETS = {RESNET: residual_network, ENCODER: encoder}
PARALLEL = {
    (net, count): (Run(net=net, spec=SYNCHRONOUS, count=count), Run(net=net, spec=DECENTRALISED, count=count))
    for net, counts in ((RESNET, WORKERS), (ENCODER, (EIGHT,)))
    for count in counts
}
"""Parallel SGD and decentralised."""
SQUEEZED = {name: Run(net=RESNET, spec=spec, count=EIGHT) for name, spec in COMPRESSED.items()}
RUNS = list(dict.fromkeys([*SQUEEZED.values(), *(run for pair in PARALLEL.values() for run in pair)]))
"""Each once."""
