"""Run a case and make its record, at most once per session.

The noise floor that a case is judged by is measured once for each workload and precision. All nodes use the same one.
The peak for utilisation is also measured once per session, while no ranks run.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshmark.adapter.contract import Adapter, Feature
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.environment import Environment, describe, refuses_to_share, threads_of_ranks
from meshmark.errors import AdapterError, ClusterError, MeshmarkError, NodeLostError, NoSpaceError, ResultsError
from meshmark.judge.beginning import describe as describe_beginning
from meshmark.judge.deviation import (
    ENDURANCE_STEPS,
    ENDURANCE_TIME,
    LARGEST_FULL,
    OBSERVED_STEPS,
    TIME_LIMITS,
    Assess,
    ObservedPath,
    assess_of,
    sample_of,
)
from meshmark.judge.faults import Fault
from meshmark.judge.tolerance_model import NoiseFloor, ToleranceModel, fit
from meshmark.launch.cluster import READY_SECONDS, NodeLoss, Scratch, from_node_0, meet, rank_room
from meshmark.launch.launch import Launcher, LaunchResult
from meshmark.measure.laps import LEAST_LAUNCHES
from meshmark.passes.noise import (
    NUM_RANKS,
    TIME_LIMIT_SECONDS,
    noise_folder,
    noise_key,
    read_noise,
    remove_partials,
    variance_ratio,
    write_noise,
)
from meshmark.passes.observe import WATCHED_STEP
from meshmark.records.record import ConformanceEvidence, Outcome, Record, Status, sources_of
from meshmark.records.record_file import RecordFile, line_of
from meshmark.records.request import Request, Task
from meshmark.run.assemble import JUDGED, assemble, outcome_of_error, outcome_of_launch, with_gaps, with_gaps_of_now
from meshmark.run.resume import KEPT, KeptRecords
from meshmark.run.throughput import launch_watched, time_again
from meshmark.serial import decode, encode
from meshmark.spec.case import Case
from meshmark.spec.known_gap import KnownGap
from meshmark.spec.layout import Layout

# --- The peak that utilisation is relative to.


class PeakProbe:
    """Measures what a number of cores, or a GPU, of this node can compute, and remembers it."""

    def __init__(self, launcher: Launcher, num_gpus: int) -> None:
        self.launcher, self.num_gpus = launcher, num_gpus
        self._measured: dict[tuple[str, int, str, str], float | None] = {}
        """Measured peaks by device, cores, precision and tuning of matrix products."""

    def of(self, request: Request) -> float | None:
        """Return the peak of all cores or GPUs that the ranks of `request` can use, or None if the probe failed.

        Each core or GPU is counted once, however many ranks share it. For several nodes it is the sum of what each
        measured.
        """
        nnodes = self.launcher.cluster.spec.nnodes
        on_cpu, local_ranks = request.device == "cpu", request.case.world_size // nnodes
        num_threads = num_cores(local_ranks) if on_cpu else 1
        case = request.case
        key = request.device, num_threads, str(case.precision.compute), str(case.tuning.arithmetic)
        if key not in self._measured:
            self._measured[key] = self._of_all_nodes(request, num_threads)
        one = self._measured[key]
        return one and one * (1 if on_cpu else max(1, min(local_ranks, self.num_gpus)))

    def _of_all_nodes(self, request: Request, num_threads: int) -> float | None:
        """Return the sum of all nodes' peaks, or None if one could not be measured. All nodes must call this."""
        cluster = self.launcher.cluster
        if cluster.spec.nnodes == 1:
            return self._measure(request, num_threads)
        meet(cluster, request)
        mine = json.dumps(self._measure(request, num_threads))
        every = [
            json.loads(t) for t in cluster.exchange("peak", mine, seconds=request.time_limit_seconds + READY_SECONDS)
        ]
        return None if None in every else sum(every)

    def _measure(self, request: Request, num_threads: int) -> float | None:
        probe = dataclasses.replace(
            request,
            task=Task.PEAK,
            adapter=builtin_adapters()["single"],
            backend="gloo",
            num_threads=num_threads,
        )
        try:
            launched = self.launcher.launch(probe, 1, alone=True)
        except MeshmarkError:  # the launch that needs the peak meets the same error and reports it
            return None
        return launched.reports[0].flops_per_second if launched.reports else None


