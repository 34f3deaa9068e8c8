"""Another user of the machine, or of the network, gets into no run."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import pwd
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from meshmark.errors import ClusterError
from meshmark.launch.cluster import Cluster, ClusterSpec, listen
from meshmark.launch.fork_server import ForkServer
from meshmark.launch.launch import process_environment
from meshmark.launch.rank import RankInfo, perform
from meshmark.launch.store import RunStore, StoreServer, run_secret
from meshmark.records.rank_report import RankFailure
from meshmark.records.record import Status
from meshmark.records.request import Task
from tests.test_launchers import make_request
from tests.test_orphans import heed_signals, processes_of, wait_until

ROOT = Path(__file__).parent.parent
SECRET = b"known to this run alone"
SECOND = timedelta(seconds=1)


# One node.


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[psutil.Process]]:
    """The processes of a run on one node whose rank 1 hangs, two ranks among them; its files are in a folder of its
    own that all may enter."""
    folder = tmp_path_factory.mktemp("run")
    target = ROOT / "tests" / "broken" / "outcomes.py"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "suites/test_throughput.py",
        "--workload",
        "gpt-mini",
        "--adapter",
        f"{target}:Hangs",
        "--results",
        str(folder / "results"),
        "--timing-budget=0",
        "-p",
        "no:cacheprovider",
    ]
    (folder / "tmp").mkdir(mode=0o777)
    environment = {
        **os.environ,
        "TMPDIR": str(folder / "tmp"),
        "MESHMARK_TEST": str(folder),
        "MESHMARK_TEST_HANGS": str(folder / "hangs"),
    }
    running = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        preexec_fn=heed_signals,
    )
    try:
        wait_until((folder / "hangs").exists, seconds=120)
        yield processes_of(str(folder))
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait(timeout=60)


def private_files(processes: list[psutil.Process]) -> list[Path]:
    """Return the files that ranks meet in and leave."""
    # pytest's own: a rank's is within it, and may have a lower number, where numbers have begun anew.
    temporary = min((Path(each.environ()["TMPDIR"]) for each in processes), key=lambda path: len(path.parts))
    return [path for folder in temporary.glob("meshmark-*") for path in (folder, *folder.iterdir())]


def test_ranks_of_one_node_meet_in_a_folder_of_this_user_alone(hanging: list[psutil.Process]) -> None:
    folder, *files = private_files(hanging)
    assert "store" in {file.name for file in files}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.stat().st_uid == os.geteuid()


def test_a_run_on_one_node_listens_on_no_port_but_gloos(hanging: list[psutil.Process]) -> None:
    """A rank of gloo listens on one, for its peers, of the loopback device alone; nobody else on any."""
    listening = {
        process.pid: [c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        for process in hanging
    }
    ranks = {p.pid for p in hanging if p.pid == os.getsid(p.pid) and listening[p.pid]}
    assert len(ranks) == 2, listening
    assert all(set(listening[rank]) <= {"127.0.0.1", "::1"} for rank in ranks), listening
    assert not any(addresses for pid, addresses in listening.items() if pid not in ranks), listening


def as_nobody(folder: Path, act: Callable[[], str]) -> str:
    """Return what `act` returns in a process of the user `nobody`."""
    queue = multiprocessing.get_context("fork").SimpleQueue()

    def child() -> None:
        nobody = pwd.getpwnam("nobody")
        os.setgroups([])
        os.setgid(nobody.pw_gid)
        os.setuid(nobody.pw_uid)
        queue.put(act())

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    said: str = queue.get()
    process.join()
    return said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_reads_and_writes_nothing_of_a_run(hanging: list[psutil.Process], tmp_path: Path) -> None:
    folder, *files = private_files(hanging)
    parents = [parent for parent in folder.parents if parent != Path("/")]
    modes = {parent: parent.stat().st_mode for parent in parents}

    def attack() -> str:
        assert os.access(folder.parent, os.R_OK | os.X_OK), "the folder itself must be what stops it"
        got = []
        for file in files:
            with contextlib.suppress(PermissionError):
                got.append(file.read_bytes())
        with contextlib.suppress(PermissionError):
            (folder / "mine").touch()
            got.append(b"wrote")
        with contextlib.suppress(RuntimeError, OSError):
            dist.FileStore(str(folder / "store")).set("key", "value")
            got.append(b"joined")
        return f"{len(files)} files tried, got {got}"

    try:
        for parent in parents:  # pytest's own temporary folders are private too
            parent.chmod(modes[parent] | 0o755)
        assert as_nobody(tmp_path, attack) == f"{len(files)} files tried, got []"
    finally:
        for parent in parents:
            parent.chmod(modes[parent])


def test_a_server_imports_nothing_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is a stranger's where somebody works in a folder that all may write to, and whose code would run."""
    (tmp_path / "numpy.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(ForkServer.start(process_environment(ClusterSpec(), Task.OBSERVE), ["numpy"])) as server:
        server.await_ready("numpy", seconds=60)
    assert not (tmp_path / "ran").exists()


# Several nodes.


@pytest.fixture
def server() -> Iterator[StoreServer]:
    serving = StoreServer(socket.create_server(("127.0.0.1", 0)), SECRET)
    yield serving
    serving.close()


@pytest.fixture
def connect(server: StoreServer) -> Iterator[Callable[[], RunStore]]:
    """Connections to it, closed in the end."""
    made: list[RunStore] = []

    def one() -> RunStore:
        made.append(RunStore("127.0.0.1", server.port, SECRET, SECOND))
        return made[-1]

    yield one
    for store in made:
        store.close()


def test_the_store_keeps_what_process_groups_ask_of_one(connect: Callable[[], RunStore]) -> None:
    mine, other = connect(), connect()
    wrapped = dist.PrefixStore("a", mine)
    wrapped.set("key", b"\x00\xff")
    assert other.get("a/key") == b"\x00\xff"
    assert (other.add("number", 3), mine.add("number", -1)) == (3, 2)
    assert mine.compare_set("new", "", "first") == b"first"
    assert mine.compare_set("new", "other", "second") == b"first"
    assert mine.compare_set("new", "first", "second") == b"second"
    assert mine.check(["new", "number"]) and not mine.check(["new", "absent"])
    assert mine.delete_key("new") and not mine.delete_key("new")
    assert other.num_keys() == 2


def test_a_wait_ends_with_the_key_or_in_time_and_holds_nobody_up(connect: Callable[[], RunStore]) -> None:
    store = connect()
    threading.Timer(0.3, lambda: store.set("late", "there")).start()
    assert store.get("late") == b"there"
    started = time.monotonic()
    with pytest.raises(ClusterError, match="nobody wrote \\['never'\\].*within 1 s"):
        store.get("never")
    assert time.monotonic() - started < 3


def test_who_does_not_know_the_secret_is_told_nothing(server: StoreServer, connect: Callable[[], RunStore]) -> None:
    connect().set("key", "value")
    with pytest.raises(ClusterError, match="has a different secret"):
        RunStore("127.0.0.1", server.port, b"a guess of sixteen", SECOND)
    with pytest.raises((RuntimeError, dist.DistNetworkError)):  # what reads, writes and lists a TCPStore
        dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=SECOND).get("key")
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as peer:
        peer.sendall(bytes(64) + b'{"what": "get", "key": "key"}')
        said = bytearray()
        with contextlib.suppress(ConnectionResetError):
            while part := peer.recv(4096):
                said += part
    assert len(said) == 48, "a greeting and a number, then the connection is closed"
    assert connect().get("key") == b"value"


