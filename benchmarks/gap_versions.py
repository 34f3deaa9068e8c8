"""Run the reproducers of known defects under other versions of their frameworks, and keep what came of each.

    python -m benchmarks.gap_versions deepspeed==0.18.0 accelerate==1.10.1   # releases, each over this environment
    python -m benchmarks.gap_versions --python DIR/bin/python                # all reproducers, in another environment

A version that is named is installed alone, without its dependencies, into .environments/gaps-NAME-VERSION, which
stands before this environment's packages: torch and all others remain those of this environment. No suite and no part
of Meshmark runs in it. Without arguments, the reproducers run under this environment, or in the one that they name
(`make env NAME=vllm`). One that cannot be run is named, with what it lacks.

Results are kept in adapters/gaps/tried.jsonl; `make pages` shows them in reports/gaps.md, and `meshmark gaps` prints
them. One that ends neither with "expected: ...; got: ..." nor with success tells nothing, and is kept as such.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from meshmark.conformance.reproducers import Outcome, Reproducer, Trial, keep_trials, read_reproducers
from meshmark.environment import interpreter_of

ROOT = Path(__file__).parent.parent
LIMIT_SECONDS = 120
# Ranks may write into one line.
_SHOWN = re.compile(r"expected: .*?; got: .+?(?=expected: |$)", re.MULTILINE)
_ERROR = re.compile(r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception|Timeout)\b.*)", re.MULTILINE)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gap_versions", description=__doc__.partition("\n")[0])
    parser.add_argument("releases", nargs="*", metavar="NAME==VERSION", help="release of a framework to install alone")
    parser.add_argument("--python", metavar="FILE", help="interpreter of another environment (default: each script's)")
    parser.add_argument("-k", dest="only", default="", metavar="TEXT", help="reproducers whose name contains this")
    parsed = parser.parse_args(arguments)
    python = parsed.python and os.path.abspath(parsed.python)  # scripts run in a folder of their own
    chosen = [each for each in read_reproducers() if parsed.only in each.name]
    for release in parsed.releases or [""]:
        name, _, version = release.partition("==")
        if release and not (version and name in {each.framework for each in chosen}):
            parser.error(f"{release}: expected NAME==VERSION of a framework that has reproducers")
        overlay = installed(name, version) if release else None
        for each in chosen:
            if not release or name == each.framework:
                try_one(each, python, overlay)
    return 0


def installed(name: str, version: str) -> Path:
    """Return a folder with that release alone, which is made if it is not there."""
    folder = ROOT / ".environments" / f"gaps-{name}-{version}"
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
        # A machine's own constraints are not the project's.
        variables = {**os.environ, "PIP_CONSTRAINT": os.devnull, "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
        try:
            subprocess.run([*command, "--target", folder, f"{name}=={version}"], check=True, env=variables, cwd="/")
        except subprocess.CalledProcessError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return folder


def try_one(reproducer: Reproducer, python: str | None, overlay: Path | None) -> Trial | None:
    """Run a reproducer, keep what came of it and return it. None where it cannot be run: what it lacks is printed.

    Without `python` it runs in the environment that it names, or in this one.
    """
    variables = environment(overlay)
    own = interpreter_of(reproducer.environment) if reproducer.environment else Path(sys.executable)
    python = python or str(own)
    versions = installed_versions(reproducer, python, variables) if Path(python).exists() else None
    if lacks := _lacks(reproducer, python, versions):
        print(f"{reproducer.name}: not tried: {lacks}", flush=True)
        return None
    assert versions is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(reproducer.num_processes)]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    command = [python, *(launcher if reproducer.launcher != "python" else []), str(reproducer.path)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = ["timeout", "--kill-after=5", str(LIMIT_SECONDS), *command]
            done = subprocess.run(run, cwd=folder, env=variables, capture_output=True, text=True, check=False)
            outcome, said = read_outcome(done.returncode, done.stdout + done.stderr)
        except OSError as error:
            outcome, said = Outcome.CANNOT_RUN, str(error)
    said = said.replace(str(ROOT), ".")[:300]
    name, digest = reproducer.name, reproducer.digest
    trial = Trial(reproducer=name, digest=digest, versions=versions, outcome=outcome, last_line=said)
    keep_trials([trial])
    print(f"{reproducer.name}: {' '.join(f'{n} {v}' for n, v in versions.items())}: {outcome}: {said}", flush=True)
    return trial


def _lacks(reproducer: Reproducer, python: str, versions: dict[str, str] | None) -> str:
    """Return why a reproducer cannot be run, or an empty text."""
    if reproducer.environment and not Path(python).exists():
        return f"it needs the environment {reproducer.environment}: make env NAME={reproducer.environment}"
    if versions is None:
        return f"{python} has not all of {', '.join(reproducer.versions)}"
    if reproducer.operators:
        return f"it needs DeepSpeed's operators {', '.join(reproducer.operators)}"
    if reproducer.launcher != "python" and not reproducer.launcher.startswith("torchrun"):
        return f"it is started by {reproducer.launcher}"
    return ""


def read_outcome(code: int, printed: str) -> tuple[Outcome, str]:
    """Return what the exit code and the output of a reproducer say, with the line that says it."""
    if shown := _SHOWN.search(printed):
        return Outcome.SHOWS, shown[0]
    if code == 0:
        return Outcome.GONE, ""
    errors = [line for line in _ERROR.findall(printed) if "ChildFailedError" not in line]
    if code in (124, 137):
        return Outcome.CANNOT_RUN, f"no end within {LIMIT_SECONDS} s"
    return Outcome.CANNOT_RUN, errors[-1] if errors else f"exit code {code}"


def environment(overlay: Path | None) -> dict[str, str]:
    """Return the variables of a run: on a CPU, with the release that is tried before all other packages."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    variables.pop("PYTHONPATH", None)
    return variables | ({"PYTHONPATH": str(overlay)} if overlay else {})


def installed_versions(reproducer: Reproducer, python: str, variables: dict[str, str]) -> dict[str, str] | None:
    """Return the versions that a reproducer's packages have under an interpreter, or None if one is missing."""
    ask = "import sys, importlib.metadata as m; print(*(m.version(name) for name in sys.argv[1:]))"
    command = [python, "-c", ask, *reproducer.versions]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    return {
        name: version.partition("+")[0] for name, version in zip(reproducer.versions, done.stdout.split(), strict=True)
    }


if __name__ == "__main__":
    sys.exit(main())
