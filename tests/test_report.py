"""The page from records made by hand: the answer, the evidence, and no speed for a wrong run."""

from __future__ import annotations

import dataclasses
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from meshmark.environment import Environment
from meshmark.measure.readings import Collective, TrafficReading
from meshmark.records.record import (
    LaunchSeconds,
    Outcome,
    Record,
    Status,
    TimingEvidence,
    TrainingCurves,
    Verdict,
    decisive,
)
from meshmark.records.record_file import Reading, read_records
from meshmark.records.request import Task
from meshmark.report.render import write_report
from meshmark.report.results import results
from meshmark.report.table import bytes_text
from meshmark.report.table import table as markdown_table
from meshmark.run.verdict import judge_memory
from meshmark.spec.layout import Layout, Schedule
from meshmark.spec.precision import Precision
from meshmark.theory.traffic import TrafficException
from tests.factories import (
    make_case,
    make_environment,
    make_flow,
    make_good,
    make_memory,
    make_memory_evidence,
    make_model,
    make_timed,
    make_timing,
    make_traffic_evidence,
    make_verdict,
    make_workload,
)

DDP, FSDP2 = make_case("ddp"), make_case("fsdp2", Layout(dp=2, zero_stage=3, num_micro_batches=2))
GPIPE, MEGATRON = make_case("gpipe", Layout(pp=2, num_micro_batches=4)), make_case("megatron", Layout(tp=2))
WRONG = make_verdict("equivalence", passed=False, summary="gradients/x at step 0 is 9e+03 x its noise, 0.5 x the truth")


def wrong_record(**changes: object) -> Record:
    return make_good(**{"case": FSDP2, "verdicts": [WRONG, make_verdict("memory")], **changes})


def skipped(**changes: object) -> Record:
    outcome = Outcome(status=Status.SKIPPED, message="megatron-core is not installed: pip install megatron-core")
    bare: dict = {"verdicts": [], "training": TrainingCurves(), "timing": TimingEvidence(), "launch": LaunchSeconds()}
    return make_timed(
        **{
            "case": MEGATRON,
            "task": Task.OBSERVE,
            "outcome": outcome,
            **bare,
            **changes,
        }
    )


def crashed(**changes: object) -> Record:
    outcome = Outcome(
        status=Status.HUNG,
        rank=1,
        message="no end within 8 s",
        log_tail="last words",
        stacks={0: "File a.py in wait", 1: "File b.py in sleep"},
    )
    return skipped(**{"case": GPIPE, "outcome": outcome, "launch": LaunchSeconds(seconds=8.0), **changes})


def launched(seconds: float) -> TimingEvidence:
    """As often as a rate is launched that something is claimed of."""
    return make_timing(num_launches=3, rank_step_seconds=[[seconds, seconds]] * 2)


def all_sorts() -> list[Record]:
    """One right, one wrong, one that hung, one skipped; the first two timed at 96 and 192 tokens a second."""
    return [
        make_good(case=DDP),
        make_timed(case=DDP, timing=launched(0.5)),
        wrong_record(),
        make_timed(case=FSDP2, timing=launched(0.25)),
        crashed(),
        skipped(),
    ]


def render(tmp_path: Path, records: list[Record], complaints: list[str] | None = None) -> str:
    path = tmp_path / "sub" / "page.md"
    write_report(Reading(records=records, complaints=complaints or []), path, "meshmark report here -o page.md")
    return path.read_text()


@pytest.fixture(scope="module")
def page_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    render(folder, all_sorts())
    return folder / "sub"


@pytest.fixture(scope="module")
def page(page_folder: Path) -> str:
    """Return the page of all kinds of records."""
    return (page_folder / "page.md").read_text()


def section(page: str, title: str) -> str:
    """Return the text under a heading."""
    found = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", page, re.M | re.S)
    assert found, f"no section {title!r}"
    return found.group(1)


def rows(text: str) -> list[dict[str, str]]:
    """The first markdown table in `text`, with what it says of every row and the tables that it goes on in; fails when
    one is not well formed."""
    found = re.search(r"(?:^In every row: (.*)\.\n\n)?((?:(?:^\|.*\|\n?)+\n?)+)", text, re.M)
    assert found, "no table"
    alike = dict(said.split(": ", 1) for said in (found[1] or "").split("; ") if said)
    parts = [_rows(part) for part in found[2].strip().split("\n\n")]
    return [alike | {name: cell for part in line for name, cell in part.items()} for line in zip(*parts, strict=True)]


def _rows(table: str) -> list[dict[str, str]]:
    header, rule, *body = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()]
    assert all(re.fullmatch(r":?-+:?", cell) for cell in rule)
    assert {len(line) for line in body} | {len(rule)} == {len(header)}
    return [dict(zip(header, line, strict=True)) for line in body]


