"""Lines of a records file that an older Meshmark wrote, in the form of today's."""

from __future__ import annotations

from typing import Any

from meshmark.run.record import SCHEMA

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
_LEFT_OUT = {"matmul_flops_per_second", "planned_traffic"}
"""Of schema 1: ranks that shared cores were told a peak each, which together the machine did not have; and what
adapters said that they would send, by which nothing is judged any more."""


def migrate(value: object) -> dict[str, Any]:
    """A line's JSON value, of this or an older schema, in the form of `SCHEMA`.

    Raises `ValueError` where it is of none that this Meshmark knows.
    """
    schema = value.get("schema") if isinstance(value, dict) else None
    if not isinstance(value, dict) or schema not in (1, SCHEMA):
        newer = "; a newer one wrote it: upgrade" if isinstance(schema, int) and schema > SCHEMA else ""
        raise ValueError(f"schema {schema}, this Meshmark reads 1 to {SCHEMA}{newer}")
    if schema == SCHEMA or "session" in value:
        return value | {"schema": SCHEMA}
    moved = _LEFT_OUT.union(*_PARTS_OF_SCHEMA_1.values())
    parts = {
        name: {new: value[old] for old, new in part.items() if old in value}
        for name, part in _PARTS_OF_SCHEMA_1.items()
    }
    return {name: each for name, each in value.items() if name not in moved} | parts | {"schema": SCHEMA}
