"""Make a record, with all verdicts that its pass allows, from the results of a launch.

The outcome is what the ranks report. If they report nothing, it is the error that prevented that.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import tempfile
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from meshmark.adapter.contract import Adapter
from meshmark.adapter.registry import known_adapters
from meshmark.environment import Environment, describe
from meshmark.errors import MeshmarkError, NodeLostError, NodesDisagreeError, NoSpaceError
from meshmark.judge.deviation import ObservedPath
from meshmark.launch.folders import is_full, means_no_space
from meshmark.launch.launch import LaunchResult
from meshmark.measure.laps import spoilt
from meshmark.records.rank_report import RankReport
from meshmark.records.record import (
    ConformanceEvidence,
    EquivalenceEvidence,
    LaunchSeconds,
    MemoryEvidence,
    Outcome,
    PeerEnd,
    Record,
    Status,
    TimingEvidence,
    TrafficEvidence,
    TrainingCurves,
    measured_traffic,
    planned_traffic,
    reach,
    sources_of,
)
from meshmark.records.request import Request, Task
from meshmark.run.throughput import relaunch_of
from meshmark.run.verdict import judge_communication, judge_equivalence, judge_memory, judge_throughput, not_judged
from meshmark.spec.case import Case
from meshmark.spec.known_gap import KnownGap
from meshmark.text import clip, describe_error, some_of
from meshmark.theory.memory import ExtraMemory, ModelStates, model_states
from meshmark.theory.traffic import Flow, OneTimeTraffic, TrafficException, departed, step_traffic

# --- How a pass ended.

_STATUS: dict[type[BaseException], Status] = {
    NoSpaceError: Status.NO_SPACE,
    NodesDisagreeError: Status.NODES_DISAGREE,
    NodeLostError: Status.NODE_LOST,
}


def outcome_of_error(error: BaseException) -> Outcome:
    """Return the outcome of a failure outside the ranks, with its stack if it is not a `MeshmarkError`.

    If the disk of temporary files is full, any other failure is attributed to that.
    """
    temporary, full = Path(tempfile.gettempdir()), ""
    status = _STATUS.get(type(error), Status.NO_SPACE if means_no_space(error, [temporary]) else Status.UNFINISHED)
    if status is Status.UNFINISHED and is_full(temporary):
        status, full = Status.NO_SPACE, f", and {str(temporary)!r} is full"
    if isinstance(error, MeshmarkError):
        return Outcome(status=status, message=clip(str(error) + full))
    stack = clip("".join(traceback.format_exception(error)))
    return Outcome(status=status, message=describe_error(error) + full, traceback=stack)


def outcome_of_launch(launched: LaunchResult, world_size: int) -> Outcome:
    """Return how the launch ended. Its first failure is taken as the root cause."""
    if launched.lost:
        return Outcome(status=Status.NODE_LOST, message=launched.lost)
    if launched.failures:
        first = launched.failures[0]
        return Outcome(
            status=Status(first.kind),
            rank=first.rank,
            message=first.message,
            traceback=first.traceback,
            log_tail=first.log_tail,
            stacks={f.rank: f.stack for f in launched.failures if f.stack},
            peers=[_peer(launched, rank) for rank in range(world_size) if rank != first.rank],
        )
    bad = [
        (step, report.rank, loss)
        for report in launched.reports
        for step, loss in enumerate(report.losses)
        if not math.isfinite(loss)
    ]
    if bad:
        step, rank, loss = min(bad)
        return Outcome(status=Status.NAN, rank=rank, message=f"loss is {loss} from step {step} on")
    return Outcome(status=Status.OK)


def _peer(launched: LaunchResult, rank: int) -> PeerEnd:
    """Return how `rank` ended after another rank failed."""
    failed = next((f for f in launched.failures if f.rank == rank), None)
    if failed:
        return PeerEnd(rank=rank, kind=failed.kind, seconds=failed.time - launched.failures[0].time)
    done = any(report.rank == rank for report in launched.reports)
    return PeerEnd(rank=rank, kind="done" if done else "ended")


# --- What each rank should hold and send, according to theory and the adapter.

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Declared:
    """Declarations of an adapter for a case, by rank."""

    states: list[ModelStates | None]
    extra_memory: list[list[ExtraMemory]]
    traffic: list[list[Flow] | None]
    """Traffic from theory alone."""
    traffic_exceptions: list[list[TrafficException]]
    one_time_traffic: list[list[OneTimeTraffic]]
    failed: dict[str, str] = field(default_factory=dict)
    """Suites that cannot be judged by the declarations, with the method that failed and how."""


def declare(adapter: type[Adapter], case: Case, ranks: Sequence[int], device: str) -> Declared:
    """Return what `adapter` declares about `case`.

    If one of its methods fails, only the verdict that depends on it cannot be judged. Extra memory on the host is
    included only if `device` is "cpu".
    """
    failed: dict[str, str] = {}

    def ask(suite: str, method: str, answer: Callable[[int], T]) -> list[T]:
        try:
            return [answer(rank) for rank in ranks]
        except (Exception, SystemExit) as error:  # whatever an adapter does wrong
            failed.setdefault(suite, f"Adapter.{method} raised {describe_error(error)}")
            return []

    planned = adapter.plans_traffic(case)
    return Declared(
        states=ask("memory", "recipe", lambda rank: model_states(case, rank, adapter.recipe(case))),
        extra_memory=ask(
            "memory", "extra_memory", lambda rank: _extra_memory(adapter.extra_memory(case, rank), device)
        ),
        traffic=[step_traffic(case, rank) if planned else None for rank in ranks],
        traffic_exceptions=ask(
            "communication",
            "traffic_exceptions",
            lambda rank: _exceptions(case, rank, adapter.traffic_exceptions(case, rank) if planned else ()),
        ),
        one_time_traffic=ask(
            "communication",
            "one_time_traffic",
            lambda rank: _one_time_traffic(adapter.one_time_traffic(case, rank)),
        ),
        failed=failed,
    )


def _extra_memory(declared: Sequence[object], device: str) -> list[ExtraMemory]:
    for each in declared:
        if not isinstance(each, ExtraMemory):
            raise TypeError(f"got {each!r} among the extra memory, expected an ExtraMemory")
    return [each for each in declared if isinstance(each, ExtraMemory) and (device == "cpu" or not each.on_host)]


def _one_time_traffic(declared: Sequence[object]) -> list[OneTimeTraffic]:
    for each in declared:
        if not isinstance(each, OneTimeTraffic):
            raise TypeError(f"got {each!r} among the one-time traffic, expected a OneTimeTraffic")
    return [each for each in declared if isinstance(each, OneTimeTraffic)]


def _exceptions(case: Case, rank: int, declared: Sequence[object]) -> list[TrafficException]:
    """Return the exceptions without their flows within a single rank, which no meter counts.

    Raises `TypeError` if one is not a `TrafficException`, and `ValueError` if one replaces flows that theory does not
    plan.
    """
    for each in declared:
        if not isinstance(each, TrafficException):
            raise TypeError(f"got {each!r} among the traffic exceptions, expected a TrafficException")
    traffic_exceptions = [
        dataclasses.replace(each, sends=tuple(flow for flow in each.sends if len(flow.ranks) > 1))
        for each in declared
        if isinstance(each, TrafficException)
    ]
    departed(step_traffic(case, rank) or [], traffic_exceptions)
    return [each for each in traffic_exceptions if each.sends or each.instead_of]


# --- The user's known gaps, added to the records of their adapters.


def with_gaps(record: Record, gaps: Sequence[tuple[str, KnownGap]]) -> Record:
    """Return `record` with those `gaps` whose pattern matches its adapter's name.

    Each of `gaps` is a pattern and a gap. They come before the gaps that the adapter declares.
    """
    known = [gap for pattern, gap in gaps if fnmatch.fnmatchcase(record.case.adapter, pattern)]
    if not known:
        return record
    evidence = dataclasses.replace(record.conformance, known_gaps=[*known, *record.conformance.known_gaps])
    return dataclasses.replace(record, conformance=evidence)


def unmatched_gaps(gaps: Sequence[tuple[str, KnownGap]], chosen: Collection[str]) -> list[str]:
    """Return remarks on patterns that match no adapter, for a user who mistyped a name.

    `chosen` may include adapters that no registry has. Nothing is said of adapters that exist and are not run, because
    several runs share a file.
    """
    patterns = dict.fromkeys(pattern for pattern, _ in gaps)
    none = [pattern for pattern in patterns if not fnmatch.filter({*known_adapters(), *chosen}, pattern)]
    return [f"--known-gaps: {pattern!r} matches no adapter that is known here" for pattern in none]


def with_gaps_of_now(kept: Record, adapter: type[Adapter], gaps: Sequence[tuple[str, KnownGap]]) -> Record:
    """Return `kept`, a record of an earlier run, with the gaps that are known now.

    Returns `kept` itself if its gaps are the same.
    """
    own = list(adapter.known_gaps) if kept.conformance.scenario else []
    bare = dataclasses.replace(kept, conformance=dataclasses.replace(kept.conformance, known_gaps=own))
    found = with_gaps(bare, gaps)
    return kept if found.conformance.known_gaps == kept.conformance.known_gaps else found


# --- Records.

_METERS_TOLERANCE = 0.01

JUDGED = (Task.OBSERVE, Task.RESUME, Task.OVERFLOW)
"""Passes whose traces are held against the truth."""


def assemble(
    request: Request,
    adapter: type[Adapter],
    outcome: Outcome,
    launches: Sequence[LaunchResult],
    *,
    nnodes: int,
    remarks: list[str],
) -> Record:
    """Return the record of `request` from its `launches`.

    There is one launch, except that a timed pass may have several and a pass that was not run has none.
    """
    case, reports = request.case, launches[0].reports if launches else []
    whole = outcome.status in (Status.OK, Status.NAN)
    ranks = request.fake_ranks or range(case.world_size)
    fake = request.task is Task.FAKE_WORLD
    observed = whole and (request.task is Task.OBSERVE or fake) and request.metered
    declared = declare(adapter, case, ranks if observed else (), request.device)
    unmeasured = declared.failed | {
        suite: f"{why} on rank {r.rank}" for r in reversed(reports) for suite, why in r.unmeasured.items()
    }
    training = _training(reports, whole)
    places, readings = launches[0].places if observed and not fake else [], [r.traffic for r in reports if r.traffic]
    draft = Record(
        case=case,
        adapter=request.adapter,
        task=request.task,
        steps=request.steps,
        warmup=request.warmup,
        timing_budget_seconds=request.timing_budget_seconds,
        environment=_environment(request, nnodes, reports),
        sources=sources_of(request.adapter, case.workload),
        outcome=outcome,
        launch=LaunchSeconds(
            seconds=sum(launched.seconds for launched in launches),
            build_seconds=max((r.build_seconds for r in reports), default=0.0),
            compile_seconds=max((r.compile_seconds for r in reports), default=0.0),
            explain_seconds=max((r.explain_seconds for r in reports), default=0.0),
        ),
        training=training,
        equivalence=_equivalence(launches, request) if whole else EquivalenceEvidence(),
        memory=MemoryEvidence(
            readings=[r.memory for r in reports if r.memory],
            planned=declared.states,
            extra_memory=declared.extra_memory,
            live_bytes=[r.steps.live_bytes for r in reports if r.steps],
            state_dtypes=_state_dtypes(reports) if whole else {},
        ),
        traffic=TrafficEvidence(
            readings=readings,
            planned=declared.traffic,
            traffic_exceptions=declared.traffic_exceptions,
            one_time_traffic=declared.one_time_traffic,
            alike_steps=[r.steps.sent for r in reports if r.steps],
            places=places,
            reach=reach(measured_traffic(readings), places) if readings else None,
            planned_reach=reach(planned_traffic(declared.traffic, declared.traffic_exceptions), places),
        ),
        timing=TimingEvidence(
            rank_step_seconds=[r.step_seconds for r in reports if r.step_seconds],
            rank_starts=[r.lap_starts for r in reports if r.lap_starts],
            rank_cpu_seconds=[r.cpu_seconds for r in reports if r.cpu_seconds] if whole else [],
            power=request.power,
            spoilt=spoilt(request.power, -(-case.world_size // (nnodes * max(len(request.power), 1)))),
            device_memory=[r.device_memory for r in reports if r.device_memory],
            lap_steps=reports[0].lap_steps if whole else [],
            peak_flops_per_second=request.peak_flops_per_second,
            digests=reports[0].timed_digests if whole else {},
            observed=request.observed,
            relaunches=[relaunch_of(launched) for launched in launches[1:]] if whole else [],
        ),
        profiles=[r.profile for r in reports if r.profile],
        conformance=ConformanceEvidence(
            scenario=request.scenario,
            base=request.base,
            samples=[r.samples for r in reports] if whole else [],
            digests=reports[0].digests if whole else [],
            known_gaps=list(adapter.known_gaps) if request.scenario else [],
        ),
        fake_ranks=request.fake_ranks,
        unmeasured=unmeasured,
        kernels=reports[0].kernels if reports else {},
        remarks=[
            *remarks,
            *_left_out(training.left_out, request.observed),
            *_disagreeing(reports),
            *_replaced(reports),
        ],
    )
    verdicts = [judge_equivalence(draft)] if whole and request.assess and request.task in JUDGED else []
    planned = (judge_memory(draft), judge_communication(draft)) if observed else ()
    timed = judge_throughput(draft) if whole and request.task is Task.TIME else None
    verdicts += [verdict for verdict in (*planned, timed) if verdict]
    judged = dataclasses.replace(draft, verdicts=verdicts)
    return dataclasses.replace(judged, not_judged=not_judged(judged, adapter)) if observed else judged


def _environment(request: Request, nnodes: int, reports: Sequence[RankReport]) -> Environment:
    """Return the environment of the run, with the package versions that its ranks report, if they do."""
    here = describe(request.device, request.backend, nnodes)
    told = reports[0].versions if reports else {}
    return dataclasses.replace(here, versions=told) if told else here


def _training(reports: list[RankReport], whole: bool) -> TrainingCurves:
    losses = [sum(shares) for shares in zip(*(r.losses for r in reports), strict=True)] if whole else []
    norms = next((r.norms for r in reports if any(n is not None for n in r.norms)), [])
    return TrainingCurves(losses=losses, norms=norms, left_out=max((r.left_out for r in reports), default=0))


def _left_out(count: int, path: ObservedPath | None) -> list[str]:
    """Return remarks on overflowed steps, for readers of the verdict or the rate."""
    told = "attempts at steps that overflowed were left out, as loss scaling does, and tried again"
    timed = "steps, warm-up included, overflowed and were left out, as loss scaling does: they moved nothing"
    found = [f"{count} {told}"] if count else []
    return found + ([f"{path.left_out} of the first {path.num_judged} {timed}"] if path and path.left_out else [])


def _replaced(reports: list[RankReport]) -> list[str]:
    """Return a remark on what of PyTorch was replaced in the ranks' processes, and not in the truth."""
    names = reports[0].replaced if reports else []
    told = list[str]()
    if names:
        told.append(f"the ranks' processes had replaced {some_of(names)}; the truth was computed by PyTorch's own")
    if reports and reports[0].misled:
        told.append(
            "the truth was computed in a process without the framework, because something is replaced in the ranks' "
            f"processes: {reports[0].misled}"
        )
    return told


