"""The examples behind "simplest code": each trains what the plain loop trains, and what is counted is statements."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshmark.report.which import read_loops
from studies.simplest import ADAPTERS, FOLDER, PLAIN, loops, statements, written_anew


def test_statements_are_counted_and_layout_is_not() -> None:
    plain = statements('"""Text."""\nimport torch\nfor x in range(3):\n    print(x)\n')
    assert plain.total() == 3
    same = "import torch  # a comment\nfor x in range(\n    3\n):\n\n    print(x)\n"
    assert not statements(same) - plain
    assert (statements(same + "print(2)\n") - plain).total() == 1


def test_every_example_stands_for_an_adapter() -> None:
    assert written_anew().keys() == ADAPTERS.keys()


def test_the_counts_that_are_shipped_are_those_of_the_examples() -> None:
    assert read_loops() == loops(), "run `python -m studies.simplest`"


TEARDOWN = "terminate called without an active exception"
"""PyTorch 2.13 now and then aborts a rank with these words after its last statement, as it leaves."""


def last_loss(script: Path, *launcher: str) -> set[str]:
    """Return the losses that the ranks of a script print, each once."""
    # Unbuffered, so that a line is out before an abort. Lines of two ranks may then stand on one.
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, *launcher, str(script)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=150, check=False)
    assert not done.returncode or TEARDOWN in done.stderr, done.stderr[-4000:]
    return set(re.findall(r"loss (\d\.\d{5})", done.stdout))


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTERS)
def test_an_example_ends_with_the_loss_of_the_plain_loop(name: str) -> None:
    (plain,) = last_loss(PLAIN)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert last_loss(FOLDER / f"{name}.py", *launcher) == {plain}
