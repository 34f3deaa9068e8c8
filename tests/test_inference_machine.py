"""What a machine does to an engine is not its fault, and what lies in the working directory is not its code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import packaging
import pytest

from meshmark.cli.commands import main
from meshmark.inference.contract import EngineOptions, Request
from meshmark.inference.process import EngineError, EngineProcess, UnfinishedError
from meshmark.inference.run import read_inference

ROOT = Path(__file__).parent.parent
REQUEST = Request(name="one", prompt=(1, 2), max_new_tokens=1)

ENGINE = """
import os, signal, time
from pathlib import Path
from meshmark.inference.contract import CacheUse, Emitted, Engine, InferenceAdapter

HERE = Path(__file__).parent

class Odd(Engine):
    def __init__(self):
        self._waiting = []
    def submit(self, request):
        self._waiting.append(request)
    def step(self, emit):
        (HERE / "step").write_text(str(os.getpid()))
        self.meet()
        for request in self._waiting:
            emit(Emitted(request=request.name, copy=0, tokens=(1,), logprobs=(0.0,), finish="length"))
        self._waiting.clear()
    def meet(self):
        pass
    def is_busy(self):
        return bool(self._waiting)
    def used_blocks(self):
        return 0
    def cache(self):
        return CacheUse(block_size=1, num_blocks=0, bytes_by_rank=(0,))

class Base(InferenceAdapter):
    precisions = ("fp32",)
    pages = False
    block_sizes = (1,)
    engine = Odd
    def build(self, model, options):
        return self.engine()

class StopsItself(Base):
    class engine(Odd):
        def meet(self):
            os.kill(os.getpid(), signal.SIGSTOP)

class StopsAChild(Base):
    class engine(Odd):
        def meet(self):
            child = os.fork()
            if not child:
                os.kill(os.getpid(), signal.SIGSTOP)
                os._exit(0)
            os.waitpid(child, 0)

class StopsInBuild(Base):
    def build(self, model, options):
        os.kill(os.getpid(), signal.SIGSTOP)

class Works(Base):
    class engine(Odd):
        def meet(self):
            for _ in range(20):
                time.sleep(0.1)

class Hangs(Base):
    class engine(Odd):
        def meet(self):
            time.sleep(600)

class FillsDisk(Base):
    class engine(Odd):
        def meet(self):
            Path("/dev/full").write_text("x")

class FillsDiskInBuild(Base):
    def build(self, model, options):
        Path("/dev/full").write_text("x")

class SaysThatItsDiskIsFull(Base):
    class engine(Odd):
        def meet(self):
            raise RuntimeError("No space left on device")

class Dies(Base):
    class engine(Odd):
        def meet(self):
            os._exit(3)

class HasNeighbour(Base):
    def build(self, model, options):
        import neighbour
        return neighbour.make(self.engine)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "odd.py").write_text(ENGINE)
    return tmp_path


def start(folder: Path, name: str, log: Path | None = None) -> EngineProcess:
    return EngineProcess(f"{folder / 'odd.py'}:{name}", folder, EngineOptions(), log or folder / "log")


# --- The working directory.


PLANTED = "from pathlib import Path\n(Path(__file__).parent / 'was executed').touch()\nraise SystemExit('planted')\n"


