"""The pytest plugin: options, the session's cases and runner, and assertion helpers of the suites.

Loaded by `meshmark.pytest_plugin.entry` or the checkout's conftest.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import tempfile
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from pathlib import Path

import pytest

from meshmark.adapter.matrix import AUTO, counts
from meshmark.conformance.clauses import Clause
from meshmark.conformance.finding import ClauseResult
from meshmark.conformance.scenario import plain_cells
from meshmark.conformance.scenario_runner import ScenarioRunner
from meshmark.environment import describe
from meshmark.errors import ClusterError, InputError, ResultsError, signals_end_like_ctrl_c
from meshmark.judge.deviation import unsampled
from meshmark.launch.cluster import Cluster
from meshmark.launch.folders import private_caches, socket_warning
from meshmark.launch.launch import LAUNCHERS
from meshmark.models.config import Dataset
from meshmark.pytest_plugin import selection as selecting
from meshmark.pytest_plugin import session_log
from meshmark.pytest_plugin.entry import asks_for_suites
from meshmark.pytest_plugin.progress import Progress
from meshmark.pytest_plugin.selection import (
    OPTIONAL,
    SELECTION,
    Selection,
    add_options,
    crowding,
    expect_gpus,
    expect_spread,
    selection,
    take_engines,
    unheeded,
    with_optional_suites,
)
from meshmark.pytest_plugin.session_log import keep_exit_status
from meshmark.records.record import Record, Status, Verdict, sources_of
from meshmark.records.record_file import read_records
from meshmark.records.request import Task
from meshmark.regression.baseline_gate import BaselineGate, expect_cases, expect_gated
from meshmark.report.failure_text import of_changes, of_outcome, of_verdict, row
from meshmark.run.assemble import unmatched_gaps
from meshmark.run.resume import KeptRecords, is_committed
from meshmark.run.runner import Runner, profile
from meshmark.run.throughput import values_of
from meshmark.spec.case import CHOOSE, Case, Cell, InvalidLayout, expect_fit
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload

# --- Assertion helpers of the suites.


def expect_ran(record: Record) -> None:
    """Skip the test if the pass was skipped, and fail with the evidence if it did not end."""
    __tracebackhide__ = True
    outcome = record.outcome
    if outcome.status is Status.SKIPPED:
        pytest.skip(outcome.message)
    if outcome.status is not Status.OK:
        pytest.fail(of_outcome(record), pytrace=False)


def expect(record: Record, suite: str, baseline: BaselineGate | None = None) -> None:
    """Fail unless the verdict of `suite` exists and passed, and its metrics are not worse than in `baseline`."""
    __tracebackhide__ = True
    expect_ran(record)
    verdict = record.verdict(suite)
    if verdict is None:
        expect_no_worse(record, suite, baseline)
        unasked = unsampled(record.case) or "--assess off"
        pytest.skip(f"not judged: {unasked}" if suite == "equivalence" else f"{suite}: not planned")
    expect_no_gap(record, verdict, baseline)
    if not verdict.passed:
        pytest.fail(of_verdict(record, verdict), pytrace=False)
    expect_no_worse(record, suite, baseline)


def expect_no_gap(record: Record, verdict: Verdict, baseline: BaselineGate | None = None) -> None:
    """Turn a failure that the user declared into an expected failure, and warn if it no longer shows.

    The gap excuses the verdict. What else is worse than in `baseline` fails.
    """
    __tracebackhide__ = True
    for gap in record.conformance.known_gaps:
        if not gap.covers(record.case, verdict.suite):
            continue
        told = f"{record.case.id}, {verdict.suite}: {gap.reason}"
        if verdict.passed:
            warnings.warn(f"{told}: passes, take the gap out of your file", StaleGapWarning, stacklevel=2)
        elif gap.symptom in f"{verdict.summary} {verdict.evidence.get('diagnosis', '')}":
            expect_no_worse(record, verdict.suite, baseline, excused=(f"{verdict.suite} verdict",))
            pytest.xfail(f"{told} ({verdict.summary}) {gap.link}".rstrip())


class NoBaselineWarning(UserWarning):
    """A case is not in the baseline, and therefore not gated."""


class UnsureWarning(UserWarning):
    """A gate cannot decide what it was asked for, and lets it pass."""


def expect_no_worse(record: Record, suite: str, baseline: BaselineGate | None, excused: Collection[str] = ()) -> None:
    """Fail with the evidence if metrics of `suite`, but for those `excused`, are worse than in `baseline`."""
    __tracebackhide__ = True
    if baseline is None or record.task is Task.FAKE_WORLD:  # whose case has the id of a real world's
        return
    if not baseline.knows(record):
        told = f"baseline {baseline.folder} does not hold {record.case.id}: it is not gated"
        warnings.warn(NoBaselineWarning(told), stacklevel=2)
        return
    changes = [change for change in baseline.changes(record, suite) if change.metric not in excused]
    if failing := baseline.gate.failing(changes):
        rows = [f"{change.metric} {change.difference}" for change in failing]
        pytest.fail(of_changes(record.case.id, str(baseline.folder), rows), pytrace=False)
    for change in baseline.gate.unsure(changes):
        warnings.warn(UnsureWarning(str(change)), stacklevel=2)


def expect_not_wrong(observed: Record | None) -> None:
    """Fail if the instrumented pass of the same case, if there is one, shows that it trains wrongly."""
    __tracebackhide__ = True
    verdict = observed.verdict("equivalence") if observed else None
    if observed and verdict:
        expect_no_gap(observed, verdict)
    if observed and verdict and not verdict.passed and not verdict.undecided:
        first = of_verdict(observed, verdict).partition("\n")[0]  # the judging suite's text, so it counts as one defect
        pytest.fail(f"{first}\n{row('so', 'trains wrongly, so its speed counts for nothing')}", pytrace=False)


class StaleGapWarning(UserWarning):
    """A known gap no longer shows."""


def expect_clause(scenarios: ScenarioRunner, case: Case, clause: Clause) -> None:
    """Fail unless the clause holds for `case`, or fails as its adapter declares."""
    __tracebackhide__ = True
    for record in scenarios.perform_all(clause, case).values():
        if record.outcome.status.outside:
            expect_ran(record)
    found = scenarios.judge(clause, case)
    text = f"{case.adapter} {case.layout.id}, {clause.name}: {found.evidence}"
    if found.result is ClauseResult.UNSUPPORTED:
        pytest.skip(found.evidence)
    if found.result is ClauseResult.TOLD:  # no test can pass that could not have failed
        pytest.skip(f"reported, not required: {found.evidence}")
    if found.result is ClauseResult.KNOWN_GAP:
        pytest.xfail(f"{text} {found.link}".rstrip())
    if found.result is ClauseResult.STALE_GAP:
        warnings.warn(f"{text}: passes, take the known gap out of its adapter", StaleGapWarning, stacklevel=2)
    if found.result in (ClauseResult.FAIL, ClauseResult.UNDECIDED):
        pytest.fail(text, pytrace=False)


# --- The pytest plugin: options, and the session's cases and runner.


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the options and the plugin's other parts.

    `pytest_plugins` would warn that they are imported already, which ends a run whose warnings are errors.
    """
    for part in (session_log, selecting):
        pluginmanager.register(part, part.__name__)
    add_options(parser)