def answer(page: str) -> dict[str, dict[str, str]]:
    return {row["adapter"]: row for row in rows(page.partition("\n## ")[0])}


# The answer.


def test_the_headline_counts_right_wrong_and_skipped(page: str) -> None:
    head = page.splitlines()[2]
    assert head.startswith("**1 of 3 cases train correctly**")
    assert f"wrong or failed: `{FSDP2.id}`, `{GPIPE.id}`;" in head
    assert "1 not run, with reasons below" in head
    assert "not judged" not in head


def test_the_fastest_and_leanest_are_sought_among_the_correct(page: str) -> None:
    """The wrong run is twice as fast; it is no result."""
    head = page.splitlines()[2]
    assert f"on 2 ranks the fastest correct case is `{DDP.id}` (96 tokens/s ±0.0%)" in head
    assert FSDP2.id not in head.partition("; 1 not run")[2], "and the only correct one is no leanest of several"


def test_the_fastest_is_not_always_the_leanest(tmp_path: Path) -> None:
    small = make_good(
        case=FSDP2, memory=make_memory_evidence(readings=[make_memory(activations=10), make_memory(activations=20)])
    )
    records = [
        *all_sorts()[:2],
        small,
        make_timed(case=FSDP2, timing=make_timing(num_launches=3, rank_step_seconds=[[1.0, 1.0]] * 2)),
    ]
    head = render(tmp_path, records).splitlines()[2]
    assert f"fastest correct case is `{DDP.id}`" in head
    assert head.index(f"the leanest is `{FSDP2.id}` (1.70 KiB") < head.index("Speed is of a model of"), "speed is last"
    scattered = make_timing(num_launches=3, rank_step_seconds=[[0.1, 1.9, 1.0]] * 2)
    head = render(tmp_path, [*all_sorts()[:2], small, make_timed(case=FSDP2, timing=scattered)]).splitlines()[2]
    assert f"on 2 ranks the fastest correct cases are `{DDP.id}` (96 tokens/s ±0.0%) and `{FSDP2.id}`, whose" in head
    assert "intervals meet, so that none is ahead." in head


def test_a_wrong_run_s_speed_is_struck_out_and_it_has_no_mfu(page: str) -> None:
    found = answer(page)
    assert (found["ddp"]["correct"], found["ddp"]["tokens/s"]) == ("yes", "96 ±0.0%")
    assert found["ddp"]["MFU"].endswith("%")
    assert (found["fsdp2"]["correct"], found["fsdp2"]["tokens/s"]) == ("**no**", "~~192 ±0.0%~~ wrong run")
    assert found["fsdp2"]["MFU"] == ""


def test_the_speed_of_a_run_that_became_nan_is_struck_out_too(tmp_path: Path) -> None:
    """The instrumented pass was right, but the timed one was not training: its losses were no numbers."""
    nan = Outcome(status=Status.NAN, rank=0, message="loss is nan from step 7 on")
    found = answer(render(tmp_path, [make_good(case=DDP), make_timed(case=DDP, outcome=nan)]))
    assert "~~" in found["ddp"]["tokens/s"]
    assert found["ddp"]["MFU"] == ""


def test_a_failed_run_shows_how_it_ended_and_no_numbers(page: str) -> None:
    found = answer(page)["gpipe"]
    assert (found["correct"], found["tokens/s"], found["peak / rank"]) == ("**hung**", "", "")


SLOW = Outcome(status=Status.SLOW, rank=0, message="no end within 8 s, but still coming on: 4 of 13 steps")


def test_a_pass_that_was_too_slow_says_nothing_against_correctness(tmp_path: Path) -> None:
    """The instrumented pass's results stand, and its memory is a result; without it nothing is known."""
    timed = make_timed(case=DDP, outcome=SLOW, timing=make_timing(rank_step_seconds=[]))
    right, unknown = (make_good(case=DDP), timed), skipped(case=GPIPE, outcome=SLOW)
    bad = (wrong_record(), dataclasses.replace(timed, case=FSDP2))
    text = render(tmp_path, [*right, unknown, *bad])
    found = answer(text)
    assert found["ddp"]["correct"] == "yes, timed pass **slow**"
    assert "~~" not in found["ddp"]["peak / rank"] and found["ddp"]["peak / rank"]
    assert found["gpipe"]["correct"] == "**slow**"
    assert found["fsdp2"]["correct"] == "**no**, timed pass slow"
    assert "**1 of 2 judged cases train correctly**" in text and "1 not judged" in text
    assert f"wrong or failed: `{FSDP2.id}`" in text and f"`{GPIPE.id}`" not in text.splitlines()[2]
    assert "4 of 13 steps" in text


