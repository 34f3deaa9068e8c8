"""The pytest side: options, the session's cases and runner. Loaded by `pytest_entry` or the checkout's conftest.py."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshmark.adapter.contract import Adapter
from meshmark.adapter.registry import load_adapter
from meshmark.conformance.scenario import plain_cells
from meshmark.conformance.scenario_runner import ScenarioRunner
from meshmark.errors import ClusterError, InputError, LayoutError, MeshmarkError, ResultsError, UnknownNameError
from meshmark.expect import expect_ran
from meshmark.options import chosen_adapters, positive, split_values
from meshmark.progress import Progress
from meshmark.pytest_entry import asks_for_suites
from meshmark.reference.data import check_data, on_corpus
from meshmark.run.cluster import Cluster, ClusterSpec
from meshmark.run.gpus import num_gpus
from meshmark.run.launchers import LAUNCHERS
from meshmark.run.passes.observe import WATCHED_STEP
from meshmark.run.record import Record
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import CHOOSE, Case, Cell, Misfit, expect_fit
from meshmark.spec.precision import Precision, precision
from meshmark.spec.workload import Workload, workload

pytest_plugins = ["meshmark.session_log"]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What the command line asks for, checked."""

    targets: dict[str, str]
    """Adapter name to "module:Class"."""
    adapters: dict[str, type[Adapter]]
    worlds: list[int]
    workloads: list[Workload]
    global_batch: int | None
    """Of every workload; None leaves each its own."""
    corpus: str | None
    """Of every workload."""
    precisions: list[Precision]
    options: RunOptions
    results: Path
    cluster: ClusterSpec
    launcher: str
    """A key of LAUNCHERS."""


