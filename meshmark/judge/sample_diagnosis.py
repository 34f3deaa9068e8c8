"""Diagnose the run of a large model from its deviations alone, because its tensors are gone.

To weigh single sequences as `diagnose` does would need several whole models in float64. A small model in the same
layout shows the same defect, and can be diagnosed fully.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshmark.judge.deviation import Deviations, Drift, Quantity, QuantityKind
from meshmark.judge.diagnosis import first_drift
from meshmark.judge.faults import MOST_NAMES, Diagnosis, Fault
from meshmark.judge.tolerance_model import ToleranceModel, zeros

_SAME = 1e-3
"""Factors that differ by less, relative to one, count as equal."""
_ALONG = 0.05
"""Share of a deviation that its factor may leave unexplained."""
_ADVICE = "a model of up to 20 million parameters in the same layout is diagnosed in full"


def diagnose_sample(
    deviations: Deviations, drifts: Sequence[Drift], tolerance_model: ToleranceModel
) -> Diagnosis | None:
    """Return the diagnosis, or None when nothing is wrong."""
    if start := [q.name for q, d in deviations.items() if q.kind is QuantityKind.INITIAL and d[0].distance]:
        return _diagnosis(Fault.START, f"{len(start)} initial values differ", 0, start)
    wrong = [(step, q, e) for e, q, step in tolerance_model.judge(deviations) if not e <= 1]
    first = min((step for step, *_ in wrong), default=None)
    drift = first_drift(drifts)
    if drift and (first is None or drift.step <= first):
        return drift
    if first is None:
        return None
    here = {q: e for step, q, e in sorted(wrong, key=lambda w: -w[2]) if step == first}
    zero = {q.name for q in zeros(deviations)}
    gradients = _names(here, QuantityKind.GRADIENTS, QuantityKind.SCALE)
    if solid := [name for name in gradients if name not in zero] or gradients:
        return _of_gradients(deviations, first, solid, loss_is_wrong=QuantityKind.LOSS.of() in here)
    if QuantityKind.NORM.of() in here:
        factor = deviations[QuantityKind.NORM.of()][first].factor
        return _diagnosis(Fault.CLIPPING, f"the reported norm is {factor:.7g} times the right one", first, [])
    if updates := _names(here, QuantityKind.PARAMETERS):
        return _diagnosis(Fault.UPDATE, f"the gradients are right; {_ADVICE}", first, updates)
    factor = deviations[QuantityKind.LOSS.of()][first].factor
    return _diagnosis(Fault.LOSS, f"{factor:.7g} times the truth, while every gradient is right", first, [])


def _names(wrong: dict[Quantity, float], *kinds: QuantityKind) -> list[str]:
    return list(dict.fromkeys(q.name for q in wrong if q.kind in kinds))


def _of_gradients(deviations: Deviations, step: int, names: list[str], *, loss_is_wrong: bool) -> Diagnosis:
    found = [deviations[QuantityKind.GRADIENTS.of(name)][step] for name in names]
    if absent := [d for d in found if not np.isfinite(d.distance) or (d.factor == 0 and d.scale)]:
        return _diagnosis(Fault.MISSING, f"{len(absent)} of {len(names)} are absent, zero or no number", step, names)
    factors = [d.factor for d in found]
    left_over = [abs(d.distance - abs(d.factor - 1) * d.scale) / d.distance for d in found]
    if max(factors) - min(factors) < _SAME and max(left_over) < _ALONG:
        return _diagnosis(Fault.SCALED, f"{factors[0]:.7g} times the truth", step, names)
    if loss_is_wrong:
        factor = deviations[QuantityKind.LOSS.of()][step].factor
        return _diagnosis(Fault.FORWARD, f"the loss is {factor:.6g} times the truth; {_ADVICE}", step, names)
    return _diagnosis(Fault.BACKWARD, f"the loss is right; {_ADVICE}", step, names)


def _diagnosis(fault: Fault, detail: str, step: int, names: list[str]) -> Diagnosis:
    return Diagnosis(fault=fault, step=step, names=names[:MOST_NAMES], num_names=len(names), detail=detail)
