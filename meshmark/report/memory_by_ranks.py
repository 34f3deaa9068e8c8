"""Model states of a rank as the number of ranks grows, in bytes a parameter: measured, and computed up to 512 ranks.

Bytes a parameter do not depend on the model, so models of several sizes stand in one row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from meshmark.errors import MeshmarkError
from meshmark.measure.readings import MemoryReading
from meshmark.records.record import Record, Status
from meshmark.records.request import Task
from meshmark.report.table import Cell, Rows, number
from meshmark.spec.case import Case
from meshmark.spec.layout import Offload
from meshmark.theory.memory import ModelStates, model_states
from meshmark.theory.model_theory import local_parameters
from meshmark.theory.recipe import RECIPES, eager_recipe

STATES = ("parameters", "gradients", "optimizer_states")
"""Categories that are model states."""
WORLDS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
TABLED = (2, 4, 8, 16, 64, 512)
"""Those that a table has room for; the picture has all."""
NOTE = (
    "Bytes a rank for each parameter of the model, by data parallelism alone; times the number of parameters they are "
    "bytes of any model. In brackets is the share of what a rank without sharding holds. Model states are weights, "
    "gradients and optimizer states; activations, which depend on the batch of a rank, are not among them. A plain "
    "number is *measured* in a real world, m1 is *measured* on a single rank of a fake world, c is *computed* by the "
    "closed form that gave the plan of the measured ones. The closed form divides evenly and pads nothing, so a "
    "measured number may be larger than a computed one of as many ranks. The second table lists by how much, and why. "
    "The difference grows with the size of a tensor over that of a rank's share. In other runs, two plans of gpt-tiny "
    "on 512 ranks were not met: the last rank of FSDP1 holds no parameters where 1,851 bytes are planned, and the peak "
    "of FSDP2 is above its plan. Padding of the shards is a likely cause; it is not proved."
)


class Source(StrEnum):
    """Where a number comes from."""

    REAL = ""
    FAKE = " m1"
    COMPUTED = " c"


@dataclass(frozen=True, kw_only=True)
class StatesPerParameter:
    """Bytes of the fullest rank for each parameter of the model."""

    parameters: float
    gradients: float
    optimizer_states: float
    source: Source
    planned: float | None = None
    """Their sum by the closed form, of a measured one."""
    reasons: tuple[str, ...] = ()
    """Why its adapter holds other bytes than the closed form."""

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer_states


@dataclass(frozen=True, kw_only=True, order=True)
class Kind:
    """The properties that stay the same as ranks are added."""

    zero_stage: int
    adapter: str
    precision: str

    @property
    def title(self) -> str:
        return f"{self.adapter} ZeRO-{self.zero_stage}" if self.zero_stage else self.adapter


def fullest_states(readings: Sequence[MemoryReading]) -> int:
    """Return the bytes of model states of the rank that has most."""
    return max(r.states.parameters + r.states.gradients + r.states.optimizer_states for r in readings)


def memory_by_ranks(records: Iterable[Record]) -> dict[Kind, dict[int, StatesPerParameter]]:
    """Return model states by kind of layout and number of ranks, for kinds that were measured on several ranks.

    Numbers of ranks that were not measured are computed, where the closed form is known to be that of the kind: it
    gives the plan that the kind's records carry. Only runs that reached their end and hold what is planned count.
    """
    found: dict[Kind, dict[int, StatesPerParameter]] = {}
    largest: dict[Kind, Record] = {}
    usable = sorted(filter(_usable, records), key=lambda record: record.task is Task.FAKE_WORLD)
    for record in usable:
        kind = _kind(record.case)
        fullest = max((reading.states for reading in record.memory.readings), key=lambda states: states.total)
        measured = _per_parameter(fullest, record, Source.FAKE if record.task is Task.FAKE_WORLD else Source.REAL)
        plan = record.memory.planned[0]
        assert plan is not None
        declared = [each for own in record.memory.extra_memory for each in own if each.category in STATES]
        measured = dataclasses.replace(
            measured,
            planned=sum(_states_of(plan)) / _size(record),
            reasons=tuple(dict.fromkeys(each.reason for each in declared)),
        )
        found.setdefault(kind, {}).setdefault(record.case.world_size, measured)
        if kind not in largest or _size(record) > _size(largest[kind]):
            largest[kind] = record
    for kind, record in largest.items():
        for world in WORLDS:
            if world not in found[kind] and (states := _computed(record, world)):
                found[kind][world] = _per_parameter(states, record, Source.COMPUTED)
    return dict(sorted(found.items()))


def rows_by_ranks(records: Iterable[Record]) -> Rows:
    """Return a table by ZeRO stage, with one row per kind of layout and one column per number of ranks."""
    found = memory_by_ranks(records)
    whole = {kind.precision: by[min(by)].total for kind, by in found.items() if not kind.zero_stage}
    rows: Rows = []
    for kind, by in found.items():
        row: dict[str, object] = {"data parallelism of": kind.title, "precision": kind.precision}
        for world in TABLED:
            if held := by.get(world):
                base = whole.get(kind.precision)
                share = f" ({100 * held.total / base:.2g} %)" if base and kind.zero_stage else ""
                text = f"{held.total:.3g}{share}{held.source}"
            else:
                text = "–"
            row[f"{world} ranks"] = Cell(text=text, order=held.total if held else None)
        rows.append(row)
    return rows


BEYOND = 0.005
"""Share of the closed form by which a measured number differs from it before `rows_beyond` says why."""


def rows_beyond(records: Iterable[Record]) -> Rows:
    """Return one row per measured number that differs from the closed form, with the reason its adapter declares."""
    return [
        {
            "data parallelism of": kind.title,
            "precision": kind.precision,
            "ranks": world,
            "measured": number(held.total),
            "closed form": number(held.planned),
            "why": "; ".join(held.reasons) or "no reason is declared",
        }
        for kind, by in memory_by_ranks(records).items()
        for world, held in by.items()
        if held.planned is not None and abs(held.total / held.planned - 1.0) > BEYOND
    ]


def _usable(record: Record) -> bool:
    case, verdict = record.case, record.verdict("memory")
    alone = (
        case.layout.dp == case.world_size > 1 and case.layout.offload is Offload.NONE and not case.workload.algorithm.id
    )
    held = bool(record.memory.readings and record.memory.planned and record.memory.planned[0])
    return (
        alone
        and held
        and _size(record) > 0
        and record.outcome.status is Status.OK
        and (verdict is None or verdict.passed)
    )


def _kind(case: Case) -> Kind:
    return Kind(adapter=case.adapter, zero_stage=case.layout.zero_stage, precision=str(case.precision))


def _size(record: Record) -> float:
    """Return the number of parameters of a record's model."""
    return float(local_parameters(record.case.workload.model, record.case.layout, 0) or 0)