CELLS = pytest.StashKey[list[Case | InvalidLayout]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Check the command line before collection, so that a mistake is one usage error and not one per test file.

    Also collects what `--conformance` and `--profile` ask for when single files are named.
    """
    config = session.config
    has_cases = bool(config.hook.pytest_meshmark_cases.get_hookimpls())
    if has_cases or asks_for_suites(config.args, config.option.pyargs, config.invocation_params.dir):
        keep_exit_status(session)
    take_engines(config)
    asked_suites = [suite for suite in OPTIONAL if config.getoption(f"--{suite}")]
    config.args = with_optional_suites(config.args, asked_suites, config.invocation_params.dir)
    # Under --pyargs the suites' conftest, which knows the cases, comes with their collection.
    asked = asks_for_suites(config.args, config.option.pyargs, config.invocation_params.dir)
    if asked or has_cases:
        if config.getoption("numprocesses", None):
            raise pytest.UsageError(
                "-n of pytest-xdist: the suites start ranks themselves, and cases that share a machine disturb one "
                "another; leave -n out, or give each machine its part by --shard"
            )
        selection(config)
        gc.freeze()  # all that has been imported stays, and pytest would look through it several times


def _cells(config: pytest.Config) -> list[Case | InvalidLayout]:
    if CELLS not in config.stash:
        config.stash[CELLS] = config.hook.pytest_meshmark_cases(config=config, selection=selection(config))
    return config.stash[CELLS]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize every test that asks for a case with the matrix that the suites define."""
    if "case" in metafunc.fixturenames:
        _parametrize(metafunc, "case", {cell.id: cell for cell in _cells(metafunc.config)})
    if "conforming" in metafunc.fixturenames:
        chosen = selection(metafunc.config)
        own = [each for each in chosen.workloads if each.dataset is Dataset.OWN]
        bases: list[Workload | None] = [*own, None] if len(own) < len(chosen.workloads) else [*own]
        batch, corpus = chosen.global_batch, chosen.corpus
        plain = {
            "-".join([cell.adapter, cell.layout.id, *([base.id] if base else []), *_but_fp32(cell.precision)]): cell
            for base in bases
            for precision in chosen.precisions
            for name, adapter in chosen.adapters.items()
            for world in (chosen.worlds if adapter.capabilities.degrees else [1])
            for fp32 in plain_cells(
                name, adapter, world, global_batch=None if base else batch, corpus=None if base else corpus, own=base
            )
            for cell in [dataclasses.replace(fp32, precision=precision)]
        }
        _parametrize(metafunc, "conforming", plain)


def _but_fp32(precision: Precision) -> list[str]:
    """Return the last part of the id of a conformance pass: its precision, unless that is the default."""
    return [] if precision == Precision.FP32 else [precision.name]


def _parametrize(metafunc: pytest.Metafunc, name: str, cells: dict[str, Case | InvalidLayout]) -> None:
    """Parametrize by cells, under their ids. An invalid layout is a skip with its reason."""
    marks = {
        id_: [pytest.mark.skip(f"{cell.reason}; {CHOOSE}")] if isinstance(cell, InvalidLayout) else []
        for id_, cell in cells.items()
    }
    parameters = [pytest.param(cell, id=id_, marks=marks[id_]) for id_, cell in cells.items()]
    metafunc.parametrize(name, parameters, scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Reject layouts that fit no workload, before `-k` applies, and a baseline of other cases."""
    try:
        expect_fit([cell for _, cell in _cells_of(items) if isinstance(cell, Cell)])
        cases = [(item, cell) for item, cell in _cells_of(items) if isinstance(cell, Case)]
        real = [cell for item, cell in cases if needs_all_ranks(item)]
        worlds = {cell.world_size for cell in real}
        expect_spread(selection(config), worlds)
        expect_gpus(selection(config), worlds)
        if cases and (keeper := selection(config).baseline_gate):
            expect_gated(real)
            expect_cases(keeper, {cell.id for cell in real})
    except InputError as error:
        raise pytest.UsageError(str(error)) from error


def _cells_of(items: Iterable[pytest.Item]) -> Iterator[tuple[pytest.Item, object]]:
    """Yield every item that is about a cell of the matrix or of the clauses, with that cell."""
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            parameters = item.callspec.params
            yield from ((item, parameters[name]) for name in ("case", "conforming") if name in parameters)


def pytest_report_collectionfinish(config: pytest.Config) -> str:
    """Return how much of the possible matrix the session covers, if layouts are chosen automatically."""
    cells, chosen = config.stash.get(CELLS, []), config.stash.get(SELECTION, None)
    return counts(chosen.adapters, chosen.worlds, cells) if cells and chosen and chosen.layouts == AUTO else ""


class Hooks:
    """Hooks for the checkout's suites to provide their matrix."""

    @pytest.hookspec(firstresult=True)
    def pytest_meshmark_cases(self, config: pytest.Config, selection: Selection) -> list[Case | InvalidLayout] | None:
        """Return the cells to parametrize by."""


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(Hooks)


@pytest.fixture(scope="session")
def runner(pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> Iterator[Runner]:
    """Provide the session's runner, which owns the cluster, the launcher and the records file."""
    chosen = selection(pytestconfig)
    progress = Progress(pytestconfig)
    pytestconfig.pluginmanager.register(progress)
    long_path = socket_warning(Path(tempfile.gettempdir()))
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ending_the_run())
        stack.enter_context(private_caches())
        stack.enter_context(signals_end_like_ctrl_c())
        cluster = stack.enter_context(Cluster(chosen.cluster, progress.say))
        launcher = stack.enter_context(contextlib.closing(LAUNCHERS[chosen.launcher](cluster)))
        held = _held(chosen, progress.say)
        running = Runner(launcher, chosen.targets, chosen.options, chosen.results, progress.announce, held)
        stack.enter_context(contextlib.closing(running))
        stack.enter_context(contextlib.closing(progress))
        progress.expect(request.session.items, running.refusal)
        crowded = crowding(chosen) if any(needs_all_ranks(item) for item in request.session.items) else []
        unmatched = unmatched_gaps(chosen.options.known_gaps, chosen.adapters)
        for warning in [*crowded, *unheeded(os.environ), *unmatched, *([long_path] if long_path else [])]:
            progress.say(warning)
        yield running


def needs_all_ranks(item: pytest.Item) -> bool:
    """Return whether a test starts all ranks of its case, and not single ranks of a fake world."""
    return "alone" not in getattr(item, "fixturenames", ())


def _held(chosen: Selection, say: Callable[[str], None]) -> KeptRecords | None:
    """Return the records to resume from, if requested. Node 0's folder has all of them."""
    if not chosen.resume:
        return None
    file = chosen.results / "records.jsonl"
    if chosen.cluster.node_rank or not (file.is_file() and file.stat().st_size):
        return KeptRecords()
    if not is_committed(describe(chosen.options.device, "", 1)):
        say("--resume: this checkout has uncommitted changes, so records cannot be matched to its code")
    elif unknown := dict.fromkeys(
        source.target
        for target in chosen.targets.values()
        for work in chosen.workloads
        for source in sources_of(target, work)
        if not source.is_known
    ):
        say(
            f"--resume: {', '.join(unknown)} is in no commit, or modules beside it are in none, so nothing is known to "
            "be of the same code: run again"
        )
    return KeptRecords(read_records(chosen.results, latest=True).records)


@pytest.fixture(scope="session")
def baseline(pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> BaselineGate | None:
    """Provide the baseline gate of `--baseline`, or None."""
    keeper = selection(pytestconfig).baseline_gate
    timed = [item for item in request.session.items if "timed" in getattr(item, "fixturenames", ())]
    return keeper and dataclasses.replace(keeper, num_timed=max(len(timed), 1))


@pytest.fixture(scope="session")
def scenarios(runner: Runner) -> ScenarioRunner:
    """Provide the conformance suite's runner on top of this session's runner."""
    return ScenarioRunner(runner)


@contextlib.contextmanager
def _ending_the_run() -> Iterator[None]:
    """End the run with one message for errors that no later case could survive (folder in use, node lost)."""
    try:
        yield
    except (ClusterError, ResultsError) as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """End the run as fixtures do, for tests that launch passes themselves, as in the conformance suite."""
    launches = isinstance(pyfuncitem.funcargs.get("scenarios"), ScenarioRunner)
    with _ending_the_run() if launches else contextlib.nullcontext():
        return (yield)


@pytest.fixture
def observed(runner: Runner, case: Case, request: pytest.FixtureRequest) -> Record:
    """Provide the record of the case's instrumented pass with verdicts. Its values become JUnit properties of the
    test.
    """
    with _ending_the_run():
        record = runner.observe(case)
    _add_properties(record, request.node)
    return record


@pytest.fixture
def timed(runner: Runner, case: Case, request: pytest.FixtureRequest) -> Record:
    """Provide the record of the case's untouched pass, which must have ended."""
    with _ending_the_run():
        record = runner.time(case)
    _add_properties(record, request.node)
    expect_ran(record)
    return record


@pytest.fixture
def alone(runner: Runner, case: Case) -> Record:
    """Provide the record of single ranks of a fake world of the case's size."""
    with _ending_the_run():
        return runner.observe_alone(case)


@pytest.fixture
def profiled(runner: Runner, case: Case) -> Record:
    """Provide the record of the case's profiled pass."""
    with _ending_the_run():
        return profile(runner, case)


def _add_properties(record: Record, test: pytest.Item) -> None:
    """Add the record's values to the test's properties.

    pytest's own `record_property` would warn for every test with JUnit's default format.
    """
    test.user_properties += values_of(record).items()
