"""Downpour SGD with Adagrad on the server (Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, sections
4.1 and 7.1; Adagrad: Duchi et al., JMLR 12, 2011). Of replica i in its step t, counted from 0, and of the server,
which is at y, at first the initial values:

- x_i <- step(x_i, g_i), the paper's x_i - a g_i or another optimizer's
- u_i <- u_i + g_i; where n_push divides t, u_i is pushed and u_i <- 0
- where n_fetch divides t + 1, x_i <- y: the paper fetches before a step, and here the step before ends with it
- by each push, in the order in which they come: s <- s + u^2, y <- y - r u / (sqrt(s) + 1e-10)

In which order they come is chance, so the run tells it: every push makes the next version of y, and replicas tell which
version a push made, and which a fetch returned. An order is followed where it can be one; where it cannot, the right
parameters are no number (`impossible` says why). u_i is summed by the bits, in the gradients' own format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from meshmark.algorithms.contract import ObservedRun, Replicas, ServerVersions, Tensors, UpdateRule
from meshmark.algorithms.downpour import Downpour
from meshmark.algorithms.downpour.parameter_server import ParameterServer
from meshmark.models.module import random_bits
from meshmark.spec.workload import Workload

EPSILON = 1e-10
"""PyTorch's Adagrad has it."""
Push = tuple[int, int]
"""Replica and step."""


def pushes_of(run: ObservedRun) -> dict[int, Push]:
    """Return the pushes by the version that each made, in order; of several that made one version, the last."""
    made = {
        versions[0]: (replica, step)
        for replica, steps in enumerate(run.server_versions)
        for step, versions in enumerate(steps)
        if versions and versions[0] is not None
    }
    return dict(sorted(made.items()))


class Server:
    """y and s, in the format of what they start with."""

    def __init__(self, start: Tensors, rate: float) -> None:
        self.here, self.rate = dict(start), rate
        self.squares = {name: np.zeros_like(x) for name, x in start.items()}

    def step(self, pushed: Tensors) -> None:
        for name, given in pushed.items():
            u = given.astype(self.here[name].dtype)
            self.squares[name] = self.summed(self.squares[name], u)
            root = np.sqrt(self.squares[name]) + EPSILON
            self.here[name] = self.here[name] - self.here[name].dtype.type(self.rate) * (u / root)

    def summed(self, before: NDArray[np.floating], u: NDArray[np.floating]) -> NDArray[np.floating]:
        total: NDArray[np.floating] = before + u * u
        return total


@dataclass(frozen=True)
class Turns:
    """In which order replicas come to the server in a step."""

    order: Sequence[int]
    together: bool = False
    """Whether all replicas push before one fetches."""


