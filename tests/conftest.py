"""Settings of Meshmark's own tests: users of the suites bring adapters, frameworks and plugins that may warn."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from meshmark.launch.launch import ForkserverLauncher

LONGEST = [
    f"test_{name}.py"
    for name in (
        "inference",
        "fake_world",
        "readme",
        "gaps",
        "compression",
        "check",
        "page",
        "own_model",
        "rendered_pages",
        "diagnosis",
        "gpu_pieces",
        "launch",
        "optimizers",
        "broken",
        "ab",
        "hostile_records",
        "reach",
        "caches",
        "report",
        "cli",
        "architecture",
        "plan_search",
        "twins",
        "eager",
        "orphans",
        "suite_file",
        "precision",
        "launchers",
        "size",
        "conformance",
        "lost_records",
        "cluster",
        "show",
        "lent_machine",
        "pipeline",
        "security",
        "downpour",
        "pairs",
        "baseline",
        "beginning",
        "suites",
        "vision",
        "foreign_records",
        "memory_by_ranks",
        "cluster_doctor",
        "wheel",
    )
]
"""In this order before all others: a file runs as a whole, and one that were left to the end would run alone."""

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that tests start; see the Makefile
if "torch" in sys.modules:  # which has read the variable already
    sys.modules["torch"].set_num_threads(1)

for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
    os.environ.pop(name, None)  # the runs of pytest that tests start are on their own: pytest-benchmark asks for these


@pytest.fixture(scope="session", autouse=True)
def noise_is_measured_once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """By the first test of any worker that needs it; those of noise itself keep it with their records."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if hasattr(request.config, "workerinput") else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHMARK_NOISE", str(shared / "noise"))
        yield


@pytest.fixture(scope="session")
def launcher() -> Iterator[ForkserverLauncher]:
    """One a worker, for PyTorch and frameworks are imported once in it; a test that harms it has one of its own."""
    from meshmark.launch.cluster import Cluster, ClusterSpec
    from meshmark.launch.launch import ForkserverLauncher

    with Cluster(ClusterSpec()) as cluster, contextlib.closing(ForkserverLauncher(cluster)) as started:
        yield started


@pytest.fixture
def own_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise floors stay with the records."""
    monkeypatch.delenv("MESHMARK_NOISE")


@pytest.fixture(scope="session", autouse=True)
def runs_of_pytest_start_fast() -> Iterator[None]:
    """Those that tests start, without plugins of others: Hypothesis's imports all of it, for a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:anyio")
        yield


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


CPU_MINUTES = {"not slow": 40, "slow": 180}
"""Budget of `make test` and of `make test-slow`: processor time of all tests with all processes that they start.

Two hardware threads of one core slow each other down, and machines differ by as much as two. The budgets are half as
much again as what the slowest machine took.
"""


def cpu_minutes() -> float:
    """Return the processor time of this process and of its descendants that have ended, in minutes."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used) / 60


def budget(config: pytest.Config) -> int:
    """Return the CPU-minutes that a run of these marks may take; one without marks runs both kinds."""
    return CPU_MINUTES.get(config.option.markexpr, sum(CPU_MINUTES.values()))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that took more than its budget. Under xdist this is the controller's to tell, as the last to end."""
    over = cpu_minutes() > budget(session.config)
    if not hasattr(session.config, "workerinput") and over and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print how much of the budget a long run used, and whether that is too much."""
    used, allowed = cpu_minutes(), budget(config)
    if used > 1:
        verdict = ": too much, so this run fails" if used > allowed else ""
        terminalreporter.write_line(f"{used:.1f} CPU-minutes of a budget of {allowed} for all tests{verdict}")


def torch_modes() -> dict[str, object]:
    """Return PyTorch's process-wide modes that a test could leave changed; none where PyTorch is not imported."""
    if "torch" not in sys.modules:
        return {}
    import torch

    torch.autocast_increment_nesting()
    return {
        "autocast blocks": torch.autocast_decrement_nesting(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype of autocast": torch.get_autocast_dtype("cpu"),
        "cache of autocast": torch.is_autocast_cache_enabled(),
        "gradients": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }


@pytest.fixture(autouse=True)
def torch_modes_are_left_as_they_were() -> Iterator[None]:
    """Fail the test that changes a mode, not one that happens to run after it in the same process."""
    before = torch_modes()
    yield
    if before:
        assert torch_modes() == before
