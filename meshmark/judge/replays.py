"""Replay a failed run of replicas under other accounts of what they do, to find one that explains it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from meshmark.algorithms.contract import Tensors, Transition, UpdateRule
from meshmark.algorithms.replicas import averaged, flat
from meshmark.judge.failed_replicas import FailedReplicas, worst_excess
from meshmark.judge.failed_step import Explanation
from meshmark.judge.faults import Fault
from meshmark.judge.trace import observed_run
from meshmark.judge.truth import ExactOptimizer
from meshmark.judge.update_hypotheses import update_hypotheses
from meshmark.spec.optimizer import OptimizerSpec
from meshmark.spec.workload import Workload

Account = tuple[int, Explanation]
"""The number of steps explained from the failed one on, and the explanation."""
Transitions = Callable[[Workload, Sequence[UpdateRule]], Transition]
"""Makes a transition, right or wrong, from a workload and the replicas' optimizers."""


class Replays:
    """Finds the account that explains the most steps from the failed one on.

    One step is not enough: at the first, all replicas have the same parameters, and many accounts agree.
    """

    def __init__(self, failed: FailedReplicas, wrong: dict[int, list[str]]) -> None:
        """`wrong` has the names of wrong parameters by replica."""
        workload = failed.case.workload
        self.failed, self.wrong = failed, wrong
        self.run = observed_run(failed.traces, failed.step)
        self.spec = workload.algorithm.local_optimizer(workload.optimizer)
        self.exact = self.replayed(self.real)

    def real(self, workload: Workload, rules: Sequence[UpdateRule]) -> Transition:
        """Return the right transition, which follows what the run leaves to chance."""
        transition = workload.algorithm.transition(workload, rules)
        transition.follow(self.run)
        return transition

    def rules(self, spec: OptimizerSpec | None = None) -> list[UpdateRule]:
        return [ExactOptimizer(spec or self.spec) for _ in self.failed.traces]

    def replayed(self, kind: Transitions, rules: Sequence[UpdateRule] | None = None) -> list[list[Tensors]]:
        """Return where a transition puts each replica, by step."""
        algorithm = kind(self.failed.case.workload, rules or self.rules())
        return [algorithm.transition(*self.failed.at(step)) for step in range(self.num_steps)]

    @property
    def num_steps(self) -> int:
        return len(self.failed.traces[0].gradients)

    def explained(self, kind: Transitions, rules: Sequence[UpdateRule] | None = None) -> int:
        """Return how many steps are explained from the failed one on, without a gap."""
        there, steps = self.replayed(kind, rules), range(self.failed.step, self.num_steps)

        def explains(step: int) -> bool:
            return worst_excess(replace(self.failed, step=step), self.wrong, self.exact[step], there[step]) <= 1

        return next((s for s in steps if not explains(s)), self.num_steps) - self.failed.step

    def of_rules(self) -> Iterator[Account]:
        """Yield other update rules of every replica."""
        for every in zip(*(update_hypotheses(self.spec, self.failed.step) for _ in self.failed.traces), strict=True):
            if every[0].gradients is None:
                steps = self.explained(self.real, [rival.optimizer for rival in every])
                yield steps, (every[0].fault, every[0].detail)
        for factor in (2.0, 0.5, *self.fitted_factors()):
            rate = replace(self.spec, learning_rate=factor * self.spec.learning_rate)
            yield self.explained(self.real, self.rules(rate)), (Fault.UPDATE, f"{factor:.4g} times the right step")

    def fitted_factors(self) -> Iterator[float]:
        """Yield the worst replica's failed step as a multiple of the right step, if all replicas are averaged."""
        if not self.failed.case.workload.algorithm.averages_after(self.failed.step):
            return
        replica, names = next(iter(self.wrong.items()))
        step, traces = self.failed.step, self.failed.traces
        before = flat(averaged([trace.parameters[step] for trace in traces])[replica], names)
        moved = flat(traces[replica].parameters[step + 1], names) - before
        right = flat(self.exact[step][replica], names) - before
        if right.any() and (factor := float(moved @ right / (right @ right))) > 0:
            yield factor

    def of_faults(self) -> Iterator[Account]:
        """Yield the ways in which the algorithm is got wrong, and what is fitted to the run."""
        workload = self.failed.case.workload
        for hypothesis in workload.algorithm.fault_hypotheses(workload, self.run):
            yield self.explained(hypothesis.transition), (Fault.ALGORITHM, hypothesis.description)
        fresh = workload.algorithm.transition(workload, self.rules())
        if fitted := workload.algorithm.estimate_fault(workload, fresh, self.run, self.wrong, self.exact):
            steps, detail = fitted
            yield steps, (Fault.ALGORITHM, detail)

    def longest(self, accounts: Iterable[Account]) -> Explanation | None:
        """Return the account that explains the most steps, or None. The first that explains all ends the search."""
        most: int = 0
        best: Explanation | None = None
        for steps, account in accounts:
            if steps > most:
                most, best = steps, account
            if most == self.num_steps - self.failed.step:
                break
        return best