def test_a_verdict_that_cannot_tell_is_neither_right_nor_wrong(tmp_path: Path) -> None:
    told = make_verdict("equivalence", False, undecided=True, summary="cannot tell: the noise hides it")
    page = render(tmp_path, [make_good(case=DDP), make_good(case=GPIPE, verdicts=[told])])
    found = answer(page)
    assert (found["ddp"]["correct"], found["gpipe"]["correct"]) == ("yes", "**cannot tell**")
    assert "**1 of 1 judged case" in page.splitlines()[2] and "1 not judged" in page.splitlines()[2]
    assert "cannot tell: the noise hides it" in page, "what must be mended before it can be judged"


@pytest.mark.parametrize("status", [status for status in Status if status.outside])
def test_what_failed_outside_the_ranks_says_nothing_against_correctness(tmp_path: Path, status: Status) -> None:
    outcome = Outcome(status=status, message="it was not the adapter")
    records = [make_good(case=DDP), make_timed(case=DDP, outcome=outcome), skipped(case=GPIPE, outcome=outcome)]
    text = render(tmp_path, records)
    found, headline = answer(text), text.splitlines()[2]
    assert found["ddp"]["correct"] == f"yes, timed pass **{status}**"
    assert "~~" not in found["ddp"]["peak / rank"] and found["ddp"]["peak / rank"]
    assert found["gpipe"]["correct"] == f"**{status}**"
    assert "**1 of 1 judged case trains correctly**" in headline and "wrong or failed" not in headline
    assert f"ended by what stands outside their ranks: `{DDP.id}`, `{GPIPE.id}`" in headline
    assert text.count("it was not the adapter") == 2


def test_a_verdict_that_the_adapter_made_impossible_has_no_error_in_figures(tmp_path: Path) -> None:
    record = make_good(
        case=DDP,
        unmeasured={"memory": "Adapter.recipe raised E: why"},
        memory=make_memory_evidence(planned=[], extra_memory=[]),
    )
    text = render(tmp_path, [dataclasses.replace(record, verdicts=[make_verdict(), judge_memory(record)])])
    assert "memory: Adapter.recipe raised E: why" in text


def test_skipped_cases_are_not_in_the_answer(page: str) -> None:
    assert set(answer(page)) == {"ddp", "fsdp2", "gpipe"}


def test_memory_in_the_answer_is_that_of_the_fullest_rank(tmp_path: Path) -> None:
    record = make_good(
        case=DDP, memory=make_memory_evidence(readings=[make_memory(activations=10), make_memory(activations=5000)])
    )
    found = answer(render(tmp_path, [record]))["ddp"]
    assert found["peak / rank"] == "6.57 KiB"
    assert found["model states / rank"] == "1.56 KiB"


def test_a_run_that_timed_alone_is_not_said_to_be_wrong(tmp_path: Path) -> None:
    head = render(tmp_path, [make_timed(case=case) for case in (DDP, FSDP2, GPIPE)]).splitlines()[2]
    assert head == (
        "**Correctness was not judged in this run** (not judged: 3 cases; judged: 0, correct: 0); failed: 0."
    )


def test_a_timed_run_that_crashed_is_counted_as_failed(tmp_path: Path) -> None:
    records = [make_timed(case=DDP), crashed(case=GPIPE, task=Task.TIME)]
    head = render(tmp_path, records).splitlines()[2]
    assert head.startswith("**Correctness was not judged in this run** (not judged: 2 cases; judged: 0, correct: 0)")
    assert f"wrong or failed: `{GPIPE.id}`." in head


def test_only_what_was_judged_is_counted(tmp_path: Path) -> None:
    head = render(tmp_path, [make_good(case=DDP), wrong_record(), make_timed(case=GPIPE)]).splitlines()[2]
    assert head.startswith("**1 of 2 judged cases train correctly**")
    assert f"wrong or failed: `{FSDP2.id}`; 1 not judged." in head


def test_where_nothing_was_run_nothing_is_counted(tmp_path: Path) -> None:
    assert render(tmp_path, [skipped()]).splitlines()[2] == "**No case was run**; 1 not run, with reasons below."


# Several records of one case.


def test_the_last_record_of_a_pass_counts(tmp_path: Path) -> None:
    found = answer(render(tmp_path, [crashed(case=DDP), make_good(case=DDP)]))
    assert found["ddp"]["correct"] == "yes"
    assert "hung" not in render(tmp_path, [crashed(case=DDP), make_good(case=DDP)])