class DownpourTransition(Replicas):
    """Without an order to follow, replicas take turns."""

    def __init__(self, workload: Workload, rules: Sequence[UpdateRule]) -> None:
        super().__init__(rules)
        self.spec: ParameterServer = cast(Downpour, workload.algorithm).server
        self.at: dict[int, Tensors] = {}
        """y, by version: of those that a fetch returned."""
        self.right: ObservedRun | None = None
        self.wrong: dict[Push, str] = {}
        """Impossible pushes, by replica and step, with the reason."""
        self.turns: Server | None = None
        self.gathered: list[Tensors] = [{} for _ in rules]
        """u_i, where replicas take turns."""
        self.turns_of: Callable[[int], Turns] = lambda step: Turns(range(len(rules)))
        """Turns of the replicas, by step."""

    def randomize(self, run: int, seed: int) -> None:
        """Which replica comes first to a server is chance, and with it where each goes on."""

        def turns_of(step: int) -> Turns:
            count = len(self.rules)
            drawn = random_bits(f"turns/{run}/{step}", (count + 1,), seed=seed)
            return Turns(order=drawn[:count].argsort().tolist(), together=bool(drawn[count] % 2))

        self.turns_of = turns_of

    def follow(self, run: ObservedRun) -> None:
        self.right, self.wrong = run, dict(impossible(self.spec, run))
        server = self.server({name: x.astype(np.float64) for name, x in run.parameters[0][0].items()})
        self.at = {0: dict(server.here)}
        wanted = self.wanted(run)
        for version, push in self.order(run).items():
            server.step(self.pushed(run, *push))
            if version in wanted:
                self.at[version] = dict(server.here)

    def wanted(self, run: ObservedRun) -> set[int]:
        """Versions that are fetched."""
        return {v for steps in run.server_versions for pair in steps if pair and (v := pair[1]) is not None}

    def order(self, run: ObservedRun) -> dict[int, Push]:
        return pushes_of(run)

    def server(self, start: Tensors) -> Server:
        return Server(start, self.spec.rate)

    def pushed(self, run: ObservedRun, replica: int, step: int) -> Tensors:
        """u_i."""
        first = max(step - self.spec.push_every + 1, 0)
        return gathered(run.gradients[replica][first : step + 1])

    def transition(self, parameters: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        alone = self.alone(parameters, gradients)
        found = self.followed(alone) if self.right else self.in_turn(parameters[0], alone, gradients)
        self.steps += 1
        return found

    def followed(self, alone: Sequence[Tensors]) -> list[Tensors]:
        found: list[Tensors] = []
        for replica, own in enumerate(alone):
            if (replica, self.steps) in self.wrong:
                found.append({name: np.full(x.shape, np.nan) for name, x in own.items()})
            elif self.spec.fetches_after(self.steps):
                found.append(self.fetched(replica))
            else:
                found.append(own)
        return found

    def fetched(self, replica: int) -> Tensors:
        """In this step."""
        assert self.right is not None
        versions = self.right.server_versions[replica][self.steps]
        assert versions is not None and versions[1] is not None
        return self.at[self.version(versions[1])]

    def version(self, reported: int) -> int:
        """Return the version that is fetched, given the one that the replica reports."""
        return reported

    def in_turn(self, start: Tensors, alone: Sequence[Tensors], gradients: Sequence[Tensors]) -> list[Tensors]:
        self.turns = self.turns or self.server(start)
        turns, found, fetches = self.turns_of(self.steps), list(alone), self.spec.fetches_after(self.steps)
        for replica in turns.order:
            self.gathered[replica] = gathered([self.gathered[replica], gradients[replica]])
            if self.spec.pushes_after(self.steps):
                self.turns.step(self.gathered[replica])
                self.gathered[replica] = {}
            if fetches:
                found[replica] = dict(self.turns.here)
        return [dict(self.turns.here) for _ in found] if fetches and turns.together else found

    def server_versions(self, step: int) -> list[ServerVersions]:
        count, turns, pushes = len(self.rules), self.turns_of(step), self.spec.pushes_after(step)
        before = count * sum(self.spec.pushes_after(earlier) for earlier in range(step))
        found: list[ServerVersions] = []
        for replica in range(count):
            made = before + list(turns.order).index(replica) + 1 if pushes else None
            there = before + count if pushes and turns.together else made or before
            found.append((made, there if self.spec.fetches_after(step) else None))
        return found


def gathered(steps: Sequence[Tensors]) -> Tensors:
    """The sum over steps, in order and in their own format."""
    total: dict[str, NDArray[np.floating]] = {}
    for own in steps:
        for name, gradient in own.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total


def impossible(spec: ParameterServer, run: ObservedRun) -> Iterator[tuple[Push, str]]:
    """Yield the pushes that are impossible in the reported order, with the reason.

    In a possible order every push is applied once, and versions of a replica never go back. A fetch returns everything
    that its replica knows to be there and nothing that is yet to come. No replica is too far ahead.
    """
    pushes = pushes_of(run)
    times = Counter(t[0] for steps in run.server_versions for t in steps if t and t[0] is not None)
    for replica, steps in enumerate(run.server_versions):
        known = 0
        for step, versions in enumerate(steps):
            for what in _of_step(spec, versions, step, known):
                yield (replica, step), f"replica {replica} tells that in step {step} {what}"
            made, fetched = versions or (None, None)
            if made is not None and times[made] > 1:
                yield (
                    (replica, step),
                    f"replica {replica}'s push of step {step} is told to have made version {made}, as is another's",
                )
            for version in (made, fetched):
                if version is not None and not 0 <= version <= len(pushes):
                    yield (
                        (replica, step),
                        f"replica {replica} tells in step {step} of version {version}, and all replicas together of "
                        f"{len(pushes)} pushes",
                    )
            known = max([known, *(v for v in (made, fetched) if v is not None)])
    yield from _too_far_ahead(spec, pushes, len(run.server_versions))


def _of_step(spec: ParameterServer, versions: ServerVersions | None, step: int, known: int) -> Iterator[str]:
    """`known`: the newest version that the replica has told of before."""
    made, fetched = versions or (None, None)
    for what, version, due in (
        ("pushes", made, spec.pushes_after(step)),
        ("fetches", fetched, spec.fetches_after(step)),
    ):
        if due != (version is not None):
            yield f"it {what}, where nothing is due" if version is not None else f"it never {what}, where it is due"
    if made is not None and made <= known:
        yield f"its push made version {made}, while version {known} was there before"
    if fetched is not None and fetched < max(known, made or 0):
        yield f"it fetched version {fetched}, while version {max(known, made or 0)} was there before"


def _too_far_ahead(spec: ParameterServer, pushes: dict[int, Push], count: int) -> Iterator[tuple[Push, str]]:
    done = [0] * count
    for replica, step in pushes.values():
        done[replica] += 1
        if (ahead := done[replica] - min(done)) > spec.lead:
            slowest = done.index(min(done))
            yield (
                (replica, step),
                f"replica {replica}'s push of step {step} is {ahead} ahead of replica {slowest}'s, where the bound is "
                f"{spec.lead}",
            )
