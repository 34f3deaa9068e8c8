"""`meshmark run suite.toml`: runs of the suites, checks of scripts and a gate, defined in a file for CI."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from meshmark.cli.options import RUN_OPTIONS
from meshmark.errors import InputError, ResultsError, UnknownNameError, refuse_device, signals_end_like_ctrl_c
from meshmark.launch.folders import python_path
from meshmark.launch.processes import die_with_parent
from meshmark.records.record import SCHEMA
from meshmark.records.record_file import Attempt, Ending, Reading, RecordFile, Session, latest_attempts, read_records
from meshmark.regression.attempts import attempts_of
from meshmark.regression.baseline_gate import suite_of
from meshmark.regression.change import Change, Kind
from meshmark.regression.cli import FAILED, compare_folders, print_comparison
from meshmark.regression.gate import DEFAULT_GATE, parse_gate
from meshmark.report.github import report_to_github

# --- The gate of a suite file.


def hold(gate: Sequence[str]) -> int:
    """Run `meshmark compare` with these arguments.

    The findings are stored with the records, replacing those of an earlier gate, so that pages show them.
    """
    _, baseline, results, _, limits = gate
    _expect_baseline(Path(baseline), results)
    command = shlex.join(["meshmark", *gate])
    print(command, flush=True)
    asked = parse_gate(limits)
    found = compare_folders(Path(baseline), Path(results), asked)
    failing = print_comparison(found, asked)
    read = read_records(Path(results), latest=True)
    missing_failures = _missing_failures(failing, read)
    elsewhere = {change.case for change in failing} - {
        change.case for change in missing_failures
    }  # whose own tests say it
    told = {f"gate[{case}]" for case in elsewhere}
    attempts = [
        attempt for attempt in attempts_of(found, missing_failures, baseline, command) if attempt.test not in told
    ]
    session = Session(
        schema=SCHEMA,
        session=f"gate {baseline}",
        command=command,
        device=read.records[-1].environment.device,
        exit_code=FAILED if failing else 0,
        attempts=[attempt for attempt in attempts if not attempt.conforming],  # clauses fail by tests of their own
    )
    with contextlib.closing(RecordFile(Path(results))) as file:
        file.append(session)
    report_to_github(
        attempts, print, annotated=attempts_of(found, _unannotated(missing_failures, read), baseline, command)
    )
    return FAILED if failing else 0


def _missing_failures(failing: Sequence[Change], read: Reading) -> list[Change]:
    """Return `failing` without wrong verdicts of cases where a failed test already reports them."""
    failed = {attempt.case for attempt in _failed(read)}
    return [change for change in failing if change.kind is not Kind.WRONG or change.case not in failed]


def _unannotated(missing_failures: Sequence[Change], read: Reading) -> list[Change]:
    """Return changes without larger bytes where the suite's failed test is already an annotation."""
    failed = {(attempt.case, PurePath(attempt.test.partition("::")[0]).stem) for attempt in _failed(read)}
    return [
        change
        for change in missing_failures
        if change.kind is not Kind.BIGGER or (change.case, f"test_{suite_of(change.metric)}") not in failed
    ]


def _failed(read: Reading) -> list[Attempt]:
    """Return failed tests, without the findings of a gate."""
    found = latest_attempts(read.sessions, conforming=False)
    return [a for a, by in found if a.ending is Ending.FAILED and not by.session.startswith("gate ")]


def _expect_baseline(baseline: Path, results: str) -> None:
    """Raise `ResultsError` if there is no baseline yet. The message says how to accept the results as one."""
    if not baseline.exists():
        raise ResultsError(
            f"no baseline {str(baseline)!r} to hold these results against: `meshmark baseline accept {results} --name "
            f"{baseline.name}` makes them the baseline, if they are as they should be"
        )


# --- The suite file.

CASES = tuple(option.name for option in RUN_OPTIONS if "cases" in option.file)
"""Keys of a run that are options of `pytest suites`."""
OPTIONS = tuple(option.name for option in RUN_OPTIONS if "options" in option.file)
"""Keys that apply to all runs."""
GATES = ("baseline", "fail-on")
_FLAGS = tuple(option.name for option in RUN_OPTIONS if option.is_flag)
_REPEATED = tuple(option.name for option in RUN_OPTIONS if option.repeated)
_OWN = ("suites", "select")
_SUITES = ("equivalence", "memory", "communication", "throughput", "conformance", "scale", "inference")
_CHECK = ("script", "arguments", "nproc", "steps", "objective", "timeout")
"""Keys of a check: the options of `meshmark check`."""
_PYTHON = (sys.executable, "-P")
"""Python without the working directory on the path, as the commands that are printed: it may be a stranger's."""
_END_SECONDS = 40.0
"""How long a run or a check may take to end in good order."""
_WORST = (3, 4, 2, 1, 5)
"""pytest's exit codes, the worst first: internal error, wrong usage, interruption, failures, no tests."""


