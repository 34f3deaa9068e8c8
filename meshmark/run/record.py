"""The gathered, versioned, serialised outcome of one pass over one case."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO

from meshmark.environment import Environment
from meshmark.errors import ResultsError
from meshmark.judge.deviation import Deviations, Drift
from meshmark.judge.faults import Diagnosis
from meshmark.judge.yardstick import Comparisons, Yardstick
from meshmark.measure.readings import MemoryReading, TrafficReading
from meshmark.run.request import Task
from meshmark.run.session import Session
from meshmark.serial import decode, encode
from meshmark.spec.case import Case
from meshmark.spec.known_gap import KnownGap
from meshmark.theory.states import ModelStates, Remainder

SCHEMA = 1
"""Version of the format; raise it with every change that an older reader would misread."""


class Status(StrEnum):
    """How a pass ended."""

    OK = "ok"
    SKIPPED = "skipped"
    """Not run: unsupported, or not installed."""
    RAISED = "raised"
    KILLED = "killed"
    HUNG = "hung"
    """No end within the time limit, and some rank stood still amid its work: a defect."""
    SLOW = "slow"
    """No end within the time limit, while its ranks came on: nothing is known of its correctness, and a higher limit is
    all that an answer costs."""
    OOM = "oom"
    NAN = "nan"
    """It ran to its end, with a loss that is not a number."""
    EXITED = "exited"
    """A rank's process ended by itself, whatever its exit code, and left neither a report nor an error."""
    UNFINISHED = "unfinished"
    """What failed stands outside the case's ranks."""
    NO_SPACE = "no space"
    """A disk was full, of the launch's own files or of what a rank wrote."""
    NODES_DISAGREE = "nodes disagree"
    """Nodes were given other commands, or hold other data or versions; ends the run."""
    NODE_LOST = "node lost"
    """Another node, or the link to it, was gone; ends the run."""
    UNKILLABLE = "could not be killed"
    """A rank outlived SIGKILL, as one does inside a driver that hangs; what it held is held still."""

    @property
    def outside(self) -> bool:
        """Whether what failed stands outside the case: no verdict on the adapter."""
        infrastructure = (Status.NO_SPACE, Status.NODES_DISAGREE, Status.NODE_LOST, Status.UNKILLABLE)
        return self is Status.UNFINISHED or self in infrastructure


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a pass ended, with the evidence when it did not end well."""

    status: Status
    rank: int | None = None
    """The rank that failed first."""
    message: str = ""
    traceback: str = ""
    log_tail: str = ""
    stacks: dict[int, str] = field(default_factory=dict)
    """Every rank's Python stacks, when it hung or was too slow."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One suite's judgement."""

    suite: str
    """equivalence, memory or communication."""
    passed: bool
    summary: str
    """One line: what decided."""
    evidence: dict[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Record:
    """All that a reader needs to know of one pass over one case."""

    schema: int = SCHEMA
    case: Case
    adapter: str
    """"module:Class" that was run."""
    task: Task
    outcome: Outcome
    environment: Environment
    steps: int
    warmup: int = 0
    launch_seconds: float = 0.0
    """From the launch to the last process's end."""
    build_seconds: float = 0.0
    """Of the slowest rank: from its first instruction to an engine ready to train."""
    losses: list[float] = field(default_factory=list)
    """Global mean, by step."""
    norms: list[float | None] = field(default_factory=list)
    """Global gradient norm before clipping, by step, where the framework tells it."""
    deviations: Deviations = field(default_factory=dict)
    """From the truth, by quantity, then step."""
    noise: Comparisons = field(default_factory=dict)
    """The largest such distance in runs of `single` under perturbation, and of the scales of gradients."""
    factors: dict[str, float] = field(default_factory=dict)
    """How many times its noise a quantity may stand from the truth, by kind."""
    drifts: list[Drift] = field(default_factory=list)
    diagnosis: Diagnosis | None = None
    """Of a run that is not equivalent: the likely defect."""
    memory: list[MemoryReading] = field(default_factory=list)
    """By rank."""
    planned_states: list[ModelStates | None] = field(default_factory=list)
    """By rank, before remainders; None where nothing is planned."""
    remainders: list[list[Remainder]] = field(default_factory=list)
    """By rank: what the adapter declares beyond the plan."""
    state_dtypes: dict[str, str] = field(default_factory=dict)
    traffic: list[TrafficReading] = field(default_factory=list)
    """By rank."""
    planned_traffic: list[dict[str, float] | None] = field(default_factory=list)
    """By rank: bytes by kind of collective; None where they are not planned."""
    unmeasured: dict[str, str] = field(default_factory=dict)
    """By suite that cannot be judged: the adapter's method that failed, and how."""
    rank_step_seconds: list[list[float]] = field(default_factory=list)
    """By rank, then step: raw."""
    matmul_flops_per_second: list[float] = field(default_factory=list)
    """By rank: the best matrix product found, all ranks at once."""
    verdicts: list[Verdict] = field(default_factory=list)
    scenario: str = ""
    """Of the conformance suite; empty in the matrix of cases."""
    base: Case | None = None
    """What the scenario varies."""
    samples: list[dict[str, list[float]]] = field(default_factory=list)
    """By rank, then name: what the passes of the conformance suite measure."""
    digests: list[str] = field(default_factory=list)
    """A hash of every parameter's bits, before the first step and after each."""
    num_replicated: int = 0
    """Tensors, of all steps, that several ranks told and that were compared bit for bit."""
    known_gaps: list[KnownGap] = field(default_factory=list)
    """Of the conformance suite: what the adapter knows that its framework gets wrong."""
    remarks: list[str] = field(default_factory=list)
    """What happened on the way that a reader should know."""

    @property
    def yardstick(self) -> Yardstick:
        return Yardstick(noise=self.noise, factors=self.factors)

    @property
    def step_seconds(self) -> list[float]:
        """The slowest rank's, step by step."""
        return [max(ranks) for ranks in zip(*self.rank_step_seconds, strict=True)]

    def verdict(self, suite: str) -> Verdict | None:
        return next((v for v in self.verdicts if v.suite == suite), None)


