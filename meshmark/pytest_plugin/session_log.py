"""Record what a pytest session asked for and how each test ended, and report it. Loaded by the plugin.

A session ends with a summary of at most one screen, and with annotations on GitHub Actions. `--max-time` ends it in
good order when its time is up. A session in which every case was skipped fails, and says why. The exit status is the
session's, even if an adapter ends the process.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import shlex
import sys
import time
import uuid
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pytest

from meshmark.environment import code_here
from meshmark.errors import ResultsError
from meshmark.pytest_plugin.selection import SELECTION, module_of, selection
from meshmark.records.record import SCHEMA, Record
from meshmark.records.record_file import Attempt, Ending, RecordFile, Session, by_defect, read_records
from meshmark.report.failure_text import row
from meshmark.report.github import report_to_github, warn_github
from meshmark.report.results import CaseResult, results
from meshmark.report.table import bytes_text, visible
from meshmark.run.throughput import throughput
from meshmark.run.verdict import smallest_detectable
from meshmark.spec.case import CHOOSE, Case, Cell
from meshmark.text import clip, pluralize, some_of

# --- `--max-time`: end a run in good order when its time is up.

_NAMED = 20
_BEGUN = pytest.StashKey[float]()
_UP = pytest.StashKey[bool]()
"""Set when the time is up."""
_LEFT = pytest.StashKey[dict[str, None]]()
"""Tests that have not ended."""


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_BEGUN] = time.monotonic()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put one case of each adapter first if time may run out, so that all adapters are covered."""
    if config.getoption("--max-time") is None:
        return
    first: dict[str, str] = {}
    for item in items:
        if case := _case(item):
            first.setdefault(case.adapter, case.id)
    items.sort(key=lambda item: bool((case := _case(item)) and first[case.adapter] != case.id))
    config.stash[_LEFT] = dict.fromkeys(item.nodeid for item in items)


