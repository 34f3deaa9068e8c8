"""The shell commands of examples/ci/, for tests."""

from __future__ import annotations

import shlex
from pathlib import Path

import yaml

JOBS = sorted(path for path in (Path(__file__).parent.parent / "examples" / "ci").iterdir() if path.suffix != ".toml")
_OURS = ("pytest", "meshmark", "srun")


def shell_of_job(path: Path) -> str:
    """All that a runner's shell is given, in order."""
    if path.suffix == ".sh":
        return path.read_text()
    read = yaml.safe_load(path.read_text())
    if "jobs" in read:
        return "\n".join(step["run"] for job in read["jobs"].values() for step in job["steps"] if "run" in step)
    keys = ("before_script", "script", "after_script")
    jobs = [job for job in read.values() if isinstance(job, dict)]
    return "\n".join(line for job in jobs for key in keys for line in job.get(key, []))


def commands_of_job(path: Path) -> list[str]:
    """Those of pytest and meshmark; a job's own number as it may be."""
    text = shell_of_job(path).replace("\\\n", " ").replace("$results", "results/ci")
    lines = [shlex.join(shlex.split(line, comments=True)) for line in text.splitlines()]
    return [line for line in lines if line.split(maxsplit=1)[:1] and line.split()[0] in _OURS]