@dataclass(frozen=True, kw_only=True)
class SuiteFile:
    """The content of a suite file."""

    runs: tuple[tuple[str, ...], ...]
    """Arguments of pytest, one run per table [[cases]]."""
    checks: tuple[tuple[str, ...], ...] = ()
    """Arguments of `meshmark`, one check of a script per table [[checks]]."""
    gate: tuple[str, ...]
    """Arguments of `meshmark compare` for the results of the runs. Empty without [gates]."""


def read_suite(path: Path, results: str | None = None) -> SuiteFile:
    """Read a suite file. Raises `InputError`, with the table and the key, for unreadable or unknown content.

    Args:
        path: The suite file.
        results: The folder to write to and to compare, in place of the one that the file names.
    """
    refuse_device(path)
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read {path}: {error}; docs/ci.md shows a suite file") from error
    _expect(f"{path}", said, ("cases", "checks", "options", "gates"))
    cases, checks = _tables(path, said, "cases"), _tables(path, said, "checks")
    if not cases and not checks:
        raise InputError(
            f"{path}: expected a table [[cases]] for every run of the suites, such as world = [2], or a table "
            '[[checks]] for every script to check, such as script = "train.py"'
        )
    options = _table(path, said, "options")
    common = options.pop("select", None)
    every = _arguments(f"{path}: [options]", options, (*OPTIONS, "select"))
    results = results or _results(f"{path}: [options]", options)
    gate = _table(path, said, "gates")
    if gate and not cases:
        raise InputError(
            f"{path}: [gates] compares the results of [[cases]], of which there is none; checks need no gate"
        )
    return SuiteFile(
        runs=tuple(_run(f"{path}: [[cases]] number {i}", one, every, common) for i, one in enumerate(cases, 1)),
        checks=tuple(_check(f"{path}: [[checks]] number {i}", one, i, results) for i, one in enumerate(checks, 1)),
        gate=_gate(f"{path}: [gates]", gate, results),
    )


def _tables(path: Path, said: Mapping[str, object], name: str) -> list[dict[str, object]]:
    tables = said.get(name, [])
    if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        raise InputError(f"{path}: {name} is {str(tables)[:40]!r}, expected a table [[{name}]]")
    return tables


def _check(where: str, said: dict[str, object], number: int, results: str) -> tuple[str, ...]:
    """Return the arguments of one check. Its page lies beside the records."""
    _expect(where, said, _CHECK)
    if "script" not in said:
        raise InputError(f'{where}: script is missing: a training script, such as script = "train.py"')
    script = _one(where, "script", said["script"])
    options = [f"--{key}={_one(where, key, said[key])}" for key in _CHECK[2:] if key in said]
    page = Path(results) / f"check-{number}-{Path(script).stem}.md"
    return ("check", *options, f"--output={page}", script, *_texts(where, "arguments", said.get("arguments", [])))


def _results(where: str, options: Mapping[str, object]) -> str:
    return _one(where, "results", options.get("results", "results"))


def _gate(where: str, said: Mapping[str, object], results: str) -> tuple[str, ...]:
    _expect(where, said, GATES)
    if not said:
        return ()
    if "baseline" not in said:
        raise InputError(f"{where}: baseline is missing: a results folder, or the name of one in baselines/")
    named = _one(where, "baseline", said["baseline"])
    folder = Path(named) if Path(named).exists() else Path("baselines") / named
    limits = ",".join(_texts(where, "fail-on", said.get("fail-on", DEFAULT_GATE)))
    parse_gate(limits)
    return ("compare", str(folder), results, "--fail-on", limits)


def _table(path: Path, said: Mapping[str, object], name: str) -> dict[str, object]:
    table = said.get(name, {})
    if not isinstance(table, dict):
        raise InputError(f"{path}: {name} is {str(table)[:40]!r}, expected a table [{name}]")
    return table


def _run(where: str, said: dict[str, object], every: Sequence[str], common: object) -> tuple[str, ...]:
    """Return the arguments of one run. `common` is the `select` of all runs, which a test must match as well."""
    own = {key: said[key] for key in _OWN if key in said}
    arguments = _arguments(where, {key: value for key, value in said.items() if key not in _OWN}, (*CASES, *_OWN))
    suites = _texts(where, "suites", own.get("suites", []))
    for name in suites:
        if name not in _SUITES:
            raise UnknownNameError(f"suite in {where}", name, _SUITES)
    named = [f"meshmark.suites.test_{name}" for name in suites] or ["meshmark.suites"]
    wanted = [" or ".join(_texts(where, "select", one)) for one in (common, own.get("select")) if one is not None]
    chosen = [f"-k={wanted[0] if len(wanted) == 1 else ' and '.join(f'({one})' for one in wanted)}"] if wanted else []
    return ("--pyargs", *named, *every, *arguments, *chosen)


def _arguments(where: str, said: Mapping[str, object], known: Sequence[str]) -> list[str]:
    _expect(where, said, known)
    found = []
    for key, value in said.items():
        if key in _FLAGS:
            if not isinstance(value, bool):
                raise InputError(f"{where}: {key} is {str(value)[:40]!r}, expected true or false")
            found += [f"--{key}"] if value else []
        elif key in _REPEATED:
            found += [f"--{key}={each}" for each in _texts(where, key, value)]
        else:
            found.append(f"--{key}={','.join(_texts(where, key, value))}")
    return found


