"""Records what a pytest session asked for, and how each test ended. Loaded by the plugin."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import uuid
from collections.abc import Generator
from typing import Any

import pytest

from meshmark.errors import ResultsError
from meshmark.pytest_plugin.optional_suites import module_of
from meshmark.pytest_plugin.selection import SELECTION, selection
from meshmark.records.record import SCHEMA
from meshmark.records.record_file import RecordFile
from meshmark.records.session import Attempt, Ending, Session
from meshmark.report.failure_text import row
from meshmark.spec.case import Case

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
            rest = shlex.join(["meshmark", "show", attempt.case, str(selection(item.config).results)])
            lines.append(row("all of it", rest))
        error.msg = "\n".join(lines)


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
