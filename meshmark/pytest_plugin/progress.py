"""Progress of a run: the current pass, how many are left, and the time so far."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from meshmark.adapter.contract import Feature
from meshmark.conformance.clauses import Clause
from meshmark.conformance.scenario import SCENARIOS
from meshmark.records.record import Record, Status
from meshmark.records.request import Task
from meshmark.spec.case import Case

if TYPE_CHECKING:
    from meshmark.pytest_plugin.live import Live

Refusal = Callable[[Case, frozenset[Feature]], str | None]
"""Function that returns why a case is not run if a pass needs these features; `Runner.refusal`."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A pass that tests depend on."""

    what: str
    """Name of its scenario or task."""
    case: Case
    """The case as it is run."""
    needs: frozenset[Feature] = frozenset()
    misfit: str | None = None
    after: Launch | None = None
    """The launch that must succeed first."""

    def is_of(self, what: str, case: Case) -> bool:
        return self.what == what and self.case == case

    def happens(self, refusal: Refusal) -> bool:
        """Return whether the launch takes place, as far as it is known beforehand."""
        try:
            allowed = not (self.misfit or refusal(self.case, self.needs))
        except (Exception, SystemExit):  # an adapter's own: its case tells of it
            return True
        return allowed and (self.after is None or self.after.happens(refusal))


class Progress:
    """Shows a bar and a line per case on a terminal, and a line per pass elsewhere."""

    def __init__(self, config: pytest.Config) -> None:
        self._reporter: Any = config.pluginmanager.getplugin("terminalreporter")
        self._capture: Any = config.pluginmanager.getplugin("capturemanager")
        self._quiet = config.get_verbosity() < 0
        self._live: Live | None = None
        self._cases = Cases(())
        self._awaited: dict[str, set[Launch]] = {}
        """Pending launches of each test that has not ended."""
        self._seconds: dict[str, list[float]] = {}
        """Durations of finished launches in seconds, by task or scenario."""
        self._started = time.monotonic()

    def expect(self, items: Sequence[pytest.Item], refusal: Refusal) -> None:
        """Count the launches that `items` depend on, each once. Refused ones do not count."""
        self._awaited = {item.nodeid: {one for one in launches_of(item) if one.happens(refusal)} for item in items}
        named = ((item.nodeid, _case_of(item), item.path.stem.removeprefix("test_")) for item in items)
        self._cases = Cases((test, case, suite) for test, case, suite in named if case)
        if on_terminal(self._reporter, self._capture):
            from meshmark.pytest_plugin.live import Live  # where its library is drawn with

            with self._capture.global_and_fixture_disabled():
                self._reporter.ensure_newline()
                self._live = Live(sys.stdout.fileno())
            self._reporter.showfspath = False

    def close(self) -> None:
        """Return the terminal to pytest, except for the line of the last case, whose test ends with the session."""
        if self._live:
            self._live.stop()

    def pytest_unconfigure(self) -> None:
        if self._live:
            self._live.close()

    @property
    def _pending(self) -> set[Launch]:
        return set().union(*self._awaited.values())

    @property
    def _done(self) -> int:
        return sum(map(len, self._seconds.values()))

    @property
    def _left(self) -> str:
        """Estimated time left, from the mean duration of launches of the same kind, or of all.

        Empty before the first.
        """
        pending = self._pending
        if not self._done or not pending:
            return ""
        all_seconds = [second for seconds in self._seconds.values() for second in seconds]
        left = sum(statistics.fmean(self._seconds.get(one.what, all_seconds)) for one in pending)
        return f"about {_minutes(left)} left"

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Hide pytest's own status if there is a bar, because a case's line shows it. pytest still counts and
        reports.
        """
        if self._live is None or report.nodeid not in self._cases or hasattr(report, "wasxfail"):
            return None
        if report.passed and report.when != "call":
            return None
        return "error" if report.failed and report.when != "call" else report.outcome, "", ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid in self._cases:
            self._cases.add(report.nodeid, report.outcome, report.duration)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Drop the launches of a finished test, unless another test depends on them."""
        self._awaited.pop(nodeid, None)
        ended = self._cases.end(nodeid) if nodeid in self._cases else None
        if self._live and ended:
            self._live.ended(*ended)

    def say(self, text: str) -> None:
        """Print a message about slow work, or something that a reader should know."""
        if self._live:
            self._live.line(f"meshmark: {text}")
        elif self._reporter is not None:
            with self._capture.global_and_fixture_disabled():
                self._reporter.ensure_newline()
                self._reporter.write_line(f"meshmark: {text}")

    def announce(self, what: str, case: Case, record: Record | None) -> None:
        if record is not None:
            self._settle(what, case, record)
        done, total = self._done, self._done + len(self._pending)
        if self._live:
            if record is None:
                self._live.show(f"{what} {case.id}", done, total, self._left)
        elif record is not None and not self._quiet and self._reporter is not None:
            told = f"{record.outcome.status} in {record.launch.seconds:.1f} s"
            elapsed = _minutes(time.monotonic() - self._started)
            left = f", {self._left}" if self._left else ""
            with self._capture.global_and_fixture_disabled():
                self._reporter.ensure_newline()
                self._reporter.write_line(f"[{done}/{total}] {what} {case.id} {elapsed} {told}{left}")
        for remark in record.remarks if record and not self._quiet else []:
            self.say(remark)

    def _settle(self, what: str, case: Case, record: Record) -> None:
        """Record that a launch is done. Launches that needed its success are dropped if it failed."""
        self._seconds.setdefault(what, []).append(record.launch.seconds)
        failed = record.outcome.status is not Status.OK
        for launches in self._awaited.values():
            launches -= {
                one
                for one in launches
                if one.is_of(what, case) or (failed and one.after and one.after.is_of(what, case))
            }


