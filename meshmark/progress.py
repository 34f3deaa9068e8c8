"""Which pass runs, how many are left, time so far."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from meshmark.adapter.capabilities import Feature
from meshmark.conformance.clauses import Clause
from meshmark.conformance.scenario import SCENARIOS
from meshmark.run.record import Record, Status
from meshmark.run.request import Task
from meshmark.spec.case import Case

Refusal = Callable[[Case, frozenset[Feature]], str | None]
"""Why a case is not run when a pass takes these features besides; `Runner.refusal`."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A pass that tests stand on."""

    what: str
    """Its scenario or task."""
    case: Case
    """As it is run."""
    needs: frozenset[Feature] = frozenset()
    misfit: str | None = None
    after: Launch | None = None
    """The launch without whose success there is none."""

    def is_of(self, what: str, case: Case) -> bool:
        return self.what == what and self.case == case

    def happens(self, refusal: Refusal) -> bool:
        """As far as can be known before."""
        try:
            allowed = not (self.misfit or refusal(self.case, self.needs))
        except (Exception, SystemExit):  # an adapter's own: its case tells of it
            return True
        return allowed and (self.after is None or self.after.happens(refusal))


class Progress:
    """Rewritten on a terminal, a line a pass elsewhere."""

    def __init__(self, config: pytest.Config) -> None:
        self._reporter: Any = config.pluginmanager.getplugin("terminalreporter")
        self._capture: Any = config.pluginmanager.getplugin("capturemanager")
        self._tty = sys.stdout.isatty()
        self._quiet = config.get_verbosity() < 0 and not self._tty
        self._awaited: dict[str, set[Launch]] = {}
        """By test that has not ended: the launches that it stands on and that are still to come."""
        self._done = 0
        self._started = time.monotonic()

    def expect(self, items: Iterable[pytest.Item], refusal: Refusal) -> None:
        """Count the launches that `items` stand on, each once; what is refused is none."""
        self._awaited = {item.nodeid: {one for one in launches_of(item) if one.happens(refusal)} for item in items}

    @property
    def _pending(self) -> int:
        return len(set().union(*self._awaited.values()))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """What a test did not launch, as when it was skipped, is only launched if another test stands on it."""
        self._awaited.pop(nodeid, None)

    def say(self, text: str) -> None:
        """Something that takes its time."""
        if self._reporter is not None:
            with self._capture.global_and_fixture_disabled():
                self._reporter.ensure_newline()
                self._reporter.write_line(f"meshmark: {text}")

    def announce(self, what: str, case: Case, record: Record | None) -> None:
        if record is not None:
            self._settle(what, case, record)
        if self._quiet or self._reporter is None or (record is None and not self._tty):
            return
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        total = self._done + self._pending
        line = f"[{self._done + (record is None)}/{total}] {what} {case.id} {minutes}:{seconds:02d}"
        with self._capture.global_and_fixture_disabled():
            if record is None:
                self._reporter.rewrite(f"\r{line} ...", erase=True)
            elif self._tty:
                self._reporter.rewrite("\r", erase=True)
            else:
                self._reporter.ensure_newline()
                self._reporter.write_line(f"{line} {record.outcome.status} in {record.launch.seconds:.1f} s")
            for remark in record.remarks if record else []:
                self._reporter.write_line(f"meshmark: {remark}")

    def _settle(self, what: str, case: Case, record: Record) -> None:
        """One launch is done; those that needed it to end well are none."""
        self._done += 1
        failed = record.outcome.status is not Status.OK
        for launches in self._awaited.values():
            launches -= {
                one
                for one in launches
                if one.is_of(what, case) or (failed and one.after and one.after.is_of(what, case))
            }


def launches_of(item: pytest.Item) -> Iterator[Launch]:
    """The passes that a test stands on."""
    fixtures = getattr(item, "fixturenames", [])
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    case, base, clause = (parameters.get(name) for name in ("case", "conforming", "clause"))
    for fixture, task in (("observed", Task.OBSERVE), ("timed", Task.TIME), ("profiled", Task.PROFILE)):
        if fixture in fixtures and isinstance(case, Case):
            yield Launch(what=task, case=case)
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
