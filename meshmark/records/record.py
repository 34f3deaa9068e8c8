"""The gathered, versioned, serialised outcome of one pass over one case.

It says how far traffic travels (within a node, to another node of the same switch, or beyond the switch), and which of
the user's own files it was made with (adapter and workload), by digest and commit.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from meshmark.environment import PACKAGES, Environment, code_digest, distributions_of, project_of, run_git
from meshmark.errors import AdapterError
from meshmark.import_target import class_at
from meshmark.judge.deviation import Deviations, Drift, ObservedPath, Quantity, QuantityKind, Sample
from meshmark.judge.faults import Diagnosis
from meshmark.judge.tolerance_model import Comparisons, ToleranceModel, Way
from meshmark.measure.laps import GpuPower, Interval, Lap, laps_of, mean_interval
from meshmark.measure.profile import Profile
from meshmark.measure.readings import AlikeSteps, DeviceMemory, MemoryReading, TrafficReading, wire_factor
from meshmark.records.request import Task
from meshmark.spec.case import Case
from meshmark.spec.known_gap import KnownGap
from meshmark.spec.own_model import OwnModelConfig
from meshmark.spec.workload import Workload
from meshmark.theory.memory import ExtraMemory, ModelStates
from meshmark.theory.traffic import Flow, OneTimeTraffic, TrafficException, by_route, departed

# --- The user's own files that a record was made with.


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A file that an adapter or a workload was loaded from."""

    target: str
    """Target as a command names it, "file.py:Class" or "package.module:Class", without the folder."""
    sha256: str
    """Hash of the file, and of what it and what it imports take from elsewhere, when this session
    first read them. Empty if it cannot be read, or if it has changed since."""
    commit: str
    """Commit of the repository that tracks the file, as in `Environment.project_commit`. Empty if none does."""

    @property
    def is_known(self) -> bool:
        """True if it identifies the code, including modules next to the file that it imports."""
        return bool(self.sha256 and self.commit) and "-dirty" not in self.commit


def sources_of(adapter: str, workload: Workload) -> list[Source]:
    """Return the sources that are not part of Meshmark, whose own version the environment records.

    A source has no digest once its code has changed after the first call. Ranks import it anew at every launch, and are
    judged by what this process has loaded, so that no version tells what was run.
    """
    targets = [adapter] if not adapter.startswith("meshmark.") else []
    if isinstance(workload.model, OwnModelConfig):
        targets.append(workload.model.target)
    return [_source(target, target == adapter) for target in targets]


@functools.cache
def code_digest_of(adapter: str) -> str:
    """Return a hash of an adapter's file and of all that it imports, by which nodes are compared, whatever repositories
    they have it from. Empty if it cannot be read.
    """
    file = _file(adapter.rpartition(":")[0])
    try:
        return _digest(file, _required(adapter), whole=True)[0] if file else ""
    except OSError:
        return ""


_SOURCES = dict[tuple[str, bool], tuple[Source, dict[Path, tuple[int, int]]]]()
"""Sources that were asked for, each with the size and date of every file of its code."""


def _source(target: str, is_adapter: bool) -> Source:
    if (target, is_adapter) in _SOURCES:
        source, stamps = _SOURCES[target, is_adapter]
        return source if _stamps(stamps) == stamps else dataclasses.replace(source, sha256="")
    where, _, name = target.rpartition(":")
    file, digest, files = _file(where), "", set[Path]()
    told = f"{Path(where).name if where.endswith('.py') else where}:{name}"
    with contextlib.suppress(OSError):
        digest, files = _digest(file, _required(target) if is_adapter else ()) if file else ("", set())
    source = Source(target=told, sha256=digest, commit=_commit(file) if file else "")
    _SOURCES[target, is_adapter] = source, _stamps(files)
    return source