def test_what_is_wrong_at_times_is_wrong(tmp_path: Path) -> None:
    """Of the same committed code. A change that is not committed may have mended it."""
    wrong = make_good(case=DDP, verdicts=[dataclasses.replace(make_good().verdicts[0], passed=False)])
    right, others = make_good(case=DDP), make_good(case=DDP, environment=make_environment(commit="fedcba987654"))
    dirty = make_environment(commit="0123456789ab-dirty")
    assert answer(render(tmp_path, [wrong, right]))["ddp"]["correct"] == "**no**"
    assert answer(render(tmp_path, [wrong, others]))["ddp"]["correct"] == "yes"
    edited = [dataclasses.replace(record, environment=dirty) for record in (wrong, right)]
    assert answer(render(tmp_path, edited))["ddp"]["correct"] == "yes"
    crashed = dataclasses.replace(right, outcome=Outcome(status=Status.HUNG, rank=0), verdicts=[])
    assert decisive([wrong, crashed]) is crashed, "how the last run ended counts"
    larger = dataclasses.replace(right, verdicts=[right.verdicts[0], make_verdict("memory", passed=False)])
    assert decisive([wrong, larger]) is wrong and decisive([wrong, larger], "memory") is larger
    for digest, correct in (("1", "**no**"), ("2", "yes")):  # as a package, Meshmark has no commit
        before = dataclasses.replace(wrong, environment=make_environment(commit="", packages_digest="1"))
        after = dataclasses.replace(right, environment=make_environment(commit="", packages_digest=digest))
        assert answer(render(tmp_path, [before, after]))["ddp"]["correct"] == correct


def test_cases_stand_in_order_of_first_appearance() -> None:
    found = results([make_good(case=FSDP2), make_good(case=DDP), make_timed(case=FSDP2)])
    assert [r.case.adapter for r in found] == ["fsdp2", "ddp"]
    assert found[0].timed is not None and found[1].timed is None


LARGE = make_workload(name="large", model=make_model(name="large"))


def test_a_case_that_was_not_judged_is_not_correct_because_its_small_kin_is(tmp_path: Path) -> None:
    """Same adapter, layout and precision."""
    big = make_good(case=make_case("ddp", workload=LARGE), verdicts=[make_verdict("memory")])
    page = render(tmp_path, [make_good(case=DDP), big])
    assert [row["correct"] for row in rows(page)] == ["yes", "not judged (as mini: yes)"]
    assert page.splitlines()[2].startswith("**1 of 1 judged case trains correctly**")


def test_a_wrong_small_kin_makes_the_large_case_wrong(tmp_path: Path) -> None:
    big = make_case("fsdp2", FSDP2.layout, workload=LARGE)
    records = [wrong_record(), make_good(case=big, verdicts=[]), make_timed(case=big)]
    page = render(tmp_path, records)
    assert [row["correct"] for row in rows(page)] == ["**no**", "**no** (as mini)"]
    assert rows(page)[1]["tokens/s"].startswith("~~")


def test_one_wrong_kin_is_not_outvoted_by_a_later_right_one() -> None:
    """Two small models are judged: whichever comes last, a framework that trains one wrong is not to be trusted."""
    llama = make_case("fsdp2", FSDP2.layout, workload=make_workload(name="mini-llama"))
    big = make_good(case=make_case("fsdp2", FSDP2.layout, workload=LARGE), verdicts=[])
    found = results([wrong_record(), make_good(case=llama), big])
    assert found[2].correct is False


def test_another_precision_or_layout_is_no_kin(tmp_path: Path) -> None:
    low = make_good(case=make_case("ddp", workload=LARGE, precision=Precision.BF16), verdicts=[])
    wide = make_good(case=make_case("ddp", Layout(dp=4), workload=LARGE), verdicts=[])
    page = render(tmp_path, [make_good(case=DDP), low, wide])
    assert [row["correct"] for row in rows(page)] == ["yes", "not judged", "not judged"]
    assert "2 not judged" in page.splitlines()[2]


# The evidence.


def test_a_failure_appears_with_its_evidence(page: str) -> None:
    text = section(page, "What failed")
    assert f"**{GPIPE.id}** (observe): hung, rank 1: no end within 8 s" in text
    for words in ("last words", "--- stack of rank 0\nFile a.py in wait", "--- stack of rank 1\nFile b.py in sleep"):
        assert words in text


def test_a_bad_verdict_appears_with_its_evidence(page: str) -> None:
    text = section(page, "What failed")
    assert f"**{FSDP2.id}**: equivalence: gradients/x at step 0 is 9e+03 x its noise, 0.5 x the truth" in text
    assert "worst_quantity: gradients/head.norm.bias" in text
    assert DDP.id not in text


def test_a_traceback_is_evidence(tmp_path: Path) -> None:
    outcome = Outcome(status=Status.RAISED, rank=0, message="ValueError: no", traceback="Traceback:\n  File x\n")
    text = section(render(tmp_path, [make_good(case=DDP), crashed(outcome=outcome)]), "What failed")
    assert "Traceback:\n  File x" in text


def test_when_nothing_failed_the_report_says_so(tmp_path: Path) -> None:
    text = section(render(tmp_path, [make_good(case=DDP), skipped()]), "What failed")
    assert "Nothing: every case that ran reached its end and passed every suite." in text


def test_skips_appear_with_their_reasons(page: str) -> None:
    (row,) = rows(section(page, "Not run"))
    assert row["adapter"] == "megatron"
    assert row["why"] == "megatron-core is not installed: pip install megatron-core"