def serve_in(place: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Serve a request in a working directory that is not on the path of the process that starts the engine."""
    script = place.parent / "script" / "parent.py"
    script.parent.mkdir()
    script.write_text(
        "from pathlib import Path\n"
        "from meshmark.inference.contract import EngineOptions, Request\n"
        "from meshmark.inference.process import EngineProcess\n"
        f"with EngineProcess('odd.py:{name}', Path.cwd(), EngineOptions(), Path('log')) as engine:\n"
        "    print(engine.serve([Request(name='one', prompt=(1, 2), max_new_tokens=1)]).completions)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, script], cwd=place, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("module", ["secrets", "queue", "packaging", "meshmark"])
def test_a_module_in_the_working_directory_is_not_executed_in_an_engine_s_process(tmp_path: Path, module: str) -> None:
    """Nor is one of those that the adapter's file may import from beside it."""
    place = tmp_path / "place"
    place.mkdir()
    (place / "odd.py").write_text(ENGINE)
    (place / "neighbour.py").write_text("import packaging, queue, secrets\ndef make(engine):\n    return engine()\n")
    (place / f"{module}.py").write_text(PLANTED)
    done = serve_in(place, "HasNeighbour")
    assert not (place / "was executed").exists(), (place / "log").read_text()
    assert done.returncode == 0 and "finish='length'" in done.stdout, done.stdout + done.stderr


def test_an_environment_without_meshmark_finds_the_checkout(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "bare"], check=True)
    (packages,) = (folder / "bare").glob("lib/*/site-packages")
    for name in ("packaging", "numpy", "numpy.libs"):  # which the contract needs
        (packages / name).symlink_to(Path(packaging.__file__).parents[1] / name)
    (folder / "odd.py").write_text(f"{ENGINE}\nBase.virtual_environment = 'bare'\n")
    monkeypatch.setenv("MESHMARK_ENVIRONMENTS", str(folder))
    monkeypatch.chdir(folder)
    with start(folder, "Base") as engine:
        assert engine.versions == {} and engine.serve([REQUEST]).completions[0].finish == "length"


# --- Stops.


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshmark.inference.process.SERVE_SECONDS", 4.0)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", ["StopsItself", "StopsAChild"])
def test_an_engine_that_somebody_stopped_is_not_blamed(folder: Path, name: str) -> None:
    with start(folder, name) as engine, pytest.raises(UnfinishedError, match="SIGSTOP.* no fault of the engine"):
        engine.serve([REQUEST])


def test_an_engine_that_was_stopped_while_it_was_built_is_not_blamed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(folder, "Base").close()
    monkeypatch.setattr("meshmark.inference.process.START_SECONDS", 8.0)
    with pytest.raises(UnfinishedError, match=r"SIGSTOP.* no fault of the engine"):
        start(folder, "StopsInBuild")


@pytest.mark.usefixtures("short")
def test_a_stopped_engine_that_reads_nothing_holds_nobody_up(folder: Path) -> None:
    """Requests larger than the buffer of the socket."""
    many = [Request(name=f"{number}", prompt=tuple(range(300)), max_new_tokens=1) for number in range(2000)]
    with start(folder, "Base") as engine:
        engine.pause()
        with pytest.raises(UnfinishedError, match=r"SIGSTOP.* no fault of the engine"):
            engine.serve(many)


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_seconds_in_which_an_engine_was_stopped_do_not_count(folder: Path) -> None:
    with start(folder, "Works") as engine:
        going_on = threading.Timer(6, engine.resume)
        going_on.start()
        engine.pause()
        with pytest.raises(UnfinishedError):  # it was stopped for as long as it may take
            engine.serve([REQUEST])
        going_on.cancel()
    with start(folder, "Works") as engine:
        going_on = threading.Timer(3, engine.resume)
        going_on.start()
        engine.pause()
        assert engine.serve([REQUEST]).completions[0].finish == "length"
        going_on.join()


@pytest.mark.usefixtures("short")
def test_an_engine_that_hangs_is_blamed_still(folder: Path) -> None:
    with start(folder, "Hangs") as engine, pytest.raises(EngineError, match="did not answer within 4 s, and was ended"):
        engine.serve([REQUEST])


