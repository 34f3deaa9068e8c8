"""Endless output and messages leave one page in the record, and take no memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

from meshmark.errors import MeshmarkError
from meshmark.launch.watchdog import tail
from meshmark.run.assemble import outcome_of_error
from meshmark.text import LIMIT


def test_the_end_of_a_log_is_read_without_the_rest(tmp_path: Path) -> None:
    """One of 2 GB (sparse), and one that is a single line of 1 MB."""
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.seek(2 * 10**9)
        file.write(b"\nbefore the end\nthe end\n")
    tracemalloc.start()
    assert tail(log).endswith("\nbefore the end\nthe end")
    assert tracemalloc.get_traced_memory()[1] < 10**7
    tracemalloc.stop()
    log.write_bytes(b"x" * 10**6 + b"the end")
    assert tail(log).endswith("xthe end") and "characters before)" in tail(log) and len(tail(log)) < LIMIT + 50
    assert tail(tmp_path / "none") == ""


def test_what_an_exception_says_is_clipped() -> None:
    for error in (RuntimeError("m" * 10**7), MeshmarkError("m" * 10**7)):
        outcome = outcome_of_error(error)
        assert max(len(outcome.message), len(outcome.traceback)) < LIMIT + 50 and "m" * 1000 in outcome.message
