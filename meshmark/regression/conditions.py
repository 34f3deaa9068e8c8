"""Compare the conditions of two sides: machine, versions and settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshmark.environment import ALLOCATOR, Environment, allocator_settings
from meshmark.errors import ResultsError
from meshmark.records.record import Record

READERS = ("pytest", "pytest-benchmark", "pandas")
"""Packages that no rank computes with."""
OF_TIMES = ("machine", "CPUs", "OMP_NUM_THREADS")
"""Conditions that affect times, but neither verdicts nor bytes, which each machine checks against its own
reference.
"""


def conditions(record: Record) -> dict[str, str]:
    """Return the conditions that the numbers of `record` depend on, apart from the code.

    Values are empty if the record lacks them.

    The commit is left out, because its effect is what a comparison measures.
    """
    return _around(record.environment) | {ALLOCATOR: record.kernels.get(ALLOCATOR, "")}


def conditions_here(environment: Environment) -> dict[str, str]:
    """Return the conditions of a session that has no record yet; `environment` is this process's."""
    return _around(environment) | ({ALLOCATOR: allocator_settings()} if environment.device == "cuda" else {})


def _around(environment: Environment) -> dict[str, str]:
    found = {
        "machine": environment.machine,
        "CPUs": str(environment.num_cpus),
        "device": environment.device,
        "nodes": str(environment.nnodes),
        "backend": environment.backend,
        "OMP_NUM_THREADS": environment.omp_num_threads,
    }
    versions = {name: version for name, version in environment.versions.items() if name not in READERS}
    if "python" in versions:  # 3.11 of 3.11.7: images and CI's set-up move to the next release by themselves
        versions["python"] = ".".join(versions["python"].split(".")[:2])
    return found | versions


def hinders(condition: str, *, timed: bool) -> bool:
    """Return whether a difference in `condition` makes sides incomparable.

    Conditions that affect only speed do not matter unless times are compared.
    """
    return timed or condition not in OF_TIMES


def differences(ours: Iterable[Record], theirs: Iterable[Record]) -> dict[str, tuple[str, str]]:
    """Return the conditions that both sides report and that differ, in words."""
    one, other = _values_by_condition(ours), _values_by_condition(theirs)
    shared = {name: (one[name], other[name]) for name in one if name in other}
    return {name: (_joined(a), _joined(b)) for name, (a, b) in shared.items() if a != b}


def _values_by_condition(records: Iterable[Record]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for record in {(id(r.environment), r.kernels.get(ALLOCATOR)): r for r in records}.values():
        for name, value in conditions(record).items():
            if value:
                found.setdefault(name, set()).add(value)
    return found


def _joined(values: set[str]) -> str:
    return " and ".join(sorted(values))


def expect_alike(found: Mapping[str, tuple[str, str]], *, timed: bool) -> None:
    """Raise `ResultsError` if relevant conditions differ."""
    found = {name: sides for name, sides in found.items() if hinders(name, timed=timed)}
    if found:
        listed = "; ".join(f"{name}: {one} in A, {other} in B" for name, (one, other) in found.items())
        raise ResultsError(
            f"A and B were measured under other conditions ({listed}), so a difference would not be the code's; "
            f"measure both in one place, or give --across where the conditions are what you compare{without(found)}"
        )


def without(found: Iterable[str]) -> str:
    """Return a hint for sides that differ only in conditions of times."""
    return "; --fail-on wrong,bigger:1%, without slower, holds on any machine" if set(found) <= set(OF_TIMES) else ""