def _per_parameter(states: object, record: Record, source: Source) -> StatesPerParameter:
    count = _size(record)
    parameters, gradients, optimizer_states = (getattr(states, name) / count for name in STATES)
    return StatesPerParameter(
        parameters=parameters, gradients=gradients, optimizer_states=optimizer_states, source=source
    )


@functools.lru_cache(maxsize=4096)
def _states(case: Case, name: str) -> ModelStates | None:
    """Return the closed form, once for each case: a report asks for it in several tables and a picture."""
    return model_states(case, 0, eager_recipe(case, name, casts_weights="deepspeed" in name))


def _computed(record: Record, world: int) -> ModelStates | None:
    """Return what a rank of another world holds, by the recipe that gives the record's plan, or None without one."""
    case = record.case
    planned = record.memory.planned[0]
    stage = case.layout.zero_stage
    assert planned is not None
    for name in ("eager", f"eager-deepspeed-{stage}"):
        if name in RECIPES and (same := _states(case, name)) and _states_of(same) == _states_of(planned):
            larger = dataclasses.replace(case.layout, dp=world)
            batch = world * case.workload.global_batch
            workload = dataclasses.replace(case.workload, global_batch=batch)
            try:
                return _states(dataclasses.replace(case, layout=larger, workload=workload), name)
            except MeshmarkError:
                return None
    return None


def _states_of(plan: ModelStates) -> tuple[float, float, float]:
    return plan.parameters, plan.gradients, plan.optimizer_states