def _disagreeing(reports: list[RankReport]) -> list[str]:
    """Return remarks on ranks whose meters disagree with CUDA's allocator, so that categories are unreliable too."""
    told = "at the peak the meters saw {:,} bytes and the allocator counted {:,} ({:.1%} apart) on rank {}"
    return [
        told.format(r.memory.counted_peak_bytes, r.memory.allocator_peak_bytes, r.memory.disagreement, r.rank)
        for r in reports
        if r.memory and r.memory.disagreement > _METERS_TOLERANCE
    ]


def _state_dtypes(reports: list[RankReport]) -> dict[str, str]:
    """Return the dtypes of states on all ranks. A stage or shard may keep states that the first one does not."""
    kinds = {kind for report in reports for kind in report.state_dtypes}
    told = {kind: {part for r in reports for part in r.state_dtypes.get(kind, "").split("+")} for kind in sorted(kinds)}
    return {kind: "+".join(sorted(parts - {""})) for kind, parts in told.items()}


def _equivalence(launches: Sequence[LaunchResult], request: Request) -> EquivalenceEvidence:
    """Return the evidence that rank 0, which gathers, has found; drifts of replicas are taken from every launch."""
    tolerance_model, first = request.tolerance_model, launches[0].reports[0]
    return EquivalenceEvidence(
        deviations=first.deviations,
        rounded=first.rounded,
        noise=tolerance_model.noise if tolerance_model else {},
        factors=tolerance_model.factors if tolerance_model else {},
        ways=tolerance_model.ways if tolerance_model else {},
        moved=first.moved,
        drifts=[drift for launched in launches for drift in launched.reports[0].drifts],
        diagnosis=first.diagnosis,
        num_replicated=first.num_replicated,
        sample=request.sample,
        gathering_bytes=[report.gathering_bytes for report in launches[0].reports] if request.sample else [],
    )