SELECTION = pytest.StashKey[Selection]()
MOST_SECONDS = 1_000_000
"""Of a time limit."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("meshmark", "Meshmark: which cases to run, and where")
    group.addoption("--adapters", default="*", metavar="A,B", help="adapters by name or shell pattern (default: all)")
    group.addoption(
        "--adapter",
        action="append",
        default=[],
        metavar="FILE.py:CLASS",
        help="an adapter from outside the repo, or package.module:Class; alone unless --adapters is given too",
    )
    group.addoption("--world", default="2", metavar="N,M", help="world sizes (default: 2); `single` always runs on 1")
    group.addoption("--device", default="cpu", help="cpu or cuda (default: cpu)")
    group.addoption("--backend", default=None, help="gloo or nccl (default: nccl where every rank has its own GPU)")
    group.addoption(
        "--precision", default="fp32", metavar="P,Q", help=f"of {', '.join(Precision.PRESETS)} (default: fp32)"
    )
    group.addoption("--workload", default="gpt-tiny", metavar="NAME,NAME", help="workload presets (default: gpt-tiny)")
    group.addoption("--global-batch", type=int, default=None, metavar="N", help="sequences a step (default: preset's)")
    group.addoption("--corpus", default=None, metavar="FILE", help="train on this file, byte by byte")
    group.addoption(
        "--conformance",
        action="store_true",
        help="collect suites/test_conformance.py too, as naming it does; it trains gpt-mini, in precisions of its own",
    )
    steps = "optimizer steps of a pass (default: 5 observed, at least 10 timed)"
    group.addoption("--steps", type=int, default=None, metavar="N", help=steps)
    budget = "seconds of timed steps a case, until its rate is known to within 2 %% (default: 1.5; 0: --steps alone)"
    group.addoption("--timing-budget", type=float, default=1.5, metavar="S", help=budget)
    group.addoption(
        "--time-limit", type=float, default=120.0, metavar="S", help="seconds a pass may take (default: 120)"
    )
    group.addoption(
        "--launcher", default="forkserver", help="how ranks are started: forkserver or torchrun (default: forkserver)"
    )
    group.addoption(
        "--results", default="results", metavar="DIR", help="where records.jsonl is appended (default: results)"
    )
    group.addoption(
        "--nnodes", type=int, default=None, help="nodes that run this same command (default: from SLURM or torchrun)"
    )
    group.addoption("--node-rank", type=int, default=0, help="which of them this is")
    group.addoption("--rdzv", default=None, metavar="HOST:PORT", help="address of node 0 and a free port on it")


def selection(config: pytest.Config) -> Selection:
    """The checked command line. Raises `pytest.UsageError` for what cannot be."""
    if SELECTION not in config.stash:
        try:
            config.stash[SELECTION] = _select(config)
        except MeshmarkError as error:
            raise pytest.UsageError(str(error)) from error
    return config.stash[SELECTION]


def _select(config: pytest.Config) -> Selection:
    option = config.getoption
    targets = chosen_adapters(option("--adapters"), option("--adapter"))
    corpus, batch = option("--corpus"), option("--global-batch")
    workloads = [on_corpus(_workload(name, batch), corpus) for name in split_values("--workload", option("--workload"))]
    for chosen in workloads:
        check_data(chosen)
    nnodes = option("--nnodes")
    return Selection(
        targets=targets,
        adapters={name: load_adapter(target) for name, target in targets.items()},
        worlds=[positive("--world", text) for text in split_values("--world", option("--world"))],
        workloads=workloads,
        global_batch=batch,
        corpus=corpus,
        precisions=[precision(text) for text in split_values("--precision", option("--precision"))],
        options=_run_options(config),
        results=Path(option("--results")),
        cluster=ClusterSpec.detect(os.environ)
        if nnodes is None
        else ClusterSpec(nnodes=nnodes, node_rank=option("--node-rank"), rdzv=option("--rdzv")),
        launcher=_launcher(option("--launcher")),
    )


def _workload(name: str, global_batch: int | None) -> Workload:
    """A preset, renamed when its batch is another, for then its numbers are too."""
    chosen = workload(name)
    if global_batch is None or global_batch == chosen.global_batch:
        return chosen
    return dataclasses.replace(chosen, name=f"{name}.b{global_batch}", global_batch=global_batch)


def _launcher(name: str) -> str:
    if name not in LAUNCHERS:
        raise UnknownNameError("launcher", name, LAUNCHERS)
    return name


def _run_options(config: pytest.Config) -> RunOptions:
    device, backend, steps = (config.getoption(name) for name in ("--device", "--backend", "--steps"))
    if device not in ("cpu", "cuda"):
        raise UnknownNameError("device", device, ["cpu", "cuda"])
    if backend not in (None, "gloo", "nccl"):
        raise UnknownNameError("backend", backend, ["gloo", "nccl"])
    if device == "cuda" and not num_gpus():
        raise InputError("--device cuda, but PyTorch sees no CUDA device here; `meshmark doctor` shows what it sees")
    if steps is not None and steps <= WATCHED_STEP:
        raise InputError(f"--steps {steps}: at least {WATCHED_STEP + 1} are needed, the last of which is watched")
    limit, budget = config.getoption("--time-limit"), config.getoption("--timing-budget")
    if not 0 < limit <= MOST_SECONDS:  # neither is true of nan
        raise InputError(f"--time-limit {limit:g}: expected seconds above 0, at most {MOST_SECONDS:,} (11 days)")
    if not 0 <= budget < limit:
        raise InputError(f"--timing-budget {budget:g}: expected seconds from 0 to below --time-limit, {limit:g}")
    counts = {} if steps is None else {"observed_steps": steps, "timed_steps": steps}
    chosen = RunOptions(device=device, backend=backend, num_gpus=num_gpus(), time_limit_seconds=limit)
    return dataclasses.replace(chosen, timing_budget_seconds=budget, **counts)


CELLS = pytest.StashKey[list[Case | Misfit]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Check the command line before anything is collected: a mistake is one usage error, not one a test file."""
    config = session.config
    # Under --pyargs the suites' conftest, which knows the cases, comes with their collection.
    asked = asks_for_suites(config.args, config.option.pyargs, config.invocation_params.dir)
    if asked or config.hook.pytest_meshmark_cases.get_hookimpls():
        selection(config)