@pytest.mark.parametrize(
    "name, said", [("Works", "answered"), pytest.param("Dies", "UnfinishedError", marks=pytest.mark.slow)]
)
def test_seconds_in_which_everything_was_stopped_do_not_count(folder: Path, name: str, said: str) -> None:
    """An engine goes on and answers. If it gives up then, that is the stop's doing."""
    (folder / "odd.py").write_text(ENGINE.replace("os._exit(3)", "time.sleep(1.5); os._exit(3)"))
    (folder / "parent.py").write_text(
        "from pathlib import Path\n"
        "from meshmark.errors import MeshmarkError\n"
        "from meshmark.inference import process\n"
        "from meshmark.inference.contract import EngineOptions, Request\n"
        "process.SERVE_SECONDS = 4.0\n"
        f"with process.EngineProcess('odd.py:{name}', Path.cwd(), EngineOptions(), Path('log')) as engine:\n"
        "    try:\n"
        "        engine.serve([Request(name='one', prompt=(1, 2), max_new_tokens=1)])\n"
        "        print('answered')\n"
        "    except MeshmarkError as error:\n"
        "        print(type(error).__name__, error)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "parent.py"]
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        until(lambda: (folder / "step").exists() and (folder / "step").read_text() != "")
        engine = int((folder / "step").read_text())
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in (parent.pid, engine):
                os.kill(pid, number)
            if number == signal.SIGSTOP:
                time.sleep(7)
        told, _ = parent.communicate(timeout=60)
    assert told.startswith(said), told
    assert said == "answered" or "the job was stopped for" in told


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# --- Full disks.


@pytest.mark.parametrize("name", ["FillsDisk", "FillsDiskInBuild"])
def test_an_engine_that_meets_a_full_disk_is_not_blamed(folder: Path, name: str) -> None:
    with pytest.raises(UnfinishedError, match="No space left on device"), start(folder, name) as engine:
        engine.serve([REQUEST])


def test_an_engine_that_says_that_a_disk_is_full_must_have_filled_one(folder: Path) -> None:
    with start(folder, "SaysThatItsDiskIsFull") as engine, pytest.raises(EngineError, match="No space left"):
        engine.serve([REQUEST])


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A folder that is full, of a disk of its own."""
    place = tmp_path / "full"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no mounts here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("name", ["Dies", "SaysThatItsDiskIsFull", "FillsDisk"])
def test_an_engine_that_ends_while_the_disk_of_its_log_is_full_is_not_blamed(
    folder: Path, full: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(full)
    with start(folder, name, full / "log") as engine:
        with (full / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(4096))
        with pytest.raises(UnfinishedError, match="is full|No space left on device"):
            engine.serve([REQUEST])


# --- The suite and the page.


@pytest.mark.slow
def test_what_the_machine_kept_from_its_end_fails_the_suite_and_no_engine(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "hurried.py").write_text("from meshmark.inference import process\nprocess.SERVE_SECONDS = 6.0\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", "-p", "hurried", "--pyargs"]
    options = ["--adapter", "odd.py:StopsItself", "--adapter", "odd.py:FillsDisk", "--results", "out"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    done = subprocess.run(
        [*command, "meshmark.suites.test_inference", *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED and "2 failed" in done.stdout, done.stdout
    assert "stopsitself-plain-llama-tiny-fp32: unfinished: the engine did not answer within 6 s" in done.stdout
    assert "fillsdisk-plain-llama-tiny-fp32: unfinished: the engine failed: OSError: [Errno 28]" in done.stdout
    for record in read_inference(folder / "out" / "records.jsonl"):
        assert record.unfinished and not record.error and not record.passed
    assert main(["report", str(folder / "out")]) == 0
    page = (folder / "out" / "report.md").read_text()
    assert "**0 of 2 cases are right**, 2 unfinished by no fault of an engine" in page
    assert "Nothing fails." in page and "## What did not finish" in page


@pytest.mark.slow
def test_a_results_folder_that_is_full_ends_the_run_with_one_message(folder: Path, full: Path) -> None:
    with (full / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", "--pyargs", "meshmark.suites.test_inference"]
    options = ["--adapter", "odd.py:FillsDiskInBuild", "--adapter", "odd.py:Dies", "--results", str(full)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, *options], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
    assert "records.jsonl' cannot be written: No space left on device" in done.stdout
    assert "fillsdiskinbuild-plain-llama-tiny-fp32 was: " in done.stdout
    assert "Traceback" not in done.stdout