class Cases:
    """The tests of each case that are still to end, and the outcomes of the others."""

    def __init__(self, tests: Iterable[tuple[str, str, str]]) -> None:
        """`tests` are tuples of node id, case and suite."""
        self._tests = {test: (case, suite) for test, case, suite in tests}
        self._found: dict[str, dict[str, str]] = {}
        self._seconds: dict[str, float] = {}

    def __contains__(self, test: str) -> bool:
        return test in self._tests

    def add(self, test: str, outcome: str, seconds: float) -> None:
        """Record one phase of a test. A failure is not overwritten."""
        case, suite = self._tests[test]
        found = self._found.setdefault(case, {})
        if found.get(suite) != "failed":
            found[suite] = outcome
        self._seconds[case] = self._seconds.get(case, 0.0) + seconds

    def end(self, test: str) -> tuple[str, dict[str, str], float] | None:
        """Record the end of a test. Returns its case, outcomes and seconds if it was the last test of the case."""
        case, _ = self._tests.pop(test)
        if any(case == other for other, _ in self._tests.values()):
            return None
        return case, self._found.pop(case, {}), self._seconds.pop(case, 0.0)


def on_terminal(reporter: Any, capture: Any) -> bool:  # noqa: ANN401
    """Return whether a bar can be drawn: on a terminal that nothing else writes to while tests run."""
    if reporter is None or capture is None or not capture.is_globally_capturing():
        return False
    return bool(reporter.isatty()) and reporter.verbosity == 0 and os.environ.get("CI", "") in ("", "false")


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"


def _case_of(item: pytest.Item) -> str:
    """Return the id of a test's case. For a clause, it is the case that its scenarios vary."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    found = parameters.get("case") or parameters.get("conforming")
    return found.id if isinstance(found, Case) else ""


def launches_of(item: pytest.Item) -> Iterator[Launch]:
    """Yield the passes that a test depends on."""
    fixtures = getattr(item, "fixturenames", [])
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    case, base, clause = (parameters.get(name) for name in ("case", "conforming", "clause"))
    for fixture, task in (("observed", Task.OBSERVE), ("timed", Task.TIME), ("profiled", Task.PROFILE)):
        if fixture in fixtures and isinstance(case, Case):
            yield Launch(what=task, case=case)
    if "alone" in fixtures and isinstance(case, Case):
        yield Launch(what=Task.FAKE_WORLD, case=case, needs=frozenset({Feature.FAKE_WORLD}))
    if isinstance(base, Case) and isinstance(clause, Clause):
        for name in clause.scenarios:
            launch: Launch | None = _of_scenario(name, base)
            while launch:
                yield launch
                launch = launch.after


def _of_scenario(name: str, base: Case) -> Launch:
    scenario = SCENARIOS[name]
    case, misfit = scenario.varied(base)
    after = _of_scenario(scenario.after, base) if scenario.after else None
    return Launch(what=name, case=case, needs=scenario.needs, misfit=misfit, after=after)
