"""Results as a table of pandas."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshmark
from meshmark.errors import ResultsError
from meshmark.records.record import ConformanceEvidence, Outcome, Status
from meshmark.records.record_file import RecordFile
from tests.factories import make_case, make_good, make_timed


def test_a_results_folder_is_a_table_with_a_row_a_case(tmp_path: Path) -> None:
    case = make_case("fsdp2")
    failed = make_good(case=case, outcome=Outcome(status=Status.RAISED, message="KeyError: 'x'"), verdicts=[])
    clause = make_good(conformance=ConformanceEvidence(scenario="plain", base=case))
    file = RecordFile(tmp_path)
    for record in (make_good(), make_timed(), failed, clause):
        file.append(record)
    file.close()
    table = meshmark.load(tmp_path).set_index("adapter")
    assert list(table.index) == ["ddp", "fsdp2"]
    ddp, fsdp2 = table.loc["ddp"], table.loc["fsdp2"]
    assert (ddp["status"], ddp["correct"], ddp["layout"], ddp["ranks"]) == ("ok", True, "dp2.mb2", 2)
    assert ddp["lowest"] <= ddp["per_second"] <= ddp["highest"] and ddp["unit"] == "tokens"
    assert ddp["peak_bytes"] == max(reading.peak.total for reading in make_good().memory.readings)
    assert (fsdp2["status"], fsdp2["reason"], fsdp2["correct"]) == ("raised", "KeyError: 'x'", False)


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="pytest suites --results DIR"):
        meshmark.load(tmp_path)