def num_cores(local_ranks: int) -> int:
    """Return the number of cores of this node that `local_ranks` ranks can use with their threads."""
    threads = threads_of_ranks(os.environ)
    return min(local_ranks * threads, len(os.sched_getaffinity(0)))


# --- The launch that measures a noise floor.


def launch_noise(launcher: Launcher, request: Request, num_gpus: int) -> NoiseFloor:
    """Launch the noise runs that `request` is judged by, and return the noise floor.

    They use PyTorch's eager kernels whatever the case's tuning. Otherwise the errors of a wrong kernel would count as
    noise. `num_gpus` counts this node's GPUs. Raises `MeshmarkError` if a process fails.
    """
    measured = dataclasses.replace(
        request,
        case=dataclasses.replace(request.case, tuning=request.case.tuning.arithmetic),
        task=Task.NOISE,
        adapter=builtin_adapters()["single"],
        backend="gloo",  # they share a GPU, which NCCL refuses; nothing is sent
        time_limit_seconds=max(TIME_LIMIT_SECONDS, request.time_limit_seconds),
    )
    launched = launcher.launch(measured, num_processes(request, num_gpus), alone=True)
    if launched.failures:
        failure = launched.failures[0]
        kind = NoSpaceError if failure.kind == Status.NO_SPACE else MeshmarkError
        raise kind(f"noise of {request.case.id} could not be measured: {failure.message}\n{failure.log_tail}")
    runs = [run for report in launched.reports for run in report.noise_runs]
    return NoiseFloor(runs=runs, truth_print=launched.reports[0].truth_print)


def num_processes(request: Request, num_gpus: int) -> int:
    """Return the number of processes that share the noise runs of `request`.

    For a large model there is at most one process per GPU, because each holds the model, optimizer states and a
    float64 truth. If the model is judged by a sample, there are at most as many processes as noise runs.
    """
    if request.case.workload.model.num_parameters <= LARGEST_FULL or request.device != "cuda":
        return NUM_RANKS
    most = request.sample.noise_runs if request.sample else NUM_RANKS
    return max(min(most, num_gpus), 1)


# --- Tolerance models of a session, the same on every node.


class ToleranceModels:
    """The tolerance models of one session, measured when first needed."""

    def __init__(self, launcher: Launcher, results: Path, remarks: list[str], num_gpus: int) -> None:
        """Collect in `remarks` what the reader of the next record should know. `num_gpus` counts this node's GPUs."""
        self._launcher, self._results, self._remarks, self._num_gpus = launcher, results, remarks, num_gpus
        self._known: dict[str, ToleranceModel] = {}
        self._failed: dict[str, MeshmarkError] = {}
        """Errors of noise floors that could not be measured, by key.

        They are not tried again, because that takes minutes and fails in the same way.
        """
        self._told = set[str]()
        """Why noise floors could not be stored, said once each."""

    def forget(self) -> None:
        """Forget all tolerance models, so that all nodes read those on node 0's disk again."""
        self._known.clear()
        self._failed.clear()

    def of(self, request: Request) -> ToleranceModel:
        """Return the tolerance model for a request's workload and precision.

        It is this session's, or read from disk, or measured now. Raises `MeshmarkError` if the measurement fails or
        has failed before in this session.
        """
        key = noise_key(request.case, request.steps, request.device, request.sample)
        path = noise_folder(self._results) / f"{key}.json"
        if key in self._failed:
            raise type(self._failed[key])(str(self._failed[key]))
        if key not in self._known:
            try:
                floor = self._shared_floor(request, path)
                model = fit(floor.runs, variance_ratio(request.case))
                self._known[key] = replace(model, truth_print=floor.truth_print)
            except ClusterError:
                raise
            except MeshmarkError as error:
                self._failed[key] = error
                raise
        return self._known[key]

    def _shared_floor(self, request: Request, path: Path) -> NoiseFloor:
        """Return node 0's noise floor, so that all nodes judge by the same. All nodes must call this."""
        cluster = self._launcher.cluster
        if cluster.spec.nnodes == 1:
            return self._floor(request, path)
        meet(cluster, request)
        limit = max(TIME_LIMIT_SECONDS, request.time_limit_seconds)
        made = from_node_0(cluster, "noise", lambda: json.dumps(encode(self._floor(request, path))), seconds=limit)
        floor: NoiseFloor = decode(NoiseFloor, json.loads(made))
        return floor

    def _floor(self, request: Request, path: Path) -> NoiseFloor:
        try:
            floor = read_noise(path)
        except FileNotFoundError:
            return self._measure(request, path)
        if floor is None:
            self._remarks.append(f"the noise floor {path} was damaged, and has been measured anew")
        return floor or self._measure(request, path)

    def _measure(self, request: Request, path: Path) -> NoiseFloor:
        """Return a noise floor measured now. It serves this session even if it cannot be stored for others."""
        floor = launch_noise(self._launcher, request, self._num_gpus)
        try:
            write_noise(path, floor)
        except FileExistsError:  # a file of the user's is where the folder should be
            raise
        except OSError as error:
            told = (
                f"noise floors cannot be stored in {str(path.parent)!r}: {error.strerror}; they are measured anew in "
                "every session"
            )
            if told not in self._told:
                self._told.add(told)
                self._remarks.append(told)
        return floor


