"""The commands `compare` and `baseline`, with their arguments."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from pathlib import Path

from meshmark.errors import ResultsError, refuse_records
from meshmark.records.record import Record
from meshmark.records.record_file import Ending, Reading, latest_attempts, read_records
from meshmark.regression.attempts import attempts_of
from meshmark.regression.baseline import ABOUT, ALLOWED, FOLDER, accept
from meshmark.regression.causes import causes
from meshmark.regression.change import Change, ChangeOutcome, Kind
from meshmark.regression.compare import Comparison, compare, unfinished_changes
from meshmark.regression.gate import DEFAULT_GATE, UNSURE, Gate, parse_gate
from meshmark.regression.page import lines, page
from meshmark.regression.runs import complain, damaged_lines, expect_whole, left_out, of_last_code, without_shared
from meshmark.report.github import report_to_github, warn_github
from meshmark.report.table import one_line
from meshmark.text import pluralize

FAILED = 1
"""Exit code if `--fail-on` found something."""


def add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=Path, metavar="A", help="results folder, or records.jsonl, to compare with")
    parser.add_argument("after", type=Path, metavar="B", help="results folder of what may be better or worse")
    add_gate(parser)
    parser.add_argument("--across", action="store_true", help="compare even if machine, versions or settings differ")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.md", help="every metric of every case, as markdown")
    parser.set_defaults(run=_compare)


def add_baseline(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB", parser_class=argparse.ArgumentParser)
    told = f"writes {FOLDER}/NAME, for `pytest suites --baseline NAME`"
    accepting = verbs.add_parser("accept", help=told, description=f"From a results folder, {told}.")
    accepting.add_argument("results", type=Path, metavar="RESULTS", help="results folder, of one session or several")
    accepting.add_argument("--name", required=True, help="such as a100-8gpu; use one name per machine and settings")
    accepting.add_argument(
        "--allow",
        action="append",
        default=[],
        choices=ALLOWED,
        help="accept results with cases that are wrong, have noisy rates, or were not all run",
    )
    accepting.add_argument("--replace", action="store_true", help="replace an existing baseline of that name")
    accepting.set_defaults(run=_accept)


def _accept(parsed: argparse.Namespace) -> None:
    folder = accept(parsed.results, parsed.name, allow=parsed.allow, replace=parsed.replace)
    about = json.loads((folder / ABOUT).read_text())
    held = f"{pluralize(about['cases'], 'case')}, {pluralize(about['records'], 'record')}"
    print(f"{folder}: {held}; gate with --baseline {parsed.name}")


def add_gate(parser: argparse.ArgumentParser) -> None:
    text = f"exit with {FAILED} if B is worse by one of these kinds of changes, each with the smallest share; "
    parser.add_argument(
        "--fail-on",
        metavar="KIND,...",
        help=f"{text}such as {DEFAULT_GATE}".replace("%", "%%") + ", missing; with unsure, also where it cannot tell",
    )


def _compare(parsed: argparse.Namespace) -> int:
    gate = parse_gate(parsed.fail_on) if parsed.fail_on is not None else None
    if parsed.output:
        refuse_records(parsed.output, parsed.before, parsed.after)
    found = compare_folders(parsed.before, parsed.after, gate, across=parsed.across)
    titles = str(parsed.before), str(parsed.after)
    command = shlex.join(["meshmark", "compare", *titles])
    if parsed.output:
        write(parsed.output, page(found, titles, command))
    failing = print_comparison(found, gate)
    if gate:
        gated = f"{command} --fail-on {parsed.fail_on}{' --across' if parsed.across else ''}"
        report_to_github(attempts_of(found, failing, titles[0], gated), print)
    if not failing:
        expect_timed(found, gate, parsed.fail_on, titles)
    return FAILED if failing else 0


def expect_timed(found: Comparison, gate: Gate | None, fail_on: str, sides: tuple[str, str]) -> None:
    """Raise `ResultsError` if the gate is about times, or about nothing but bytes, that both sides have of no case."""
    measured = {change.kind for change in found.changes}
    suites = {Kind.SLOWER: "throughput", Kind.SLOWER_START: "equivalence"}
    if gate and not {*gate.limits} - {Kind.BIGGER, Kind.MISSING}:
        suites[Kind.BIGGER] = "memory"
    for kind, suite in suites.items():
        if gate and kind in gate.limits and kind not in measured:
            what = "measured" if kind is Kind.BIGGER else "timed"
            raise ResultsError(
                f"--fail-on {fail_on}: no case was {what} in both {sides[0]} and {sides[1]}, so that none can be "
                f"{kind}; expected records of suites/test_{suite}.py, or a gate without {kind}"
            )


def compare_folders(before: Path, after: Path, gate: Gate | None, *, across: bool = False) -> Comparison:
    """Compare two folders, with times only if the gate needs them. Raises `ResultsError` like `compare`, or on read
    errors.
    """
    timed, margin = (gate.timed, gate.margin) if gate else (True, None)
    ours, held = _read_side(before)
    theirs, reading = _read_side(after)
    if gate:
        expect_whole(before, held)
        _expect_records_of_failures(after, reading)
    found = compare(ours, without_shared(theirs, ours), across=across, timed=timed, margin=margin)
    changes = [*found.changes, *unfinished_changes(found, ours, reading.sessions)]
    return dataclasses.replace(found, changes=changes)


def _expect_records_of_failures(path: Path, reading: Reading) -> None:
    """Raise `ResultsError` if tests failed and lines are damaged: an older record may stand for one that failed."""
    attempts = [attempt for each in (False, True) for attempt, _ in latest_attempts(reading.sessions, conforming=each)]
    failed = [attempt for attempt in attempts if attempt.ending is Ending.FAILED]
    if failed and (damaged := damaged_lines(reading)):
        raise ResultsError(
            f"{str(path)!r}: {pluralize(len(failed), 'test')} failed, such as {failed[0].case}, and "
            f"{pluralize(len(damaged), 'line')} cannot be read, any of which may be its record; expected readable "
            "records of what failed. Run these tests again, and delete the damaged lines"
        )


def _read_side(path: Path) -> tuple[list[Record], Reading]:
    """Read all launches of a folder by the code that ran last, and all else. Prints what it leaves out."""
    reading = read_records(path)
    complain(path, reading.complaints)
    records, others = of_last_code(reading.records)
    if others:
        print(f"meshmark: {path}: {left_out(records, others)}", file=sys.stderr)
    return records, reading


def write(path: Path, text: str) -> None:
    """Write `text` to `path`. Raises `ResultsError` on failure."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise ResultsError(f"{str(path)!r} cannot be written: {error.strerror}") from error


def print_comparison(found: Comparison, gate: Gate | None) -> list[Change]:
    """Print the comparison, one line per cause, and return the changes that fail.

    Changes that the gate cannot decide become annotations on GitHub.
    """
    for line in lines(found):  # one that begins with two colons would be a command to GitHub
        print(f" {line}" if line.startswith("::") else line)
    if not gate:
        return []
    failing, unsure = gate.failing(found.changes), gate.unsure(found.changes)
    for cause in causes(failing):
        kind = UNSURE if cause.change.outcome is ChangeOutcome.UNDECIDED else cause.change.kind
        print(one_line(f"FAILED by --fail-on {kind}: {cause}"))
    if unsure and not gate.fails_unsure:
        told = [str(cause) for cause in causes(unsure)]
        for line in told:
            print(one_line(f"CANNOT TELL: {line}"))
        number = pluralize(len(told), "cause")
        print(f"undecided: {number}, which this gate lets pass; --fail-on ...,{UNSURE} makes it fail")
        warn_github(told, print)
    return failing