def _case(item: pytest.Item) -> Case | None:
    parameters: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    found = parameters.get("case") or parameters.get("conforming")
    return found if isinstance(found, Case) else None


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Start no other test once the time is up."""
    left = item.config.stash.get(_LEFT, None)
    if left is None:
        return
    left.pop(item.nodeid, None)
    limit, taken = selection(item.config).max_seconds, time.monotonic() - item.config.stash[_BEGUN]
    if limit is not None and taken > limit and nextitem is not None:
        item.config.stash[_UP] = True
        item.session.shouldstop = (
            f"--max-time {item.config.getoption('--max-time')} is up; {pluralize(len(left), 'test')} not run"
        )


def _list_tests_not_run(terminalreporter: Any, config: pytest.Config) -> None:  # noqa: ANN401
    """List the tests that were not run."""
    unrun: dict[str, None] = config.stash.get(_LEFT, {})
    if left := [] if config.option.collectonly else list(unrun):
        up = config.stash.get(_UP, False)  # else -x or a signal has ended it
        terminalreporter.section(
            "not run: the time was up" if up else "not run: the run was ended before its time was up"
        )
        for test in left[:_NAMED]:
            terminalreporter.write_line(test)
        if len(left) > _NAMED:
            terminalreporter.write_line(f"... and {len(left) - _NAMED} more")
        terminalreporter.write_line("The same command with --resume goes on from here.")


# --- Fails a run of the suites in which every case was skipped, and says why.

_REASONS = 3
"""Number of reasons printed per adapter."""
_SKIPPED = "Skipped: "
"""Prefix that pytest puts before the reason of a skip."""


@dataclass
class Skips:
    """Outcomes so far of the tests that have a case."""

    adapters: dict[str, str]
    """Adapter of each test that has a case."""
    ended: set[str] = field(default_factory=set)
    """Tests that have an outcome."""
    others: int = 0
    """Number of tests with another outcome than a skip."""
    reasons: dict[str, Counter[str]] = field(default_factory=dict)
    """By adapter: how many tests were skipped for each reason."""

    @property
    def are_all(self) -> bool:
        """True if every test of a case was skipped. A test that a time limit left out does not count as skipped."""
        return bool(self.adapters) and not self.others and self.ended == set(self.adapters)


_SKIPS = pytest.StashKey[Skips]()


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        session.config.stash[_SKIPS] = Skips({item.nodeid: name for item in session.items for name in _adapter(item)})
        session.config.pluginmanager.register(_Listener(session.config.stash[_SKIPS]))


def _adapter(item: pytest.Item) -> Iterator[str]:
    parameters: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    found = parameters.get("case") or parameters.get("conforming")
    if isinstance(found, Cell):
        yield found.adapter


class _Listener:
    """Collects reports, which pytest passes without their session."""

    def __init__(self, skips: Skips) -> None:
        self.skips = skips

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        adapter = self.skips.adapters.get(report.nodeid)
        if adapter is None:
            return
        if report.when == "call" or not report.passed:
            self.skips.ended.add(report.nodeid)
            if report.skipped and not hasattr(report, "wasxfail"):  # a known gap has been run
                self.skips.reasons.setdefault(adapter, Counter())[_reason(report)] += 1
            else:
                self.skips.others += 1


def _reason(report: pytest.TestReport) -> str:
    told = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    return told.removeprefix(_SKIPPED).removesuffix(f"; {CHOOSE}")


def _fail_if_all_skipped(session: pytest.Session) -> None:
    """Fail the session before pytest prints its summary.

    Does nothing for a part of a run (`--shard`), which may contain only skips. Only the whole run shows whether
    anything ran.
    """
    if _fails(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _fails(config: pytest.Config) -> bool:
    skips = config.stash.get(_SKIPS, None)
    if skips is None or not skips.are_all:
        return False
    return not config.getoption("--allow-skipped") and selection(config).shard[1] == 1


def _report_all_skipped(terminalreporter: Any, config: pytest.Config) -> None:  # noqa: ANN401
    skips = config.stash.get(_SKIPS, None)
    if skips is None or not skips.are_all:
        return
    fails = _fails(config)
    terminalreporter.section("every case was skipped: nothing was judged", red=fails, yellow=not fails)
    for adapter, reasons in skips.reasons.items():
        for reason, count in reasons.most_common(_REASONS):
            terminalreporter.write_line(f"{adapter}, {pluralize(count, 'test')}: {reason}")
        if more := sum(reasons.values()) - sum(count for _, count in reasons.most_common(_REASONS)):
            terminalreporter.write_line(f"{adapter}, {pluralize(more, 'test')}: other reasons (-rs shows them)")
    if fails:
        terminalreporter.write_line(
            f"This run shows nothing, so it fails. Install what is missing (`meshmark doctor` lists it), or {CHOOSE}"
            "; --allow-skipped lets it pass."
        )


# --- Records what a pytest session asked for, and how each test ended.

_MESSAGE_CHARACTERS = 4000
_LOG = pytest.StashKey[Session]()
ATTEMPTS = pytest.StashKey[dict[str, Attempt]]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Write the planned tests, so that a killed run leaves at least this.

    A part of a run (`--shard`) may have no test. That it has ended is written too, for whoever waits for it.
    """
    config = session.config
    attempts = {item.nodeid: attempt for item in session.items if (attempt := _planned(item))}
    is_part = SELECTION in config.stash and selection(config).shard[1] > 1
    if not (attempts or is_part) or config.option.collectonly or selection(config).cluster.node_rank:
        return
    config.stash[ATTEMPTS] = attempts
    config.stash[_LOG] = Session(
        schema=SCHEMA,
        session=uuid.uuid4().hex,
        command=shlex.join(["pytest", *config.invocation_params.args]),
        device=config.getoption("--device"),
        corpus=config.getoption("--corpus"),
        code=" ".join(filter(None, code_here())),
    )
    with contextlib.suppress(ResultsError):  # the runner, which needs the folder too, says so
        _write(config)