def test_a_reason_with_a_bar_in_it_does_not_break_the_table(tmp_path: Path) -> None:
    """Adapters from outside say what they like."""
    record = skipped(outcome=Outcome(status=Status.SKIPPED, message="needs cpu|cuda, got neither"))
    (row,) = rows(section(render(tmp_path, [make_good(case=DDP), record]), "Not run"))
    assert row["why"].replace("\\", "").strip("`") == "needs cpu|cuda, got neither"


def test_evidence_with_fences_in_it_stays_inside_its_own(tmp_path: Path) -> None:
    """A log that holds ``` must not turn the rest of the page into code or markup."""
    outcome = Outcome(status=Status.RAISED, rank=0, message="x", log_tail="```\n# not a heading\n```")
    page = render(tmp_path, [make_good(case=DDP), crashed(outcome=outcome)])
    fence, outside = "", []
    for line in page.splitlines():
        opening = re.match(r"`{3,}", line)
        if opening and not fence:
            fence = opening.group()
        elif fence and re.fullmatch(rf"{fence}`*", line.strip()):
            fence = ""
        elif not fence:
            outside.append(line)
    assert not fence
    assert "# not a heading" not in outside


def test_lines_that_could_not_be_read_are_listed(tmp_path: Path) -> None:
    page = render(tmp_path, all_sorts(), ["records.jsonl line 3: not whole JSON", "records.jsonl line 7: schema 9"])
    text = section(page, "What could not be read")
    assert "- records.jsonl line 3: not whole JSON\n- records.jsonl line 7: schema 9" in text


def test_every_table_is_well_formed(page: str) -> None:
    blocks = re.findall(r"(?:^\|.*\|\n?)+", page, re.M)
    assert len(blocks) >= 9
    for block in blocks:
        assert rows(block)


# One table a suite.


def test_the_equivalence_table_tells_what_decided(page: str) -> None:
    found = {row["adapter"]: row for row in rows(section(page, "Equivalence"))}
    assert set(found) == {"ddp", "fsdp2"}
    row = found["ddp"]
    assert (row["verdict"], row["worst quantity"], row["step"]) == ("yes", "gradients/head.norm.bias", "1")
    assert (row["distance / noise"], row["limit"]) == ("1.5", "4")
    assert row["smallest detectable error"] == "2.5e-06"
    assert row["loss, first to last"] == "5.5000 to 5.2500"
    assert found["fsdp2"]["verdict"] == "**no**"


def test_a_distance_without_bound_is_not_left_blank(tmp_path: Path) -> None:
    """A missing gradient is infinitely far; from disk it comes as NaN. Blank would look like nothing to report."""
    for ratio in (math.inf, math.nan):
        evidence = make_verdict().evidence | {"ratio": ratio}
        record = wrong_record(verdicts=[make_verdict(passed=False, evidence=evidence)])
        (row,) = rows(section(render(tmp_path, [record]), "Equivalence"))
        assert row["distance / noise"] != ""


def test_the_memory_table_is_of_the_fullest_rank(tmp_path: Path) -> None:
    record = make_good(
        case=DDP, memory=make_memory_evidence(readings=[make_memory(activations=10), make_memory(activations=5000)])
    )
    (row,) = rows(section(render(tmp_path, [record]), "Memory"))
    assert (row["rank"], row["activations"], row["peak"]) == ("1", "4.88 KiB", "6.57 KiB")
    assert (row["allocator peak"], row["reserved"]) == ("2.93 KiB", "4 KiB")
    assert row["worst error"] == "0.10%"


def test_declared_remainders_stand_under_memory_with_their_reason(tmp_path: Path) -> None:
    text = section(render(tmp_path, [make_good(case=DDP)]), "Memory").partition("Declared beyond")[2]
    (row,) = rows(text)
    assert (row["category"], row["bytes"], row["why"]) == ("gradients", "2", "padding")


def test_the_communication_table_is_of_the_rank_that_sends_most(tmp_path: Path) -> None:
    """Both what was asked for and what the backend made of it; calls of scalars are left out."""

    def reading(num_bytes: int) -> TrafficReading:
        asked = Collective(kind="reduce_scatter", group_size=2, ranks=(0, 1), count=2, num_bytes=num_bytes)
        scalar = Collective(kind="all_reduce", group_size=2, ranks=(0, 1), count=1, num_bytes=4)
        return TrafficReading(
            asked=[asked, scalar],
            issued=[Collective(kind="all_reduce", group_size=2, count=2, num_bytes=num_bytes)],
        )

    (row,) = rows(
        section(
            render(
                tmp_path, [make_good(case=DDP, traffic=make_traffic_evidence(readings=[reading(2048), reading(4096)]))]
            ),
            "Communication",
        )
    )
    assert (row["asked for"], row["backend issued"]) == ("2 reduce_scatter 4 KiB", "2 all_reduce 4 KiB")
    assert (row["sent / rank"], row["really sent / rank"]) == ("2.00 KiB", "4 KiB")
    assert row["differences"] == "0"


