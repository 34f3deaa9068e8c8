"""`make gpu`: a first run on a machine with a GPU, in pieces that each end within nine minutes.

    python -m benchmarks.gpu                     # every piece, some 30 minutes; ends where the first is red
    python -m benchmarks.gpu start correct       # these, in this order

The pieces run on the machine's own Python, with whatever frameworks it has. They leave their records in results/gpu.
After each piece, results/gpu/bring holds what to bring back: a few files, each compressed.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LIMIT_SECONDS = 9 * 60
"""After which a piece is ended. A machine that is lent gives ten minutes to a command."""

MOST_FILES, MOST_BYTES = 8, 16 * 2**20
"""To bring back: what a machine that is lent lets out."""

_MODEL = ("--workload=gpt-1.3b", "--precision=bf16", "--time-limit=150")
_LARGE = (*_MODEL, "--world=1")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Commands that run one after the other; a piece is red where one of them is."""

    what: str
    """Purpose of the piece."""
    suites: tuple[str, ...] = ()
    """Arguments of pytest behind `suites`."""
    minutes: int
    """After which the suites begin no further test. All pieces together take 30."""
    module: str | None = None
    """Another command: a module that is run with `arguments`. `{out}` stands for the folder of results."""
    arguments: tuple[str, ...] = ()

    def command(self, out: Path) -> list[str]:
        """The words of the command, with this Python."""
        if self.module:
            return [sys.executable, "-m", self.module, *(word.format(out=out) for word in self.arguments)]
        options = ["--device=cuda", f"--results={out}", f"--max-time={self.minutes}m"]
        return [sys.executable, "-m", "pytest", "suites", *options, *self.suites]


PIECES = {
    "start": Piece(
        what="whether anything runs at all",
        suites=("-x", "--world=1", "--adapters=single,ddp", "--workload=gpt-mini"),
        minutes=2,
    ),
    "correct": Piece(
        what="every adapter that one GPU can show, in fp32 and bf16",
        suites=("--world=1", "--workload=gpt-tiny", "--precision=fp32,bf16", "-k", "not throughput"),
        minutes=5,
    ),
    # Two ranks of one GPU. In bf16 a noise floor takes a minute, for each layout.
    "nccl": Piece(
        what="two ranks over NCCL, which share a GPU where there is only one",
        suites=(
            *("--world=2", "--oversubscribe", "--workload=gpt-tiny", "--precision=fp32", "-k", "not throughput"),
            "--adapters=ddp,fsdp2,megatron,gpipe,pipeline,deepspeed,accelerate,fairscale-oss,fairscale-fsdp,tp",
        ),
        minutes=3,
    ),
    # Not judged: a noise floor of this model takes ten minutes and most of the disk.
    "memory": Piece(
        what="memory of a model of 1.3 billion parameters",
        suites=(*_LARGE, "--assess=off", "--steps=3", "-k", "memory"),
        minutes=3,
    ),
    "scale": Piece(
        what="what a rank of eight holds of that model, each alone",
        suites=(
            *("--scale", "-k", "test_scale", "--world=8", "--workload=gpt-1.3b", "--precision=bf16"),
            *("--global-batch=32", "--steps=3", "--time-limit=150"),
            "--adapters=fsdp2,megatron,deepspeed,ddp,ddp-zero1,pipeline",
        ),
        minutes=3,
    ),
    # 7 billion parameters, 14 GB of states a rank: a model that one GPU cannot hold. Tensor parallelism is fp32 here.
    "scale-7b": Piece(
        what="what a rank of eight holds of a model of 7 billion parameters",
        suites=(
            *("--scale", "-k", "test_scale", "--workload=gpt-1.3b", "--model=layers=32,hidden=4096,heads=32"),
            *("--precision=fp32", "--layouts=dp8.zero3,dp4.tp2.zero3", "--global-batch=8", "--steps=3"),
            *("--time-limit=240", "--adapters=fsdp2,tp-fsdp2"),
        ),
        minutes=2,
    ),
    # The same rungs for all three adapters, in four micro-batches, which fit 80 GB. The compiled rung is last: each
    # case compiles anew. On an H200 a case, in three launches, took 45 to 60 s.
    "ladder": Piece(
        what="its speed, and what each tuning gains",
        suites=(
            *(*_MODEL, "--layouts=dp1.mb4,dp1.zero3.mb4", "--global-batch=32", "--steps=6"),
            *("-k", "throughput", "--adapters=single,ddp,fsdp2"),
            *("--tuning=none", "--tuning=cudnn,fused,chunked", "--tuning=cudnn,fused,chunked,compile"),
        ),
        minutes=6,
    ),
    "calibrate": Piece(
        what="rates of this GPU for the planner",
        module="meshmark",
        arguments=("calibrate", "--seconds", "60", "-o", "{out}/here.json"),
        minutes=2,
    ),
    # Dumps of NCCL's flight recorder, of the driver and of the allocator, which tests are made of.
    "fixtures": Piece(
        what="what the driver and the allocator say",
        module="benchmarks.gpu_fixtures",
        arguments=("{out}/fixtures",),
        minutes=1,
    ),
    "roster": Piece(
        what="every adapter there is, memory and traffic alone",
        suites=("--world=1", "--workload=gpt-mini", "--assess=off", "--adapters=*", "-k", "memory or communication"),
        minutes=2,
    ),
    "conformance": Piece(
        what="a few clauses",
        suites=(
            "--conformance",
            "--world=1",
            "--adapters=ddp,fsdp2,deepspeed",
            "-k",
            "determinism or resum or dropout",
        ),
        minutes=1,
    ),
}
"""In the order of their value: a lent machine may be taken back before the end."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"of {', '.join(PIECES)} (default: all)")
    parser.add_argument("--out", type=Path, default=Path("results/gpu"), metavar="DIR", help="default: results/gpu")
    parsed = parser.parse_args(arguments)
    if unknown := [name for name in parsed.pieces if name not in PIECES]:
        parser.error(f"{', '.join(unknown)}: no such piece, expected some of {', '.join(PIECES)}")
    parsed.out.mkdir(parents=True, exist_ok=True)
    describe_machine(parsed.out / "machine.txt")
    red = []
    for name in parsed.pieces or PIECES:
        print(f"--- {name}: {PIECES[name].what}", flush=True)
        if run(PIECES[name].command(parsed.out)) != 0:
            red.append(name)
        bring_back(parsed.out)
        if name == "start" and red:
            break
    print(f"red: {', '.join(red)}" if red else "all green")
    return 1 if red else 0


def describe_machine(file: Path) -> None:
    """Write what the machine is and what can run on it."""
    with file.open("w") as output:
        for command in (
            [sys.executable, "-m", "meshmark", "doctor"],
            ["nvidia-smi", "-q"],
            ["nvidia-smi", "topo", "-m"],
        ):
            try:
                subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=60, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                output.write(f"{error}\n")
            output.flush()


def run(command: Sequence[str]) -> int:
    """Run a command from the root of the checkout, with the checkout's packages first; return its exit code."""
    root = Path(__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))}
    try:
        return subprocess.run(command, env=environment, timeout=LIMIT_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"ended after {LIMIT_SECONDS} s", flush=True)
        return 1