def _planned(item: pytest.Item) -> Attempt | None:
    parameters: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    for name in ("case", "conforming"):
        if isinstance(case := parameters.get(name), Case):
            return Attempt(test=item.nodeid, case=case.id, conforming=name == "conforming")
    return None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    attempts = item.config.stash.get(ATTEMPTS, {})
    before = attempts.get(item.nodeid)
    told = _words(call.excinfo) if call.excinfo else ""
    if before and call.excinfo:
        _add_command(item, call.excinfo.value, before)
    report = yield
    if before and report.failed:
        told = told or report.longreprtext
        attempts[item.nodeid] = dataclasses.replace(
            before, ending=Ending.FAILED, message=told[:_MESSAGE_CHARACTERS], command=_repeat(item)
        )
    elif before and before.ending is not Ending.FAILED and (report.skipped or report.when == "call"):
        attempts[item.nodeid] = dataclasses.replace(before, ending=Ending(report.outcome))
    return report


def _words(raised: pytest.ExceptionInfo[BaseException]) -> str:
    """Return the text of a failure. Exceptions other than Meshmark's include their type."""
    error = raised.value
    return str(error.msg) if isinstance(error, pytest.fail.Exception) else raised.exconly()


def _add_command(item: pytest.Item, error: BaseException, attempt: Attempt) -> None:
    """Append the repeat command to a Meshmark failure, for when only the terminal output is left."""
    if isinstance(error, pytest.fail.Exception) and not error.pytrace:
        lines = [str(error.msg), row("again", _repeat(item))]
        if not attempt.conforming:  # a clause stands on several records
            rest = shlex.join(["meshmark", "show", attempt.case, _as_given(item.config)])
            lines.append(row("all of it", rest))
        error.msg = "\n".join(lines)


def _as_given(config: pytest.Config) -> str:
    """Return the results folder as the user named it, for commands that are to be pasted into the same shell."""
    return str(Path(config.getoption("--results")))


def _repeat(item: pytest.Item) -> str:
    """Return this session's command for one test, quoted for a shell."""
    config = item.config
    given = set(config.args) if config.args_source is config.ArgsSource.ARGS else set()
    options = [argument for argument in config.invocation_params.args if argument not in given]
    module = module_of(item.path) if config.option.pyargs else None  # found wherever Meshmark is installed
    file = module or os.path.relpath(item.path, config.invocation_params.dir)
    return shlex.join(["pytest", f"{file}::{item.nodeid.partition('::')[2]}", *map(str, options)])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Generator[None]:
    """Write the end of the session after pytest's own hooks, which close the runner and its records.

    Also runs if these end the session.
    """
    _fail_if_all_skipped(session)
    code = int(exitstatus)
    try:
        yield
        code = int(session.exitstatus)  # a run in which every case was skipped fails
    except pytest.exit.Exception as ended:
        code = code if ended.returncode is None else int(ended.returncode)
        raise
    finally:
        if log := session.config.stash.get(_LOG, None):
            session.config.stash[_LOG] = dataclasses.replace(log, exit_code=code)
            _write_end(session)


def _write_end(session: pytest.Session) -> None:
    try:
        _write(session.config)
    except ResultsError as error:
        if session.exitstatus == pytest.ExitCode.USAGE_ERROR:  # what ended the run has been said already
            return
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
        reporter: Any = session.config.pluginmanager.getplugin("terminalreporter")
        if reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(f"meshmark: how this session ended is not recorded: {error}", red=True)


def _write(config: pytest.Config) -> None:
    """Write the session. Raises `ResultsError` when it cannot be written."""
    log = dataclasses.replace(config.stash[_LOG], attempts=list(config.stash[ATTEMPTS].values()))
    with contextlib.closing(RecordFile(selection(config).results)) as file:
        file.append(log)


# --- Reports the tests of a session to GitHub Actions.

_UNSURE = "UnsureWarning: "
"""Prefix of what a gate cannot decide, among pytest's warnings."""


def _report_on_github(terminalreporter: Any, config: pytest.Config) -> None:  # noqa: ANN401
    warnings = [report.message for report in terminalreporter.stats.get("warnings", ())]
    unsure = [text.partition(_UNSURE)[2].partition("\n")[0] for text in warnings if _UNSURE in text]
    warn_github(unsure, terminalreporter.write_line)
    report_to_github(list(config.stash.get(ATTEMPTS, {}).values()), terminalreporter.write_line)


