"""What frameworks get wrong: each reproducer still shows its defect, and each known gap of an adapter names one."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from meshmark.adapter.registry import known_adapters, load_adapter
from meshmark.adapters.deepspeed.operators import missing
from meshmark.cli.commands import main
from meshmark.conformance.reproducers import Reproducer, failed_clauses, read_reproducer, read_reproducers
from meshmark.errors import InputError, UnknownNameError
from meshmark.report.gaps import gaps_page
from studies.pages import unmarked
from tests.ranks import run_reproducer

REPRODUCERS = read_reproducers()


@pytest.mark.parametrize("reproducer", REPRODUCERS, ids=lambda each: each.name)
def test_a_reproducer_shows_its_defect(reproducer: Reproducer) -> None:
    """One that no longer does has found a version where it is mended: the adapter may do without its way around it."""
    for name in reproducer.versions:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed")
    if reproducer.operators and (reason := missing(*reproducer.operators)):
        pytest.skip(reason)
    ends = run_reproducer(reproducer.path, reproducer.num_processes, reproducer.operators)
    assert any(end.startswith("expected: ") and "; got: " in end for end in ends), f"it shows nothing: {ends}"


def test_no_reproducer_is_long() -> None:
    """A maintainer reads it at a glance: fewer than 40 lines with code."""
    lengths = {each.name: sum(bool(line.strip()) for line in each.source.splitlines()) for each in REPRODUCERS}
    assert {name: length for name, length in lengths.items() if length >= 40} == {}


@pytest.mark.parametrize("name, target", known_adapters().items())
def test_a_known_gap_names_a_reproducer_of_an_installed_distribution(name: str, target: str) -> None:
    names = {each.name for each in REPRODUCERS}
    assert [gap.reason for gap in load_adapter(target).known_gaps if gap.reproducer not in names] == []


def test_the_page_is_up_to_date() -> None:
    page = Path(__file__).parent.parent / "reports" / "gaps.md"
    assert unmarked(page.read_text()) == gaps_page(REPRODUCERS, failed_clauses()), (
        "run `meshmark gaps -o reports/gaps.md`"
    )


def test_the_command_prints_what_an_adapter_fails_by(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gaps", "--adapter", "deepspeed"]) == 0
    printed = capsys.readouterr().out
    assert "ZeRO-3 updates an unused parameter" in printed and "clauses that fail by it: unused (deepspeed" in printed
    assert "horovod" not in printed.replace("horovod)", "")


@pytest.mark.parametrize("option, value", [("--adapter", "deepsped"), ("--framework", "megatron")])
def test_an_unknown_name_is_an_error(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gaps", option, value]) == 2
    assert value in capsys.readouterr().err


BLOCK = '# /// script\n# dependencies = ["torch==2.13.0"]\n# [tool.meshmark]\n{fields}# ///\n'


@pytest.mark.parametrize(
    "text, error",
    [
        ("import torch\n", "expected a block"),
        (BLOCK.format(fields='# title = "a"\n'), "lacks framework, symptom, cause, processes"),
        (BLOCK.format(fields='# titel = "a"\n'), "titel"),
    ],
)
def test_a_script_without_its_metadata_is_an_error(tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "script.py").write_text(text)
    with pytest.raises((InputError, UnknownNameError), match=error):
        read_reproducer(tmp_path / "script.py")
