"""How many files a reader opens who follows one case from the command line to its verdict."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOST_FILES = 75
TRACER = '''
import os, sys, threading

ROOT, OUT = os.environ.get("TRACED_ROOT"), os.environ.get("TRACED_OUT")
known = set()


def note(frame, event, argument):
    """Write down the file of a function at its first call, unless a module that is being imported calls it."""
    code = frame.f_code
    if event != "call" or code in known:
        return
    file = code.co_filename
    if file.startswith(ROOT) and code.co_name != "<module>":
        caller = frame.f_back
        while caller is not None:
            if caller.f_code.co_filename.startswith("<frozen importlib"):
                return
            caller = caller.f_back
        with open(f"{OUT}/{os.getpid()}", "a") as noted:
            noted.write(file + "\\n")
    known.add(code)


if ROOT:
    sys.setprofile(note)
    threading.setprofile(note)
'''


@pytest.mark.slow
def test_one_case_runs_in_few_files(tmp_path: Path) -> None:
    """Python imports `sitecustomize` in every process, so ranks are traced too."""
    (tmp_path / "sitecustomize.py").write_text(TRACER)
    noted = tmp_path / "noted"
    noted.mkdir()
    traced = {"TRACED_ROOT": f"{ROOT}{os.sep}", "TRACED_OUT": str(noted), "PYTHONPATH": str(tmp_path)}
    case = ["suites/test_equivalence.py", "--adapters", "ddp", "--layouts", "dp2.mb2"]
    command = [sys.executable, "-m", "pytest", "-q", *case, "--results", str(tmp_path / "results")]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | traced, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    files = {Path(line) for each in noted.iterdir() for line in each.read_text().splitlines()}
    ours = sorted(str(file.relative_to(ROOT)) for file in files if ".venv" not in file.parts)
    assert {"meshmark/judge/truth.py", "adapters/ddp.py", "meshmark/launch/rank.py"} <= {
        name.replace("meshmark/adapters/", "adapters/") for name in ours
    }, "ranks are traced"
    assert len(ours) <= MOST_FILES, "\n".join(ours)
