"""The first wrong step of replicas that may differ, and how well another account of it fits."""

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
    """The first step at which anything is wrong, for all replicas together."""

    case: Case
    traces: Sequence[Trace]
    tolerance_models: Sequence[ToleranceModel]
    """Tolerance models by replica, like the traces."""
    step: int
    wrong: dict[int, dict[Quantity, float]]
    """Excesses by replica, then quantity: distance from the truth in tolerances. Contains only replicas with any."""

    def names(self, *kinds: QuantityKind) -> dict[int, list[str]]:
        """Return the names of wrong tensors by replica, the worst first."""
        found = {}
        for replica, excesses in self.wrong.items():
            worst = sorted((q for q in excesses if q.kind in kinds), key=lambda q: -excesses[q])
            if worst:
                found[replica] = list(dict.fromkeys(q.name for q in worst))
        return found

    def at(self, step: int) -> tuple[list[Tensors], list[Tensors]]:
        """Return each replica's parameters before `step`, and its gradients."""
        uses = self.case.workload.uses
        own: list[Tensors] = [
            {n: g for n, g in trace.gradients[step].items() if uses(n, step)} for trace in self.traces
        ]
        return [trace.parameters[step] for trace in self.traces], own


def worst_excess(
    failed: FailedReplicas, wrong: dict[int, list[str]], exact: Sequence[Tensors], there: Sequence[Tensors]
) -> float:
    """Return how far the worst of the wrong parameters is from `there`. Up to 1, `there` explains the run."""
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