def test_traffic_names_the_axes_of_its_groups_where_there_are_several(tmp_path: Path) -> None:
    case = make_case(layout=Layout(dp=2, tp=2))
    groups = {"tp": (0, 1), "dp": (0, 2), "dp+tp": (0, 1, 2, 3)}
    asked = [Collective(kind="all_reduce", group_size=2, ranks=r, count=1, num_bytes=2048) for r in groups.values()]
    traffic = make_traffic_evidence(
        readings=[TrafficReading(asked=asked, issued=[])], planned=[[]], traffic_exceptions=[[]]
    )
    (row,) = rows(section(render(tmp_path, [make_good(case=case, traffic=traffic)]), "Communication"))
    assert row["asked for"] == ", ".join(f"1 all_reduce 2 KiB over {axes}" for axes in groups)


def test_declared_departures_stand_under_communication_with_their_reason(tmp_path: Path) -> None:
    theory, sent = make_flow("reduce_scatter", num_bytes=4096), make_flow(num_bytes=4096)
    declared = [
        TrafficException(sends=(sent,), instead_of=(theory,), reason="whole gradients"),
        TrafficException(instead_of=(theory,), reason="none"),
    ]
    record = make_good(case=DDP, traffic=make_traffic_evidence(traffic_exceptions=[declared, []]))
    text = section(render(tmp_path, [record]), "Communication").partition("Declared exceptions")[2]
    first, second = rows(text)
    assert (first["sent"], first["in place of"]) == ("gradients: all_reduce 4 KiB", "gradients: reduce_scatter 4 KiB")
    assert (first["why"], second["sent"]) == ("whole gradients", "nothing")
    assert [row["difference"] for row in (first, second)] == ["+2,048 B", "-2,048 B"], "of two ranks, by rings"


def test_the_throughput_table_marks_wrong_runs_and_shows_the_spread(tmp_path: Path) -> None:
    ranks = [[0.1, 0.2, 0.4, 0.3], [0.1, 0.3, 0.3, 0.3]]
    records = [*all_sorts()[2:3], make_timed(case=FSDP2, timing=make_timing(rank_step_seconds=ranks))]
    (row,) = rows(section(render(tmp_path, records), "Throughput"))
    assert row["correct"] == "**no**"
    assert (row["p5 / p50 / p95"], row["rank gap"]) == ("130 / 300 / 300 ms", "0.00 ms")
    assert (row["steps"], row["tokens/s"], row["drift"]) == ("4", "192", "+50.0%")
    assert row["95 % interval"] == "(1 launch)", "its steps say nothing of how far another may lie"


def test_a_speed_of_steps_that_were_not_those_judged_is_struck_out(tmp_path: Path) -> None:
    other = Verdict(suite="throughput", passed=False, summary="not what was judged")
    page = render(tmp_path, [make_good(case=DDP), make_timed(case=DDP, verdicts=[other])])
    assert rows(page)[0]["tokens/s"].startswith("~~")
    assert "throughput: not what was judged" in section(page, "What failed")


def test_times_are_compared_with_a_baseline_case_by_case(tmp_path: Path) -> None:
    """By medians: 100 ms against 400 ms; one whose rates' intervals meet is tied, one that the baseline lacks new."""
    records = [
        make_timed(case=DDP, timing=make_timing(num_launches=3, rank_step_seconds=[[0.1, 0.1, 0.11]] * 2)),
        make_timed(case=GPIPE, timing=make_timing(num_launches=3, rank_step_seconds=[[0.1, 0.1, 9.0]] * 2)),
        make_timed(case=FSDP2),
    ]
    slower = make_timing(num_launches=3, rank_step_seconds=[[0.4, 0.4, 0.39]] * 2)
    before = Reading(records=[make_timed(case=case, timing=slower) for case in (DDP, GPIPE)], complaints=[])
    path = tmp_path / "page.md"
    write_report(Reading(records=records, complaints=[]), path, "meshmark report", before)
    column = [row["median / baseline's"] for row in rows(section(path.read_text(), "Throughput"))]
    assert column == ["0.25", "0.25 tied", "new"]


OTHER = {
    "machine": make_environment(machine="Babbage 2"),
    "CPUs": make_environment(num_cpus=64),
    "device": make_environment(device="cuda"),
    "nodes": make_environment(nnodes=2),
}


