"""Formulas of the number of ranks for what each adapter's rank holds and sends under data parallelism.

Every formula is fitted to what `meshmark.theory` computes for the adapter, by its recipe and its traffic exceptions,
on 2 and 4 ranks. It is stated only if it also gives the number of 8 ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from meshmark.adapter.contract import Adapter
from meshmark.report.communication import wire_bytes
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.workload import workload
from meshmark.theory.memory import model_states
from meshmark.theory.model_theory import local_parameters
from meshmark.theory.traffic import departed, step_traffic

NOTE = (
    "Computed, for float32 and AdamW, by the closed forms that the suites hold each adapter to, without the extra "
    "memory that some adapters declare besides. *d* is the number of data-parallel ranks. Columns of memory are bytes "
    "a rank for each parameter of the model. *Sent* is what a rank sends in a step of one micro-batch by ring "
    "algorithms, in multiples of the bytes of the model's weights. *Not of this form*: it depends on the model's "
    "layers too."
)
OTHER = "not of this form"
_STATES = ("parameters", "gradients", "optimizer_states", "buffers")
_RANKS = (2, 4, 8)
_TOLERANCE = 0.02
"""Tolerance in bytes a parameter: padding and the traffic of norms stay below it in a model of 236,928 parameters."""


def formula_rows(adapters: Mapping[str, type[Adapter]]) -> list[dict[str, object]]:
    """Return a row for each adapter and ZeRO stage that trains the same model on 2, 4 and 8 data-parallel ranks."""
    rows: list[dict[str, object]] = []
    for name, adapter in adapters.items():
        for stage in sorted(adapter.capabilities.zero_stages):
            cases = [_case(name, stage, ranks) for ranks in _RANKS]
            if not any(adapter.refusal(case, "cpu", "gloo") for case in cases):
                rows.append({"adapter": name, "ZeRO": stage, **_formulas(adapter, cases)})
    return rows


def _case(name: str, stage: int, ranks: int) -> Case:
    model = dataclasses.replace(workload("gpt-tiny"), global_batch=max(_RANKS))
    return Case(adapter=name, workload=model, layout=Layout(dp=ranks, zero_stage=stage))


def _formulas(adapter: type[Adapter], cases: list[Case]) -> dict[str, str]:
    states = [_held(adapter, case) for case in cases]
    found = {
        name.replace("_", " "): sharded({d: held[name] for d, held in zip(_RANKS, states, strict=True) if held})
        for name in _STATES
    }
    sent = {case.layout.dp: _sent(adapter, case) for case in cases}
    return {**found, "sent": ring({d: value for d, value in sent.items() if value is not None})}


def _held(adapter: type[Adapter], case: Case) -> dict[str, float] | None:
    """Return bytes of rank 0 for each parameter, or None if they are not planned."""
    held, count = model_states(case, 0, adapter.recipe(case)), local_parameters(case.workload.model, case.layout, 0)
    return {name: getattr(held, name) / count for name in _STATES} if held and count else None


def _sent(adapter: type[Adapter], case: Case) -> float | None:
    """Return the bytes that rank 0 sends in a step, in multiples of the model's, or None if they are not planned."""
    flows, count = step_traffic(case, 0), local_parameters(case.workload.model, case.layout, 0)
    if flows is None or not count or not adapter.plans_traffic(case):
        return None
    total = wire_bytes(departed(flows, adapter.traffic_exceptions(case, 0)))
    return total / (count * case.precision.weights.itemsize)


def sharded(values: Mapping[int, float]) -> str:
    """Return bytes by number of ranks as `a + b/d`, or that they are not of this form."""
    if tuple(values) != _RANKS:
        return OTHER
    share = 4 * (values[2] - values[4])
    whole = values[2] - share / 2
    if any(abs(whole + share / ranks - value) > _TOLERANCE for ranks, value in values.items()):
        return OTHER
    if not (_is_general(whole) and _is_general(share)):
        return OTHER
    parts = [f"{whole:.2g}"] * (abs(whole) > _TOLERANCE) + [f"{share:.2g}/d"] * (abs(share) > _TOLERANCE)
    return " + ".join(parts) or "0"


def _is_general(factor: float) -> bool:
    """Return whether a factor counts bytes, or halves, of every parameter, not some that this model happens to have."""
    return abs(2 * factor - round(2 * factor)) < 4 * _TOLERANCE


def ring(values: Mapping[int, float]) -> str:
    """Return what is sent by number of ranks as `c (d-1)/d`, or that it is not of this form."""
    times = [value * ranks / (ranks - 1) for ranks, value in values.items()]
    if tuple(values) != _RANKS or max(times) - min(times) > _TOLERANCE or not _is_general(times[0]):
        return OTHER
    return f"{times[0]:.2g} (d-1)/d" if times[0] > _TOLERANCE else "0"