def test_node_0_tells_of_a_node_that_holds_another_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had waited for it without a word, while the other node told why to its own user alone."""
    monkeypatch.setattr("meshmark.launch.cluster._JOIN_SECONDS", 2)
    monkeypatch.setenv("MESHMARK_RDZV_SECRET", SECRET.decode())
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    stranger = threading.Timer(0.5, lambda: _come_with_another_secret(port))
    stranger.start()
    with pytest.raises(ClusterError, match=r"node 1 of 2 did not answer.*\(from 127.0.0.1 somebody came who holds"):
        Cluster(ClusterSpec(nnodes=2, node_rank=0, rdzv=f"127.0.0.1:{port}")).__enter__()
    stranger.join()


def _come_with_another_secret(port: int) -> None:
    with contextlib.suppress(ClusterError):
        RunStore("127.0.0.1", port, b"a guess of sixteen", SECOND)


def test_a_proof_that_was_overheard_is_worth_nothing(server: StoreServer) -> None:
    """A new connection has new numbers."""
    heard: list[bytes] = []

    def relay(listener: socket.socket) -> None:
        peer, _ = listener.accept()
        with peer, socket.create_connection(("127.0.0.1", server.port)) as real:
            peer.sendall(real.recv(48))
            heard.append(peer.recv(64))
            real.sendall(heard[0])
            peer.sendall(real.recv(32))

    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=relay, args=(listener,))
    thread.start()
    RunStore("127.0.0.1", listener.getsockname()[1], SECRET, SECOND).close()
    thread.join()
    listener.close()
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as peer:
        assert len(peer.recv(48)) == 48
        peer.sendall(heard[0])
        assert peer.recv(32) == b""


@pytest.mark.parametrize(
    "says",
    [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"meshmark store 1" + bytes(32 + 32)],
    ids=["nothing", "http", "without the secret"],
)
def test_a_foreign_listener_is_found_out(says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says nothing, another program's, and one that plays the store without the secret."""
    monkeypatch.setattr("meshmark.launch.store._PROVE_SECONDS", 2.0)
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        peer, _ = listener.accept()
        with peer:
            peer.sendall(says)
            with contextlib.suppress(OSError):
                peer.recv(64)

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(ClusterError, match="is not this run's store"):
        RunStore("127.0.0.1", listener.getsockname()[1], SECRET, SECOND)
    thread.join()
    listener.close()