def _one(where: str, key: str, value: object) -> str:
    texts = _texts(where, key, value)
    if len(texts) != 1 or not texts[0].strip():
        raise InputError(f"{where}: {key} is {str(value)[:40]!r}, expected one text")
    return texts[0]


def _texts(where: str, key: str, value: object) -> list[str]:
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str | int | float) and not isinstance(one, bool) for one in values):
        raise InputError(f"{where}: {key} is {str(value)[:40]!r}, expected a text, a number or a list of them")
    texts = [str(one) for one in values]
    for text in texts:
        if "\0" in text:
            raise InputError(f"{where}: {key} is {text[:40]!r}, expected no NUL in it: no command takes one")
    return texts


def _expect(where: str, said: Mapping[str, object], known: Sequence[str]) -> None:
    for key in said:
        if key not in known:
            raise UnknownNameError(f"key in {where}", key, known)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `run`."""
    parser.add_argument("suite", type=Path, metavar="SUITE.toml", help="runs of the suites, options and gates")
    parser.add_argument("pytest", nargs=argparse.REMAINDER, metavar="OPTIONS", help="pytest options besides the file's")
    parser.set_defaults(run=run_suite)


def run_suite(arguments: argparse.Namespace) -> int:
    """Run the file that `meshmark run` names."""
    return run_file(arguments.suite, arguments.pytest)


def run_file(path: Path, words: Sequence[str] = ()) -> int:
    """Run the runs of a suite file, its checks and its gate, one after the other; return the worst exit code.

    Args:
        path: The suite file.
        words: More arguments for pytest, behind the file's own.
    """
    said, rest = _words().parse_known_args(words)
    suite = read_suite(path, said.results)
    if said.results is not None:
        rest.append(f"--results={said.results}")
    if said.collect_only:
        rest.append("--collect-only")
    ended = [run_pytest([*_narrowed(run, said.k), *rest]) for run in suite.runs]
    if said.collect_only:  # nothing has run that could be compared
        return _worst(ended)
    ended += [run_check(check) for check in suite.checks]
    if suite.gate:
        ended.append(hold(suite.gate))
    return _worst(ended)


def _worst(ended: Sequence[int]) -> int:
    return min(ended, key=lambda code: (code == 0, _WORST.index(code) if code in _WORST else -1))


def _words() -> argparse.ArgumentParser:
    """Return a parser of those options of pytest that the runs, the checks and the gate have to agree on."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--results")
    parser.add_argument("-k")
    parser.add_argument("--collect-only", "--co", action="store_true")
    return parser


def _narrowed(run: Sequence[str], expression: str | None) -> list[str]:
    """Return the arguments of a run for the tests that match `expression` too. Pytest heeds the last -k alone."""
    if expression is None:
        return [*run]
    own = [word.removeprefix("-k=") for word in run if word.startswith("-k=")]
    both = " and ".join(f"({one})" for one in (*own, expression)) if own else expression
    return [*(word for word in run if not word.startswith("-k=")), f"-k={both}"]


def run_pytest(words: Sequence[str]) -> int:
    """Run pytest in a separate process, and print the command."""
    command = [*_PYTHON, "-m", "pytest", *words]
    print(shlex.join(["pytest", *words]), flush=True)
    return _run_process(command)[0]


def _run_process(command: Sequence[str], *, stdout: int | None = None) -> tuple[int, str]:
    """Return a process's exit code, and its output where `stdout` is a pipe.

    Signals that end this process also end that one gracefully, so that it can clean up.
    """
    environment = {**os.environ, "PYTHONPATH": python_path(os.environ)}
    ends_with_us = functools.partial(die_with_parent, os.getpid())  # where SIGKILL leaves no time for good order
    with (
        signals_end_like_ctrl_c(),
        subprocess.Popen(command, env=environment, stdout=stdout, text=True, preexec_fn=ends_with_us) as process,
    ):
        try:
            told, _ = process.communicate()
            return process.returncode, told or ""
        except KeyboardInterrupt as interrupt:
            if interrupt.args:  # SIGTERM or SIGHUP; a terminal's Ctrl-C has reached it already
                process.terminate()
            for end in (process.terminate, process.kill):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_SECONDS)
                    break
                end()
            raise


def run_check(words: Sequence[str]) -> int:
    """Check a script in a separate process, and print the command.

    Return 0 if the script trains right, 2 for a mistake in the command, else 1: a script that could not be judged, or
    not be run, fails a gate.
    """
    page = next(word.partition("=")[2] for word in words if word.startswith("--output="))
    Path(page).parent.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["meshmark", *words])
    print(command, flush=True)
    code, told = _run_process([*_PYTHON, "-m", "meshmark", *words], stdout=subprocess.PIPE)
    print(told, end="", flush=True)
    if code in (0, 2):
        return code
    message = told.strip() or f"ended with exit code {code}"
    name = f"check[{Path(page).stem.removeprefix('check-')}]"
    failed = Attempt(test=name, case=name, conforming=False, ending=Ending.FAILED, message=message, command=command)
    report_to_github([failed], print)
    return FAILED