# --- The verified path of a case, which the untouched pass is held against.


def find_path(
    observed: Record | None, timed: Sequence[LaunchResult], retrace: Callable[[], LaunchResult]
) -> ObservedPath | None:
    """Return the verified path to compare timed launches with, or None if no such pass came to its end.

    `retrace` runs the instrumented pass's steps again and continues to the last step that was timed. The path's first
    steps are those of the session's instrumented pass, if there is one. If any of the `timed` launches computed other
    bits, `retrace` is run again, to see whether this engine's bits are reproducible.

    A pass that tried a skipped step again has trained on other batches since, so its bits are not used.
    """
    if observed and observed.outcome.status is not Status.OK:
        return None
    again = _path_of(retrace())
    path = again if observed is None or observed.training.left_out else _judged_first(observed, again)
    if path is None or not any(path.differences(each.losses, each.reports[0].timed_digests) for each in timed):
        return path
    return replace(path, repeats=path == again == _path_of(retrace()))


def _judged_first(observed: Record, again: ObservedPath | None) -> ObservedPath:
    """Return the path of the instrumented pass, continued by the later steps of `again`."""
    losses, digests = observed.training.losses, observed.conformance.digests
    if again is None:
        return ObservedPath(losses=losses, digests=digests)
    return replace(again, losses=losses + again.losses[len(losses) :], digests=digests)


def _path_of(launched: LaunchResult) -> ObservedPath | None:
    if launched.failures:
        return None
    first = launched.reports[0]
    return ObservedPath(
        losses=launched.losses, digests=first.digests, later=first.timed_digests, left_out=first.left_out
    )


# --- The runner.


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run that do not define a case."""

    device: str = "cpu"
    backend: str | None = None
    """Communication backend. None means nccl if every rank on a node has its own CUDA GPU, else gloo."""
    num_gpus: int = 0
    """Number of GPUs on this node."""
    oversubscribe: bool = False
    """Whether ranks that share a GPU use NCCL. Each of them then poses as its own host."""
    observed_steps: int | None = None
    """Number of steps of the instrumented pass.

    None means OBSERVED_STEPS, or up to the metered step if the model is judged by a sample.
    """
    timed_steps: int = 10
    """Smallest number of timed steps."""
    timing_budget_seconds: float = 0.0
    """Time for more timed steps and launches, in seconds. They end early once the rate is known well."""
    warmup: int = 3
    time_limit_seconds: float = 120.0
    assess: Assess | None = None
    """What runs are compared with. None means that the size of the model decides."""
    localise: bool | None = False
    """Whether to run a case that is not equivalent again, to find the module in which it begins to deviate.

    None means only if the run is short and its diagnosis leaves the module open.
    """
    on_node_loss: NodeLoss = NodeLoss.END
    known_gaps: tuple[tuple[str, KnownGap], ...] = ()
    """Known gaps besides those of adapters, each with a pattern of adapter names."""

    def refuses_to_share(self, ranks: int) -> str | None:
        """Return why NCCL cannot serve this many ranks on a node, or None if it can or `oversubscribe` is set."""
        return None if self.oversubscribe else refuses_to_share(ranks, self.num_gpus)


_OPEN = (Fault.FORWARD, Fault.BACKWARD, Fault.UNEXPLAINED)
"""Diagnoses that leave open where a run goes wrong."""
_SHORT_SECONDS = 30.0


def is_open_and_short(record: Record) -> bool:
    """Return whether a wrong run is worth another one that finds the module in which it begins to deviate.

    The diagnosis leaves that open, a launch is short without the search for the cause, every rank runs the whole model,
    and nothing is rounded to 16 bits.
    """
    verdict, layout = record.verdict("equivalence"), record.case.layout
    if verdict is None or record.case.precision.is_mixed or layout.tp * layout.pp * layout.cp > 1:
        return False
    diagnosis = str(verdict.evidence.get("diagnosis", ""))
    seconds = record.launch.seconds - record.launch.explain_seconds
    return seconds <= _SHORT_SECONDS and diagnosis.startswith(_OPEN)


FAKE_NEEDS = frozenset({Feature.FAKE_WORLD})
"""Features that a pass over ranks of a fake world needs of an adapter."""


def fake_ranks(layout: Layout) -> list[int]:
    """Return the ranks that are measured in place of the whole world.

    They are the first and the last. With three or more pipeline stages the middle stage's first rank is added.
    """
    middle = next(rank for rank in range(layout.world_size) if layout.coordinates(rank).pp == layout.pp // 2)
    return sorted({0, middle, layout.world_size - 1}) if layout.pp > 2 else sorted({0, layout.world_size - 1})


_Key = tuple[Task, Case, str]


def _key(request: Request) -> _Key:
    """Return the key of a request. It has the whole case, because a case's id leaves out the seed and the corpus."""
    return request.task, request.case, request.scenario