def _stamps(files: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    """Return the sizes and dates of files, by which a change is noticed."""
    found = dict[Path, tuple[int, int]]()
    for file in files:
        with contextlib.suppress(OSError):
            about = file.stat()
            found[file] = about.st_size, about.st_mtime_ns
    return found


def _required(adapter: str) -> list[str]:
    """Return the distributions that an adapter says it requires, whoever imports them."""
    try:
        load_adapter: Callable[[str], Any] = class_at("meshmark.adapter.registry:load_adapter")
        return [requirement.distribution for requirement in load_adapter(adapter).requires]
    except AdapterError:
        return []


def _file(where: str) -> Path | None:
    if where.endswith(".py"):
        return Path(where).resolve()
    try:
        spec = importlib.util.find_spec(where)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin else None


_MOST_FILES = 2_000
"""Number of imported files from which on code counts as unknown."""
_CONFIGURATIONS = frozenset(".json .toml .yaml .yml".split())
_SUFFIXES = _CONFIGURATIONS | frozenset(".py .so .pyd .c .cc .cpp .cu .cuh .h .hpp".split())
"""Files that a package computes with: its modules, compiled ones, what is compiled as it runs, and configurations."""
_LARGE_BYTES = 64 * 2**20
"""Size from which on a file is told by its size and date."""


def _digest(file: Path, required: Iterable[str] = (), *, whole: bool = False) -> tuple[str, set[Path]]:
    """Return a hash of a file, of what it and what it imports import from other folders, of installed distributions
    among that, those that are `required` too, and of what git does not track of that in the file's own folder, such as
    another repository's clone. And all files that it and they import.

    The hash is not of what git tracks next to it, which `_commit` covers, unless it is to be the `whole` code. Empty if
    that is too much. Raises `OSError` if the file cannot be read.
    """
    found, seen, queue, packages, distributions = {file: file.read_bytes()}, {file}, [file], set[str](), set(required)
    tracked = set[Path]() if whole else _tracked(file.parent)
    while queue:
        each = queue.pop()
        names, beside = _imported(each, found.get(each) or _content(each))
        names -= packages  # of which all files were taken when the first file imported them
        packages |= names
        distributions.update(*map(distributions_of, names))
        new = {*beside, *(code for name in names for code in _code_of_package(name))} - seen
        seen |= new
        found |= {one: _content(one) for one in new if _is_unknown(one, file.parent, tracked)}
        queue += [one for one in new if one.suffix == ".py"]
        if len(seen) > _MOST_FILES:
            return "", seen
    digest = hashlib.sha256(found.pop(file))
    for each in sorted(found):
        digest.update(hashlib.sha256(found[each]).digest())
    if others := distributions - {"meshmark", *PACKAGES}:  # the environment has a digest of those
        digest.update(code_digest(others).encode())
    return digest.hexdigest(), seen


def _content(file: Path) -> bytes:
    """Return what tells one version of a file from another: its bytes, or of a large one its size and date."""
    about = file.stat()
    if about.st_size > _LARGE_BYTES:
        return f"{about.st_size} {about.st_mtime_ns}".encode()
    return file.read_bytes()


def _imported(file: Path, source: bytes) -> tuple[set[str], set[Path]]:
    """Return the names of the packages that a file imports anywhere, and the modules that it imports by relative
    names. Names that are made when it runs are not seen.
    """
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return set(), set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    beside = list[Path]()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = file.parents[node.level - 1] if node.level <= len(file.parents) else file.parent
            base = base.joinpath(*(node.module or "").split("."))
            beside += [base, *(base / alias.name for alias in node.names)]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                names.append(node.args[0].value)
    modules = {each for one in beside for each in (one.with_name(f"{one.name}.py"), one / "__init__.py")}
    packages = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {""}
    return packages, {each for each in modules if each.is_file()}


def _tracked(folder: Path) -> set[Path] | None:
    """Return the files in `folder` that git tracks. None if no repository has it."""
    try:
        listed = run_git("ls-files", "-z", folder=folder)
    except OSError:
        return None
    names = listed.stdout.split(b"\0")
    return None if listed.returncode else {folder / os.fsdecode(name) for name in names if name}


def _code_of_package(name: str) -> list[Path]:
    """Return the files of code of a package that is not installed, compiled ones among them."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return []
    roots = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    if spec and spec.origin and not roots:
        roots = [Path(spec.origin)]
    roots = [
        root
        for root in roots
        if not {"site-packages", "dist-packages"} & set(root.parts)
        and not root.is_relative_to(Path(__file__).parents[1])
    ]
    files = [each for root in roots for each in ([root] if root.is_file() else sorted(root.rglob("*")))]
    return [each for each in files if each.suffix in _SUFFIXES and "__pycache__" not in each.parts and each.is_file()]


def _is_unknown(file: Path, folder: Path, tracked: set[Path] | None) -> bool:
    """Return whether no commit of the repository around `folder` tells what a file of code holds: it is elsewhere, or
    not `tracked`.

    Configurations in `folder`, which a run may write, count if they are another repository's. Nothing in `folder` does
    if `tracked` is None: then it has no repository, and what is in it is not known at all.
    """
    if not file.is_relative_to(folder):
        return True
    if tracked is None or file in tracked:
        return False
    *between, _ = file.relative_to(folder).parents
    return file.suffix not in _CONFIGURATIONS or any((folder / each / ".git").exists() for each in between)


def _commit(file: Path) -> str:
    """Return the commit of the repository around a file, if the repository tracks the file. It counts as changed where
    the repository holds modules that are in no commit, which the file may import.
    """
    try:
        tracked = run_git("ls-files", "--error-unmatch", "--", file.name, folder=file.parent).returncode == 0
    except OSError:
        return ""
    if not tracked or not (commit := project_of(str(file.parent)).commit):
        return ""
    modules = _untracked_modules(file.parent)
    return f"{commit}-dirty.{modules}" if modules else commit


def _untracked_modules(folder: Path) -> str:
    """Return a digest of what git does not track of the modules in the repository around `folder`.

    Those in Python count if git does not ignore them, compiled ones always: they are built there. Configurations count
    in `folder` itself.
    """
    listing = ["ls-files", "-z", "--others"]
    configurations = [f":(glob)*{suffix}" for suffix in sorted(_CONFIGURATIONS)]
    names = list[bytes]()
    for command in (
        [*listing, "--exclude-standard", "--", ":/*.py", *configurations],
        [*listing, "--", ":/*.so"],
    ):
        listed = run_git(*command, folder=folder).stdout
        names += [name for name in listed.split(b"\0") if name and b"site-packages" not in name]
    digest = hashlib.sha256()
    for name in names:
        with contextlib.suppress(OSError):
            digest.update(name + b"\0" + _content(folder / os.fsdecode(name)))
    return digest.hexdigest()[:8] if names else ""


def decisive(records: Sequence[Record], suite: str = "") -> Record:
    """Return the record that counts, of several of one pass of a case: the last one.

    If the same committed code was judged wrong before, with the same packages, the last record that says so counts:
    what is wrong at times is wrong. A crash or a hang may have been the machine's, and does not, unless it came last.

    Args:
        records: The records of a pass, the oldest first.
        suite: The suite whose verdict is asked for. By default any counts, and a wrong training before all others.
    """
    last = records[-1]
    if not suite and last.outcome.status.is_defect:
        return last
    here = last.environment
    changed = any(commit.endswith("-dirty") for commit in (here.commit, here.project_commit))
    if changed or not all(source.is_known for source in last.sources):
        return last
    same = [record for record in reversed(records) if _code_of(record) == _code_of(last)]
    wrong = [record for record in same if was_wrong(record, suite)]
    return next((record for record in wrong if was_wrong(record, suite or "equivalence")), [*wrong, last][0])


def was_wrong(record: Record, suite: str = "") -> bool:
    """Return whether a verdict of a record says so, of any suite or of one."""
    of_suite = [verdict for verdict in record.verdicts if suite in ("", verdict.suite)]
    return any(not (verdict.passed or verdict.undecided) for verdict in of_suite)


def _code_of(record: Record) -> tuple[object, ...]:
    """Return what tells the code of a record. Where Meshmark is installed as a package it has no commit, but a version
    and a digest.
    """
    here = record.environment
    return here.commit, here.project_commit, record.sources, here.versions, here.packages_digest, record.adapter


# --- How far traffic travels: within a node, to another node of the same switch, or beyond the switch.


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The node and switch that a rank runs on."""

    node: int = 0
    switch: str = ""
    """Path of switches above its node, from the top of the tree. Empty if no scheduler reports it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """Bytes that all ranks together send in one step, under ring algorithms.

    A ring visits the ranks of a node, and the nodes of a switch, one after the other, as NCCL's do. An all-to-all
    sends equally to every peer.
    """

    within_nodes: float
    between_nodes: float
    """Bytes between nodes of one switch, or between any nodes if switches are unknown."""
    between_switches: float


Sent = tuple[int, str, tuple[int, ...], int]
"""Sending rank, kind of collective, its ranks, and bytes of the full tensors."""


def measured_traffic(readings: Sequence[TrafficReading]) -> list[Sent]:
    return [(rank, c.kind, c.ranks, c.num_bytes) for rank, read in enumerate(readings) for c in read.asked]


def planned_traffic(
    flows: Sequence[list[Flow] | None], traffic_exceptions: Sequence[list[TrafficException]]
) -> list[Sent] | None:
    """Return the traffic that theory predicts, with the exceptions that adapters declare.

    None if theory makes no prediction, or an adapter could not be asked.
    """
    sent = list[Sent]()
    if not flows or len(flows) != len(traffic_exceptions):
        return None
    for rank, (theirs, declared) in enumerate(zip(flows, traffic_exceptions, strict=True)):
        if theirs is None:
            return None
        routes = by_route(departed(theirs, declared))
        sent += [(rank, kind, ranks, flow.num_bytes) for (kind, ranks), flow in routes.items()]
    return sent


def reach(sent: Iterable[Sent] | None, places: Sequence[Place]) -> Reach | None:
    """Return how far the traffic travels, or None for an unknown kind of collective or unknown places."""
    if sent is None or not places:
        return None
    parts: dict[str, list[float]] = {"within_nodes": [], "between_nodes": [], "between_switches": []}
    for rank, kind, ranks, num_bytes in sent:
        total = num_bytes * wire_factor(kind, len(ranks))
        if math.isnan(total):
            return None
        for peer, share in _peers(rank, kind, ranks, places) if total else ():
            parts[_distance(places[rank], places[peer])].append(total * share)
    return Reach(**{name: math.fsum(values) for name, values in parts.items()})


def _peers(rank: int, kind: str, ranks: tuple[int, ...], places: Sequence[Place]) -> Iterator[tuple[int, float]]:
    """Yield the ranks that `rank` sends to, each with its share."""
    if kind == "all_to_all":
        yield from ((peer, 1 / (len(ranks) - 1)) for peer in ranks if peer != rank)
        return
    ring = sorted(ranks, key=lambda r: (places[r].switch, places[r].node, r))
    yield ring[(ring.index(rank) + 1) % len(ring)], 1.0


def _distance(one: Place, other: Place) -> str:
    if one.node == other.node:
        return "within_nodes"
    return "between_nodes" if one.switch == other.switch else "between_switches"


# --- Records.

SCHEMA = 4
"""Version of the format. Raise it with every change that an older reader would misread."""


class Status(StrEnum):
    """How a pass ended."""

    OK = "ok"
    SKIPPED = "skipped"
    """Not run: unsupported, or not installed."""
    RAISED = "raised"
    KILLED = "killed"
    HUNG = "hung"
    """Did not end within the time limit, and some rank made no progress in its work. This is a defect."""
    SLOW = "slow"
    """Did not end within the time limit, but its ranks made progress.

    Nothing is known about its correctness. A higher limit is enough to get an answer.
    """
    OOM = "oom"
    NAN = "nan"
    """Ran to the end, with a loss that is not a number."""
    EXITED = "exited"
    """A rank's process ended by itself, with any exit code, and left neither a report nor an error."""
    UNFINISHED = "unfinished"
    """The failure is outside the case's ranks."""
    NO_SPACE = "no space"
    """A disk was full, for the launch's files or for those that a rank wrote."""
    NODES_DISAGREE = "nodes disagree"
    """Nodes were given different commands, or have different data or versions. Ends the run."""
    NODE_LOST = "node lost"
    """Another node, or the link to it, was lost. Ends the run, unless the others continue."""
    UNKILLABLE = "could not be killed"
    """A rank survived SIGKILL, as happens inside a driver that hangs. It still holds its resources."""

    @property
    def outside(self) -> bool:
        """True if the failure is outside the case and says nothing about the adapter."""
        infrastructure = (Status.NO_SPACE, Status.NODES_DISAGREE, Status.NODE_LOST, Status.UNKILLABLE)
        return self is Status.UNFINISHED or self in infrastructure

    @property
    def is_defect(self) -> bool:
        """True if the pass failed because of something in its ranks."""
        return self not in (Status.OK, Status.SKIPPED, Status.SLOW) and not self.outside


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerEnd:
    """How another rank ended after the first failure."""

    rank: int
    kind: str
    """Kind as in `RankFailure`; "done" if the rank finished, "ended" if the launcher had to end it."""
    seconds: float | None = None
    """Seconds after the first failure, or None if unknown."""

    @property
    def by_itself(self) -> bool:
        """True if nobody had to end it. torchrun's agent kills peers; the default launcher waits for them first."""
        return self.kind not in ("killed", "ended")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a pass ended, with the evidence if it failed."""

    status: Status
    rank: int | None = None
    """The rank that failed first."""
    message: str = ""
    traceback: str = ""
    log_tail: str = ""
    stacks: dict[int, str] = field(default_factory=dict)
    """Python stacks of every rank, if the pass hung or was too slow."""
    peers: list[PeerEnd] = field(default_factory=list)
    """How the other ranks ended after one failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The verdict of one suite."""

    suite: str
    """equivalence, memory or communication."""
    passed: bool
    undecided: bool = False
    """True if nothing can be concluded. The verdict is then not passed, but the adapter is not at fault."""
    summary: str
    """The deciding fact, in one line."""
    evidence: dict[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSeconds:
    """Durations of a launch."""

    seconds: float = 0.0
    """Seconds from the launch to the end of the last process."""
    build_seconds: float = 0.0
    """For the slowest rank: seconds from its first instruction until its engine is ready to train."""
    compile_seconds: float = 0.0
    """For the slowest rank: seconds of `torch.compile`, which no timed step includes."""
    explain_seconds: float = 0.0
    """Seconds in which the cause of a wrong run was searched for, included in `seconds`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCurves:
    """Values that training itself reports."""

    losses: list[float] = field(default_factory=list)
    """Global mean loss, by step."""
    norms: list[float | None] = field(default_factory=list)
    """Global gradient norm before clipping, by step, if the framework reports it."""
    left_out: int = 0
    """Steps that dynamic loss scaling skipped because a gradient overflowed. Each was tried again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EquivalenceEvidence:
    """Comparison of a run with the truth, and the noise of that comparison."""

    deviations: Deviations = field(default_factory=dict)
    """Deviations from the truth, by quantity, then step."""
    noise: Comparisons = field(default_factory=dict)
    """Root mean square of such deviations in perturbed runs of `single`, and of the scales of gradients."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Largest allowed deviation as a multiple of its noise: by kind, and by quantity where it is larger."""
    ways: Mapping[str, Way] = field(default_factory=dict)
    """Allowed ways to compute for a run that is not bitwise equal to the twin, as in `ToleranceModel`."""
    moved: list[float] = field(default_factory=list)
    """How far each step moved the parameters: the L2 norm over all of them. Empty in old records."""
    drifts: list[Drift] = field(default_factory=list)
    diagnosis: Diagnosis | None = None
    """The likely defect of a run that is not equivalent."""
    rounded: list[str] = field(default_factory=list)
    """Gradients that hold values of the narrow dtype alone, where the twin's need more bits."""
    num_replicated: int = 0
    """Number of tensors, over all steps, that several ranks reported and that were compared bit for bit."""
    sample: Sample | None = None
    """The part of a large model that was judged. None if all of it was, or nothing."""
    gathering_bytes: list[int] = field(default_factory=list)
    """By rank, for a sample: peak memory for gathering tensors, besides the engine's."""

    @property
    def tolerance_model(self) -> ToleranceModel:
        return ToleranceModel(noise=self.noise, factors=self.factors, ways=self.ways)

    @property
    def fitted_tolerances(self) -> ToleranceModel:
        """The tolerance model, fitted to the way in which the run computes. A run with a diagnosis has no such way."""
        fitted = self.tolerance_model.fitted_to(self.deviations)
        return self.tolerance_model.declared(None) if fitted.way and self.diagnosis else fitted

    @property
    def wrong_start(self) -> list[Quantity]:
        """Initial values that differ from the truth in at least one bit."""
        return [q for q, steps in self.deviations.items() if q.kind is QuantityKind.INITIAL and steps[0].distance]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEvidence:
    """Memory that ranks held, and the memory that was planned. Lists are by rank."""

    readings: list[MemoryReading] = field(default_factory=list)
    planned: list[ModelStates | None] = field(default_factory=list)
    """Planned states without extra memory. None if there is no plan."""
    extra_memory: list[list[ExtraMemory]] = field(default_factory=list)
    """Memory beyond the plan, as the adapter declares it."""
    live_bytes: list[dict[int, int]] = field(default_factory=list)
    """Total of the allocator after each step. Empty in old records."""
    state_dtypes: dict[str, str] = field(default_factory=dict)
    """Dtypes over all ranks; see `RankReport`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficEvidence:
    """Traffic that ranks sent, and the traffic that was planned. Lists are by rank."""

    readings: list[TrafficReading] = field(default_factory=list)
    planned: list[list[Flow] | None] = field(default_factory=list)
    """Traffic planned by theory, or None without a plan. Empty in old records, whose plan came from their adapter."""
    traffic_exceptions: list[list[TrafficException]] = field(default_factory=list)
    """Exceptions from theory, as the adapter declares them."""
    one_time_traffic: list[list[OneTimeTraffic]] = field(default_factory=list)
    """Additional traffic of some steps, as the adapter declares it."""
    alike_steps: list[list[AlikeSteps]] = field(default_factory=list)
    """Operations of the backend in every step. Empty in old records, and for a rank that could not report them."""
    places: list[Place] = field(default_factory=list)
    """Where each rank ran. Empty in old records."""
    reach: Reach | None = None
    """How far the measured traffic travelled."""
    planned_reach: Reach | None = None
    """How far the planned traffic would travel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Relaunch:
    """Another launch of the untouched pass, with the same number of steps, in one lap."""

    rank_step_seconds: list[list[float]]
    """Raw step times in seconds, by rank, then step."""
    rank_starts: list[list[float]] = field(default_factory=list)
    """Start of each rank in seconds after the first rank of the same node, in a list of one. Empty if all start
    together.
    """
    rank_cpu_seconds: list[list[float]] = field(default_factory=list)
    """Processor time of each rank, in a list of one, measured as in the first launch."""
    losses: list[float] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    """Hashes of parameters, as in the first launch."""


@dataclass(frozen=True, kw_only=True)
class TimingEvidence:
    """Measurements of the untouched pass."""

    rank_step_seconds: list[list[float]] = field(default_factory=list)
    """Raw step times in seconds, by rank, then step, over all laps."""
    rank_starts: list[list[float]] = field(default_factory=list)
    """Start of each lap, by rank, in seconds after the first rank of the same node. Empty if all start together."""
    lap_steps: list[int] = field(default_factory=list)
    """Steps of each lap. Empty for a single lap."""
    rank_cpu_seconds: list[list[float]] = field(default_factory=list)
    """Processor time in seconds, by rank, then lap: all threads, user and system.

    Empty on GPUs and before schema 4.
    """
    device_memory: list[DeviceMemory] = field(default_factory=list)
    """By rank, on GPUs."""
    power: list[GpuPower] = field(default_factory=list)
    """Power of the GPUs of the node that writes the record, if NVML reports it."""
    spoilt: list[str] = field(default_factory=list)
    """Reasons why the rate does not represent this machine: a GPU was throttled or shared."""
    peak_flops_per_second: float | None = None
    """Measured peak of all cores or GPUs that the ranks can use. None if it was not measured."""
    digests: dict[int, str] = field(default_factory=dict)
    """A hash of every parameter's bits, by steps done: during warm-up and after the last step."""
    observed: ObservedPath | None = None
    """The path that these digests and the losses were compared with."""
    relaunches: list[Relaunch] = field(default_factory=list)
    """Launches of the same steps in fresh processes, one after the other."""

    @functools.cached_property
    def interval(self) -> Interval:
        """Confidence interval of the mean of `step_seconds`. Cached, because every table of a report uses it."""
        return mean_interval(self.step_seconds, repeat=len(self.rank_step_seconds[0]) if self.relaunches else 0)

    @property
    def cpu_seconds_per_step(self) -> float | None:
        """Processor time per step of all ranks together, averaged over all launches. None if it was not measured."""
        launches = [self.rank_cpu_seconds, *(one.rank_cpu_seconds for one in self.relaunches)]
        if not all(launches) or not self.rank_step_seconds:
            return None
        steps = len(self.rank_step_seconds[0]) * self.num_launches
        return sum(sum(laps) for ranks in launches for laps in ranks) / steps or None

    @property
    def num_launches(self) -> int:
        return 1 + len(self.relaunches)

    @property
    def laps(self) -> list[Lap]:
        """Laps of all launches."""
        if not self.rank_step_seconds:
            return []
        again = [lap for one in self.relaunches for lap in laps_of(one.rank_step_seconds, one.rank_starts)]
        return laps_of(self.rank_step_seconds, self.rank_starts, self.lap_steps) + again

    @property
    def step_seconds(self) -> list[float]:
        """Seconds between the last rank's ends of successive steps. They add up to the wall-clock time."""
        return [seconds for lap in self.laps for seconds in lap.step_seconds]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConformanceEvidence:
    """Evidence for the scenario of a conformance clause. Empty in the matrix of cases."""

    scenario: str = ""
    base: Case | None = None
    """The case that the scenario varies."""
    samples: list[dict[str, list[float]]] = field(default_factory=list)
    """Values that the passes of the conformance suite measure, by rank, then name."""
    digests: list[str] = field(default_factory=list)
    """A hash of every parameter's bits before the first step and after each step."""
    known_gaps: list[KnownGap] = field(default_factory=list)
    """Known gaps that the adapter declares for its framework."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Everything that a reader needs to know about one pass over one case."""

    schema: int = SCHEMA
    case: Case
    adapter: str
    """The adapter that was run, as "module:Class"."""
    task: Task
    steps: int
    warmup: int = 0
    timing_budget_seconds: float = 0.0
    """How long steps could be added in one launch of the untouched pass."""
    environment: Environment
    sources: list[Source] = field(default_factory=list)
    """The user's own files that the record was made with."""
    outcome: Outcome
    launch: LaunchSeconds = field(default_factory=LaunchSeconds)
    training: TrainingCurves = field(default_factory=TrainingCurves)
    equivalence: EquivalenceEvidence = field(default_factory=EquivalenceEvidence)
    memory: MemoryEvidence = field(default_factory=MemoryEvidence)
    traffic: TrafficEvidence = field(default_factory=TrafficEvidence)
    timing: TimingEvidence = field(default_factory=TimingEvidence)
    profiles: list[Profile] = field(default_factory=list)
    """Profiles of the profiled pass, by rank."""
    conformance: ConformanceEvidence = field(default_factory=ConformanceEvidence)
    fake_ranks: list[int] = field(default_factory=list)
    """Ranks of a fake world that were measured, each alone.

    Every list by rank is in this order. Empty for a real world with all ranks.
    """
    unmeasured: dict[str, str] = field(default_factory=dict)
    """Suites that cannot be judged, each with the adapter method that failed and how."""
    kernels: dict[str, str] = field(default_factory=dict)
    """Dtype settings and kernels that PyTorch was set to use on the first rank."""
    verdicts: list[Verdict] = field(default_factory=list)
    not_judged: list[str] = field(default_factory=list)
    """Parts that the verdicts of an observed pass leave out, in words. Empty in old records."""
    remarks: list[str] = field(default_factory=list)
    """Events during the pass that a reader should know."""

    @property
    def ranks(self) -> Sequence[int]:
        """The rank of each entry in the lists by rank."""
        return self.fake_ranks or range(self.case.world_size)

    def verdict(self, suite: str) -> Verdict | None:
        return next((v for v in self.verdicts if v.suite == suite), None)


# --- Validation of records that are read. A damaged or foreign file may hold values that no run writes.

_LONGEST_SECONDS = 1e9
_MOST_BYTES = 2**63


def validate_record(record: Record) -> None:
    """Raise `ValueError` for a record with impossible or useless values."""
    _expect_times(record.timing)
    if record.task is Task.TIME and record.outcome.status is Status.OK and not record.timing.rank_step_seconds:
        raise ValueError("a completed timed pass without step times")
    for reading in record.memory.readings:
        for instant in (value for name in dataclasses.fields(reading) if (value := getattr(reading, name.name))):
            if dataclasses.is_dataclass(instant):
                _expect_bytes([getattr(instant, category.name) for category in dataclasses.fields(instant)])


def _expect_times(timing: TimingEvidence) -> None:
    if timing.lap_steps and sum(timing.lap_steps) != max(map(len, timing.rank_step_seconds), default=0):
        raise ValueError(f"laps of {timing.lap_steps[:4]} steps, which do not match the times")
    launches: list[TimingEvidence | Relaunch] = [timing, *timing.relaunches]
    for launch in launches:
        ranks = launch.rank_step_seconds
        if len({len(steps) for steps in ranks}) > 1:
            raise ValueError(f"times of {' and '.join(str(len(steps)) for steps in ranks[:4])} steps on its ranks")
        if launch.rank_starts and len(launch.rank_starts) != len(ranks):
            raise ValueError(f"times of {len(ranks)} ranks, of which {len(launch.rank_starts)} started")
        for laps in launch.rank_cpu_seconds:
            if not all(0 <= seconds < _LONGEST_SECONDS for seconds in laps):
                raise ValueError(f"laps that took {str(list(laps[:4]))[:80]} seconds of processors")
        for steps in ranks:
            if not (steps and min(steps) >= 0 and 0 < sum(steps) < _LONGEST_SECONDS):
                raise ValueError(f"steps that took {str(list(steps[:4]))[:80]} seconds")


def _expect_bytes(numbers: Sequence[float]) -> None:
    if not all(-_MOST_BYTES < number < _MOST_BYTES for number in numbers):
        raise ValueError("numbers of bytes that no machine has")
