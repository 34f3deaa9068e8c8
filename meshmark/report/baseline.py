"""Comparison with another run. Times only compare on one machine with the same settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from meshmark.environment import Environment
from meshmark.records.record import Record
from meshmark.report.results import CaseResult
from meshmark.report.table import Cell, number
from meshmark.run.throughput import throughput

_MACHINE = ("machine", "CPUs", "device", "nodes")
"""Facts without which times do not compare at all. All others are settings, which a comparison may be about."""


def facts(environment: Environment) -> dict[str, str]:
    """Return the facts that times depend on. Values are empty if the record lacks them."""
    return {
        "machine": environment.machine,
        "CPUs": str(environment.num_cpus),
        "device": environment.device,
        "nodes": str(environment.nnodes),
        "backend": environment.backend,
        "torch": environment.versions.get("torch", ""),
        "OMP_NUM_THREADS": environment.omp_num_threads,
    }


def differences(here: Environment, there: Environment) -> dict[str, tuple[str, str]]:
    """Return the facts that both records have and that differ, as (here, there)."""
    pairs = {name: (told, facts(there)[name]) for name, told in facts(here).items()}
    return {name: (one, other) for name, (one, other) in pairs.items() if one and other and one != other}


_NEW = Cell(text="new")


class Baseline:
    """The results of another run, by case."""

    def __init__(self, found: Iterable[CaseResult] = ()) -> None:
        self._results: dict[str, list[CaseResult]] = {}
        for result in found:
            self._results.setdefault(result.case.id, []).append(result)

    def __bool__(self) -> bool:
        return bool(self._results)

    def of(self, result: CaseResult) -> CaseResult | None:
        """Return the result of the same case, preferably on the same device, or None."""
        known = self._results.get(result.case.id, [])
        here = result.any.environment.device
        return next((r for r in known if r.any.environment.device == here), known[0] if known else None)

    def time(self, result: CaseResult) -> Cell:
        """Return the median step as a multiple of the baseline's.

        The cell is marked if the intervals of the rates overlap, and if the baseline has another machine or other
        settings.
        """
        before = self.of(result)
        if not (result.timed and before and before.timed and before.timed.timing.rank_step_seconds):
            return _NEW
        multiple = number(_median(result.timed) / _median(before.timed), ".2f")
        different = differences(result.timed.environment, before.timed.environment)
        if different.keys() & set(_MACHINE):
            return multiple.strike("other machine")
        tied = " tied" if throughput(result.timed).ties(throughput(before.timed)) else ""
        other = f" (other {', '.join(different)})" if different else ""
        return Cell(text=f"{multiple.text}{tied}{other}", order=multiple.order)

    def peak(self, result: CaseResult) -> Cell:
        """Return the fullest rank's peak as a multiple of the baseline's."""
        before = self.of(result)
        if not (result.observed and before and before.observed and before.observed.memory.readings):
            return _NEW
        return number(_peak(result.observed) / max(_peak(before.observed), 1), ".4f")

    def verdict(self, result: CaseResult) -> Cell:
        before = self.of(result)
        return before.correctness if before else _NEW

    def warning(self, found: Sequence[CaseResult]) -> str:
        """Return a warning about conditions that differ between the runs, or an empty string."""
        told: dict[str, None] = {}
        for result in found:
            before = self.of(result)
            if result.timed and before and before.timed:
                different = differences(result.timed.environment, before.timed.environment)
                told |= {f"{name} {one} here, {other} there": None for name, (one, other) in different.items()}
        if not told:
            return ""
        return (
            f"**The baseline was measured under other conditions**: {'; '.join(told)}. Times of another machine say "
            "nothing about the code and are struck out; bytes and correctness remain comparable."
        )


def _median(record: Record) -> float:
    return float(np.median(record.timing.step_seconds))


def _peak(record: Record) -> int:
    return max(reading.peak.total for reading in record.memory.readings)
