"""`make gpu`: a first run on a machine with a GPU, in pieces that each end within nine minutes.

    python -m benchmarks.gpu                     # every piece, some 30 minutes; ends where the first is red
    python -m benchmarks.gpu start correct       # these, in this order

The pieces run on the machine's own Python, with whatever frameworks it has. They leave their records in results/gpu.
After each piece, results/gpu/bring holds what to bring back: a few files, each compressed.
"""

from __future__ import annotations

import argparse
import gzip
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

_LARGE = ("--workload=gpt-1.3b", "--precision=bf16", "--world=1", "--time-limit=150")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Commands that run one after the other; a piece is red where one of them is."""

    what: str
    """What it shows."""
    suites: tuple[str, ...] = ()
    """Arguments of pytest behind `suites`."""
    minutes: int = 0
    """After which the suites begin no further test. All pieces together take some 30."""
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
        minutes=3,
    ),
    "correct": Piece(
        what="every adapter that one GPU can show, in fp32 and bf16",
        suites=("--world=1", "--workload=gpt-tiny", "--precision=fp32,bf16", "-k", "not throughput"),
        minutes=6,
    ),
    # NCCL refuses two ranks of one GPU, and gloo takes no pipelines of CUDA tensors.
    "shared": Piece(
        what="two ranks of one GPU over gloo",
        suites=("--world=2", "--backend=gloo", "--workload=gpt-tiny", "-k", "not throughput"),
        minutes=5,
    ),
    # Not judged: a noise floor of this model takes ten minutes and most of the disk.
    "memory": Piece(
        what="memory of a model of 1.3 billion parameters",
        suites=(*_LARGE, "--assess=off", "--steps=3", "-k", "memory"),
        minutes=3,
    ),
    "speed": Piece(what="its speed", suites=(*_LARGE, "--steps=30", "-k", "throughput"), minutes=4),
    # A rung more each time, the same for all three adapters. The compiled rung is last: each case compiles anew.
    "ladder": Piece(
        what="what each tuning gains",
        suites=(
            *(*_LARGE, "--steps=30", "-k", "throughput", "--adapters=single,ddp,fsdp2"),
            *("--tuning=cudnn", "--tuning=cudnn,fused", "--tuning=cudnn,fused,chunked"),
            "--tuning=cudnn,fused,chunked,compile",
        ),
        minutes=5,
    ),
    "calibrate": Piece(
        what="rates of this GPU for the planner",
        module="meshmark",
        arguments=("calibrate", "--seconds", "60", "-o", "{out}/here.json"),
    ),
    # Dumps of NCCL's flight recorder, of the driver and of the allocator, which tests are made of.
    "fixtures": Piece(
        what="what the driver and the allocator say", module="benchmarks.gpu_fixtures", arguments=("{out}/fixtures",)
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
        minutes=4,
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


def bring_back(out: Path) -> None:
    """Make OUT/bring anew: the page, the records, rates, fixtures and what the machine is, compressed."""
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


if __name__ == "__main__":
    sys.exit(main())