# --- Ends a run of the suites with a summary of at most one screen.

MOST_CASES = 20
"""Number of table rows. Cases that are not correct come first."""
MOST_DEFECTS = 10
MOST_LEFT_OUT = 4
_HEADINGS = ("case", "correct", "memory", "traffic", "peak / rank", "speed")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Hide pytest-benchmark's own table, unless the command line has one of its options."""
    asked = any(str(argument).startswith("--benchmark") for argument in config.invocation_params.args)
    if not asked and hasattr(config.option, "benchmark_quiet"):
        config.option.benchmark_quiet = True


def _summarize(terminalreporter: Any, config: pytest.Config) -> None:  # noqa: ANN401
    attempts = list(config.stash.get(ATTEMPTS, {}).values())
    if not attempts:
        return
    folder = selection(config).results
    try:
        records = read_records(folder, latest=True).records
    except ResultsError:  # the run has already failed because of it
        records = []
    lines = summary(attempts, records)
    if not lines:
        return
    terminalreporter.section("meshmark")
    for line in lines:
        terminalreporter.write_line(visible(line))
    given = _as_given(config)
    command = shlex.join(["meshmark", "report", given, "-o", str(Path(given) / "report.html")])
    terminalreporter.write_line(f"\nall results as a page: {command}")


def summary(attempts: Sequence[Attempt], records: Sequence[Record]) -> list[str]:
    """Return the summary's lines: a table of the cases that ran, then what failed, in words."""
    ids = {attempt.case for attempt in attempts if not attempt.conforming}
    plain = [record for record in records if record.case.id in ids and not record.conformance.scenario]
    last = {(record.case.id, record.task, record.environment.device): record for record in plain}
    ran = [result for result in results(last.values()) if not result.skipped]
    ran.sort(key=_is_right)
    lines = _table([_HEADINGS, *map(_row, ran[:MOST_CASES])]) if ran else []
    if len(ran) > MOST_CASES:
        rest = Counter(result.correctness.text for result in ran[MOST_CASES:])
        lines.append(f"and {pluralize(len(ran) - MOST_CASES, 'more case')}; correct: " + _counts(rest))
    right = {result.case.id for result in ran if _is_right(result)}
    if before := [one.case.id for one in results(plain) if one.case.id in right and not _is_right(one)]:
        lines += ["", f"right now, but wrong in an earlier run of the same code, which counts: {some_of(before)}"]
    lines += _left_out([result.observed for result in ran if result.observed])
    lines += _clauses(attempts)
    if defects := by_defect(attempts):
        lines.append("")
        for same in defects[:MOST_DEFECTS]:
            first = same[0].message.partition("\n")[0] or "failed"
            lines.append(f"- {clip(first, 300)}" + (f" ({pluralize(len(same), 'test')})" if len(same) > 1 else ""))
        if len(defects) > MOST_DEFECTS:
            lines.append(f"- and {len(defects) - MOST_DEFECTS} more, above")
    return lines


def _left_out(observed: Sequence[Record]) -> list[str]:
    """Return a few lines with what was not judged, and the smallest excess that would have been detected."""
    counted = Counter(text for record in observed for text in record.not_judged)
    lines = [
        f"not judged: {text}" + ("" if count == len(observed) else f" ({pluralize(count, 'case')})")
        for text, count in counted.most_common(MOST_LEFT_OUT)
    ]
    if len(counted) > MOST_LEFT_OUT:
        lines.append(f"not judged: and {len(counted) - MOST_LEFT_OUT} more, which `meshmark report` lists")
    if seen := smallest_detectable(observed):
        lines.append(f"smallest seen: {seen}")
    return ["", *lines] if lines else []


def _is_right(result: CaseResult) -> bool:
    records = [record for record in (result.observed, result.timed) if record]
    return result.correct is not False and all(verdict.passed for record in records for verdict in record.verdicts)


