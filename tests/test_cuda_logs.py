"""Readers of a GPU's logs, with logs made by hand as PyTorch writes them: no line of these has come from a GPU yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.environment import ALLOCATOR_VARIABLES, allocator_settings
from meshmark.measure.allocations import cublas_workspace_bytes, timeline
from meshmark.measure.meters import Named, Watch, Window, read_memory
from meshmark.passes import kernels
from meshmark.plan import microbenchmarks
from meshmark.plan.microbenchmarks import Bench
from meshmark.run.assemble import declare
from meshmark.run.verdict import memory_totals
from meshmark.spec.layout import Layout
from meshmark.spec.workload import workload
from meshmark.theory.memory import ModelStates
from tests.factories import make_case

CUDA = SimpleNamespace(type="cuda", index=0)
KIB = 1024
WORKSPACE = 8 * 4096 * KIB
MAIN, AUTOGRAD = 1, 2
BLOCK = 512


class Log:
    """What the profiler would record of one step: allocations on two threads, each inside an operator or none."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.now, self.total = 0, 0

    def tick(self) -> int:
        self.now += 10
        return self.now

    def operator(self, name: str, thread: int = MAIN) -> SimpleNamespace:
        found = SimpleNamespace(name=name, start_time_ns=self.tick(), start_tid=thread, parent=None)
        self.events.append(found)
        return found

    def change(self, address: int, num_bytes: int, parent: Any = None, thread: int = MAIN) -> None:  # noqa: ANN401
        self.total += num_bytes
        fields = SimpleNamespace(ptr=address, alloc_size=num_bytes, total_allocated=self.total, device=CUDA)
        event = SimpleNamespace(
            name="[memory]", start_time_ns=self.tick(), start_tid=thread, parent=parent, extra_fields=fields
        )
        self.events.append(event)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Two steps. A weight of 1,000 bytes takes two blocks, a loss of 4 takes one. The first product's result is as
    large as a workspace; autograd's thread has a workspace of its own; both are cleared when the step is over."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    log, seen = Log(), Watch(torch.device("cuda"))
    log.change(0x1000, 2 * BLOCK)
    for step in range(2):
        start = log.tick()
        product = log.operator("aten::addmm")
        log.change(0x20000, WORKSPACE, product)  # the result
        log.change(0x30000, WORKSPACE, product)  # and what it is computed in
        again = log.operator("aten::mm")
        log.change(0x40000, WORKSPACE, again)  # another result
        node = log.operator("autograd::engine::evaluate_function: AddmmBackward0", AUTOGRAD)
        backward = log.operator("aten::mm", AUTOGRAD)
        log.change(0x50000, 2 * BLOCK, backward, AUTOGRAD)  # the gradient
        log.change(0x60000, WORKSPACE, backward, AUTOGRAD)
        assert node
        log.change(0x20000, -WORKSPACE, None, AUTOGRAD)
        log.change(0x40000, -WORKSPACE, None, AUTOGRAD)
        middle = log.tick()
        log.change(0x70000 + step, BLOCK)  # the loss, which is kept until the next one
        if step:
            log.change(0x70000, -BLOCK)
        log.change(0x50000, -2 * BLOCK)
        stop = log.tick()
        log.change(0x30000, -WORKSPACE)
        log.change(0x60000, -WORKSPACE)
        seen.steady_ns[step] = log.tick()
        seen.windows += [
            Window(name="backward", step=step, start_ns=start, stop_ns=middle),
            Window(name="update", step=step, start_ns=middle, stop_ns=stop),
        ]
    seen._events = log.events
    return seen


WEIGHTS = Named(parameters={0x1000: 1000})
WITH_GRADIENTS = Named(parameters={0x1000: 1000}, gradients={0x50000: 1000})


def test_workspaces_of_cublas_are_told_from_results_as_large(watch: Watch) -> None:
    found = [life for life in timeline(watch.changes()).lives if life.is_workspace]
    assert [life.address for life in found] == [0x30000, 0x60000] * 2


def test_a_step_s_activations_are_without_workspaces(watch: Watch) -> None:
    read = read_memory(watch, 1, WITH_GRADIENTS, WEIGHTS)
    assert read.peak.workspaces == 2 * WORKSPACE
    assert read.peak.activations == 2 * WORKSPACE, "two results that are as large"
    assert read.peak.gradients == read.peak.parameters == 2 * BLOCK, "by blocks"
    assert read.peak.total == 4 * WORKSPACE + 5 * BLOCK
    assert read.steady.workspaces == 0 and read.ends_known


