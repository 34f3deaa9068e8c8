"""How ranks start: what a framework does when imported reaches no other; torchrun's outcomes are the default's."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import hashlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import BuiltinFunctionType, FunctionType

import psutil
import pytest
import torch

from meshmark import rank_progress
from meshmark.adapter.registry import builtin_adapters
from meshmark.environment import threads_of_ranks
from meshmark.errors import InputError, MeshmarkError, NoSpaceError
from meshmark.launch import fork_server, launch
from meshmark.launch.cluster import Cluster, ClusterSpec
from meshmark.launch.folders import import_folder, private_base, private_caches, private_folder
from meshmark.launch.fork_server import LAUNCHER, LOST_EXIT_CODE, ForkServer
from meshmark.launch.launch import (
    LAUNCHERS,
    ForkedRanks,
    ForkserverLauncher,
    Launcher,
    TorchrunLauncher,
    process_environment,
)
from meshmark.launch.rank import RankInfo
from meshmark.passes.clauses import live_bytes
from meshmark.pytest_plugin.selection import unheeded
from meshmark.records.record import Record, Status
from meshmark.records.request import Request, Task
from meshmark.run.runner import Runner, RunOptions
from meshmark.spec.case import Case
from meshmark.spec.layout import Layout
from meshmark.spec.workload import workload
from tests.broken.outcomes import KillsServer
from tests.test_orphans import wait_until

ACCIDENTS = {
    name.lower(): f"tests.broken.outcomes:{name}"
    for name in (
        "Raises",
        "Killed",
        "ExitsEarly",
        "LeavesDaemon",
        "StopsServer",
        "KillsServer",
        "KillsServerAtTheEnd",
        "Freezes",
        "WritesToFullDisk",
        "FillsDisk",
    )
}
ADAPTERS = builtin_adapters() | ACCIDENTS


def test_another_environment_gets_no_packages_of_meshmark_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed as a package, Meshmark put its whole site-packages before those of the environment that was named."""
    assert import_folder("python") == str(Path(__file__).parents[1]), "a checkout has no packages beside it"
    installed = tmp_path / "site-packages" / "meshmark"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("NAME = 'meshmark'\n")
    (installed.parent / "others.py").touch()
    monkeypatch.setattr("meshmark.__file__", str(installed / "__init__.py"))
    assert import_folder(sys.executable) == ""
    asks = "import importlib.util, meshmark; print(meshmark.NAME, importlib.util.find_spec('others'))"
    there = {"PYTHONPATH": import_folder("/environments/other/bin/python")}
    command = [sys.executable, "-S", "-c", asks]
    found = subprocess.run(command, env=there, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout == "meshmark None\n"


def make_case(adapter: str) -> Case:
    return Case(adapter=adapter, workload=workload("gpt-mini"), layout=Layout(dp=2, num_micro_batches=2))


def make_request(adapter: str) -> Request:
    return Request(
        case=make_case(adapter),
        adapter=ADAPTERS[adapter],
        task=Task.TIME,
        device="cpu",
        backend="gloo",
        steps=4,
        time_limit_seconds=120,
    )


def wait_for_exit(server: ForkServer, pid: int, seconds: float = 60) -> int:
    deadline = time.monotonic() + seconds
    while (code := server.exit_code(pid)) is None:
        assert time.monotonic() < deadline
        server.listen(1)
    return code


# The server.


@pytest.fixture
def server() -> Iterator[ForkServer]:
    with contextlib.closing(ForkServer.start(process_environment(ClusterSpec(), Task.OBSERVE), [])) as started:
        started.await_ready("nothing", seconds=60)
        yield started


def test_every_way_to_end_is_told(server: ForkServer) -> None:
    ends = {
        server.call(time.sleep, 0): 0,
        server.call(int, "no number"): 1,
        server.call(os._exit, 3): 3,
        server.call(signal.raise_signal, signal.SIGKILL): -signal.SIGKILL,
        server.call(signal.raise_signal, signal.SIGTERM): -signal.SIGTERM,
    }
    assert {pid: wait_for_exit(server, pid) for pid in ends} == ends


def test_a_number_that_the_kernel_gives_out_again_is_a_new_process(server: ForkServer) -> None:
    """A rank was said to be killed as soon as it started: an earlier one had its number, and had been killed."""
    server._exit_codes = dict.fromkeys(range(1, 2**22), -signal.SIGKILL)
    pid = server.call(time.sleep, 0.5)
    assert server.exit_code(pid) is None
    assert wait_for_exit(server, pid) == 0


def raise_into_a_full_disk() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_rank_that_cannot_say_why_it_ended_has_failed_and_takes_nothing_with_it(server: ForkServer) -> None:
    """It took itself for the server and, since nobody spoke to it, the launcher for gone: and removed its folders."""
    with private_folder() as folder:
        assert wait_for_exit(server, server.call(raise_into_a_full_disk)) == 1
        assert folder.is_dir() and server.serves()


def test_a_branch_has_its_environment_and_modules_and_the_trunk_neither(server: ForkServer, tmp_path: Path) -> None:
    branch = server.branch({"MESHMARK_TEST_BRANCH": "here"}, ["colorsys", "no_such_module_at_all"])
    branch.await_ready("colorsys", seconds=60)
    seen = {}
    for name, one in (("branch", branch), ("trunk", server)):
        code = f"import os, sys; print('colorsys' in sys.modules, os.environ.get('MESHMARK_TEST_BRANCH'), file=open({str(tmp_path / name)!r}, 'w'))"  # noqa: E501
        assert wait_for_exit(one, one.call(exec, code)) == 0
        seen[name] = (tmp_path / name).read_text().strip()
    assert seen == {"branch": "True here", "trunk": "False None"}


@pytest.mark.skipif(not os.access("/proc/sys/kernel/ns_last_pid", os.W_OK), reason="only root chooses process numbers")
def test_a_number_that_has_gone_to_another_process_is_left_alone(server: ForkServer, tmp_path: Path) -> None:
    """Numbers come round within minutes where many processes start: a rank that ended early had another's killed."""
    pid = server.call(time.sleep, 0)
    assert wait_for_exit(server, pid) == 0
    info = RankInfo(rank=0, local_rank=0, local_world_size=1, world_size=1, host="", port=0, prefix="", folder=tmp_path)
    for _ in range(200):  # others start processes meanwhile
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        if (other := subprocess.Popen(["sleep", "60"], start_new_session=True)).pid == pid:
            break
        other.kill()
        other.wait()
    assert other.pid == pid
    try:
        ranks = ForkedRanks(server, make_request("ddp"), [info])
        ranks._pids = {0: pid}
        assert ranks.end() == []
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_what_a_dead_server_forked_counts_as_lost(server: ForkServer) -> None:
    pid = server.call(time.sleep, 600)
    os.kill(server.pid, signal.SIGKILL)
    assert wait_for_exit(server, pid) == LOST_EXIT_CODE
    with pytest.raises((MeshmarkError, OSError)):
        server.call(time.sleep, 0)
    for _ in range(100):
        if not psutil.pid_exists(pid):
            return
        time.sleep(0.1)
    raise AssertionError("the fork outlived its server")


def test_an_import_that_takes_too_long_is_an_error_and_no_process(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "sleeps_for_ever.py").write_text("import time\ntime.sleep(600)\n")
    path = process_environment(ClusterSpec(), Task.OBSERVE) | {
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    }
    slow = ForkServer.start(path, ["sleeps_for_ever"])
    with pytest.raises(MeshmarkError, match="importing sleeps_for_ever took longer than 2 s"):
        slow.await_ready("sleeps_for_ever", seconds=2)
    assert not psutil.pid_exists(slow.pid)


# One framework's import.


@pytest.fixture(scope="module")
def launcher() -> Iterator[ForkserverLauncher]:
    with Cluster(ClusterSpec()) as cluster, contextlib.closing(ForkserverLauncher(cluster)) as started:
        yield started


def look_around(file: Path) -> None:
    """In a rank's process: which frameworks are there, and a digest of every function and class that PyTorch holds."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name == "torch" or name.startswith("torch."):
            for key, value in vars(module).items():
                if issubclass(type(value), type | FunctionType | BuiltinFunctionType):  # asks no lazy object anything
                    found[f"{name}.{key}"] = digest(value)
    known = {"deepspeed", "accelerate", "fairscale", "megatron"}
    frameworks = sorted(known & {name.partition(".")[0] for name in sys.modules})
    file.write_text(json.dumps([frameworks, os.environ.get("DS_ACCELERATOR"), found]))


def digest(value: object) -> str:
    """Where a function or class is from; also of a class's own methods, which is what gets patched."""
    if isinstance(value, type) and value.__module__.startswith("torch"):
        methods = sorted((k, origin(v)) for k, v in vars(value).items() if callable(v))
        return hashlib.sha256(repr(methods).encode()).hexdigest()[:12]
    return origin(value)


def origin(value: object) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"


def surroundings(
    launcher: ForkserverLauncher, adapter: str, file: Path
) -> tuple[list[str], str | None, dict[str, str]]:
    server = launcher._server(make_request(adapter))
    assert wait_for_exit(server, server.call(look_around, file)) == 0
    frameworks, accelerator, torch_holds = json.loads(file.read_text())
    return frameworks, accelerator, torch_holds


@pytest.mark.slow
def test_a_framework_reaches_the_ranks_of_its_own_adapters_alone(launcher: ForkserverLauncher, tmp_path: Path) -> None:
    """DeepSpeed and Megatron change PyTorch (its AdamW) when they are imported; Accelerate and FairScale do not."""
    before = surroundings(launcher, "ddp", tmp_path / "before")
    deepspeed = surroundings(launcher, "deepspeed", tmp_path / "deepspeed")
    megatron = surroundings(launcher, "megatron", tmp_path / "megatron")
    assert deepspeed[:2] == (["deepspeed"], "cpu")
    assert megatron[:2] == (["megatron"], None)
    for framework in (deepspeed, megatron):
        changed = {name for name, value in before[2].items() if framework[2].get(name, value) != value}
        assert "torch.optim.AdamW" in changed, "the servers are kept apart for nothing?"
    assert surroundings(launcher, "ddp", tmp_path / "after") == before
    assert before[:2] == ([], None)


def train_a_little(file: Path) -> None:
    """In a rank's process: how many modules the first optimizer and the first profile import."""
    import torch
    import torch.profiler

    before = set(sys.modules)
    with torch.profiler.profile():
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.AdamW([weight])
        weight.sum().backward()
        optimizer.step()
    file.write_text(json.dumps([float(weight.detach()), len(set(sys.modules) - before)]))


def test_what_every_rank_imports_is_there_before_it_is_forked(launcher: ForkserverLauncher, tmp_path: Path) -> None:
    """Two hundred modules of `torch._dynamo` would be half of a small rank's time."""
    server = launcher._server(make_request("ddp"))
    assert wait_for_exit(server, server.call(train_a_little, tmp_path / "told")) == 0
    weight, num_imported = json.loads((tmp_path / "told").read_text())
    assert weight < 1 and num_imported < 20


def test_a_launch_leaves_this_process_s_environment_alone(launcher: ForkserverLauncher) -> None:
    before = dict(os.environ)
    sharded = Layout(dp=2, zero_stage=1, num_micro_batches=2)
    case = dataclasses.replace(make_case("deepspeed"), layout=sharded)
    launched = launcher.launch(dataclasses.replace(make_request("deepspeed"), case=case, steps=2), 2)
    assert not launched.failures, launched.failures[0].message
    assert dict(os.environ) == before


def test_variables_of_ranks_are_theirs_unless_the_user_set_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    told = process_environment(ClusterSpec(), Task.OBSERVE)
    assert (told["OMP_NUM_THREADS"], told["GLOO_SOCKET_IFNAME"], told["TP_SOCKET_IFNAME"]) == ("1", "lo", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert process_environment(ClusterSpec(), Task.OBSERVE)["OMP_NUM_THREADS"] == "3"
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")  # changes what is sent: adapters were blamed for it
    assert process_environment(ClusterSpec(), Task.OBSERVE)["TORCH_DISTRIBUTED_DEBUG"] == "OFF"
    here = socket.gethostbyname(socket.gethostname())  # gloo takes the device that leads to node 0
    told = process_environment(ClusterSpec(nnodes=2, rdzv=f"{here}:29000"), Task.OBSERVE)
    assert told["GLOO_SOCKET_IFNAME"] in {name for _, name in socket.if_nameindex()}
    nowhere = ClusterSpec(nnodes=2, rdzv="no-such-host.invalid:29000")
    assert "GLOO_SOCKET_IFNAME" not in process_environment(nowhere, Task.OBSERVE)


CONFIGURING = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_DYNAMO_BACKEND": "EAGER",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "LT_PRECISION": "bf16-true",
    "HOROVOD_FUSION_THRESHOLD": "0",
}
PLACING = {"OMPI_COMM_WORLD_RANK": "3", "PMI_RANK": "3", "SLURM_PROCID": "3"}


def test_a_shell_configures_no_framework_and_places_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters were blamed for each of these. What a user asked for so is told."""
    for name, value in (CONFIGURING | PLACING | {"MY_OWN": "1"}).items():
        monkeypatch.setenv(name, value)
    found = process_environment(ClusterSpec(), Task.OBSERVE)
    assert not found.keys() & (CONFIGURING | PLACING).keys() and found["MY_OWN"] == "1"
    (warning,) = unheeded(os.environ)
    assert all(name in warning for name in CONFIGURING) and "SLURM_PROCID" not in warning
    assert unheeded({"MY_OWN": "1"}) == []


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"])
def test_a_network_interface_that_is_not_here_is_the_user_s_mistake(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "lo,eth99")
    with pytest.raises(InputError, match=rf"{variable}=lo,eth99 .*'eth99'.*expected some of .*lo"):
        process_environment(ClusterSpec(), Task.OBSERVE)


@pytest.mark.parametrize("text", ["1,1", "0", "two", "-1"])
def test_threads_that_are_no_whole_number_are_the_user_s_mistake(text: str) -> None:
    with pytest.raises(InputError, match="OMP_NUM_THREADS=.*expected a whole number of at least 1"):
        threads_of_ranks({"OMP_NUM_THREADS": text})
    assert threads_of_ranks({}) == threads_of_ranks({"OMP_NUM_THREADS": ""}) == 1


@pytest.mark.parametrize(("task", "cached"), [(Task.OBSERVE, True), (Task.ENDURE, False)])
def test_what_is_freed_is_in_use_no_more_where_growth_is_measured(
    launcher: ForkserverLauncher, tmp_path: Path, task: Task, cached: bool
) -> None:
    """Otherwise the C library keeps it for the thread, and counts it."""
    server = launcher._server(dataclasses.replace(make_request("ddp"), task=task))
    wait_for_exit(server, server.call(_tell_whether_freed_is_in_use, str(tmp_path / "told")))
    assert json.loads((tmp_path / "told").read_text()) is cached


def _tell_whether_freed_is_in_use(path: str) -> None:
    """In a thread, which begins with nothing cached."""
    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    found = []

    def allocate() -> None:
        library.free(library.malloc(808))  # so that what calling takes is there
        before = live_bytes(torch.device("cpu"))
        for piece in [library.malloc(1000) for _ in range(5)]:
            library.free(piece)
        found.append(live_bytes(torch.device("cpu")) - before > 4000)

    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    Path(path).write_text(json.dumps(found[0]))


def test_a_user_s_own_tunables_of_the_c_library_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")
    assert process_environment(ClusterSpec(), Task.OBSERVE)["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=2"
    told = process_environment(ClusterSpec(), Task.ENDURE)["GLIBC_TUNABLES"]
    assert told == "glibc.malloc.arena_max=2:glibc.malloc.tcache_count=0"


def test_a_server_that_was_killed_is_started_anew(launcher: ForkserverLauncher) -> None:
    killed = launcher._server(make_request("ddp"))
    os.kill(killed.pid, signal.SIGKILL)
    wait_for_exit(killed, -1)
    launched = launcher.launch(make_request("ddp"), 2)
    assert not launched.failures, launched.failures[0].message
    assert launcher._server(make_request("ddp")) is not killed


def test_a_server_that_is_stopped_costs_no_case(launcher: ForkserverLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    """How its ranks end is seen without it; then it is ended, and the next case has another."""
    monkeypatch.setattr(fork_server, "_STOPPED_SECONDS", 0.5)
    launched = launcher.launch(make_request("stopsserver"), 2)
    assert not launched.failures and len(launched.reports) == 2, launched.failures
    stopped = next(iter(launcher._servers.values()))
    assert psutil.Process(stopped.pid).status() == psutil.STATUS_STOPPED
    launched = launcher.launch(make_request("ddp"), 2)
    assert not launched.failures, launched.failures[0].message
    assert not psutil.pid_exists(stopped.pid) or psutil.Process(stopped.pid).status() == psutil.STATUS_ZOMBIE


def test_a_server_that_is_killed_is_no_fault_of_the_ranks(launcher: ForkserverLauncher) -> None:
    launched = launcher.launch(make_request("killsserver"), 2)
    assert {failure.kind for failure in launched.failures} == {Status.UNFINISHED}, launched.failures
    assert "what starts ranks was killed" in launched.failures[0].message
    left = [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == KillsServer.STARTED]
    assert not left


def test_a_server_that_is_killed_once_ranks_have_reported_is_no_fault_of_theirs(launcher: ForkserverLauncher) -> None:
    launched = launcher.launch(make_request("killsserverattheend"), 2)
    assert {failure.kind for failure in launched.failures} == {Status.UNFINISHED}, launched.failures
    assert "what starts ranks was killed" in launched.failures[0].message


def test_a_rank_that_finds_a_disk_full_is_no_fault_of_its_framework(launcher: ForkserverLauncher) -> None:
    first = launcher.launch(make_request("writestofulldisk"), 2).failures[0]
    assert (first.kind, first.rank, first.message) == (Status.NO_SPACE, 1, "RuntimeError: could not save")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_is_told_before_a_launch_and_after(
    launcher: ForkserverLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", tmp_path], check=True)
    try:
        launched = launcher.launch(make_request("fillsdisk"), 2)
        assert launched.failures[0].kind == Status.NO_SPACE, launched.failures
        assert f"before it could report, and '{tmp_path}' is full" in launched.failures[0].message
        assert not list(tmp_path.iterdir())
        (tmp_path / "other").write_bytes(bytes(5 * 2**20))
        with pytest.raises(NoSpaceError, match="a launch needs 16,777,216"):
            launcher.launch(make_request("ddp"), 2)
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


@pytest.mark.slow
def test_a_report_larger_than_files_may_be_is_no_fault_of_the_framework() -> None:
    """`ulimit -f` ended the rank, which had *exited before it could report*."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Cluster(ClusterSpec()) as cluster, contextlib.closing(ForkserverLauncher(cluster)) as own:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # its processes inherit it
        try:
            launched = own.launch(dataclasses.replace(make_request("ddp"), task=Task.OBSERVE), 2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert launched.failures[0].kind == Status.NO_SPACE, launched.failures
    assert "what it measured cannot be written: OSError: [Errno 27]" in launched.failures[0].message


FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.mark.skipif(not os.access(FREEZER, os.W_OK), reason="needs root and the freezer of control groups")
def test_a_rank_that_cannot_be_killed_is_told_and_left_behind(
    launcher: ForkserverLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "KILL_SECONDS", 1.0)
    group = FREEZER / f"meshmark-test-{os.getpid()}"
    group.mkdir()
    try:
        started = time.monotonic()
        launched = launcher.launch(dataclasses.replace(make_request("freezes"), time_limit_seconds=5), 2)
        assert time.monotonic() - started < 5 + 12
        first = launched.failures[0]
        assert (first.kind, first.rank) == (Status.UNKILLABLE, 1), first
        assert f"process {int((group / 'cgroup.procs').read_text())} outlived SIGKILL" in first.message
        assert not launcher.launch(make_request("ddp"), 2).failures, "the run goes on beside it"
    finally:
        (group / "freezer.state").write_text("THAWED")
        wait_until(lambda: not (group / "cgroup.procs").read_text(), seconds=10)
        group.rmdir()


# torchrun.


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


def observe(launcher: Launcher, results: Path) -> Record:
    running = Runner(launcher, ADAPTERS, RunOptions(observed_steps=3), results)
    record = running.observe(make_case("ddp"))
    running.close()
    return record


@pytest.fixture(scope="module")
def torchrun() -> Iterator[TorchrunLauncher]:
    with Cluster(ClusterSpec()) as cluster, contextlib.closing(TorchrunLauncher(cluster)) as started:
        yield started


@pytest.fixture
def nothing_left(torchrun: TorchrunLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = descendants()
    with private_caches():  # of what this process imports meanwhile
        yield
    assert len(descendants() - before) <= 1, "the server alone"
    assert [path for path in tmp_path.iterdir() if path != private_base(tmp_path)] == []


def descendants() -> set[int]:
    """Also those that have another parent by now: they inherit the server's environment."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(LAUNCHER) == str(os.getpid()) and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
    return found


@contextlib.contextmanager
def listening() -> Iterator[dict[str, set[str]]]:
    """Addresses that ranks of torchrun, and others that descend from here, listen at meanwhile."""
    found: dict[str, set[str]] = {}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            for pid in descendants():
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(pid)
                    kind = "rank" if "meshmark.launch.rank" in process.cmdline()[2:4] else "other"
                    open_ = [c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
                    found.setdefault(kind, set()).update(open_)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        over.set()
        watcher.join()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
def test_torchrun_s_record_is_the_forkserver_s_and_nobody_listens_but_gloo(
    launcher: ForkserverLauncher, torchrun: TorchrunLauncher, results: Path
) -> None:
    """But for times. The noise floor is measured once, by the first. A rank of gloo listens for its peers, on the
    loopback device alone; the agent on nothing."""
    first = observe(launcher, results)
    with listening() as listened:
        second = observe(torchrun, results)
    assert second.outcome.status is Status.OK, second.outcome.message + second.outcome.log_tail
    for part in ("training", "equivalence", "traffic", "memory", "conformance", "verdicts"):
        assert getattr(first, part) == getattr(second, part), part
    assert len(first.training.losses) == 3 and len(first.traffic.readings) == 2
    assert first.conformance.digests and first.verdicts
    assert listened["rank"] and listened["rank"] <= {"127.0.0.1", "::1"}, listened
    assert listened["other"] == set()


def run(torchrun: TorchrunLauncher, adapter: str, results: Path, limit: float = 120) -> Record:
    running = Runner(torchrun, ADAPTERS, RunOptions(timed_steps=4, time_limit_seconds=limit), results)
    record = running.time(make_case(adapter))
    running.close()
    return record


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
def test_torchrun_s_failures_are_told_as_the_forkserver_s(torchrun: TorchrunLauncher, results: Path) -> None:
    outcome = run(torchrun, "raises", results).outcome
    assert (outcome.status, outcome.rank) == (Status.RAISED, 1), outcome.message + outcome.log_tail
    assert "ArithmeticError: planted in step 3" in outcome.message
    assert "in happen" in outcome.traceback and "about to raise" in outcome.log_tail


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
def test_a_hang_under_torchrun_ends_at_the_limit_with_stacks_and_its_processes(
    torchrun: TorchrunLauncher, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what it has put into a session of its own. Six seconds of silence are a hang here: on a busy machine, ranks
    may import for most of the limit before they hang.
    """
    monkeypatch.setattr(rank_progress, "LAST_PART", 0.1)
    record = run(torchrun, "leavesdaemon", results, limit=60)
    assert record.outcome.status is Status.HUNG, record.outcome.message
    assert set(record.outcome.stacks) == {0, 1}
    assert all("launch/rank.py" in stack for stack in record.outcome.stacks.values())


@pytest.mark.parametrize(
    "asked, given",
    [
        ("", ""),
        ("error", "default"),
        ("ignore,error::DeprecationWarning", "ignore,default::DeprecationWarning"),
        ("ignore:error in it", "ignore:error in it"),
    ],
)
def test_a_framework_s_warning_is_no_error(asked: str, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", asked)
    assert process_environment(ClusterSpec(), Task.OBSERVE)["PYTHONWARNINGS"] == given


@pytest.mark.usefixtures("nothing_left")
def test_torchrun_itself_failing_is_told_with_its_log(
    torchrun: TorchrunLauncher, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "none")
    monkeypatch.setenv("PET_MAX_RESTARTS", "many")
    torchrun.close()  # its server has the environment of when it was started
    outcome = run(torchrun, "ddp", results).outcome
    assert outcome.status is Status.UNFINISHED and "failed before they began" in outcome.message
    assert "PET_MAX_RESTARTS" in outcome.log_tail or "many" in outcome.log_tail, outcome.log_tail


def test_torchrun_runs_on_one_node_alone() -> None:
    with pytest.raises(InputError, match="it runs on one"):
        TorchrunLauncher(Cluster(ClusterSpec(nnodes=2, rdzv="10.0.0.1:29000")))


@pytest.mark.slow
def test_a_launcher_that_does_not_exist_is_a_usage_error(tmp_path: Path) -> None:
    assert set(LAUNCHERS) == {"forkserver", "torchrun"}
    command = [sys.executable, "-m", "pytest", "suites", "--launcher", "magic", "--results", str(tmp_path)]
    done = subprocess.run(
        command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "magic" in done.stderr and "forkserver, torchrun" in done.stderr
