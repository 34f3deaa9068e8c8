"""Where people look: a byte-level language model and a vision transformer, trained by algorithms' transitions in
float32, to a loss of a fixed set. Several seeds, and all replicas of each, are trained at once.

Replicas differ: each draws from a part of the text of its own, or from images of which half are dealt by label.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshmark.algorithms.contract import Transition
from meshmark.models.config import ModelConfig
from meshmark.models.module import Model, build_model, initial_value, parameter_shapes
from meshmark.models.transformer import MODELS
from meshmark.models.vision_transformer import VIT_MINI
from meshmark.models.vision_transformer.module import BatchNorm
from meshmark.reference.data import IGNORED, load_corpus, load_digits
from meshmark.reference.objective import cross_entropy
from meshmark.spec.algorithm import Algorithm
from studies.convergence.claim import GROUPS
from studies.convergence.logistic import dealt_rows
from studies.convergence.quadratics import Array, plain_transition

Stacked = dict[str, NDArray[np.float32]]
"""By canonical name; axes: seed, replica, and the parameter's own."""
SORTED = 0.5
"""Share of the images that are sorted by label."""


class Data(Protocol):
    @property
    def count(self) -> int:
        """Number of replicas."""

    @property
    def seeds(self) -> int: ...

    def drawn(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets. Axes: seed, replica, row, and the row's own."""

    def fixed(self) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets that a loss is reported for, from all replicas' parts."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """Windows of the standard text: replica i of n draws them from the i-th n-th of it."""

    count: int
    length: int
    """Tokens of a window."""
    rows: int = 4
    """Drawn by each replica in a step."""
    fixed_rows: int = 48
    seeds: int = GROUPS

    def drawn(self, step: int) -> tuple[Tensor, Tensor]:
        part = len(load_corpus(None, self.length + 1)) // self.count
        shape, last = (self.count, self.rows), part - self.length
        starts = [np.random.default_rng([seed, step]).integers(last, size=shape) for seed in range(self.seeds)]
        return self.windows(torch.from_numpy(np.stack(starts) + part * np.arange(self.count)[:, None]))

    def fixed(self) -> tuple[Tensor, Tensor]:
        last = len(load_corpus(None, self.length + 1)) - self.length - 1
        return self.windows(torch.arange(self.fixed_rows) * last // self.fixed_rows)

    def windows(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        found = load_corpus(None, self.length + 1)[starts[..., None] + torch.arange(self.length + 1)].long()
        return found[..., :-1], found[..., 1:]


@dataclass(frozen=True, kw_only=True)
class Images:
    """Digits, half of each replica's dealt by label."""

    count: int
    rows: int = 8
    fixed_rows: int = 192
    seeds: int = GROUPS

    @functools.cached_property
    def whose(self) -> NDArray[np.intp]:
        """By seed and replica."""
        labels = load_digits()[1].numpy()
        return np.stack([dealt_rows(labels, self.count, SORTED, seed) for seed in range(self.seeds)])

    def drawn(self, step: int) -> tuple[Tensor, Tensor]:
        shape, each = (self.count, self.rows), self.whose.shape[2]
        places = [np.random.default_rng([seed, step]).integers(each, size=shape) for seed in range(self.seeds)]
        return self.taken(torch.from_numpy(np.take_along_axis(self.whose, np.stack(places), axis=2)))

    def fixed(self) -> tuple[Tensor, Tensor]:
        return self.taken(torch.arange(self.fixed_rows) * len(load_digits()[1]) // self.fixed_rows)

    def taken(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        images, labels = load_digits()
        return images[rows], labels[rows]


@dataclass(frozen=True, kw_only=True)
class Net:
    """A model to train on its data by plain SGD, to a loss."""

    name: str
    model: ModelConfig
    data: Data
    rate: float
    aim: float
    most_steps: int

    def __post_init__(self) -> None:
        assert self.module, "which vmap would not let be built"

    @property
    def count(self) -> int:
        return self.data.count

    def aims(self) -> Array:
        """By seed."""
        return np.full(self.data.seeds, self.aim)

    def losses(self, spec: Algorithm) -> Iterator[Array]:
        """After each step, by seed: of the mean of the replicas, on the fixed set."""
        return map(self.loss, self.means(spec))

    def means(self, spec: Algorithm) -> Iterator[Stacked]:
        """Yield the mean of the replicas after each step."""
        algorithm, here = plain_transition(spec, self.rate, self.count), self.start()
        for step in range(self.most_steps):
            here = self.stepped(algorithm, here, self.gradients(here, *self.data.drawn(step)))
            yield {name: x.mean(axis=1) for name, x in here.items()}

    def start(self) -> Stacked:
        """The prescribed values, which replicas have in common and seeds do not."""
        return {
            name: np.stack(
                [
                    np.repeat(initial_value(self.model, name, shape, seed=seed).numpy()[None], self.count, axis=0)
                    for seed in range(self.data.seeds)
                ]
            )
            for name, shape in parameter_shapes(self.model).items()
        }

    def stepped(self, algorithm: Transition, here: Stacked, gradients: Stacked) -> Stacked:
        """Every seed's tensors are tensors of one transition."""
        seeds = range(self.data.seeds)
        told = [
            [{f"{s}/{name}": x[s, r] for name, x in stacked.items() for s in seeds} for r in range(self.count)]
            for stacked in (here, gradients)
        ]
        after = algorithm.transition(*told)
        return {name: np.stack([[t[f"{s}/{name}"] for t in after] for s in seeds]).astype(np.float32) for name in here}

    def gradients(self, here: Stacked, inputs: Tensor, targets: Tensor) -> Stacked:
        """Return the gradients of each replica's mean loss at its own parameters."""
        flat = {name: torch.from_numpy(x).flatten(0, 1) for name, x in here.items()}
        with sdpa_kernel(SDPBackend.MATH):  # others have no rule for several models at once
            found = vmap(grad(self.mean_loss))(flat, inputs.flatten(0, 1), targets.flatten(0, 1))
        return {name: found[name].numpy().reshape(x.shape) for name, x in here.items()}

    def loss(self, means: Stacked) -> Array:
        """By seed."""
        targets = self.data.fixed()[1]
        count = int((targets != IGNORED).sum())
        return np.array([float(cross_entropy(own, targets)) / count for own in self.outputs(means)])

    def accuracy(self, means: Stacked) -> Array:
        """Percent of the fixed set that are taken for what they are, by seed."""
        found = self.outputs(means).argmax(-1) == self.data.fixed()[1]
        return np.asarray(100 * found.double().mean(dim=1))

    def outputs(self, means: Stacked) -> Tensor:
        """Return the outputs for the fixed set, by seed."""
        told = {name: torch.from_numpy(x) for name, x in means.items()}
        with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            found: Tensor = vmap(self.called, in_dims=(0, None))(told, self.data.fixed()[0])
        return found

    def called(self, parameters: dict[str, Tensor], inputs: Tensor) -> Tensor:
        found: Tensor = functional_call(self.module, parameters, (inputs,))
        return found

    def mean_loss(self, parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.called(parameters, inputs), targets) / (targets != IGNORED).sum()

    @functools.cached_property
    def module(self) -> Model:
        """Whose batch norms know the batch before them alone: running statistics are no parameters."""
        with torch.device("meta"):
            module = build_model(self.model)
        for part in module.modules():
            if isinstance(part, BatchNorm):
                part.track_running_stats = False
        return module


def language_model(count: int) -> Net:
    model = MODELS["gpt-mini"]
    return Net(
        name="language model",
        model=model,
        data=Text(count=count, length=model.seq_len),
        rate=0.3,
        aim=3.2,
        most_steps=200,
    )


def vision_transformer(count: int) -> Net:
    return Net(
        name="vision transformer",
        model=VIT_MINI,
        data=Images(count=count),
        rate=0.2,
        aim=1.5,
        most_steps=250,
    )