_BROUGHT = ("machine", "report", "records", "here", "fixtures")
"""Files of OUT/bring by the beginnings of their names, the most important first."""


def bring_back(out: Path, most_bytes: int = MOST_BYTES) -> None:
    """Make OUT/bring anew: the page, the records, rates, fixtures and what the machine is, compressed, in at most eight
    files of at most `most_bytes`."""
    folder = out / "bring"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if (out / "records.jsonl").exists():
        run([sys.executable, "-m", "meshmark", "report", str(out), "-o", str(out / "report" / "report.md")])
        with (out / "records.jsonl").open("rb") as records, gzip.open(folder / "records.jsonl.gz", "wb") as packed:
            shutil.copyfileobj(records, packed)
    for name in ("machine.txt", "here.json"):
        if (out / name).exists():
            shutil.copy(out / name, folder)
    for name in ("report", "fixtures"):
        if (out / name).exists():
            with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as packed_folder:
                packed_folder.add(out / name, arcname=name)
    for file in [file for file in folder.iterdir() if file.stat().st_size > most_bytes]:
        _split(file, most_bytes)
    # What is left behind is named, and lies in OUT all the same.
    for file in sorted(folder.iterdir(), key=lambda file: _BROUGHT.index(file.name.partition(".")[0]))[MOST_FILES:]:
        print(f"left out of {folder}: {file.name} is more than {MOST_FILES} files", flush=True)
        file.unlink()


def _split(file: Path, most_bytes: int) -> None:
    """Cut `file` into parts, to be put together by `cat FILE.*`."""
    with file.open("rb") as whole:
        for number in itertools.count():
            part = whole.read(most_bytes)
            if not part:
                break
            file.with_name(f"{file.name}.{number:02}").write_bytes(part)
    file.unlink()


if __name__ == "__main__":
    sys.exit(main())