def compared(tmp_path: Path, there: Environment) -> str:
    """A page of this machine, with a baseline of another environment: twice as slow, wrong, three times as full."""
    before = [
        make_timed(case=DDP, environment=there, timing=make_timing(num_launches=3, rank_step_seconds=[[1.0, 1.0]] * 2)),
        make_good(
            case=DDP,
            environment=there,
            verdicts=[WRONG],
            memory=make_memory_evidence(readings=[make_memory(activations=6348)] * 2),
        ),
    ]
    here = make_environment(omp_num_threads="1")
    now = [make_timed(case=DDP, environment=here, timing=launched(0.5))]
    now += [make_good(case=DDP, environment=here)]
    path = tmp_path / "page.md"
    write_report(Reading(records=now, complaints=[]), path, "meshmark report", Reading(records=before, complaints=[]))
    return path.read_text()


@pytest.mark.parametrize("fact", OTHER)
def test_times_of_another_machine_are_struck_out_and_what_differs_is_told(tmp_path: Path, fact: str) -> None:
    text = section(compared(tmp_path, OTHER[fact]), "Throughput")
    (row,) = rows(text)
    assert row["median / baseline's"] == "~~0.50~~ other machine"
    assert f"The baseline was measured under other conditions**: {fact} " in text
    assert text.index("under other conditions") < text.index("| p5 / p50 / p95"), "before the comparison"


@pytest.mark.parametrize(
    ("changes", "label", "told"),
    [
        ({"versions": {"torch": "2.12.0"}}, "torch", "torch 2.13.0 here, 2.12.0 there"),
        ({"omp_num_threads": "4"}, "OMP_NUM_THREADS", "OMP_NUM_THREADS 1 here, 4 there"),
    ],
)
def test_times_under_other_settings_are_marked(
    tmp_path: Path, changes: dict[str, object], label: str, told: str
) -> None:
    text = section(compared(tmp_path, make_environment(**changes)), "Throughput")
    (row,) = rows(text)
    assert row["median / baseline's"] == f"0.50 (other {label})"
    assert told in text


def test_a_baseline_of_the_same_machine_is_compared_without_a_word(tmp_path: Path) -> None:
    """Older records do not tell the number of threads: that is no difference."""
    page = compared(tmp_path, make_environment())
    (row,) = rows(section(page, "Throughput"))
    assert row["median / baseline's"] == "0.50"
    assert "other conditions" not in page


@pytest.mark.parametrize("there", [make_environment(), OTHER["machine"]], ids=["same machine", "other machine"])
def test_bytes_and_correctness_are_compared_wherever_the_baseline_is_from(tmp_path: Path, there: Environment) -> None:
    page = compared(tmp_path, there)
    (memory,), (equivalence,) = rows(section(page, "Memory")), rows(section(page, "Equivalence"))
    assert float(memory["peak / baseline's"]) == pytest.approx(2724 / 8072, abs=1e-4)
    assert (equivalence["verdict"], equivalence["baseline's"]) == ("yes", "**no**")


def test_the_committed_baseline_is_read_and_known_to_be_of_another_machine(tmp_path: Path) -> None:
    before = read_records(Path(__file__).parents[1] / "baselines" / "epyc-2cpu")
    assert not before.complaints
    timed = next(record for record in before.records if record.task is Task.TIME)
    path = tmp_path / "page.md"
    now = make_timed(case=timed.case, timing=make_timing(rank_step_seconds=timed.timing.rank_step_seconds))
    write_report(Reading(records=[now], complaints=[]), path, "meshmark report", before)
    text = section(path.read_text(), "Throughput")
    assert "machine Abacus 3000 here, AMD EPYC there" in text and "~~1.00~~ other machine" in text


def test_without_a_baseline_there_is_no_such_column(tmp_path: Path) -> None:
    (row,) = rows(section(render(tmp_path, [make_timed()]), "Throughput"))
    assert "median / baseline's" not in row


def test_pipelines_are_shown_with_the_bubble_that_theory_gives_them(tmp_path: Path) -> None:
    interleaved = Layout(pp=2, num_micro_batches=4, schedule=Schedule.INTERLEAVED, virtual_stages=2)
    deep = make_workload(model=make_model(num_layers=4))
    cases = [DDP, GPIPE, make_case("pipeline", interleaved, workload=deep)]
    found = rows(section(render(tmp_path, [make_timed(case=case) for case in cases]), "Throughput"))
    assert [row["bubble, planned"] for row in found] == ["", "20.0%", "11.1%"]
    assert "bubble" not in render(tmp_path, [make_timed(case=DDP)])


def test_the_time_of_all_launches_is_accounted_for(page: str) -> None:
    found = {row["adapter"]: row for row in rows(section(page, "Where the time went"))}
    assert found["ddp"] == {"adapter": "ddp", "launches": "4", "seconds": "7.0", "of these building engines": "2.5"}
    assert (found["all"]["launches"], found["all"]["seconds"]) == ("9", "22.0")
    assert found["megatron"]["launches"] == "0"


