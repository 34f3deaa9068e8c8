"""The commands `ab` and `bisect`, which run suites themselves."""

from __future__ import annotations

import argparse
import functools
import shlex
import tempfile
from pathlib import Path

from meshmark.errors import InputError, signals_end_like_ctrl_c
from meshmark.regression.alternate import MARGIN, SIDES, alternate
from meshmark.regression.attempts import attempts_of
from meshmark.regression.bisect import Search, bisect, suspects_between
from meshmark.regression.cli import FAILED, add_gate, expect_timed, print_comparison
from meshmark.regression.gate import DEFAULT_GATE, UNSURE, parse_gate
from meshmark.regression.samples import LEAST_DEGREES
from meshmark.regression.side import open_side, run_suites
from meshmark.report.github import report_to_github

_LEAST_TIMED = 1 + LEAST_DEGREES // 2
"""Least number of sessions per side that shows how launches of one case scatter."""
_SIDE = "a git ref of the repository here, a virtual environment's folder, or a pip requirement such as torch==2.12.1"
_OPTIONS = "options and tests of pytest, as of `pytest suites`, such as suites/test_throughput.py --adapters ddp"


def add_ab(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--a", required=True, metavar="REF|VENV|REQ", help=f"the first side: {_SIDE}")
    parser.add_argument("--b", required=True, metavar="REF|VENV|REQ", help="the second side, which may be worse")
    parser.add_argument(
        "--pairs", type=int, default=30, metavar="N", help="most pairs (default: 30); stops once all is decided"
    )
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="keep the records there (default: a temporary folder)"
    )
    add_gate(parser)
    parser.add_argument("options", nargs=argparse.REMAINDER, metavar="-- ...", help=_OPTIONS)
    parser.set_defaults(run=_ab)


def add_bisect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--good", required=True, metavar="REF|REQ", help="a commit or release that was as it should be")
    parser.add_argument("--bad", required=True, metavar="REF|REQ", help="a later one that is worse")
    parser.add_argument(
        "--launches",
        type=int,
        default=3,
        metavar="N",
        help="sessions per commit (default: 3; 1 is enough for exact changes)",
    )
    add_gate(parser)
    parser.add_argument("options", nargs=argparse.REMAINDER, metavar="-- CASE", help=_OPTIONS)
    parser.set_defaults(run=_bisect)


def _ab(parsed: argparse.Namespace) -> int:
    gate = parse_gate(parsed.fail_on) if parsed.fail_on is not None else None
    if parsed.pairs < 1:
        raise InputError(f"--pairs {parsed.pairs}: expected at least 1")
    margin = (gate.margin if gate else None) or MARGIN
    options = _behind_dashes(parsed.options)
    if parsed.results and any((parsed.results / side).exists() for side in SIDES):
        raise InputError(
            f"--results {parsed.results}: it holds the sessions of an earlier `meshmark ab`, which are not compared "
            "with new ones; name a new folder"
        )
    with signals_end_like_ctrl_c(), tempfile.TemporaryDirectory(prefix="meshmark-ab-") as folder:
        kept = parsed.results or Path(folder) / "results"
        with open_side(parsed.a, Path(folder), "A") as a, open_side(parsed.b, Path(folder), "B") as b:
            ours, theirs = (functools.partial(run_suites, side, options) for side in (a, b))
            found = alternate(ours, theirs, kept.absolute(), most_pairs=parsed.pairs, margin=margin)
    failing = print_comparison(found, gate)
    if gate:
        words = ["--a", parsed.a, "--b", parsed.b, "--pairs", str(parsed.pairs), "--fail-on", parsed.fail_on]
        command = shlex.join(["meshmark", "ab", *words, "--", *options])
        report_to_github(attempts_of(found, failing, parsed.a, command), print)
    if not failing:
        expect_timed(found, gate, parsed.fail_on, (parsed.a, parsed.b))
    return FAILED if failing else 0


def _bisect(parsed: argparse.Namespace) -> int:
    gate = parse_gate(parsed.fail_on or DEFAULT_GATE)
    if gate.fails_unsure:
        raise InputError(f"--fail-on {parsed.fail_on}: {UNSURE} never marks a commit as bad; leave it out")
    if parsed.launches < 1:
        raise InputError(f"--launches {parsed.launches}: expected at least 1")
    if gate.timed and parsed.launches < _LEAST_TIMED:
        raise InputError(
            f"--launches {parsed.launches} with --fail-on {parsed.fail_on or DEFAULT_GATE}: expected at least "
            f"{_LEAST_TIMED}, which show how launches scatter on this machine; or a gate without slower"
        )
    suspects = suspects_between(parsed.good, parsed.bad)
    with signals_end_like_ctrl_c(), tempfile.TemporaryDirectory(prefix="meshmark-bisect-") as folder:
        options = _behind_dashes(parsed.options)
        search = Search(options=options, gate=gate, scratch=Path(folder), launches=parsed.launches)
        found = bisect(parsed.good, suspects, search)
    print(f"first bad: {found.subject}")
    for change in found.changes:
        print(f"  {change}")
    if found.skipped:
        print(f"  or one of these, which cannot be run or are worse in another way: {', '.join(found.skipped)}")
    return FAILED if found.skipped else 0


def _behind_dashes(options: list[str]) -> list[str]:
    """Return the options of pytest. Raises `InputError` if there are none."""
    options = options[1:] if options[:1] == ["--"] else options
    if not options:
        raise InputError("expected a command after --, such as -- suites/test_throughput.py --adapters ddp")
    return options