def test_blocks_of_512_bytes_are_neither_a_leak_nor_a_buffer(watch: Watch) -> None:
    """Names count bytes and the allocator blocks; a scalar that stays takes one."""
    read = read_memory(watch, 1, WITH_GRADIENTS, WEIGHTS)
    assert read.rounding_bytes == 2 * BLOCK - 1000 and read.previous_steady_bytes == 3 * BLOCK
    plan = ModelStates(parameters=1000, gradients=1000, optimizer_states=0)
    for held in memory_totals(0, read, plan, [], on_cpu=False):
        assert held.error == 0, held


@pytest.mark.parametrize(
    ("config", "num_bytes"), [(":4096:8", WORKSPACE), (":16:8:4096:2", 128 * KIB + 8192 * KIB), ("", 0), ("all", 0)]
)
def test_what_the_variable_asks_for(config: str, num_bytes: int) -> None:
    assert cublas_workspace_bytes(config) == num_bytes


@pytest.mark.parametrize("name", ["megatron", "megatron-gpt"])
def test_random_states_of_megatron_are_the_host_s(name: str) -> None:
    """They were declared on CUDA too, whose allocator has none of them: 15 kB less than planned, and a failure."""
    case = make_case(name, Layout(tp=2), workload=workload("gpt-mini"))
    adapter = load_adapter(builtin_adapters()[name])
    (there,), (here,) = (declare(adapter, case, [0], device).extra_memory for device in ("cuda", "cpu"))
    assert sum(one.num_bytes for one in here if one not in there) == 3 * 5056
    assert all("random" not in one.reason for one in there if one.category == "steady")


# A GPU that computes what the host has queued, in order, on a clock that is simulated.


class Queue:
    """`launch` takes the host ten microseconds; the GPU takes `kernel` for it, and begins when it is free."""

    def __init__(self, kernel: float) -> None:
        self.kernel, self.host, self.free, self.most, self.started = kernel, 0.0, 0.0, 0, list[float]()

    def launch(self) -> None:
        self.host += 10e-6
        self._run(self.kernel)

    def sleep(self, cycles: int) -> None:
        self._run(cycles / 2e9)

    def _run(self, seconds: float) -> None:
        self.free = max(self.free, self.host) + seconds
        self.started = [end for end in self.started if end > self.host] + [self.free]
        self.most = max(self.most, len(self.started))


@pytest.mark.parametrize("kernel", [2e-6, 30e-6, 5e-3])
def test_a_call_shorter_than_its_launch_is_timed_by_the_gpu(kernel: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was timed by the host: 10 microseconds for 2."""
    queue = Queue(kernel)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = max(queue.free, queue.host)

        def synchronize(self) -> None:
            queue.host = max(queue.host, queue.free)

        def elapsed_time(self, other: Event) -> float:
            return 1e3 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "_sleep", queue.sleep)
    bench = Bench(device=torch.device("cuda"))
    assert bench.seconds(queue.launch, 0.05) == pytest.approx(kernel, rel=1e-6)
    assert bench.collective_seconds(queue.launch) == pytest.approx(kernel, rel=1e-6)
    assert queue.most <= 1024, "more than a queue holds"


def test_a_sample_lasts_a_millisecond_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, samples = [0.0], list[float]()
    ticking = SimpleNamespace(process_time=lambda: clock[0], perf_counter=lambda: clock[0])
    monkeypatch.setattr(microbenchmarks, "time", ticking)
    sample = Bench._sample

    def noted(bench: Bench, run: Any, inner: int, *, alone: bool = False) -> float:  # noqa: ANN401
        samples.append(sample(bench, run, inner, alone=alone))
        return samples[-1]

    def run() -> None:
        clock[0] += 1e-6

    monkeypatch.setattr(Bench, "_sample", noted)
    assert Bench(device=torch.device("cpu")).seconds(run, 0.01) == pytest.approx(1e-6)
    assert Bench(device=torch.device("cpu")).collective_seconds(run) == pytest.approx(1e-6)
    short = [seconds for seconds in samples if seconds < 0.999e-3]
    assert len(short) == 2, "but for the first of each, which tells how many"


def test_how_memory_is_handed_out_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert allocator_settings() == "PyTorch's defaults"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert allocator_settings() == "PYTORCH_ALLOC_CONF=expandable_segments:True"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert kernels.effective_settings()["allocator"].endswith("expandable_segments:True")