def test_a_message_of_absurd_size_ends_its_connection_alone(connect: Callable[[], RunStore]) -> None:
    store = connect()
    store._peer.sendall((2**62).to_bytes(8, "big"))
    with pytest.raises(ClusterError):
        store.get("key")
    connect().set("key", "value")


SERVES = """
import os, resource, socket, sys, time
from meshmark.launch.store import StoreServer
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
server = StoreServer(socket.create_server(("127.0.0.1", 0)), sys.stdin.readline().strip().encode())
print(server.port, flush=True)
for line in sys.stdin:
    if line.strip() == "fill":
        held = []
        try:
            while True:
                held.append(os.dup(0))
        except OSError as error:
            print(error.errno, flush=True)
    else:
        for file in held:
            os.close(file)
"""


@pytest.fixture
def narrow() -> Iterator[subprocess.Popen[str]]:
    """A store in a process that may have 64 files open. Its first line is its port; "fill" takes all of its files."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", SERVES], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        tell(process, SECRET.decode())
        yield process
        process.kill()


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def heard(process: subprocess.Popen[str]) -> int:
    assert process.stdout
    return int(process.stdout.readline())


def test_strangers_keep_nobody_out(narrow: subprocess.Popen[str]) -> None:
    """Three hundred of them, who stay and say nothing, in front of a store that may have 64 files open."""
    port = heard(narrow)
    with contextlib.ExitStack() as stack:
        for number in range(300):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            if number % 2:
                stranger.settimeout(None)
                with contextlib.suppress(OSError):
                    stranger.sendall(b"x")
        stores = [RunStore("127.0.0.1", port, SECRET, SECOND) for _ in range(4)]
        stores[0].set("key", "value")
        assert stores[-1].get("key") == b"value"
        for store in stores:
            store.close()


def test_want_of_files_ends_no_store(narrow: subprocess.Popen[str]) -> None:
    """Who comes meanwhile waits, and is served as soon as there is room."""
    port = heard(narrow)
    first = RunStore("127.0.0.1", port, SECRET, SECOND)
    tell(narrow, "fill")
    assert heard(narrow) == errno.EMFILE
    with contextlib.ExitStack() as stack:
        # Linux reserves a file when accept() is called, so that one more may get in: of two, one waits.
        late = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)) for _ in range(2)]
        waiting = list[socket.socket]()
        for peer in late:
            peer.settimeout(0.5)
            try:
                assert peer.recv(48).startswith(b"meshmark store")
            except TimeoutError:
                waiting.append(peer)
        assert waiting
        tell(narrow, "release")
        for peer in waiting:
            peer.settimeout(10)
            assert peer.recv(48).startswith(b"meshmark store")
    first.set("key", "value")
    assert first.get("key") == b"value"
    first.close()


def test_many_ranks_that_come_at_once_all_get_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far more than may be unproven at one time."""
    monkeypatch.setattr("meshmark.launch.store._MOST_UNPROVEN", 4)
    serving = StoreServer(socket.create_server(("127.0.0.1", 0), backlog=128), SECRET)
    found = list[int]()

    def rank() -> None:
        store = RunStore("127.0.0.1", serving.port, SECRET, SECOND)
        found.append(store.add("ranks", 1))
        store.close()

    ranks = [threading.Thread(target=rank) for _ in range(64)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    serving.close()
    assert sorted(found) == list(range(1, 65))


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_peer_that_drips_is_let_go_in_time(monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    """A byte now and then is not a proof: what is limited is the whole of it."""
    monkeypatch.setattr("meshmark.launch.store._PROVE_SECONDS", 1.0)
    over = threading.Event()

    def drip(peer: socket.socket, text: bytes) -> None:
        with peer, contextlib.suppress(OSError):
            for byte in text:
                peer.sendall(bytes([byte]))
                if over.wait(0.5):
                    return

    if side == "client":
        serving = StoreServer(socket.create_server(("127.0.0.1", 0)), SECRET)
        with socket.create_connection(("127.0.0.1", serving.port), timeout=20) as peer:
            assert len(peer.recv(48)) == 48
            dripping = threading.Thread(target=drip, args=(peer, bytes(64)))
            dripping.start()
            with contextlib.suppress(ConnectionResetError):
                assert peer.recv(1) == b""
            ended_early = dripping.is_alive()
            over.set()
            dripping.join()
        serving.close()
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        dripping = threading.Thread(target=lambda: drip(listener.accept()[0], b"meshmark store 1" + bytes(48)))
        dripping.start()
        with pytest.raises(ClusterError, match="is not this run's store.* bytes came in time"):
            RunStore("127.0.0.1", listener.getsockname()[1], SECRET, SECOND)
        ended_early = dripping.is_alive()
        over.set()
        dripping.join()
        listener.close()
    assert ended_early, "the connection outlived 32 s of dripping"


def test_a_store_that_cannot_be_reached_is_no_adapter_s_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHMARK_RDZV_SECRET", SECRET.decode())
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    info = RankInfo(
        rank=1,
        local_rank=1,
        local_world_size=2,
        world_size=2,
        host="127.0.0.1",
        port=port,
        prefix="launch",
        folder=tmp_path,
    )
    failure = perform(make_request("ddp"), info)
    assert isinstance(failure, RankFailure)
    assert failure.kind is Status.UNFINISHED
    assert f"node 0's store at 127.0.0.1:{port} cannot be reached" in failure.message


def test_node_0_listens_at_the_address_of_rdzv_alone() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with listen("127.0.0.1", port) as listener:
        assert listener.getsockname() == ("127.0.0.1", port)
        with pytest.raises(ConnectionRefusedError):  # every address of 127.0.0.0/8 is this machine's
            socket.create_connection(("127.0.0.2", port), timeout=5)
        with pytest.raises(ClusterError, match="cannot listen"):
            listen("127.0.0.1", port)
    with pytest.raises(ClusterError, match="which no other node reaches"):
        listen("127.0.0.3", port)


def test_a_secret_is_made_once_and_is_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MESHMARK_RDZV_SECRET", raising=False)
    made = run_secret()
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert run_secret() == made and len(set(made)) > 4
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    with pytest.raises(ClusterError, match="mode 0600"):
        run_secret()
    monkeypatch.setenv("MESHMARK_RDZV_SECRET", "short")
    with pytest.raises(ClusterError, match="5 characters"):
        run_secret()
    monkeypatch.setenv("MESHMARK_RDZV_SECRET", "0123456789abcdef")
    assert run_secret() == b"0123456789abcdef"


def test_a_user_without_a_home_directory_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs by a number alone."""
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("MESHMARK_RDZV_SECRET", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda user: {}[user])
    with pytest.raises(ClusterError, match="has no home directory: set the same MESHMARK_RDZV_SECRET"):
        run_secret()


def test_a_single_node_serves_no_store() -> None:
    before = psutil.Process().net_connections("inet")
    with Cluster(ClusterSpec()):
        assert psutil.Process().net_connections("inet") == before
