"""Terminal output while suites run: a line per finished case, and a progress bar with the time left."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from meshmark.report.table import visible

_MARKS = {"passed": "[green]✓[/]", "failed": "[red]✗[/]", "skipped": "[yellow]–[/]"}


class Live:
    """A progress bar on its own copy of the terminal, because pytest redirects output while tests run."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor` is that of the terminal. A copy of it is kept."""
        self._file = os.fdopen(os.dup(descriptor), "w")
        self.console = Console(file=self._file)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn())
        more = (TimeElapsedColumn(), TextColumn("{task.fields[left]}"))
        self._bar = Progress(*columns, *more, console=self.console, transient=True, refresh_per_second=4)
        self._task = self._bar.add_task("starting", total=None, left="")
        self._bar.start()

    def show(self, what: str, done: int, total: int, left: str) -> None:
        """Show what runs, how many launches are done, and the time left."""
        self._bar.update(self._task, description=escape(visible(what)), completed=done, total=total, left=left)

    def line(self, text: str) -> None:
        """Print a line above the bar. Markup in `text` is not interpreted."""
        self.console.print(escape(visible(text)), highlight=False, soft_wrap=True)

    def ended(self, case: str, suites: Mapping[str, str], seconds: float) -> None:
        """Print a case whose tests have all ended. `suites` maps each suite to its outcome."""
        told = "  ".join(f"{_MARKS.get(how, '?')} {escape(suite)}" for suite, how in suites.items())
        worst = next((how for how in ("failed", "passed") if how in suites.values()), "skipped")
        line = f"{_MARKS[worst]} [bold]{escape(visible(case))}[/]  {told}  [dim]{seconds:.1f} s[/]"
        self.console.print(line, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        """Remove the bar. Lines may follow."""
        self._bar.stop()

    def close(self) -> None:
        self.stop()
        self._file.close()