class RecordFile:
    """Appends records to DIR/records.jsonl, one a line, each on disk before the next case starts; and sessions."""

    def __init__(self, folder: Path) -> None:
        """Raises `ResultsError` when the folder cannot be written or another run has it."""
        self.path = folder / "records.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = open(self.path, "ab+")  # noqa: SIM115
        except OSError as error:
            raise ResultsError(
                f"results folder {str(folder)!r}: {error.strerror}; name another with --results"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise ResultsError(
                f"results folder {str(folder)!r} is in use by another run; name another with --results"
            ) from error
        self._end_last_line()

    def _end_last_line(self) -> None:
        """A line that an earlier run left unfinished must not swallow ours."""
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def append(self, record: Record | Session) -> None:
        """Raises `ResultsError` when the line does not reach the disk."""
        try:
            self._file.write(json.dumps(encode(record)).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise ResultsError(
                f"{str(self.path)!r} cannot be written: {error.strerror}; what it held before is kept"
            ) from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a line that `append` has already complained about
            self._file.close()


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a results folder holds."""

    records: list[Record]
    complaints: list[str]
    """One for every line that could not be read; the others are good."""
    sessions: list[Session] = field(default_factory=list)


def read_records(folder: Path) -> Reading:
    """Every good line of DIR/records.jsonl, and a complaint for each bad one.

    Raises `ResultsError` when there is no such file, or not one good line in it.
    """
    path = folder / "records.jsonl" if folder.is_dir() else folder
    try:
        lines = path.read_text(errors="replace").split("\n")
    except OSError as error:
        raise ResultsError(
            f"no records at {str(path)!r}: {error.strerror}; run `pytest suites --results DIR` first"
        ) from error
    records, sessions, complaints = list[Record](), list[Session](), list[str]()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            parsed = _parse(line)
            records += [parsed] if isinstance(parsed, Record) else []
            sessions += [parsed] if isinstance(parsed, Session) else []
        except (ValueError, KeyError, TypeError) as error:
            complaints.append(f"{path.name} line {number}: {error}")
    if not records and not sessions:
        raise ResultsError(
            f"{str(path)!r} holds no record that can be read: {'; '.join(complaints[:3]) or 'it is empty'}"
        )
    return Reading(records=records, complaints=complaints, sessions=sessions)


def _parse(line: str) -> Record | Session:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not whole JSON ({error.msg} at character {error.pos}); a run was cut off there") from error
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"schema {schema}, this Meshmark reads {SCHEMA}")
    parsed: Record | Session = decode(Session if "session" in value else Record, value)
    return parsed
