"""The findings about a script, and how they are presented."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

UPDATES_NOT_JUDGED = "updates are not judged"
"""Class of the finding that an optimizer's rule is not known."""
DIFFERENT_FUNCTIONS = "ranks train different functions"
"""Class of the finding that the mean of the ranks' gradients is that of no function of one process."""


class Outcome(StrEnum):
    """The result of `check` in one word."""

    RIGHT = "right"
    WRONG = "wrong"
    CANNOT_TELL = "cannot tell"
    COULD_NOT_RUN = "could not run"

    @property
    def code(self) -> int:
        """Exit code. 2 is a mistake in the command, as for all commands."""
        return {Outcome.RIGHT: 0, Outcome.WRONG: 1, Outcome.CANNOT_TELL: 3, Outcome.COULD_NOT_RUN: 4}[self]


class Level(StrEnum):
    """Severity of a finding."""

    FAILED = "could not run"
    WRONG = "wrong"
    UNKNOWN = "cannot tell"
    NOTE = "note"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fact that a user should know."""

    level: Level
    fault: str
    """A short name of its class, such as `gradient scaled`."""
    text: str
    step: int | None = None


@dataclass(kw_only=True)
class Verdict:
    """The verdict on one script."""

    script: str
    setting: str = ""
    """Numbers of steps and ranks, and the wrappers."""
    findings: list[Finding] = field(default_factory=list)
    """Findings. The cause comes first."""
    lines: dict[str, str] = field(default_factory=dict)
    """Results by the subject that was checked."""

    def has(self, *faults: str) -> bool:
        """Return whether there is a finding of one of these classes."""
        return any(finding.fault in faults for finding in self.findings)

    def add(self, level: Level, fault: str, text: str, step: int | None = None) -> None:
        """Add a finding, unless there is one of the same class. The first is the nearest to the cause."""
        if not self.has(fault):
            self.findings.append(Finding(level=level, fault=fault, text=text, step=step))

    @property
    def outcome(self) -> Outcome:
        levels = {f.level for f in self.findings}
        if Level.FAILED in levels:
            return Outcome.COULD_NOT_RUN
        if Level.WRONG in levels:
            return Outcome.WRONG
        return Outcome.CANNOT_TELL if Level.UNKNOWN in levels else Outcome.RIGHT

    @property
    def text(self) -> str:
        """About ten lines of text, with the diagnosis first."""
        headline = f"{self.outcome.upper()}: {self.script}"
        if self.outcome is Outcome.RIGHT and self.has(UPDATES_NOT_JUDGED):
            headline += " has the gradients of one process in float64"
        elif self.outcome is Outcome.RIGHT and self.has(DIFFERENT_FUNCTIONS):
            headline += " has the gradients of its ranks' losses in float64, and updates by them"
        elif self.outcome is Outcome.RIGHT:
            headline += " trains as one process would in float64"
        lines = [headline]
        order = list(Level)
        for finding in sorted(self.findings, key=lambda f: order.index(f.level)):
            where = "" if finding.step is None else f" (from step {finding.step} on)"
            lines.append(f"  {finding.level}: {finding.fault}{where}: {finding.text}")
        if self.setting:
            lines.append(f"  seen        {self.setting}")
        lines += [f"  {subject:<11} {told}" for subject, told in self.lines.items()]
        return "\n".join(lines)

    @property
    def page(self) -> str:
        """The verdict in Markdown."""
        table = ["| | |", "|:--|:--|", f"| seen | {self.setting} |"]
        table += [f"| {subject} | {told} |" for subject, told in self.lines.items()]
        found = [f"- **{f.level}**: {f.fault}: {f.text}" for f in self.findings]
        return "\n".join([f"# {self.script}: {self.outcome}", "", *found, "", *table, ""])