def test_the_origin_names_machine_versions_and_both_commands(tmp_path: Path) -> None:
    environment = make_environment(command="pytest suites --world 4")
    text = section(render(tmp_path, [make_good(case=DDP), make_timed(environment=environment)]), "How it was obtained")
    for words in ("\npytest suites\n", "\npytest suites --world 4\n", "\nmeshmark report here -o page.md\n"):
        assert words in text
    found = {row["what"]: row["value"] for row in rows(text)}
    assert (found["machine"], found["commit"], found["torch"]) == ("Abacus 3000", "0123456789ab", "2.13.0")


def test_a_commit_that_is_not_known_is_said_to_be(tmp_path: Path) -> None:
    page = render(tmp_path, [make_good(environment=make_environment(commit=""))])
    assert {row["what"]: row["value"] for row in rows(section(page, "How it was obtained"))}["commit"] == "unknown"


@pytest.mark.parametrize(
    "records",
    [
        [skipped()],
        [crashed()],
        [make_timed()],
        [make_good(verdicts=[])],
        [make_good(memory=make_memory_evidence(readings=[]), traffic=make_traffic_evidence(readings=[]))],
    ],
    ids=["all skipped", "all crashed", "timed alone", "not judged", "nothing measured"],
)
def test_a_report_of_little_is_still_a_report(tmp_path: Path, records: list[Record]) -> None:
    page = render(tmp_path, records)
    assert page.startswith("# Meshmark report: Abacus 3000, 2 CPUs, cpu\n\n**")
    assert rows(section(page, "How it was obtained"))


# Pictures.

SVG = "{http://www.w3.org/2000/svg}"


def picture(folder: Path, name: str) -> tuple[ElementTree.Element, str]:
    """The root, and all its text."""
    root = ElementTree.parse(folder / f"page-{name}.svg").getroot()
    return root, " ".join("".join(text.itertext()) for text in root.iter(f"{SVG}text"))


def test_pictures_stand_beside_the_page_and_are_linked(page: str, page_folder: Path) -> None:
    linked = re.findall(r"!\[.*?\]\((.*?)\)", page)
    assert linked == ["page-tradeoff.svg", "page-memory.svg", "page-ranks.svg", "page-throughput.svg"]
    for name in linked:
        assert ElementTree.parse(page_folder / name).getroot().tag == f"{SVG}svg"


def test_the_memory_picture_names_every_measured_case_and_every_category(page_folder: Path) -> None:
    _, text = picture(page_folder, "memory")
    for words in ("ddp  dp2.mb2", "fsdp2  dp2.zero3.mb2", "optimizer states", "activations", "communication"):
        assert words in text
    assert "gpipe" not in text


def test_the_throughput_picture_has_a_dot_for_every_sample_and_hollow_ones_for_wrong_runs(page_folder: Path) -> None:
    root, text = picture(page_folder, "throughput")
    dots = [g for g in root.iter(f"{SVG}g") if (g.get("id") or "").startswith("PathCollection")]
    fills = [["none" in (use.get("style") or "").split("fill: ")[1][:5] for use in g.iter(f"{SVG}use")] for g in dots]
    assert fills == [[False] * 6, [True] * 6]
    assert "hollow: wrong, or narrower states" in text


def test_pictures_without_data_are_not_linked(tmp_path: Path) -> None:
    assert "![" not in render(tmp_path, [skipped()])
    assert not list((tmp_path / "sub").glob("*.svg"))


def test_the_same_records_make_the_same_bytes(tmp_path: Path) -> None:
    """A committed report changes only when its records do."""
    pages = []
    for folder in ("one", "two"):
        render(tmp_path / folder, all_sorts())
        pages.append([file.read_bytes() for file in sorted((tmp_path / folder / "sub").iterdir())])
    assert len(pages[0]) == 5
    assert pages[0] == pages[1]


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (1024, "1 KiB"),
        (925 * 1024, "925 KiB"),
        (3 * 2**20, "3 MiB"),
        (2.904 * 2**20, "2.90 MiB"),
        (80 * 2**30, "80 GiB"),
        (2 * 2**40, "2 TiB"),
        (2048 * 2**40, "2.05e+03 TiB"),
    ],
)
def test_bytes_have_three_digits_and_binary_units(count: int, text: str) -> None:
    assert bytes_text(count) == text


def test_numbers_that_a_row_lacks_stay_empty() -> None:
    text = markdown_table([{"a": 1, "b": 2.5}, {"a": 3}, {"b": None, "c": "x"}])
    assert rows(text) == [
        {"a": "1", "b": "2.5", "c": ""},
        {"a": "3", "b": "", "c": ""},
        {"a": "", "b": "", "c": "x"},
    ]


def test_the_environment_of_a_report_is_the_last_record_s(tmp_path: Path) -> None:
    later: Environment = make_environment(machine="Babbage 2")
    page = render(tmp_path, [make_good(), make_timed(environment=later)])
    assert page.startswith("# Meshmark report: Babbage 2,")
