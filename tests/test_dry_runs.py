"""Theory at 16,384 ranks: single ranks of that world, each alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_three_axes_over_16384_ranks_hold_and_send_what_theory_says() -> None:
    command = [sys.executable, "-m", "studies.dry_runs", "--worlds", "16384", "--only=pipeline-fsdp2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [line for line in run.stdout.splitlines() if line.startswith("| ") and "16,384" in line]
    layouts = {re.split(r" *\| *", row)[2] for row in rows}
    assert layouts == {"dp64.tp16.pp16.1f1b.zero3.mb16"}, run.stdout
    assert len(rows) == 1 and "to the byte" in rows[0] and "0, " in rows[0] and "16,383" in rows[0]
