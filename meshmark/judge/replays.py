"""A failed run of replicas under other accounts of what they do: which of them goes on to explain it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from meshmark.algorithms.replicas import Algorithm, Tensors, UpdateRule
from meshmark.algorithms.table import local_optimizer
from meshmark.judge.failed_replicas import FailedReplicas, misfit
from meshmark.judge.faults import Fault
from meshmark.judge.gradient_faults import Explanation
from meshmark.judge.truth import ExactOptimizer
from meshmark.judge.update_rivals import rivals
from meshmark.spec.optimizer import OptimizerSpec
from meshmark.spec.workload import Workload

Account = tuple[int, Explanation]
"""With the number of steps that it explains, from the failed one on."""


class Transitions(Protocol):
    """A class of algorithms."""

    def __call__(self, workload: Workload, rules: Sequence[UpdateRule], /) -> Algorithm: ...


class Replays:
    """Of several accounts of the failed step, that which goes on to explain the most steps: at the first all replicas
    stand at one place, and many are the same."""

    def __init__(self, failed: FailedReplicas, wrong: dict[int, list[str]], real: Transitions) -> None:
        """`wrong`: parameters by replica; `real`: what is right."""
        self.failed, self.wrong, self.real = failed, wrong, real
        self.spec = local_optimizer(failed.case.workload)
        self.exact = self.replayed(real)

    def rules(self, spec: OptimizerSpec | None = None) -> list[UpdateRule]:
        return [ExactOptimizer(spec or self.spec) for _ in self.failed.traces]

    def replayed(self, kind: Transitions, rules: Sequence[UpdateRule] | None = None) -> list[list[Tensors]]:
        """By step, where it puts each replica."""
        algorithm = kind(self.failed.case.workload, rules or self.rules())
        return [algorithm.transition(*self.failed.at(step)) for step in range(self.num_steps)]

    @property
    def num_steps(self) -> int:
        return len(self.failed.traces[0].gradients)

    def explained(self, kind: Transitions, rules: Sequence[UpdateRule] | None = None) -> int:
        """Steps from the failed one on, without a gap."""
        there, steps = self.replayed(kind, rules), range(self.failed.step, self.num_steps)

        def explains(step: int) -> bool:
            return misfit(replace(self.failed, step=step), self.wrong, self.exact[step], there[step]) <= 1

        return next((s for s in steps if not explains(s)), self.num_steps) - self.failed.step

    def of_rules(self) -> Iterator[Account]:
        """Other update rules of every replica."""
        for every in zip(*(rivals(self.spec, self.failed.step) for _ in self.failed.traces), strict=True):
            if every[0].gradients is None:
                steps = self.explained(self.real, [rival.optimizer for rival in every])
                yield steps, (every[0].fault, every[0].detail)
        for factor in (2.0, 0.5):
            rate = replace(self.spec, learning_rate=factor * self.spec.learning_rate)
            yield self.explained(self.real, self.rules(rate)), (Fault.UPDATE, f"{factor:g} times the right step")

    def longest(self, accounts: Iterable[Account]) -> Explanation | None:
        """None where no step is explained. The first that explains all ends the search."""
        most: int = 0
        best: Explanation | None = None
        for steps, account in accounts:
            if steps > most:
                most, best = steps, account
            if most == self.num_steps - self.failed.step:
                break
        return best