def _row(result: CaseResult) -> tuple[str, ...]:
    readings = result.observed.memory.readings if result.observed else []
    peak = bytes_text(max(reading.peak.total for reading in readings)) if readings else ""
    return (
        result.case.id,
        result.correctness.text,
        _judged(result.observed, "memory"),
        _judged(result.observed, "communication"),
        peak,
        _speed(result),
    )


def _judged(record: Record | None, suite: str) -> str:
    verdict = record.verdict(suite) if record else None
    if verdict is None:
        return ""
    if verdict.undecided:
        return "not judged"
    return "as planned" if verdict.passed else "NOT as planned"


def _speed(result: CaseResult) -> str:
    if result.timed is None or not result.timed.timing.step_seconds:
        return ""
    if not result.comparable:
        return "no result"
    measured = throughput(result.timed)
    return f"{_three_digits(measured.per_second)} {measured.unit}/s"


def _three_digits(value: float) -> str:
    """Return `value` with three significant digits and without an exponent: 11,500 or 3.05."""
    return f"{float(f'{value:.3g}'):,.10g}"


def _clauses(attempts: Sequence[Attempt]) -> list[str]:
    """Return a line for each adapter of the conformance suite: how its clauses ended."""
    endings: dict[str, Counter[str]] = {}
    for attempt in attempts:
        if attempt.conforming:
            endings.setdefault(attempt.case, Counter())[_CLAUSE[attempt.ending]] += 1
    return [f"clauses of {case}: {_counts(counted)}" for case, counted in endings.items()]


_CLAUSE = {
    Ending.PASSED: "yes",
    Ending.FAILED: "NO",
    Ending.SKIPPED: "unsupported or a known gap",
    Ending.UNFINISHED: "not run",
}


def _counts(counted: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counted.most_common())


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows in aligned columns, without the columns that no case fills."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    padded = [[cell.ljust(width) for cell in column] for column, width in zip(columns, widths, strict=True)]
    return ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:  # noqa: ANN401
    _report_all_skipped(terminalreporter, config)
    _report_on_github(terminalreporter, config)
    _summarize(terminalreporter, config)
    _list_tests_not_run(terminalreporter, config)


# --- The exit status of a session whose adapters end pytest's process themselves.
# Frameworks that hang at exit are often left by `atexit.register(os._exit, 0)`. A failed session would end with 0.

_CUT_OFF = pytest.ExitCode.INTERNAL_ERROR
"""Status of a process that ends before its session: nobody knows what would have come."""
_ENDED = pytest.StashKey[bool]()


def keep_exit_status(session: pytest.Session) -> None:
    """Give `os._exit(0)` of this process the status of `session`. Call it before adapters are imported.

    Other statuses, and those of forked processes, stay as they are. Does nothing if pytest runs inside another program,
    whose end is not pytest's to decide.
    """
    if not _is_program(sys._getframe()):
        return
    process, end = os.getpid(), os._exit

    def exit_with(status: int) -> NoReturn:
        if os.getpid() == process and not status:
            status = _status(session)
            if not _has_ended(session):
                print("meshmark: os._exit(0) was called before the session had ended", file=sys.stderr)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # closed, or a pipe that nobody reads
                    stream.flush()
        end(status)

    def forget_other_ends() -> None:
        if _status(session):  # of what was imported before this function was called
            atexit.unregister(end)

    os._exit = exit_with
    atexit.register(forget_other_ends)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_unconfigure(config: pytest.Config) -> Generator[None, object, object]:
    """Note that the session has ended, and that its status is final."""
    config.stash[_ENDED] = True
    return (yield)


def _has_ended(session: pytest.Session) -> bool:
    return session.config.stash.get(_ENDED, False)


def _status(session: pytest.Session) -> int:
    return int(session.exitstatus if _has_ended(session) else _CUT_OFF)


def _is_program(frame: FrameType | None) -> bool:
    """Return whether pytest was started from a shell, and `frame` belongs to the only session of its process."""
    called = list[str]()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("_pytest."):
            called.append(frame.f_code.co_name)
        frame = frame.f_back
    return called.count("wrap_session") == 1 and any(name.endswith("console_main") for name in called)
