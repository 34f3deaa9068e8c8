"""A stranger's records, with what else lies beside them: reading them runs nothing of it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshmark.errors import ResultsError
from meshmark.records.record import ConformanceEvidence
from meshmark.records.record_file import RecordFile, records_path
from meshmark.report.planned import planned_memory, totals
from meshmark.report.results import results
from tests.factories import make_case, make_good, make_memory_evidence, make_timed

ROOT = Path(__file__).parent.parent
CONSOLE_SCRIPT = [str(Path(sys.executable).parent / "meshmark")]
MODULE = [sys.executable, "-m", "meshmark"]
BESIDE = ("evil_module", "tabulate", "adapters", "suites", "numpy", "pandas")
"""Modules beside the records: one that a record names, and some that the report imports, or once did."""


def leave(folder: Path) -> Path:
    """Records, and the code beside them; returns the marker that any of the code writes."""
    marker = folder / "marker"
    trap = f"open({str(marker)!r}, 'a').write(__file__ + chr(10))\n"
    for name in BESIDE:
        (folder / f"{name}.py").write_text(trap)
    elsewhere = folder / "elsewhere" / "evil.py"
    elsewhere.parent.mkdir()
    elsewhere.write_text(trap)
    (folder / "matplotlibrc").write_text("text.usetex: True\n")
    file = RecordFile(folder)
    for number, adapter in enumerate((f"{elsewhere}:Evil", "elsewhere/evil.py:Evil", "evil_module:Evil")):
        case = make_case(f"evil{number}")
        file.append(make_good(adapter=adapter, case=case))
        file.append(make_timed(adapter=adapter, case=case))
        file.append(make_good(adapter=adapter, case=case, conformance=ConformanceEvidence(scenario="plain", base=case)))
    file.close()
    return marker


@pytest.mark.slow
@pytest.mark.parametrize("command", [CONSOLE_SCRIPT, MODULE], ids=["console script", "python -m"])
def test_a_report_runs_nothing_that_records_name_and_nothing_beside_them(tmp_path: Path, command: list[str]) -> None:
    marker = leave(tmp_path)
    done = subprocess.run(
        [*command, "report", ".", "--baseline", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert not marker.exists(), f"ran {marker.read_text()}"
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.md").read_text().startswith("# Meshmark report")
    assert (tmp_path / "report-memory.svg").is_file() and (tmp_path / "report-conformance.md").is_file()


def test_the_checkout_s_adapters_and_suites_are_found_from_anywhere(tmp_path: Path) -> None:
    """Not the working directory's, which may be a stranger's too."""
    marker = leave(tmp_path)
    done = subprocess.run(
        [*CONSOLE_SCRIPT, "cases", "--adapters", "ddp"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [line for line in done.stdout.splitlines() if not line.startswith("layouts of 1 adapter: ")] == [
        "ddp-dp2.mb3-gpt-tiny-fp32",
        "1 case",
    ]
    assert not marker.exists()


def test_the_plan_in_the_report_is_the_record_s(tmp_path: Path) -> None:
    """Whatever the adapter of that name would say today."""
    record = make_good()
    doubled = [dataclasses.replace(plan, parameters=2 * plan.parameters) for plan in record.memory.planned]
    record = dataclasses.replace(record, memory=make_memory_evidence(planned=doubled))
    (row,) = planned_memory(results([record]))
    assert str(row["parameters"]) == "100.00%"


@pytest.mark.parametrize("missing", ["planned", "extra_memory"])
def test_a_record_without_a_plan_has_a_dash(missing: str) -> None:
    record = make_good(memory=make_memory_evidence(**{missing: []}))
    assert totals(record) == []
    (row,) = planned_memory(results([record]))
    assert (row["steady, planned"], row["peak, planned"]) == ("–", "–")


def test_a_folder_that_cannot_be_looked_at_is_an_error_of_results() -> None:
    """As one that this user may not enter, which root may."""
    with pytest.raises(ResultsError, match="name too long; name another with --results"):
        records_path(Path("x" * 300))
