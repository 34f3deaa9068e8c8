"""The page "Which framework?": answers from measured records, plans marked as such, and what is missing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from meshmark.cli.commands import main
from meshmark.conformance.finding import ClauseResult, Finding
from meshmark.plan.model_names import plan_model
from meshmark.records.record import Record
from meshmark.records.record_file import RecordFile, read_records
from meshmark.report.conformance import AdapterColumn, Conformance
from meshmark.report.results import results
from meshmark.report.which import Cluster, measured_rows, which_page
from meshmark.spec.hardware import gpu
from meshmark.spec.layout import Layout
from tests.factories import make_case, make_good, make_record

ROOT = Path(__file__).parent.parent
MEASURED = ROOT / "baselines" / "epyc-2cpu"
CLUSTER = Cluster(model=plan_model("llama-7b"), gpu=gpu("a100-40"), num_gpus=8, global_batch=256)


def test_the_smallest_share_of_ddp_is_the_answer() -> None:
    page = "\n\n".join(which_page(read_records(MEASURED, latest=True).records, CLUSTER, "meshmark which"))
    (line,) = [line for line in page.splitlines() if line.startswith("- **Fit a larger model")]
    assert "fsdp2 dp4.zero3.mb2" in line and "deepspeed" not in line, "DeepSpeed keeps small parameters whole"
    assert "model states a rank are 25 % of DDP's on 4 ranks" in line
    (planned,) = [line for line in page.splitlines() if line.startswith("- **Train llama-7b on 8 a100-40")]
    assert "*Planned*" in planned and "tokens/s a GPU" in planned


def test_the_least_change_of_a_plain_loop_is_answered_everywhere() -> None:
    records = read_records(MEASURED, latest=True).records
    for page in (which_page(records, CLUSTER, "x"), which_page(records, CLUSTER, "x", in_reports=True)):
        answer = next(line for line in "\n".join(page).splitlines() if "Change the least of a plain" in line)
        assert "statements are not those of a plain PyTorch loop" in answer and ": ddp." in answer
    assert "(../examples/loops/ddp.py)" in "".join(page)


def test_a_framework_of_which_no_layout_fits_says_what_is_missing() -> None:
    page = "\n\n".join(which_page(read_records(MEASURED, latest=True).records, CLUSTER, "meshmark which"))
    assert "| ddp           | none fits" in page
    assert "- ddp: 'llama-7b' does not fit on 8 a100-40" in page


@pytest.mark.parametrize(
    ("model", "kind", "batch", "ties"),
    [("llama-7b", "a100-40", 256, {True}), ("llama-8b", "h100", 64, {True, False})],
)
def test_speeds_whose_intervals_overlap_are_a_tie(model: str, kind: str, batch: int, ties: set[bool]) -> None:
    """Nobody is named slower by less than the planner can tell; of a tie the simplest layout comes first."""
    cluster = Cluster(model=plan_model(model), gpu=gpu(kind), num_gpus=8, global_batch=batch)
    page = "\n\n".join(which_page(read_records(MEASURED, latest=True).records, cluster, "meshmark which"))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if " to " in line]
    plans = [(row[0], row[1], *map(number, (row[3], *row[4].split(" to "))), row[5]) for row in rows if len(row) == 6]
    fastest = max(plans, key=lambda plan: plan[2])
    meets = [plan[3] <= fastest[4] and fastest[3] <= plan[4] for plan in plans]
    assert set(meets) == ties and meets == sorted(meets, reverse=True), "ties stand above what is slower"
    for plan, tied in zip(plans, meets, strict=True):
        slower = f"{100 * (1 - plan[2] / fastest[2]):.0f} % slower"
        assert plan[5] == ("within noise of the fastest" if tied else slower)
    (answer,) = [line for line in page.splitlines() if line.startswith(f"- **Train {model}")]
    assert [f"{plan[0]} {plan[1]}" in answer for plan in plans] == meets and "slower" not in answer


def number(text: str) -> int:
    return int(text.replace(",", ""))


def column(adapter: str, layout: Layout, **found: ClauseResult) -> AdapterColumn:
    findings = {name.replace("_", " "): Finding(result=one, evidence="some reason") for name, one in found.items()}
    base = make_case(adapter=adapter, layout=layout)
    return AdapterColumn(base=base, findings=findings, launch_seconds=1.0)


def test_what_resumes_and_what_reshards_are_two_answers() -> None:
    yes, no_answer = ClauseResult.PASS, ClauseResult.UNSUPPORTED
    two = Layout(dp=2)
    found = [
        column("single", Layout(), resume=yes, reshard=no_answer),
        column("ddp", two, resume=yes, reshard=yes, dropout=yes, recomputed_dropout=yes),
        column("accelerate", two, resume=yes, reshard=no_answer, dropout=no_answer, recomputed_dropout=no_answer),
    ]
    records = read_records(MEASURED, latest=True).records
    kept = Conformance(columns=found, environment=records[0].environment)
    page = "\n\n".join(which_page(records, CLUSTER, "meshmark which", [kept]))
    assert "- **Resume exactly from a checkpoint**: all 2 that run on several ranks: " in page
    assert (
        "- **Resume exactly on another number of ranks**: ddp. *Measured* by the clause reshard. Not supported, or not"
        in page
    )
    assert "All 2 rows of the conformance table with several ranks: ddp, accelerate." in page, "the count is of rows"
    assert "| single " not in page and "some reason; some reason" not in page


def test_links_are_those_of_the_page_s_place() -> None:
    records = read_records(MEASURED, latest=True).records
    assert "](validation.md)" in "".join(which_page(records, CLUSTER, "x", in_reports=True))
    assert "](" not in "".join(which_page(records, CLUSTER, "x")), "elsewhere no page lies beside it"


def test_shares_are_of_ddp_on_as_many_ranks() -> None:
    rows = measured_rows(results(read_records(MEASURED, latest=True).records))
    shares = {(row["adapter"], row["layout"]): str(row["model states / rank"]) for row in rows}
    assert shares["ddp", "dp2.mb2"].endswith("(100 %)") and shares["ddp", "dp4.mb2"].endswith("(100 %)")
    assert shares["fsdp2", "dp2.zero3.mb2"].endswith("(50 %)")
    assert [row["ranks"] for row in rows] == sorted(int(str(row["ranks"])) for row in rows)


def test_a_wrong_case_is_no_answer() -> None:
    records = list(read_records(MEASURED, latest=True).records)

    def fail(record: Record) -> Record:
        verdicts = [dataclasses.replace(v, passed=v.passed and v.suite != "equivalence") for v in record.verdicts]
        return dataclasses.replace(record, verdicts=verdicts)

    wrong = [fail(record) if record.case.adapter == "fsdp2" else record for record in records]
    page = "\n\n".join(which_page(wrong, CLUSTER, "meshmark which"))
    (line,) = [line for line in page.splitlines() if line.startswith("- **Fit a larger model")]
    assert " fsdp2 " not in line and "fairscale-fsdp dp4.zero3.mb2" in line


def test_without_a_correct_case_there_is_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = RecordFile(tmp_path)
    file.append(make_record())
    file.close()
    assert main(["which", str(tmp_path)]) == 2
    assert "no record of a case that trains correctly" in capsys.readouterr().err


def test_the_command_says_what_it_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = RecordFile(tmp_path)
    file.append(make_record())
    file.close()
    with (tmp_path / "records.jsonl").open("a") as end:
        end.write('{"schema": 999}\n')
    assert main(["which", str(tmp_path)]) == 2
    assert "left out records.jsonl line 2: schema 999, this Meshmark reads 1 to" in capsys.readouterr().err


def test_the_command_writes_the_page_and_notes_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "which.md"
    command = ["which", str(MEASURED), "-o", str(output), "--model", "llama-8b", "--gpus", "16", "--gpu", "h100"]
    assert main(command) == 0
    page = output.read_text()
    assert "**Train llama-8b on 16 h100**" in page and "--gpus 16 --gpu h100" in page
    assert make_good().case.adapter in page


def test_a_page_replaces_no_records_and_follows_no_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stranger's results folder may have a link in the page's place."""
    file = RecordFile(tmp_path)
    file.append(make_good())
    file.close()
    held, mine = (tmp_path / "records.jsonl").read_bytes(), tmp_path / "mine"
    assert main(["which", str(tmp_path), "-o", str(tmp_path / "records.jsonl")]) == 2
    assert "it holds records, which a page would replace" in capsys.readouterr().err
    mine.write_text("mine")
    (tmp_path / "which.md").symlink_to(mine)
    assert main(["which", str(tmp_path)]) == 2
    assert "is a link to" in capsys.readouterr().err
    assert mine.read_text() == "mine" and (tmp_path / "records.jsonl").read_bytes() == held
