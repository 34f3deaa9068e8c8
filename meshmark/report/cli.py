"""The commands `report`, `show` and `schema`, with their arguments."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshmark.errors import InputError, ResultsError, refuse_page, refuse_strangers
from meshmark.records.judged_case import num_judged
from meshmark.records.record_file import OTHER_RECORD, Reading, latest_attempts, read_records
from meshmark.report.guard import rendered, write_page
from meshmark.report.render import write_report
from meshmark.report.table import one_line
from meshmark.text import pluralize

if TYPE_CHECKING:
    from meshmark.inference.run import InferenceRecord


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, metavar="DIR", help="folder with records.jsonl")
    parser.add_argument(
        "-o",
        "--output",
        type=_output_file,
        metavar="FILE",
        help="markdown; .html: one interactive page that needs no network (default: DIR/report.md)",
    )
    parser.add_argument("--baseline", type=Path, metavar="NAME", help="baselines/NAME, or a folder, to compare with")
    parser.set_defaults(run=_report)


def add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("case", metavar="CASE", help="a case's id, or a part of it that is in no other case's id")
    parser.add_argument(
        "results", type=Path, metavar="DIR", nargs="?", default=Path("results"), help="(default: results)"
    )
    parser.set_defaults(run=_show)


def add_schema(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_schema)


def _show(parsed: argparse.Namespace) -> None:
    from meshmark.report.show import matching, show

    if not parsed.results.exists() and (Path(parsed.case) / "records.jsonl").is_file():
        raise InputError(
            f"{parsed.case!r} is a folder of results, expected a case; give the case first: "
            f"meshmark show CASE {shlex.quote(parsed.case)}"
        )
    reading = read_records(parsed.results, latest=True)
    _complain(reading.complaints)
    sys.stdout.write(show(matching(reading.records, parsed.case)))


def _schema(_: argparse.Namespace) -> None:
    from meshmark.records.schema import schema

    print(json.dumps(schema(), indent=2))


def _output_file(text: str) -> Path:
    """Parse the path of an output file, for argparse."""
    if not (path := Path(text)).name:
        raise argparse.ArgumentTypeError(f"{text!r} names no file")
    return path


def _report(parsed: argparse.Namespace) -> None:
    folder = parsed.results if parsed.results.is_dir() else parsed.results.parent
    output = parsed.output or folder / "report.md"
    refuse_page(output, parsed.results)
    if not parsed.output:
        refuse_strangers(folder)
    judged = _judged(parsed.results)
    try:
        reading = read_records(parsed.results, latest=True)
    except ResultsError:
        if judged is None:
            raise
        if not _write_judged(judged, output, parsed.results):
            raise
        return
    if judged is not None:
        others = [each for each in reading.complaints if OTHER_RECORD not in each]
        reading = dataclasses.replace(reading, complaints=others)
        _write_judged(judged, output.with_name(f"{output.stem}-inference.md"), parsed.results, others)
    _complain(reading.complaints)
    command = ["meshmark", "report", str(parsed.results)]
    for option, value in (("-o", parsed.output), ("--baseline", parsed.baseline)):
        command += [option, str(value)] if value else []
    before = parsed.find_baseline(parsed.baseline, Path()) if parsed.baseline else None
    baseline = read_records(before, latest=True) if before else None
    write = _write_html if output.suffix.lower() in (".html", ".htm") else _write_markdown
    try:
        left_out = write(reading, output, shlex.join(command), baseline)
    except OSError as error:
        raise ResultsError(f"{str(output)!r} cannot be written: {error.strerror}") from error
    _complain(left_out)
    if unread := len(reading.complaints):
        lines = pluralize(unread, "line")
        if not reading.records:
            raise ResultsError(f"no record of {str(parsed.results)!r} can be read ({lines}, named above)")
        print(f"meshmark: {lines} could not be read and stand in no table; {output} lists them", file=sys.stderr)


def _judged(results: Path) -> Path | None:
    """Return the file of records, if it has some of engines that generate text.

    Raises `InputError` if it has records of models made smaller, which no report shows.
    """
    path = results / "records.jsonl" if results.is_dir() else results
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    if num_judged(path, "method"):
        raise InputError(
            f"{str(path)!r} holds records of compressed models, which this report does not cover; "
            "run `make compression` in a checkout to make their page"
        )
    return path if num_judged(path, "engine") else None


def _write_judged(path: Path, output: Path, results: Path, said: Sequence[str] = ()) -> bool:
    """Write the page of engines that generate text, and return whether the file has a record of one.

    `said` are complaints about lines of the file that the page of training tells.
    """
    from meshmark.inference.run import read_inference  # torch, which other reports do not need
    from meshmark.report.inference import inference_page, unread

    if output.suffix.lower() in (".html", ".htm"):
        raise InputError(f"-o {str(output)!r}: the page of engines that generate text is Markdown; name a .md file")
    complaints = list[str]()
    records = read_inference(path, complaints)
    told = {each.partition(": ")[0] for each in said}  # the file and the line
    complaints = [each for each in complaints if each.partition(": ")[0] not in told]
    _complain(complaints)
    if not records:
        return False

    def page(some: Sequence[InferenceRecord], lacking: Sequence[str]) -> list[str]:
        links = f"Made by `meshmark report {shlex.quote(str(results))}`."
        return [inference_page(some, links), *unread([*complaints, *lacking])]

    parts, lacking = rendered(page, records, lambda record: " ".join(record.case.values()))
    try:
        write_page(output, [part.rstrip("\n") for part in parts])
    except OSError as error:
        raise ResultsError(f"{str(output)!r} cannot be written: {error.strerror}") from error
    _complain(lacking)
    print(f"{output}: {pluralize(len(records) - len(lacking), 'record')} of engines that generate text")
    if complaints:
        lines = pluralize(len(complaints), "line")
        print(f"meshmark: {lines} could not be read and stand in no table; {output} lists them", file=sys.stderr)
    return True


def _complain(complaints: list[str]) -> None:
    for complaint in complaints:
        print(f"meshmark: left out {one_line(complaint)}", file=sys.stderr)


def _write_html(reading: Reading, output: Path, command: str, baseline: Reading | None) -> list[str]:
    from meshmark.report.page import write_html  # whose libraries not everybody has

    left_out = write_html(reading, output, command, baseline)
    print(f"{output}: {pluralize(len(reading.records), 'record')}")
    return left_out


def _write_markdown(reading: Reading, output: Path, command: str, baseline: Reading | None) -> list[str]:
    """Write the report. Clauses go to a separate page if there are cases too."""
    matrix = [record for record in reading.records if not record.conformance.scenario]
    told = matrix or latest_attempts(reading.sessions, conforming=False)
    clauses = output.with_name(f"{output.stem}-conformance.md") if told else output
    left_out = list[str]()
    if told:
        left_out = write_report(dataclasses.replace(reading, records=matrix), output, command, baseline)
        print(f"{output}: {pluralize(len(matrix), 'record')}")
    if len(matrix) < len(reading.records) or latest_attempts(reading.sessions, conforming=True):
        from meshmark.report.conformance import write_conformance  # which imports torch, by way of its scenarios

        left_out += write_conformance(reading, clauses, command)
        left = len(reading.records) - len(matrix)
        print(f"{clauses}: {pluralize(left, 'record')} of the conformance suite")
    return left_out
