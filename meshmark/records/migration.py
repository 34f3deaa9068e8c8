"""Convert lines of records files from older schemas to the current one."""

from __future__ import annotations

from typing import Any

from meshmark.records.judged_case import OTHER_RECORD
from meshmark.records.record import SCHEMA
from meshmark.spec.algorithm import without_foreign_options
from meshmark.spec.model_config import with_kind

_PARTS_OF_SCHEMA_1: dict[str, dict[str, str]] = {
    "launch": {"launch_seconds": "seconds", "build_seconds": "build_seconds"},
    "training": {"losses": "losses", "norms": "norms"},
    "equivalence": {
        "deviations": "deviations",
        "noise": "noise",
        "factors": "factors",
        "drifts": "drifts",
        "diagnosis": "diagnosis",
        "num_replicated": "num_replicated",
    },
    "memory": {
        "memory": "readings",
        "planned_states": "planned",
        "remainders": "remainders",
        "state_dtypes": "state_dtypes",
    },
    "traffic": {"traffic": "readings"},
    "timing": {"rank_step_seconds": "rank_step_seconds"},
    "conformance": {
        "scenario": "scenario",
        "base": "base",
        "samples": "samples",
        "digests": "digests",
        "known_gaps": "known_gaps",
    },
}
"""Fields of each part of a record: their flat names in schema 1, and their names within the part."""
_RENAMED_IN_SCHEMA_3 = {
    "memory": {"remainders": "extra_memory"},
    "traffic": {"departures": "traffic_exceptions"},
}
"""Fields of each part that had another name in schema 2."""
_SAME_AS_TODAY = 3
"""Records have had today's form since this schema. Schema 4 only adds the user's repository, files and processor
times.
"""
_LEFT_OUT = {"matmul_flops_per_second", "planned_traffic"}
"""Fields of schema 1 that are dropped.

Ranks that shared cores each reported a peak that the machine did not have as a whole. Adapters reported the traffic
they planned, which verdicts no longer use.
"""


def migrate(value: object) -> dict[str, Any]:
    """Return a line's JSON value, of this or an older schema, in the form of `SCHEMA`.

    Raises `ValueError` for an unknown schema.
    """
    schema = value.get("schema") if isinstance(value, dict) else None
    if isinstance(value, dict) and schema is None and "verdicts" in value:
        raise ValueError(f"{OTHER_RECORD}; `meshmark report DIR` reads it")
    if not isinstance(value, dict) or schema not in range(1, SCHEMA + 1):
        newer = "; a newer one wrote it: upgrade" if isinstance(schema, int) and schema > SCHEMA else ""
        raise ValueError(f"schema {schema}, this Meshmark reads 1 to {SCHEMA}{newer}")
    if schema in range(_SAME_AS_TODAY, SCHEMA + 1) or "session" in value:
        return value | {"schema": SCHEMA}
    if schema == 1:
        value = _to_schema_2(value)
    return _to_schema_3(value)


def _to_schema_2(value: dict[str, Any]) -> dict[str, Any]:
    """Group the fields of a record into the parts of schema 2."""
    moved = _LEFT_OUT.union(*_PARTS_OF_SCHEMA_1.values())
    parts = {
        name: {new: value[old] for old, new in part.items() if old in value}
        for name, part in _PARTS_OF_SCHEMA_1.items()
    }
    return {name: each for name, each in value.items() if name not in moved} | parts


def _to_schema_3(value: dict[str, Any]) -> dict[str, Any]:
    """Return a record in the form of schema 3.

    Algorithms have only their own options, models have a kind, and fields have their new names.
    """
    found = value | {"schema": SCHEMA}
    for part, renamed in _RENAMED_IN_SCHEMA_3.items():
        if isinstance(held := value.get(part), dict):
            found[part] = {renamed.get(name, name): each for name, each in held.items()}
    if isinstance(case := value.get("case"), dict):
        found["case"] = _with_algorithm_options(case)
    conformance = value.get("conformance")
    if isinstance(conformance, dict) and isinstance(base := conformance.get("base"), dict):
        found["conformance"] = conformance | {"base": _with_algorithm_options(base)}
    return found


def _with_algorithm_options(case: dict[str, Any]) -> dict[str, Any]:
    workload = case.get("workload")
    if not isinstance(workload, dict):
        return case
    changed: dict[str, Any] = {}
    if isinstance(algorithm := workload.get("algorithm"), dict):
        changed["algorithm"] = without_foreign_options(algorithm)
    if isinstance(model := workload.get("model"), dict):
        changed["model"] = with_kind(model)
    return case | {"workload": workload | changed}
