"""Lines of a records file that an older Meshmark wrote, in the form of today's."""

from __future__ import annotations

from typing import Any

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
"""By part of a record: its fields as they lay side by side in schema 1, and as they are named within the part."""
_RENAMED_IN_SCHEMA_3 = {
    "memory": {"remainders": "extra_memory"},
    "traffic": {"departures": "traffic_exceptions"},
}
"""By part of a record: fields that schema 2 had under another name."""
_SAME_AS_TODAY = 3
"""From this schema on a record has today's form: 4 only adds the user's repository and files, and processor times."""
_LEFT_OUT = {"matmul_flops_per_second", "planned_traffic"}
"""Of schema 1: ranks that shared cores were told a peak each, which together the machine did not have; and what
adapters said that they would send, by which nothing is judged any more."""


def migrate(value: object) -> dict[str, Any]:
    """A line's JSON value, of this or an older schema, in the form of `SCHEMA`.

    Raises `ValueError` where it is of none that this Meshmark knows.
    """
    schema = value.get("schema") if isinstance(value, dict) else None
    if not isinstance(value, dict) or schema not in range(1, SCHEMA + 1):
        newer = "; a newer one wrote it: upgrade" if isinstance(schema, int) and schema > SCHEMA else ""
        raise ValueError(f"schema {schema}, this Meshmark reads 1 to {SCHEMA}{newer}")
    if schema in range(_SAME_AS_TODAY, SCHEMA + 1) or "session" in value:
        return value | {"schema": SCHEMA}
    if schema == 1:
        value = _to_schema_2(value)
    return _to_schema_3(value)


def _to_schema_2(value: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a record in the parts that schema 2 has them in."""
    moved = _LEFT_OUT.union(*_PARTS_OF_SCHEMA_1.values())
    parts = {
        name: {new: value[old] for old, new in part.items() if old in value}
        for name, part in _PARTS_OF_SCHEMA_1.items()
    }
    return {name: each for name, each in value.items() if name not in moved} | parts


def _to_schema_3(value: dict[str, Any]) -> dict[str, Any]:
    """Return a record whose algorithms have their own options alone, whose models tell their kind, and whose fields are
    renamed."""
    found = value | {"schema": SCHEMA}
    for part, renamed in _RENAMED_IN_SCHEMA_3.items():
        if isinstance(held := value.get(part), dict):
            found[part] = {renamed.get(name, name): each for name, each in held.items()}
    if isinstance(case := value.get("case"), dict):
        found["case"] = _with_own_options(case)
    conformance = value.get("conformance")
    if isinstance(conformance, dict) and isinstance(base := conformance.get("base"), dict):
        found["conformance"] = conformance | {"base": _with_own_options(base)}
    return found


def _with_own_options(case: dict[str, Any]) -> dict[str, Any]:
    workload = case.get("workload")
    if not isinstance(workload, dict):
        return case
    changed: dict[str, Any] = {}
    if isinstance(algorithm := workload.get("algorithm"), dict):
        changed["algorithm"] = without_foreign_options(algorithm)
    if isinstance(model := workload.get("model"), dict):
        changed["model"] = with_kind(model)
    return case | {"workload": workload | changed}
