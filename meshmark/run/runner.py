"""From a case to its record: once a session, whoever asks."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshmark.adapter.capabilities import Feature
from meshmark.adapter.contract import Adapter
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.environment import describe
from meshmark.errors import ClusterError, MeshmarkError, ResultsError
from meshmark.judge.yardstick import Comparisons, Yardstick, fit
from meshmark.run.declared import declare
from meshmark.run.launch import Launcher, LaunchResult
from meshmark.run.memory_verdict import judge_memory
from meshmark.run.passes.noise import NUM_RANKS, TIME_LIMIT_SECONDS, noise_key, read_noise, write_noise
from meshmark.run.record import Outcome, Record, RecordFile, Status
from meshmark.run.request import Request, Task
from meshmark.run.scratch import Scratch
from meshmark.run.verdict import judge_communication, judge_equivalence
from meshmark.spec.case import Case

ASSESSABLE_PARAMETERS = 20_000_000
"""Largest model that is compared with the float64 truth, which takes 24 bytes a parameter on one rank and as long as
the whole run takes in float64."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How cases are run; what they are is the case's business."""

    device: str = "cpu"
    backend: str | None = None
    """None takes nccl on cuda where every rank of a node has a GPU of its own, else gloo."""
    num_gpus: int = 0
    """On this node."""
    observed_steps: int = 5
    timed_steps: int = 10
    warmup: int = 3
    time_limit_seconds: float = 120.0


_JUDGED = (Task.OBSERVE, Task.RESUME, Task.OVERFLOW)
"""Passes whose traces are held against the truth."""

Announce = Callable[[str, Case, Record | None], None]
"""Told before a pass (with None) and after it: its scenario or task, its case, its record."""


