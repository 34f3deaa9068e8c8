"""examples/ci/: what people copy into their CI. tests/test_readme.py runs the commands; here is the rest."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema

from meshmark.cli.suite_file import read_suite
from tests.ci_commands import JOBS, commands_of_job, shell_of_job

ROOT = Path(__file__).parent.parent


def schema_of(path: Path) -> dict[str, Any]:
    """The schema that the CI's own maintainers publish, as it was vendored."""
    found: dict[str, Any] = get_builtin_schema(f"vendor.{'gitlab-ci' if 'gitlab' in path.name else 'github-workflows'}")
    return found


@pytest.mark.parametrize("path", [path for path in JOBS if path.suffix == ".yml"], ids=lambda path: path.name)
def test_a_workflow_is_one(path: Path) -> None:
    read = yaml.safe_load(path.read_text())
    said = {"on" if key is True else key: value for key, value in read.items()}  # YAML 1.1 reads `on` as a truth
    jsonschema.validate(said, schema_of(path))
    for job in said.get("jobs", {}).values():
        job["runs_on"] = job.pop("runs-on")
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(said, schema_of(path))


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_its_shell_is_one_and_gates(path: Path) -> None:
    """Each has at least one command whose exit code ends the job badly, for a reason that somebody chose."""
    subprocess.run(["bash", "-n"], input=shell_of_job(path), text=True, check=True)
    commands = commands_of_job(path)
    gates = [command for command in commands if "--fail-on" in command or command.startswith("meshmark run")]
    assert gates, commands
    assert not [line for line in shell_of_job(path).splitlines() if "|| true" in line]


def test_what_a_push_is_held_to_depends_on_no_machine() -> None:
    suite = read_suite(ROOT / "examples" / "ci" / "suite.toml")
    assert suite.gate[-1] == "wrong,bigger:1%,missing"
    assert not any("throughput" in word for run in suite.runs for word in run)


def test_a_batch_job_asks_for_what_its_run_needs() -> None:
    text = (ROOT / "examples" / "ci" / "slurm.sh").read_text()
    asked = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in text.splitlines() if "#SBATCH" in line)
    words = json.dumps(commands_of_job(ROOT / "examples" / "ci" / "slurm.sh"))
    assert f"--world {int(asked['nodes']) * int(asked['gpus-per-node'])} " in words and asked["ntasks-per-node"] == "1"
