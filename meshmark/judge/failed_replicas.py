"""The first step at which anything is wrong of replicas that may differ, and how well another account of it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshmark.algorithms.replicas import LEFT_OVER
from meshmark.judge.deviation import Quantity, QuantityKind, Tensors
from meshmark.judge.tolerance_model import ToleranceModel
from meshmark.judge.trace import Trace
from meshmark.spec.case import Case


@dataclass(frozen=True, kw_only=True)
class FailedReplicas:
    """The first step at which anything is wrong, of all replicas together."""

    case: Case
    traces: Sequence[Trace]
    tolerance_models: Sequence[ToleranceModel]
    """By replica, as the traces."""
    step: int
    wrong: dict[int, dict[Quantity, float]]
    """By replica, then quantity: how many times its tolerance it is from the truth. No replica without any."""

    def names(self, *kinds: QuantityKind) -> dict[int, list[str]]:
        """Of the wrong tensors, the worst first."""
        found = {}
        for replica, excesses in self.wrong.items():
            worst = sorted((q for q in excesses if q.kind in kinds), key=lambda q: -excesses[q])
            if worst:
                found[replica] = list(dict.fromkeys(q.name for q in worst))
        return found

    def at(self, step: int) -> tuple[list[Tensors], list[Tensors]]:
        """Where each replica was, and the gradients that it had."""
        uses = self.case.workload.uses
        own: list[Tensors] = [
            {n: g for n, g in trace.gradients[step].items() if uses(n, step)} for trace in self.traces
        ]
        return [trace.parameters[step] for trace in self.traces], own


def misfit(
    failed: FailedReplicas, wrong: dict[int, list[str]], exact: Sequence[Tensors], there: Sequence[Tensors]
) -> float:
    """How far the worst of the wrong parameters is from `there`, relative to what explains it: up to one does."""
    after = [trace.parameters[failed.step + 1] for trace in failed.traces]
    return max(
        float(np.linalg.norm(after[r][name] - there[r][name]))
        / max(
            failed.tolerance_models[r].tolerance(QuantityKind.PARAMETERS.of(name), failed.step),
            LEFT_OVER * float(np.linalg.norm(after[r][name] - exact[r][name])),
        )
        for r, names in wrong.items()
        for name in names
    )