Announce = Callable[[str, Case, Record | None], None]
"""Called before a pass (with None) and after it, with its scenario or task, its case and its record."""


class Runner:
    """Runs passes, judges them, and appends their records."""

    def __init__(
        self,
        launcher: Launcher,
        adapters: dict[str, str],
        options: RunOptions,
        results: Path,
        announce: Announce | None = None,
        held: KeptRecords | None = None,
    ) -> None:
        """Create a runner that appends records to the folder `results`.

        `adapters` maps names to "module:Class". Passes in `held` are not run again. Raises `ResultsError` if `results`
        cannot be written.
        """
        self.launcher, self.adapters, self.options = launcher, adapters, options
        self.announce: Announce = announce or (lambda what, case, record: None)
        self.results, self._held = results, held
        self._file = None if launcher.cluster.spec.node_rank else RecordFile(results)
        if self._file:  # the folder is this run's alone from here on
            remove_partials(results / "noise")
        self._records: dict[_Key, Record] = {}
        self._remarks: list[str] = []
        """Remarks for the next record."""
        self._tolerances = ToleranceModels(launcher, results, self._remarks, options.num_gpus)
        self._peaks = PeakProbe(launcher, options.num_gpus)

    def close(self) -> None:
        """Close the record file and remove the scratch folder. Raises `ResultsError` if the records have moved."""
        try:
            if self._file:
                self._file.close()
        finally:
            if "scratch" in vars(self):
                self.scratch.remove()

    def refusal(self, case: Case, needs: frozenset[Feature] = frozenset()) -> str | None:
        """Return why `case` is not run, or None if it is. `needs` are features that the pass needs besides."""
        cluster = self.launcher.cluster
        if Feature.FAKE_WORLD in needs:  # one process at a time, whatever the size of the world
            return self.adapter(case).refusal(case, self.options.device, self._fake_backend(), needs)
        if case.world_size % cluster.spec.nnodes:
            return f"{case.world_size} ranks cannot be spread evenly over {cluster.spec.text}{cluster.lost_nodes_note}"
        if cluster.room is not None and self._local_ranks(case) > cluster.room:
            of = f"{case.world_size} ranks are more than {cluster.spec.text} can hold, {cluster.room} each"
            return f"{of}{cluster.lost_nodes_note}"
        backend = self._backend(case)
        if backend == "nccl" and (told := self.options.refuses_to_share(self._local_ranks(case))):
            return told
        return self.adapter(case).refusal(case, self.options.device, backend, needs)

    def observe(self, case: Case) -> Record:
        """Run the instrumented pass and return its record with all verdicts."""
        return self.once(self.request(Task.OBSERVE, case))

    def observe_alone(self, case: Case) -> Record:
        """Measure memory and traffic of single ranks in a fake world of the case's size, one rank after the other."""
        request = dataclasses.replace(
            self.request(Task.FAKE_WORLD, case, Assess.OFF),
            backend=self._fake_backend(),
            fake_ranks=fake_ranks(case.layout),
        )
        return self.once(request, FAKE_NEEDS)

    def time(self, case: Case) -> Record:
        """Run the timed pass, which does not instrument the engine, and return its record."""
        return self.once(self.request(Task.TIME, case))

    def observed(self, case: Case) -> Record | None:
        """Return the record of the instrumented pass, or None if this session has not made one."""
        return self._records.get((Task.OBSERVE, case, ""))

    @functools.cached_property
    def scratch(self) -> Scratch:
        """Scratch folder of this run. All nodes must call this."""
        while True:
            try:
                return Scratch(self.results, self.launcher.cluster)
            except NodeLostError as error:
                self._go_on(error, "scratch", TIME_LIMIT_SECONDS, list(self._records))

    def adapter(self, case: Case) -> type[Adapter]:
        """Return the adapter class that runs `case`."""
        return load_adapter(self.adapters[case.adapter])

    def once(self, request: Request, needs: frozenset[Feature] = frozenset(), misfit: str | None = None) -> Record:
        """Return the record of `request`, which is run if this session has no record of it.

        The pass is skipped if the case is refused, or if `misfit` gives a reason why it does not fit. `needs` are
        features that the pass needs besides those of the case.
        """
        while True:
            try:
                return self._once(request, needs, misfit)
            except NodeLostError as error:
                what = f"{request.task} {request.scenario} {request.case.id}"
                limit = max(TIME_LIMIT_SECONDS, request.time_limit_seconds)
                self._go_on(error, what, limit, [key for key in self._records if key != _key(request)])
            lost = self._records.get(_key(request))
            if lost and self.refusal(request.case, needs):
                self.announce(request.scenario or request.task, request.case, lost)
                return lost
            self._records.pop(_key(request), None)

    def _go_on(self, error: NodeLostError, what: str, limit: float, before: Sequence[_Key]) -> None:
        """Continue without the lost nodes. `what` is the call during which they were lost.

        Waits `limit` seconds for the other nodes. Raises `error` if the run should end, and `ClusterError` if none can
        continue.
        """
        if self.options.on_node_loss is NodeLoss.END:
            raise error
        room = rank_room(self.options.device, self.options.num_gpus)
        self.launcher.cluster.regroup(f"{what}, {len(before)}", room, seconds=limit)
        self.launcher.close()  # what it has started knows the other nodes
        self._tolerances.forget()  # and node 0's are the same for all
        self._peaks = PeakProbe(self.launcher, self.options.num_gpus)

    def _once(self, request: Request, needs: frozenset[Feature], misfit: str | None) -> Record:
        case, key = request.case, _key(request)
        cluster, here = self.launcher.cluster, self._here(request.backend)
        if key not in self._records and self._held and (kept := self._held.on_all_nodes(cluster, request, here)):
            self._records[key] = now = with_gaps_of_now(kept, self.adapter(case), self.options.known_gaps)
            if now is not kept:
                self._write(now)
            self.announce(request.scenario or request.task, case, dataclasses.replace(kept, remarks=[KEPT]))
        if key not in self._records:
            try:
                record = self._attempt(request, needs, misfit)
            except (ClusterError, ResultsError) as error:  # they end the run
                self._keep(key, self._unfinished(request, error))
                raise
            except (Exception, SystemExit) as error:  # whatever it is, the case is not lost from the report
                record = self._unfinished(request, error)
            record = self._keep(key, record)
            if record.outcome.status is Status.NODE_LOST:
                raise NodeLostError(record.outcome.message)
            if record.outcome.status is not Status.SKIPPED:
                self.announce(request.scenario or request.task, case, record)
        return self._records[key]

    def _attempt(self, request: Request, needs: frozenset[Feature], misfit: str | None) -> Record:
        case = request.case
        if reason := misfit or self.refusal(case, needs):
            return self._record(request, Outcome(status=Status.SKIPPED, message=reason))
        self.announce(request.scenario or request.task, case, None)
        return self._run(request)

    def _keep(self, key: _Key, record: Record) -> Record:
        """Write `record` and return it.

        If no reader could read it, a record of that failure is written instead. This is the same on every node.
        """
        try:
            self._write(record)
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, ResultsError):
                raise
            told = AdapterError(f"its record cannot be read again: {error}; does the adapter declare invalid values?")
            record = self._unfinished(record, told)
            self._write(record)
        self._records[key] = record
        return record

    def _write(self, record: Record) -> None:
        if self._file is None:
            line_of(record)
            return
        try:
            self._file.append(record)
        except ResultsError as error:
            outcome = record.outcome
            told = f"{error}. {record.task} {record.case.id} was {outcome.status}: {outcome.message}".rstrip(": ")
            raise ResultsError(told) from error

    def _unfinished(self, asked: Request | Record, error: BaseException) -> Record:
        """Return the record of a pass that was ended by something outside its ranks.

        It calls no code of the adapter, which may be the cause.
        """
        remarks = self._take_remarks()
        backend = asked.backend if isinstance(asked, Request) else asked.environment.backend
        told = asked if isinstance(asked, Request) else asked.conformance
        return Record(
            case=asked.case,
            adapter=asked.adapter,
            task=asked.task,
            outcome=outcome_of_error(error),
            environment=self._here(backend),
            sources=sources_of(asked.adapter, asked.case.workload),
            steps=asked.steps,
            warmup=asked.warmup,
            timing_budget_seconds=asked.timing_budget_seconds,
            conformance=ConformanceEvidence(scenario=told.scenario, base=told.base),
            remarks=remarks,
        )

    def _take_remarks(self) -> list[str]:
        """Return the remarks for the record that is being made, and clear them."""
        remarks = list(self._remarks)
        self._remarks.clear()
        return remarks

    def _here(self, backend: str) -> Environment:
        return describe(self.options.device, backend, self.launcher.cluster.spec.num_hosts)

    def request(self, task: Task, case: Case, assess: Assess | None = None) -> Request:
        """Return the request for `case` under this run's options. `assess` overrides theirs."""
        options, assess = self.options, assess_of(case, assess or self.options.assess)
        sample = sample_of(case) if assess is Assess.SAMPLED and task is Task.OBSERVE else None
        observed = options.observed_steps or (WATCHED_STEP + 1 if sample else OBSERVED_STEPS)
        time_limits = TIME_LIMITS if sample else 1
        if task is Task.OBSERVE and observed == ENDURANCE_STEPS:
            time_limits *= ENDURANCE_TIME
        return Request(
            case=case,
            adapter=self.adapters[case.adapter],
            task=task,
            device=options.device,
            backend=self._backend(case),
            time_limit_seconds=options.time_limit_seconds * time_limits,
            steps=options.timed_steps if task is Task.TIME else observed,
            sample=sample,
            warmup=options.warmup if task in (Task.TIME, Task.PROFILE) else 0,
            timing_budget_seconds=options.timing_budget_seconds / LEAST_LAUNCHES if task is Task.TIME else 0.0,
            assess=assess is Assess.FULL or sample is not None,
        )

    def _backend(self, case: Case) -> str:
        serves = self.options.device == "cuda" and not self.options.refuses_to_share(self._local_ranks(case))
        return self.options.backend or ("nccl" if serves else "gloo")

    def _fake_backend(self) -> str:
        """Return the backend that a fake world imitates."""
        return self.options.backend or ("nccl" if self.options.device == "cuda" else "gloo")

    def _local_ranks(self, case: Case) -> int:
        """Return the number of ranks that share the resources of a node, or of a task with GPUs of its own."""
        spec = self.launcher.cluster.spec
        return case.world_size // (spec.nnodes if spec.gpus_by_task else spec.num_hosts)

    def _run(self, request: Request) -> Record:
        sources_of(request.adapter, request.case.workload)  # a change from here on is noticed when the record is made
        if request.task is Task.FAKE_WORLD:
            return self._run_alone(request)
        if request.task in JUDGED and request.assess:
            arithmetic = load_adapter(request.adapter).arithmetic
            tolerance_model = self._tolerances.of(request).declared(arithmetic.casting if arithmetic else None)
            request = dataclasses.replace(request, tolerance_model=tolerance_model)
        first, power = launch_watched(self.launcher, request)
        launches, outcome = [first], outcome_of_launch(first, request.case.world_size)
        if request.task is Task.TIME and outcome.status is Status.OK:
            launches, power = time_again(self.launcher, request, first, power)
            outcome = outcome_of_launch(launches[-1], request.case.world_size)
            request = dataclasses.replace(request, power=power)
        if request.task is Task.TIME and outcome.status is Status.OK:
            request = dataclasses.replace(request, peak_flops_per_second=self._peaks.of(request))
            request = self._with_path(request, launches) if request.assess else request
        record = self._record(request, outcome, launches)
        wanted = is_open_and_short(record) if self.options.localise is None else self.options.localise
        return self._localised(request, record) if wanted else record

    def _localised(self, request: Request, record: Record) -> Record:
        """Return `record` with where it begins to deviate in the evidence of its equivalence, where that fails."""
        verdict = record.verdict("equivalence")
        if verdict is None or verdict.passed or verdict.undecided or request.task is not Task.OBSERVE:
            return record
        again = dataclasses.replace(request, task=Task.LOCALISE, metered=False, tolerance_model=None)
        launched = self.launcher.launch(again, request.case.world_size)
        outcome = outcome_of_launch(launched, request.case.world_size)
        found = [report.beginning for report in launched.reports if report.beginning]
        why = f"unknown: {outcome.message.partition(chr(10))[0]}"
        text = describe_beginning(found, request.case.world_size) if outcome.status is Status.OK else why
        told = dataclasses.replace(verdict, evidence={**verdict.evidence, "begins": text})
        verdicts = [told if each is verdict else each for each in record.verdicts]
        return dataclasses.replace(record, verdicts=verdicts)

    def _run_alone(self, request: Request) -> Record:
        """Run each fake rank in a separate launch, one after the other, so that each has the whole GPU."""
        launches = list[LaunchResult]()
        for rank in request.fake_ranks:
            asked = dataclasses.replace(request, fake_ranks=[rank])
            launches.append(self.launcher.launch(asked, 1, alone=True))
            outcome = outcome_of_launch(launches[-1], 1)
            if outcome.status is not Status.OK:
                return self._record(asked, dataclasses.replace(outcome, rank=rank))
        together = LaunchResult(
            reports=[report for launched in launches for report in launched.reports],
            failures=[],
            seconds=sum(launched.seconds for launched in launches),
        )
        return self._record(request, Outcome(status=Status.OK), [together])

    def _with_path(self, timed: Request, launches: Sequence[LaunchResult]) -> Request:
        """Add the verified path to `timed`, against which its launches are compared.

        If their bits differ although this engine's bits are not reproducible, they are compared by the tolerance
        model.
        """
        observing = dataclasses.replace(self.request(Task.OBSERVE, timed.case), adapter=timed.adapter)
        retracing = dataclasses.replace(
            observing,
            task=Task.RETRACE,
            marks=sorted(launches[0].reports[0].timed_digests),
            time_limit_seconds=max(timed.time_limit_seconds, 3 * launches[0].seconds),  # it also reads what it computes
        )
        observed = self._records.get((Task.OBSERVE, timed.case, ""))
        path = find_path(observed, launches, lambda: self.launcher.launch(retracing, timed.case.world_size))
        tolerant = path is not None and path.is_left_to_tolerance(timed.case.workload.algorithm)
        tolerance_model = self._tolerances.of(observing) if tolerant else None
        return dataclasses.replace(timed, observed=path, tolerance_model=tolerance_model)

    def _record(self, request: Request, outcome: Outcome, launches: Sequence[LaunchResult] = ()) -> Record:
        remarks = self._take_remarks()
        nnodes = self.launcher.cluster.spec.num_hosts
        record = assemble(request, self.adapter(request.case), outcome, launches, nnodes=nnodes, remarks=remarks)
        return with_gaps(record, self.options.known_gaps)


# --- The profiled pass of a case.

STEPS = 3
_LONGEST_STEM = 150
"""Longest stem of a file's name, in characters."""


def profile(runner: Runner, case: Case) -> Record:
    """Run the profiled pass over `case`. Its trace is written to the folder `traces` of the results."""
    return runner.once(profiling(runner.request(Task.PROFILE, case), runner.results))


def profiling(asked: Request, results: Path) -> Request:
    """Return `asked` as a request for a few profiled steps, which are not compared with anything.

    The trace is written to the folder `traces` of `results`. Raises `ResultsError` if that folder cannot be made.
    """
    folder = (results / "traces").absolute()  # ranks may start elsewhere
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ResultsError(f"{str(folder)!r} cannot be made: {error.strerror}; did its results move?") from error
    digest = hashlib.sha256(repr(asked.case).encode()).hexdigest()[:8]
    trace = folder / f"{asked.case.id[:_LONGEST_STEM]}-{digest}.json.gz"
    return dataclasses.replace(asked, steps=STEPS, assess=False, traces=str(trace))
