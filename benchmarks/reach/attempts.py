"""Outcomes of mutants of the frameworks, and how the survivors are read."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from benchmarks.reach.mutate import Mutation
from meshmark.serial import decode

TRIED = Path("baselines/reach/mutants.jsonl")
READINGS = Path("baselines/reach/readings.toml")


class End(StrEnum):
    """How a mutant was killed, or that it was not."""

    VERDICT = "verdict"
    CRASH = "crash"
    HANG = "hang"
    SURVIVED = "survived"
    NO_MUTANT = "no mutant"
    """No rank had the mutation in a function that runs, or it changes nothing."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Outcome of one mutant."""

    framework: str
    version: str
    mutation: Mutation
    before: str
    after: str
    end: End
    by: str
    """Adapter and suite or clause that killed it."""
    message: str
    """The killer's message, in one line."""
    tried: list[str]
    """Passes that were run, in order."""
    seconds: float


class ReadingKind(StrEnum):
    """Why a mutant survived."""

    EQUIVALENT = "equivalent"
    """No run can tell it from the original, or none that trains as the adapters do."""
    SPEED = "speed or checks alone"
    """It changes when work is done, or what is checked, and no value, byte held or byte sent."""
    HOLE = "hole"
    """A judged pass could tell it from the original, and none does."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Why one mutant survived, as a person found."""

    kind: ReadingKind
    why: str


def tried_before(path: Path = TRIED) -> list[Attempt]:
    """Return what was run already."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [decode(Attempt, json.loads(line)) for line in lines]


def read_readings(path: Path = READINGS) -> dict[str, Reading]:
    """Return the readings by the name of their mutant."""
    found = tomllib.loads(path.read_text()).get("reading", []) if path.exists() else []
    return {each["mutant"]: Reading(kind=ReadingKind(each["kind"]), why=each["why"]) for each in found}
