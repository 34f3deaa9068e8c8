"""The roster's page: what became of every adapter, on a partial run too."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.roster import main
from benchmarks.roster_page import page
from meshmark.adapter.contract import Adapter
from meshmark.adapter.registry import builtin_adapters, load_adapter
from meshmark.adapters.deepspeed.replicated import DeepSpeedZero0
from meshmark.records.record import Outcome, Record, Status
from meshmark.records.record_file import RecordFile
from meshmark.report.table import WIDTH
from meshmark.spec.layout import Layout
from meshmark.spec.precision import Precision
from meshmark.spec.workload import workload
from tests.broken.roster import ROSTER_MUTANTS
from tests.factories import make_case, make_environment, make_good, make_timed, make_verdict

NAMES = ("ddp", "fsdp2", "tp", "fsdp2-hsdp")
ADAPTERS: dict[str, type[Adapter]] = {name: load_adapter(builtin_adapters()[name]) for name in NAMES}
DP, ZERO, TP = Layout(dp=2), Layout(dp=2, zero_stage=3), Layout(tp=2)


def of(adapter: str, layout: Layout, **changes: object) -> Record:
    return make_good(case=make_case(adapter, layout), **changes)


def made(*records: Record) -> str:
    return page(records, ADAPTERS, (), "an Abacus")


def row(text: str, adapter: str, after: str) -> str:
    """The adapter's line of the table below that heading."""
    below = text.partition(f"## {after}")[2]
    return next(line for line in below.splitlines() if line.startswith(f"| {adapter} "))


def test_a_cell_says_yes_no_and_not_run_and_which_suites_decide() -> None:
    unplanned = of("tp", TP, verdicts=[make_verdict("equivalence"), make_verdict("memory")])
    bad = make_verdict("memory", passed=False, summary="peak on rank 1: 2 bytes, planned 1")
    text = made(
        of("ddp", DP), of("fsdp2", ZERO, verdicts=[make_verdict(), bad]), unplanned, of("tp", TP, verdicts=[bad])
    )
    assert [cell.strip() for cell in row(text, "ddp", "Over data-parallel").split("|")[2:4]] == ["yes", "–"]
    assert "**no**" in row(text, "fsdp2", "Over data-parallel")
    assert "?" in row(text, "tp", "Over data-parallel"), "it could, and was not run"
    assert "**no**" in row(text, "tp", "Over axes"), "one case of two fails"
    assert "- memory: peak on rank 1: 2 bytes, planned 1: fsdp2 dp2.zero3 fp32, tp tp2 fp32\n" in text
    assert "yes EM" in row(made(unplanned), "tp", "Over axes")


def test_another_workload_has_its_own_column_and_its_own_reason() -> None:
    images = workload("vit-digits")
    on_images = [
        dataclasses.replace(record, case=dataclasses.replace(record.case, workload=images))
        for record in (
            of("ddp", DP),
            of("tp", DP, outcome=Outcome(status=Status.SKIPPED, message="tp does not support vit (a vocabulary)")),
        )
    ]
    text = made(of("fsdp2", ZERO), *on_images)
    cells = {name: row(text, name, "On other workloads").split("|")[2].strip() for name in ("ddp", "fsdp2")}
    assert cells == {"ddp": "yes", "fsdp2": "?"}, "of fsdp2 there is none on images"
    assert "vit-digits" in text.partition("## On other")[2].splitlines()[2]
    assert "- vit (a vocabulary): tp\n" in text.partition("## Why not")[2]


def test_one_reason_is_one_line_with_the_systems_that_it_concerns() -> None:
    text = made(of("ddp", DP), of("fsdp2", ZERO), of("tp", TP), of("tp", Layout(tp=2, dp=2)))
    why = text.partition("## Why not")[2].partition("## Broken")[0]
    assert "- ranks along tp: all but tp\n" in why
    assert "- ZeRO stage 0: fsdp2, fsdp2-hsdp\n" in why
    assert "- 2 replicas take a larger multiple of 2 data-parallel ranks: fsdp2-hsdp\n" in why
    assert "- not run: dp: tp" in why
    low = of("ddp", DP)
    low = dataclasses.replace(low, case=dataclasses.replace(low.case, precision=Precision.BF16))
    nested = page([low], {"zero0": DeepSpeedZero0}, (), "an Abacus").partition("## Why not")[2]
    assert (
        '- precision bf16 (without ZeRO it accumulates gradients in bf16, and refuses float32 ("unsupported' in nested
    )
    assert not [line for line in text.splitlines() if line.startswith("|") and len(line) > WIDTH]


def test_a_run_that_broke_off_and_was_gone_on_with_says_so() -> None:
    later = make_environment(commit="fedcba987654")
    killed = Outcome(status=Status.KILLED, message="by signal 9\nmore")
    text = made(of("ddp", DP, environment=later), of("fsdp2", ZERO, outcome=killed), make_timed(case=make_case()))
    assert "1 record at fedcba987654, 2 records at 0123456789ab" in text
    assert "- killed: by signal 9: fsdp2 dp2.zero3 fp32\n" in text
    assert "tokens/s, dp2.mb2" in text and "0 of 1" in text and "Not tried." in text


def test_the_page_alone_tells_of_mutants_that_were_tried_before(tmp_path: Path) -> None:
    mutant = next(m for m in ROSTER_MUTANTS if m.suite == "communication")
    survived = make_good(case=mutant.case, verdicts=[make_verdict("communication")])
    for folder, record in ((tmp_path, of("ddp", DP)), (tmp_path / "mutants", survived)):
        file = RecordFile(folder)
        file.append(record)
        file.close()
    output = tmp_path / "page.md"
    assert main(["--page", "--results", str(tmp_path), "-o", str(output)]) == 1
    broken = output.read_text().partition("## Broken on purpose")[2]
    assert "**not caught**" in row(f"## Broken{broken}", mutant.adapter, "Broken")


def test_a_name_of_no_mutant_is_an_error_and_not_a_page_that_says_all_were_caught(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = RecordFile(tmp_path)
    file.append(of("ddp", DP))
    file.close()
    with pytest.raises(SystemExit):
        main(["--results", str(tmp_path), "-k", "no-such", "-o", str(tmp_path / "page.md")])
    assert "no mutant is called so" in capsys.readouterr().err and not (tmp_path / "page.md").exists()