def _cells(config: pytest.Config) -> list[Case | Misfit]:
    if CELLS not in config.stash:
        config.stash[CELLS] = config.hook.pytest_meshmark_cases(config=config, selection=selection(config))
    return config.stash[CELLS]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize every test that asks for a case by the matrix that the suites define."""
    if "case" in metafunc.fixturenames:
        _parametrize(metafunc, "case", {cell.id: cell for cell in _cells(metafunc.config)})
    if "conforming" in metafunc.fixturenames:
        chosen = selection(metafunc.config)
        plain = [
            cell
            for name, adapter in chosen.adapters.items()
            for world in (chosen.worlds if adapter.capabilities.degrees else [1])
            for cell in plain_cells(name, adapter, world, global_batch=chosen.global_batch, corpus=chosen.corpus)
        ]
        _parametrize(metafunc, "conforming", {f"{cell.adapter}-{cell.layout.id}": cell for cell in plain})


def _parametrize(metafunc: pytest.Metafunc, name: str, cells: dict[str, Case | Misfit]) -> None:
    """By cells under their ids; one that cannot be is a skip with its reason."""
    marks = {
        id_: [pytest.mark.skip(f"{cell.reason}; {CHOOSE}")] if isinstance(cell, Misfit) else []
        for id_, cell in cells.items()
    }
    parameters = [pytest.param(cell, id=id_, marks=marks[id_]) for id_, cell in cells.items()]
    metafunc.parametrize(name, parameters, scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Layouts none of which fits its workload are a mistake, before `-k` has its say."""
    parameters = [
        item.callspec.params for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
    cells = [p[name] for p in parameters for name in ("case", "conforming") if name in p]
    try:
        expect_fit([cell for cell in cells if isinstance(cell, Cell)])
    except LayoutError as error:
        raise pytest.UsageError(str(error)) from error


class Hooks:
    """Where the checkout's suites plug their matrix in."""

    @pytest.hookspec(firstresult=True)
    def pytest_meshmark_cases(self, config: pytest.Config, selection: Selection) -> list[Case | Misfit] | None:
        """The cells to parametrize by."""


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(Hooks)


@pytest.fixture(scope="session")
def runner(pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> Iterator[Runner]:
    """This session's runner, which owns the cluster, the launcher and the records file."""
    chosen = selection(pytestconfig)
    progress = Progress(pytestconfig)
    pytestconfig.pluginmanager.register(progress)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ending_the_run())
        stack.enter_context(_signals_end_like_ctrl_c())
        cluster = stack.enter_context(Cluster(chosen.cluster, progress.say))
        launcher = stack.enter_context(contextlib.closing(LAUNCHERS[chosen.launcher](cluster)))
        running = Runner(launcher, chosen.targets, chosen.options, chosen.results, announce=progress.announce)
        stack.enter_context(contextlib.closing(running))
        progress.expect(request.session.items, running.refusal)
        yield running


@pytest.fixture(scope="session")
def scenarios(runner: Runner) -> ScenarioRunner:
    """The conformance suite's side of this session's runner."""
    return ScenarioRunner(runner)


@contextlib.contextmanager
def _ending_the_run() -> Iterator[None]:
    """What no later case could survive (a folder in use, a node that is gone) ends the run with one message."""
    try:
        yield
    except (ClusterError, ResultsError) as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)


@contextlib.contextmanager
def _signals_end_like_ctrl_c() -> Iterator[None]:
    """`timeout`, `scancel` and a terminal that closes interrupt the run as Ctrl-C does: fixtures are torn down, and
    what was recorded is reported. A signal that is ignored (by `nohup`) stays so."""
    endings = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]

    def interrupt(number: int, frame: object) -> None:
        for ending in endings:  # one interrupts; a second, such as a shell's own SIGHUP, would break the clean-up off
            signal.signal(ending, signal.SIG_IGN)
        raise KeyboardInterrupt(signal.Signals(number).name)

    for ending in endings:
        signal.signal(ending, interrupt)
    try:
        yield
    finally:
        for ending in endings:
            signal.signal(ending, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Tests that launch by themselves, those of the conformance suite, end the run as fixtures do."""
    launches = isinstance(pyfuncitem.funcargs.get("scenarios"), ScenarioRunner)
    with _ending_the_run() if launches else contextlib.nullcontext():
        return (yield)


@pytest.fixture
def observed(runner: Runner, case: Case) -> Record:
    """The record of the case's instrumented pass, with its verdicts."""
    with _ending_the_run():
        return runner.observe(case)


@pytest.fixture
def timed(runner: Runner, case: Case) -> Record:
    """The record of the case's untouched pass, which must have reached its end."""
    with _ending_the_run():
        record = runner.time(case)
    expect_ran(record)
    return record