class Runner:
    """Runs passes, judges them, and appends their records."""

    def __init__(
        self,
        launcher: Launcher,
        adapters: dict[str, str],
        options: RunOptions,
        results: Path,
        announce: Announce | None = None,
    ) -> None:
        """`adapters`: name to "module:Class". Raises `ResultsError` when `results` cannot be written."""
        self.launcher, self.adapters, self.options = launcher, adapters, options
        self.announce: Announce = announce or (lambda what, case, record: None)
        self.results = results
        writes = launcher.cluster.spec.node_rank == 0
        self._file = RecordFile(results) if writes else None
        self._records: dict[tuple[Task, Case, str], Record] = {}
        self._yardsticks: dict[str, Yardstick] = {}
        self._remarks: list[str] = []
        """For the next record."""
        self._scratch: Scratch | None = None

    def close(self) -> None:
        if self._file:
            self._file.close()
        if self._scratch:
            self._scratch.remove()

    def refusal(self, case: Case, needs: frozenset[Feature] = frozenset()) -> str | None:
        """Why `case` is not run; None when it is. `needs`: what the pass takes beyond the case."""
        nnodes = self.launcher.cluster.spec.nnodes
        if case.world_size % nnodes:
            return f"{case.world_size} ranks cannot be spread evenly over {nnodes} nodes"
        return self.adapter(case).refusal(case, self.options.device, self._backend(case), needs)

    def observe(self, case: Case) -> Record:
        """The instrumented pass, with all its verdicts."""
        return self.once(self.request(Task.OBSERVE, case))

    def time(self, case: Case) -> Record:
        """The untouched pass."""
        return self.once(self.request(Task.TIME, case))

    def checkpoint(self, base: Case) -> Path:
        """A folder of `base`'s own, for all nodes; absolute, for ranks may start elsewhere."""
        if self._scratch is None:
            self._scratch = Scratch(self.results, self.launcher.cluster)
        folder = self._scratch.folder / hashlib.sha256(repr(base).encode()).hexdigest()[:16]
        folder.mkdir(exist_ok=True)
        return folder

    def adapter(self, case: Case) -> type[Adapter]:
        """The class that `case` is run under."""
        return load_adapter(self.adapters[case.adapter])

    def once(self, request: Request, needs: frozenset[Feature] = frozenset(), misfit: str | None = None) -> Record:
        """The record of `request`, from this session or run now; skipped where its case is refused, or with `misfit`,
        the reason why it does not fit. `needs`: what the pass takes beyond the case."""
        case = request.case
        key = request.task, case, request.scenario  # not the case's id, which says nothing of seed or corpus
        if key not in self._records:
            try:
                record = self._attempt(request, needs, misfit)
            except (ClusterError, ResultsError) as error:  # they end the run
                self._keep(key, self._record(request, _unfinished(error)))
                raise
            except Exception as error:  # whatever it is, the case is not lost from the report
                record = self._record(request, _unfinished(error))
            if record.outcome.status is not Status.SKIPPED:
                self.announce(request.scenario or request.task, case, record)
            self._keep(key, record)
        return self._records[key]

    def _attempt(self, request: Request, needs: frozenset[Feature], misfit: str | None) -> Record:
        case = request.case
        if reason := misfit or self.refusal(case, needs):
            return self._record(request, Outcome(status=Status.SKIPPED, message=reason))
        self.announce(request.scenario or request.task, case, None)
        return self._run(request)

    def _keep(self, key: tuple[Task, Case, str], record: Record) -> None:
        self._records[key] = record
        if self._file:
            self._file.append(record)

    def request(self, task: Task, case: Case) -> Request:
        """What ranks are asked to do with `case` under this run's options."""
        options = self.options
        return Request(
            case=case,
            adapter=self.adapters[case.adapter],
            task=task,
            device=options.device,
            backend=self._backend(case),
            time_limit_seconds=options.time_limit_seconds,
            steps=options.timed_steps if task is Task.TIME else options.observed_steps,
            warmup=options.warmup if task is Task.TIME else 0,
            assess=case.workload.model.num_parameters <= ASSESSABLE_PARAMETERS,
        )

    def _backend(self, case: Case) -> str:
        local_ranks = case.world_size // self.launcher.cluster.spec.nnodes
        own_gpus = self.options.device == "cuda" and local_ranks <= self.options.num_gpus
        return self.options.backend or ("nccl" if own_gpus else "gloo")

    def _run(self, request: Request) -> Record:
        if request.task in _JUDGED and request.assess:
            request = dataclasses.replace(request, yardstick=self.yardstick(request))
        launched = self.launcher.launch(request, request.case.world_size)
        return self._record(request, _outcome(launched), launched)

    def _record(self, request: Request, outcome: Outcome, launched: LaunchResult | None = None) -> Record:
        case, adapter = request.case, self.adapter(request.case)
        reports = launched.reports if launched else []
        whole = outcome.status in (Status.OK, Status.NAN)
        observed = whole and request.task is Task.OBSERVE and request.metered
        declared = declare(adapter, case, range(case.world_size) if observed else range(0))
        unmeasured = declared.failed | {
            suite: f"{why} on rank {r.rank}" for r in reversed(reports) for suite, why in r.unmeasured.items()
        }
        yardstick = request.yardstick if whole and request.yardstick else Yardstick(noise={}, factors={})
        remarks, self._remarks = self._remarks, []
        draft = Record(
            case=case,
            adapter=request.adapter,
            task=request.task,
            outcome=outcome,
            environment=describe(request.device, request.backend, self.launcher.cluster.spec.nnodes),
            steps=request.steps,
            warmup=request.warmup,
            launch_seconds=launched.seconds if launched else 0.0,
            build_seconds=max((r.build_seconds for r in reports), default=0.0),
            losses=[sum(shares) for shares in zip(*(r.losses for r in reports), strict=True)] if whole else [],
            norms=next((r.norms for r in reports if any(n is not None for n in r.norms)), []),
            deviations=reports[0].deviations if whole else {},
            noise=yardstick.noise,
            factors=yardstick.factors,
            drifts=reports[0].drifts if whole else [],
            diagnosis=reports[0].diagnosis if whole else None,
            memory=[r.memory for r in reports if r.memory],
            state_dtypes=reports[0].state_dtypes if whole else {},
            planned_states=declared.states,
            remainders=declared.remainders,
            unmeasured=unmeasured,
            traffic=[r.traffic for r in reports if r.traffic],
            planned_traffic=declared.traffic,
            rank_step_seconds=[r.step_seconds for r in reports if r.step_seconds],
            matmul_flops_per_second=[r.matmul_flops_per_second for r in reports if r.matmul_flops_per_second],
            scenario=request.scenario,
            base=request.base,
            samples=[r.samples for r in reports] if whole else [],
            digests=reports[0].digests if whole else [],
            num_replicated=reports[0].num_replicated if whole else 0,
            known_gaps=list(adapter.known_gaps) if request.scenario else [],
            remarks=remarks,
        )
        verdicts = [judge_equivalence(draft)] if whole and request.assess and request.task in _JUDGED else []
        planned = (judge_memory(draft), judge_communication(draft)) if observed else ()
        verdicts += [verdict for verdict in planned if verdict]
        return dataclasses.replace(draft, verdicts=verdicts)

    def yardstick(self, request: Request) -> Yardstick:
        """The yardstick of a request's workload and precision: from this session, from disk, or measured now.

        Raises `MeshmarkError` when the single process fails, for then nothing can be judged.
        """
        key = noise_key(request.case, request.steps)
        path = self.results / "noise" / f"{key}.json"
        if key not in self._yardsticks:
            self._yardsticks[key] = fit(self._noise_runs(request, path))
        return self._yardsticks[key]

    def _noise_runs(self, request: Request, path: Path) -> list[Comparisons]:
        try:
            runs = read_noise(path)
        except FileNotFoundError:
            return self._measure_noise(request, path)
        if runs is None:
            self._remarks.append(f"the noise floor {path} was damaged, and has been measured anew")
        return runs or self._measure_noise(request, path)

    def _measure_noise(self, request: Request, path: Path) -> list[Comparisons]:
        measured = dataclasses.replace(
            request,
            task=Task.NOISE,
            adapter=builtin_adapters()["single"],
            time_limit_seconds=max(TIME_LIMIT_SECONDS, request.time_limit_seconds),
        )
        launched = self.launcher.launch(measured, NUM_RANKS, alone=True)
        if launched.failures:
            failure = launched.failures[0]
            raise MeshmarkError(
                f"noise of {request.case.id} could not be measured: {failure.message}\n{failure.log_tail}"
            )
        runs = [run for report in launched.reports for run in report.noise_runs]
        write_noise(path, runs)
        return runs


def _unfinished(error: Exception) -> Outcome:
    """A failure outside the ranks; one that nobody foresaw with its stack."""
    if isinstance(error, MeshmarkError):
        return Outcome(status=Status.UNFINISHED, message=str(error))
    stack = "".join(traceback.format_exception(error))
    return Outcome(status=Status.UNFINISHED, message=f"{type(error).__name__}: {error}", traceback=stack)


def _outcome(launched: LaunchResult) -> Outcome:
    """How the launch ended, after its root cause."""
    if launched.failures:
        first = launched.failures[0]
        return Outcome(
            status=Status(first.kind),
            rank=first.rank,
            message=first.message,
            traceback=first.traceback,
            log_tail=first.log_tail,
            stacks={f.rank: f.stack for f in launched.failures if f.stack},
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
