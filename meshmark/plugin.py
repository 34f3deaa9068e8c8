"""The pytest side: options, the session's runner, progress. Loaded by the checkout's conftest.py."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from meshmark.adapter.contract import Adapter
from meshmark.adapter.registry import builtin_adapters, load_adapter, outside_name, select
from meshmark.conformance.scenario import SCENARIOS, plain_cases
from meshmark.errors import ClusterError, InputError, MeshmarkError, ResultsError, UnknownNameError
from meshmark.expect import expect_ran
from meshmark.options import positive, precision, split_values
from meshmark.reference.data import check_data
from meshmark.run.cluster import Cluster, ClusterSpec
from meshmark.run.gpus import num_gpus
from meshmark.run.launch import Launcher
from meshmark.run.passes.observe import WATCHED_STEP
from meshmark.run.record import Record
from meshmark.run.request import Task
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from meshmark.spec.precision import Precision
from meshmark.spec.workload import Workload, workload

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What the command line asks for, checked."""

    targets: dict[str, str]
    """Adapter name to "module:Class"."""
    adapters: dict[str, type[Adapter]]
    worlds: list[int]
    workloads: list[Workload]
    precisions: list[Precision]
    options: RunOptions
    results: Path
    cluster: ClusterSpec


SELECTION = pytest.StashKey[Selection]()


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
    group.addoption("--precision", default="fp32", metavar="P,Q", help="fp64, fp32, bf16, fp16 (default: fp32)")
    group.addoption("--workload", default="gpt-tiny", metavar="NAME,NAME", help="workload presets (default: gpt-tiny)")
    group.addoption("--global-batch", type=int, default=None, metavar="N", help="sequences a step (default: preset's)")
    group.addoption("--corpus", default=None, metavar="FILE", help="train on this file, byte by byte")
    group.addoption(
        "--steps", type=int, default=None, metavar="N", help="optimizer steps of a pass (default: 5 observed, 10 timed)"
    )
    group.addoption(
        "--time-limit", type=float, default=120.0, metavar="S", help="seconds a pass may take (default: 120)"
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
    outside = {outside_name(target): target for target in option("--adapter")}
    patterns = split_values("--adapters", option("--adapters"))
    clash = sorted(outside.keys() & builtin_adapters().keys()) if outside else []
    if clash or len(outside) < len(option("--adapter")):
        raise InputError(f"--adapter: {', '.join(clash or outside)} would stand for two adapters; rename the class")
    targets = outside if outside and patterns == ["*"] else select(patterns, builtin_adapters()) | outside
    corpus, batch = option("--corpus"), option("--global-batch")
    workloads = [_workload(name, corpus, batch) for name in split_values("--workload", option("--workload"))]
    for chosen in workloads:
        check_data(chosen)
    nnodes = option("--nnodes")
    return Selection(
        targets=targets,
        adapters={name: load_adapter(target) for name, target in targets.items()},
        worlds=[positive("--world", text) for text in split_values("--world", option("--world"))],
        workloads=workloads,
        precisions=[precision(text) for text in split_values("--precision", option("--precision"))],
        options=_run_options(config),
        results=Path(option("--results")),
        cluster=ClusterSpec.detect(os.environ)
        if nnodes is None
        else ClusterSpec(nnodes=nnodes, node_rank=option("--node-rank"), rdzv=option("--rdzv")),
    )


def _workload(name: str, corpus: str | None, global_batch: int | None) -> Workload:
    """A preset, renamed when its batch is another, for then its numbers are too."""
    chosen = workload(name, corpus=corpus)
    if global_batch is None or global_batch == chosen.global_batch:
        return chosen
    return dataclasses.replace(chosen, name=f"{name}.b{global_batch}", global_batch=global_batch)


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
    limit = config.getoption("--time-limit")
    if limit <= 0:
        raise InputError(f"--time-limit {limit:g}: expected seconds above 0")
    counts = {} if steps is None else {"observed_steps": steps, "timed_steps": steps}
    return RunOptions(device=device, backend=backend, num_gpus=num_gpus(), time_limit_seconds=limit, **counts)


CASES = pytest.StashKey[list[Case]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Check the command line before anything is collected: a mistake is one usage error, not one a test file."""
    if session.config.hook.pytest_meshmark_cases.get_hookimpls():
        _cases(session.config)


def _cases(config: pytest.Config) -> list[Case]:
    if CASES not in config.stash:
        try:
            config.stash[CASES] = config.hook.pytest_meshmark_cases(config=config, selection=selection(config))
        except MeshmarkError as error:
            raise pytest.UsageError(str(error)) from error
    return config.stash[CASES]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize every test that asks for a case by the matrix that the suites define."""
    if "case" in metafunc.fixturenames:
        cases = _cases(metafunc.config)
        metafunc.parametrize("case", cases, ids=lambda case: case.id, scope="session")
    if "conforming" in metafunc.fixturenames:
        chosen = selection(metafunc.config)
        plain = [
            case
            for name, adapter in chosen.adapters.items()
            for world in (chosen.worlds if adapter.capabilities.degrees else [1])
            for case in plain_cases(name, adapter, world)
        ]
        metafunc.parametrize("conforming", plain, ids=lambda c: f"{c.adapter}-{c.layout.id}", scope="session")


class Hooks:
    """Where the checkout's suites plug their matrix in."""

    @pytest.hookspec(firstresult=True)
    def pytest_meshmark_cases(self, config: pytest.Config, selection: Selection) -> list[Case] | None:
        """The cases to parametrize by."""


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(Hooks)


@pytest.fixture(scope="session")
def runner(pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> Iterator[Runner]:
    """This session's runner, which owns the cluster, the forkserver and the records file."""
    chosen = selection(pytestconfig)
    for adapter in chosen.adapters.values():
        os.environ.update(adapter.environment(chosen.options.device))
    preload = [module for adapter in chosen.adapters.values() for module in adapter.modules()]
    progress = Progress(pytestconfig, request.session.items)
    with _ending_the_run(), Cluster(chosen.cluster) as cluster:
        running = Runner(
            Launcher(cluster, preload), chosen.targets, chosen.options, chosen.results, announce=progress.announce
        )
        yield running
        running.close()


@contextlib.contextmanager
def _ending_the_run() -> Iterator[None]:
    """What no later case could survive (a folder in use, a node that is gone) ends the run with one message."""
    try:
        yield
    except (ClusterError, ResultsError) as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)


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


class Progress:
    """Which pass runs, how many are left, time so far: rewritten on a terminal, a line a pass elsewhere."""

    def __init__(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self._reporter: Any = config.pluginmanager.getplugin("terminalreporter")
        self._capture: Any = config.pluginmanager.getplugin("capturemanager")
        self._tty = sys.stdout.isatty()
        self._quiet = config.get_verbosity() < 0 and not self._tty
        self._total = len({launch for item in items for launch in _launches(item)})
        self._done = 0
        self._started = time.monotonic()

    def announce(self, what: str, case: Case, record: Record | None) -> None:
        if record is not None:
            self._done += 1
        if self._quiet or self._reporter is None or (record is None and not self._tty):
            return
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        line = f"[{self._done + (record is None)}/{self._total}] {what} {case.id} {minutes}:{seconds:02d}"
        with self._capture.global_and_fixture_disabled():
            if record is None:
                self._reporter.rewrite(f"\r{line} ...", erase=True)
            elif self._tty:
                self._reporter.rewrite("\r", erase=True)
            else:
                self._reporter.ensure_newline()
                self._reporter.write_line(f"{line} {record.outcome.status} in {record.launch_seconds:.1f} s")
            for remark in record.remarks if record else []:
                self._reporter.write_line(f"meshmark: {remark}")


def _launches(item: pytest.Item) -> Iterator[tuple[str, str]]:
    """The passes that a test stands on, as far as can be known before: what, and of which case."""
    fixtures = getattr(item, "fixturenames", [])
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    for fixture, task in (("observed", Task.OBSERVE), ("timed", Task.TIME)):
        if fixture in fixtures:
            yield task, parameters["case"].id
    if "conforming" in fixtures:
        for name in parameters["clause"].scenarios:
            for scenario in filter(None, (SCENARIOS[name].after, name)):
                yield scenario, repr(parameters["conforming"])
